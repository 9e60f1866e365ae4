"""Commands, settings, links and files named in the docs exist.

test_docs_commands.py runs their commands, test_docs_code.py their code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest

from agentgrpo import cli
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_config, shipped_configs
from agentgrpo.config.section import walk
from agentgrpo.rewards.rollout_view import RolloutView
from agentgrpo.sandbox.selftest import CASES
from agentgrpo.train.config_docs import options
from agentgrpo.train.plugins import KINDS
from agentgrpo.types import Rollout
from bench.pages import with_made
from tests import architecture
from tests.sandbox.attacks import test_attacks  # noqa: F401 - registers CASES

ROOT = Path(__file__).parents[2]
KEYS = {
    *dict(walk(TrainConfig)),
    *(f"{s.section}.{s.key}" for of in KINDS for kind in KINDS[of] for s in options(of, kind)),
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KIT = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "LOG.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def lines(page: Path) -> list[str]:
    """Every command of a page's sh blocks, with continuation lines."""
    return [
        line
        for text in blocks(page, "sh")
        for line in re.split(r"(?<!\\)\n", text)
        if line.strip() and not line.startswith("#")
    ]


def words(line: str) -> list[str]:
    """A command split into words like a shell."""
    return shlex.split(line.replace("\\\n", " "), comments=True)


def inline(page: Path) -> list[str]:
    """Commands in the running text: `agentgrpo view RUN`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    known = r"(?:agentgrpo|make|sh|source|(?:python|torchrun)(?= -m))"
    mentions = re.findall(rf"`({known} (?:[^`\n]|\n(?!\n))+)`", text)
    return [line for line in mentions if "..." not in line]


ALL = [(p.name, words(line)) for p in PAGES for line in (*lines(p), *inline(p))]


def help_of(words: list[str]) -> str:
    """The help of a command, given by as many of these words as it knows."""
    buffer = io.StringIO()
    known = words if words[0] == "sandbox" else words[:1]
    with contextlib.redirect_stdout(buffer), contextlib.suppress(SystemExit):
        cli.main([*known, "--help"])
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("page", "command"), ALL, ids=[f"{page}: {' '.join(c)[:50]}" for page, c in ALL]
)
def test_documented_commands_and_options_exist(page: str, command: list[str]) -> None:
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
    help_text = help_of(
        arguments[:3] if arguments[1:2] in (["template"], ["image"]) else arguments[:2]
    )
    for option in arguments[1:]:
        assert not option.startswith("-") or re.search(rf"(?<!\S){option}\b", help_text), option
    overrides = [a for a in arguments if re.match(r"[a-z_.]+=", a)]
    for override in overrides:
        assert override.partition("=")[0] in KEYS
    if word in ("train", "evaluate") and arguments[1] in shipped_configs():
        load_config(arguments[1], overrides)


def test_settings_named_in_backticks_exist() -> None:
    """Every `section.key` in the docs is a setting."""
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


PLACES = (
    "",
    "agentgrpo",
    "csrc",
    "tests",
    *(f"agentgrpo/sandbox/{room}" for room in ("", "isolation", "session")),
)
"""Folders of files that are named without one."""
READERS = {"letters.toml", "agentgrpo_config.toml", "runs/quickstart/", "generate_with_tau.py"}
READERS |= {f"{where}NAME.py" for where in ("agentgrpo/envs/", "agentgrpo/agents/")}
READERS |= {f"tests/{where}/test_NAME.py" for where in ("envs", "agents")}
"""Files that the reader creates or already has."""


@pytest.mark.parametrize("page", [*PAGES, *KIT], ids=lambda page: page.name)
def test_files_named_in_backticks_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for name in re.findall(r"`([\w./-]+\.(?:py|c|h|sh|toml|png)|\w[\w./-]+/)`", text):
        there = any((ROOT / place / name).exists() for place in PLACES)
        assert there or name in READERS, f"{page.name}: {name}"


def test_architecture_page_matches_the_table() -> None:
    page = architecture.PAGE.read_text()
    assert page == with_made(page, "tests.architecture", architecture.picture()), (
        "python -m tests.architecture --write"
    )


def test_files_next_to_the_step_diagram_exist() -> None:
    page = PAGES[0].read_text()
    picture = page[page.index("    tasks ──> groups") : page.index("* **One copy of the")]
    named = re.findall(r"(?<=\s)(?:[a-z_]+/)+(?:[a-z_]+\.py)?(?=\s)", picture)
    assert len(named) > 10
    assert {n for n in named if not any((ROOT / p / n).exists() for p in PLACES)} == set()


def test_documented_number_of_attacks_is_a_lower_bound() -> None:
    """In SECURITY.md and docs/sandbox.md too, if they have a number."""
    documented = [
        int(number)
        for page in (ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "docs" / "sandbox.md")
        for number in re.findall(r"[Oo]ver (\d+) (?:attacks|cases|of them)", page.read_text())
    ]
    assert documented
    shipped = sum(not case.group.startswith("on_") for case in CASES)
    assert all(number < shipped <= number + 10 for number in documented)


@pytest.mark.parametrize("page", [*PAGES, *KIT], ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_reading_list_of_contributing_stays_short() -> None:
    """CONTRIBUTING.md lists the files with about their number of lines: under 4,150 in total."""
    listed = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", KIT[0].read_text(), re.M)
    lines = {name: len((ROOT / name).read_text().splitlines()) for name, _ in listed}
    assert {"agentgrpo/train/loop.py", "agentgrpo/rollout/play.py", "kernels/grpo_loss.py"} <= {
        *lines
    }
    assert sum(lines.values()) < 4150
    far = {name: lines[name] for name, count in listed if abs(int(count) - lines[name]) > 30}
    assert not far, f"CONTRIBUTING.md: lines of {far}"


def test_make_targets_of_contributing_exist() -> None:
    targets = set(re.findall(r"`make (\w+)", KIT[0].read_text()))
    there = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"fast", "test", "check", "mutants"} <= targets <= there
