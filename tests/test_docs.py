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
from typing import Any

import pytest

from agentgrpo import cli
from agentgrpo.config import RewardConfig, TrainConfig
from agentgrpo.data.sources import training_tasks
from agentgrpo.read_config import _all_keys, load_config, shipped_configs
from agentgrpo.registry import make_agent, make_env, make_reward
from agentgrpo.rewards import score
from agentgrpo.sandbox import SandboxPool, SandboxUnavailable
from agentgrpo.types import Group, Rollout
from tests.playing import play, shown

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


def written(page: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the example that a page calls `name` into a file of that name, to be imported."""
    (source,) = [text for text in blocks(ROOT / page, "python") if f"# {name}\n" in text]
    assert len(source.splitlines()) <= 32
    (folder / name).write_text(source)
    monkeypatch.syspath_prepend(folder)


def test_the_readmes_environment_is_played_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file and its name in the config, as README.md says; nothing else."""
    written("README.md", "guess.py", tmp_path, monkeypatch)
    (toml,) = [text for text in blocks(ROOT / "README.md", "toml") if "guess:GuessEnv" in text]
    (tmp_path / "c.toml").write_text('model = "m"\n' + toml)
    config = load_config(str(tmp_path / "c.toml"), [f"out_dir={tmp_path}/run"])
    env: Any = make_env(config, None)
    agent = make_agent(config, env)
    five = training_tasks(config.data, 0, env, answers=False).next(9)
    (secret,) = [task for task in five if task.spec["secret"] == 5]
    turns = ["<fn>guess(3)</fn>", "<fn>guess(8)</fn>", "<fn>guess(5)</fn>", "Answer: 5<|im_end|>"]
    played = play(agent, env, *turns, given=secret)
    assert [word in shown(played) for word in ("higher", "lower", "right")] == [True] * 3
    score(Group(task=secret, rollouts=[played]), make_reward(RewardConfig(format=0), env))
    assert played.rewards == {"solved": 1.0}
    lazy = play(agent, env, "Answer: 5<|im_end|>", given=secret)
    assert lazy.rewards == {"solved": 0.0}


@pytest.mark.nsjail
def test_the_pages_agent_is_played_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("docs/agents.md", "lines.py", tmp_path, monkeypatch)
    settings = ["agent.kind=lines:LineAgent", 'agent.options={prompt="P"}']
    (tmp_path / "c.toml").write_text('model = "m"\n')
    config = load_config(str(tmp_path / "c.toml"), [f"out_dir={tmp_path}/run", *settings])
    try:
        pool = SandboxPool(max_live=2)
    except SandboxUnavailable as reason:
        pytest.skip(f"this machine cannot isolate: {reason}")
    with pool:
        env = make_env(config, pool)
        played = play(make_agent(config, env), env, "x = 6\n", "x * 7\n", "= 42\n")
    assert shown(played).endswith("x = 6\n(no output)\nx * 7\n42\n= 42\n")
    assert played.answer == "42"


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
