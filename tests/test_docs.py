"""What the documents tell a reader to type exists: commands, settings, links, files.

test_docs_commands.py runs their commands, test_docs_code.py their code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import tokenize
from pathlib import Path

import pytest

from agentgrpo import cli
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import all_keys, load_config, shipped_configs
from agentgrpo.registry import KINDS
from agentgrpo.rewards.view import RolloutView
from agentgrpo.sandbox.hostile import CASES
from agentgrpo.settings import options
from agentgrpo.types import Rollout
from bench.pages import with_made
from tests import house
from tests.test_imports import TOP, WINGS

ROOT = Path(__file__).parent.parent
KEYS = {
    *all_keys(TrainConfig),
    *(f"{s.section}.{s.key}" for of in KINDS for kind in KINDS[of] for s in options(of, kind)),
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KIT = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "LOG.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def lines(page: Path) -> list[str]:
    """Every command of a page's sh blocks, as it is printed, continued lines with it."""
    return [
        line
        for text in blocks(page, "sh")
        for line in re.split(r"(?<!\\)\n", text)
        if line.strip() and not line.startswith("#")
    ]


def words(line: str) -> list[str]:
    """A command as the shell's words."""
    return shlex.split(line.replace("\\\n", " "), comments=True)


def inline(page: Path) -> list[str]:
    """Commands in the running text: `agentgrpo view RUN`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    known = r"(?:agentgrpo|make|sh|source|(?:python|torchrun)(?= -m))"
    said = re.findall(rf"`({known} (?:[^`\n]|\n(?!\n))+)`", text)
    return [line for line in said if "..." not in line]


ALL = [(p.name, words(line)) for p in PAGES for line in (*lines(p), *inline(p))]


def help_of(words: list[str]) -> str:
    """What a command says of itself, after so many of these words as it knows."""
    said = io.StringIO()
    known = words if words[0] == "sandbox" else words[:1]
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*known, "--help"])
    return said.getvalue()


@pytest.mark.parametrize(
    ("page", "command"), ALL, ids=[f"{page}: {' '.join(c)[:50]}" for page, c in ALL]
)
def test_commands_are_of_this_project(page: str, command: list[str]) -> None:
    program, *arguments = command
    if program == "srun":
        program, *arguments = arguments
    if "-m" in arguments:  # python, torchrun
        assert importlib.util.find_spec(arguments[arguments.index("-m") + 1])
    if program == "make":
        (target,) = [word for word in arguments if "=" not in word]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
        return
    if program == "sh":
        assert (ROOT / arguments[0]).is_file()
        return
    if program in ("python", "torchrun"):
        assert "your-task.md" in page or "-m" in arguments
        return
    if program == "source":
        return
    assert program == "agentgrpo", command
    word = arguments[0]
    assert word in cli.COMMANDS or word.startswith("-")
    said = help_of(arguments[:3] if arguments[1:2] == ["template"] else arguments[:2])
    for option in arguments[1:]:
        assert not option.startswith("-") or re.search(rf"(?<!\S){option}\b", said), option
    overrides = [a for a in arguments if re.match(r"[a-z_.]+=", a)]
    for override in overrides:
        assert override.partition("=")[0] in KEYS
    if word in ("train", "evaluate") and arguments[1] in shipped_configs():
        load_config(arguments[1], overrides)


def test_settings_named_in_backticks_exist() -> None:
    """`section.key` of the documents is a setting."""
    sections = set(TrainConfig.model_fields)
    for page in (*PAGES, *KIT):
        if page.name in ("kernels.md", "sandbox.md"):
            continue  # modules' names look alike there
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        if page.name == "coming-from.md":  # the first column has the others' names
            text = "\n".join(line.split("|")[2] for line in text.splitlines() if line[:1] == "|")
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?: ?=[^`]*)?`", text):
            if name.partition(".")[0] in sections and not name.endswith(
                (".py", ".json", ".jsonl", ".md")
            ):
                first, second, *_ = name.split(".")
                of_rollout = first == "rollout" and second in {
                    *Rollout.__annotations__,
                    *vars(RolloutView),
                }
                assert name in KEYS or of_rollout, f"{page.name}: there is no setting {name}"


PLACES = ("", "agentgrpo", "agentgrpo/sandbox", "csrc", "tests")
"""Where files that are named without their folder lie."""
READERS = {"letters.toml", "agentgrpo_config.toml", "runs/quickstart/", "generate_with_tau.py"}
READERS |= {f"{where}NAME.py" for where in ("agentgrpo/envs/", "agentgrpo/agents/")}
READERS |= {f"tests/{where}/test_NAME.py" for where in ("envs", "agents")}
"""Files that a reader makes, or had before."""


@pytest.mark.parametrize("page", [*PAGES, *KIT], ids=lambda page: page.name)
def test_files_named_in_backticks_are_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for name in re.findall(r"`([\w./-]+\.(?:py|c|h|sh|toml|png)|\w[\w./-]+/)`", text):
        there = any((ROOT / place / name).exists() for place in PLACES)
        assert there or name in READERS, f"{page.name}: {name}"


def said_in(path: Path) -> str:
    """The comments and docstrings of a source file."""
    text = path.read_text()
    if path.suffix in (".c", ".h"):
        return "\n".join(re.findall(r"/\*.*?\*/|//.*", text, re.S))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    strings = (
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    return "\n".join([*comments, *map(str, strings)])


OWN = ("agentgrpo", "kernels", "csrc", "tests", "bench", "docs")
SOURCES = [
    path
    for folder in OWN
    for path in sorted((ROOT / folder).rglob("*.*"))
    if path.suffix in (".py", ".c", ".h") and not path.is_relative_to(ROOT / "agentgrpo/kernels")
]
ELSEWHERE = {"convert_hf_to_gguf.py", "server.py", "my_env.py", "NAME.py", "tools.py"}
"""Files of llama.cpp, and those that a reader has."""


NAMES_A_FILE = re.compile(r"(?<![\w.@/*<{-])((?:[\w-]+/)*[\w-]+\.(?:py|c|h))\b(?!\()")


def test_files_named_in_comments_are_there() -> None:
    """By their path from the root, from `agentgrpo/` or `tests/`, or from where they are named."""
    missing = []
    for path in SOURCES:
        for name in NAMES_A_FILE.findall(said_in(path)):
            folder, _, file = name.rpartition("/")
            if file in ELSEWHERE or folder.split("/")[0] in ("vllm", "linux", "trl"):
                continue
            places = (ROOT, ROOT / "agentgrpo", ROOT / "tests", path.parent)
            if not any((place / name).is_file() for place in places):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert len(SOURCES) > 300
    assert not missing


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or a word in the longest beginning of it that is one."""
    parts = name.split(".")
    for known in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:known])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if known == len(parts) and (path.is_dir() or file.is_file()):
            return True
        if file.is_file():
            return re.search(rf"\b{parts[known]}\b", file.read_text()) is not None
    return False


