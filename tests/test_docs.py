"""What the documents tell a reader to type works: cheap commands are run, the others looked up.

your-task.md is followed literally, in an empty directory, up to its dry run; the training that
comes after it is tests/end_to_end's business.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentgrpo import cli
from agentgrpo.config import TrainConfig
from agentgrpo.read_config import _all_keys, load_config, shipped_configs
from agentgrpo.sandbox import SandboxPool, SandboxUnavailable
from agentgrpo.types import Rollout

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Every command of a page's sh blocks, continued lines joined, as words."""
    return [
        shlex.split(line)
        for text in blocks(page, "sh")
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


ALL = [(page.name, command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(
    ("page", "command"), ALL, ids=[f"{page}: {' '.join(c)[:50]}" for page, c in ALL]
)
def test_commands_are_of_this_project(page: str, command: list[str]) -> None:
    program, *arguments = command
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    if program == "python":
        assert "your-task.md" in page or arguments[0] == "-m"
        return
    if program in ("pip", "apt-get", "source"):
        return
    assert program == "agentgrpo", command
    word = arguments[0]
    assert word in cli.available() or word.startswith("-")
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


@pytest.mark.slow
@pytest.mark.nsjail
def test_your_task_followed_literally(tmp_path: Path) -> None:
    """Files as the page has them, its commands in its order; the model in the cache is reused."""
    try:
        SandboxPool(max_live=1).close()
    except SandboxUnavailable as reason:
        pytest.skip(f"this machine cannot isolate: {reason}")
    page = ROOT / "docs" / "your-task.md"
    for text in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, "a python block begins with the name of its file"
        (tmp_path / name[1]).write_text(text)
    cheap = [c for c in commands(page) if c[0] == "python" or c[1] == "init" or "--dry-run" in c]
    assert [c[0] for c in cheap] == ["python", "agentgrpo", "agentgrpo"]
    for command in cheap:
        if command[0] == "agentgrpo":
            command = ["python", "-m", *command]
        ran = subprocess.run(
            [sys.executable, *command[1:]],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "336 training tasks, 64 held out" in ran.stdout
    assert "WARNING" not in ran.stdout
