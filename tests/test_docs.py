"""What the documents tell a reader to type exists: commands, settings, links.

test_docs_code.py runs their code, and follows your-task.md.
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
from agentgrpo.read_config import _all_keys, load_config, shipped_configs
from agentgrpo.types import Rollout

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Every command of a page's sh blocks, continued lines joined, as words."""
    return [
        shlex.split(line, comments=True)
        for text in blocks(page, "sh")
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


ALL = [(page.name, command) for page in PAGES for command in commands(page)]


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
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    if program in ("python", "torchrun"):
        assert "your-task.md" in page or "-m" in arguments
        return
    if program == "source":
        return
    assert program == "agentgrpo", command
    word = arguments[0]
    assert word in cli.available() or word.startswith("-")
    said = help_of(arguments[:3] if arguments[1:2] == ["template"] else arguments[:2])
    for option in arguments[1:]:
        assert not option.startswith("-") or re.search(rf"(?<!\S){option}\b", said), option
    overrides = [a for a in arguments if re.match(r"[a-z_.]+=", a)]
    for override in overrides:
        assert override.partition("=")[0] in _all_keys(TrainConfig)
    if word in ("train", "evaluate") and arguments[1] in shipped_configs():
        load_config(arguments[1], overrides)


def test_settings_named_in_backticks_exist() -> None:
    """`section.key` of the documents is a setting."""
    sections = set(TrainConfig.model_fields)
    known = set(_all_keys(TrainConfig))
    for page in PAGES:
        if page.name in ("kernels.md", "sandbox.md"):
            continue  # modules' names look alike there
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        if page.name == "coming-from.md":  # the first column has the others' names
            text = "\n".join(line.split("|")[2] for line in text.splitlines() if line[:1] == "|")
        for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?: ?=[^`]*)?`", text):
            if name.partition(".")[0] in sections and not name.endswith((".py", ".json", ".md")):
                of_rollout = name.startswith("rollout.") and name[8:] in Rollout.__annotations__
                assert name in known or of_rollout, f"{page.name}: there is no setting {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