def test_modules_named_in_full_are_there() -> None:
    """In comments, documents and strings: the places where an import does not fail."""
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in (*SOURCES, *PAGES, *KIT)
        for name in re.findall(r"(?<!/)\b(agentgrpo(?:\.[A-Za-z]\w*)+)", path.read_text())
    }
    assert len(named) > 1000
    missing = {(path, name) for path, name in named if not is_there(name)}
    assert {path for path, _ in missing} == {"tests/test_docs.py"}, missing
    assert {name for _, name in missing} == {"agentgrpo.nosuch"}, missing


def test_the_picture_of_the_house_is_what_the_table_makes() -> None:
    page = house.PAGE.read_text()
    assert page == with_made(page, "tests.house", house.picture()), "python -m tests.house --write"


def test_every_wing_and_module_of_the_top_says_what_it_is_for() -> None:
    assert {
        name: house.clause(name) for name in (*WINGS, *TOP) if len(house.clause(name)) < 20
    } == {}


def test_the_files_beside_the_picture_of_a_step_are_there() -> None:
    page = PAGES[0].read_text()
    picture = page[page.index("    tasks ──> groups") : page.index("* **One copy of the")]
    named = re.findall(r"(?<=\s)(?:[a-z_]+/)+(?:[a-z_]+\.py)?(?=\s)", picture)
    assert len(named) > 10
    assert {n for n in named if not any((ROOT / p / n).exists() for p in PLACES)} == set()


def test_the_table_of_the_sandbox_names_every_module() -> None:
    rows = (ROOT / "docs/sandbox.md").read_text().splitlines()
    table = " ".join(row.split("|")[1] for row in rows if row.startswith("| `"))
    there = {p.name for p in (ROOT / "agentgrpo/sandbox").iterdir() if p.suffix in ("", ".py")}
    named = {name for name in there if re.search(rf"[`/]{re.escape(name)}[`/]", table)}
    assert {name for name in there - named if not name.startswith("_")} == set()


def test_the_number_of_attacks_is_not_below_what_pages_say() -> None:
    """Nor SECURITY.md or docs/sandbox.md, where they say one."""
    said = [
        int(number)
        for page in (ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "docs" / "sandbox.md")
        for number in re.findall(r"[Oo]ver (\d+) (?:attacks|cases|of them)", page.read_text())
    ]
    assert said
    assert all(number < len(CASES) <= number + 10 for number in said)


@pytest.mark.parametrize("page", [*PAGES, *KIT], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_path_of_a_step_can_be_read_in_an_afternoon() -> None:
    """CONTRIBUTING.md names its files with about as many lines as they have: under 4,100 in all."""
    said = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", KIT[0].read_text(), re.M)
    lines = {name: len((ROOT / name).read_text().splitlines()) for name, _ in said}
    assert {"agentgrpo/loop.py", "agentgrpo/rollout/play.py", "kernels/grpo_loss.py"} <= {*lines}
    assert sum(lines.values()) < 4100
    far = {name: lines[name] for name, count in said if abs(int(count) - lines[name]) > 30}
    assert not far, f"CONTRIBUTING.md: lines of {far}"


def test_the_targets_of_make_that_contributing_names_are_there() -> None:
    targets = set(re.findall(r"`make (\w+)", KIT[0].read_text()))
    there = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"fast", "test", "check", "mutants"} <= targets <= there


def test_commits_of_the_log_are_there() -> None:
    page = KIT[2].read_text()
    named = set(re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b", page))
    known = subprocess.run(
        ["git", "log", "--format=%h", "--abbrev=7"], cwd=ROOT, capture_output=True, text=True
    )
    if known.returncode or len(known.stdout.split()) < 100:
        pytest.skip("not a whole git checkout")
    assert len(named) > 12
    assert named <= set(known.stdout.split())
