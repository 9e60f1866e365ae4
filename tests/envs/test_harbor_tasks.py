# ruff: noqa: E501 - tables, a case a line
"""Harbor task folders: what is read and refused, which changes a verdict takes, which rewards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.envs.harbor import changes_to_keep, read_reward
from agentgrpo.envs.harbor_tasks import read_task
from agentgrpo.sandbox.isolation.images import Image
from agentgrpo.sandbox.isolation.snapshots import Kept
from agentgrpo.train.resolve import resolve
from tests.envs.harbor_folders import make_folder

KEPT = {
    ("app", True): "ALL", ("app/x/y", False): "ALL", ("app", False): "NO", ("usr", True): "NO",
    ("var", True): "PARTLY", ("var", False): "NO", ("var/lib", False): "NO",
    ("var/lib/pg", True): "ALL", ("var/lib/dpkg", True): "NO", ("root/.local", True): "NO",
    ("root/x", False): "ALL", ("home/a/.b", False): "NO", ("home/a", True): "PARTLY",
    ("opt", True): "PARTLY", ("opt/venv", True): "NO", ("opt/venv2", True): "ALL",
    ("srv/.venv/bin", True): "ALL", ("tests", True): "NO", ("", True): "PARTLY",
}  # fmt: skip
NARROW = {
    ("etc", True): "PARTLY", ("etc/nginx", True): "ALL", ("etc/nginx/a", False): "ALL",
    ("etc/passwd", False): "NO", ("app", True): "NO", ("etc/nginx2", True): "NO",
    ("tests", True): "NO", ("etc", False): "NO",
}  # fmt: skip


def test_paths_that_are_kept() -> None:
    image = Image("i", (), {"PATH": "/opt/venv/bin:/srv/bin:/usr/bin"}, "/srv/app", "", 0)
    decide = changes_to_keep(image, ())
    assert {key: decide(*key).name for key in KEPT} == KEPT
    decide = changes_to_keep(image, ["/etc/nginx/"])
    assert {key: decide(*key).name for key in NARROW} == NARROW
    assert changes_to_keep(image, ["/a"])("a", True) is Kept.ALL


REWARDS: dict[str, dict[str, Any]] = {
    "reward.json": {
        '{"reward": 1, "speed": 0.5, "a b": 1, "text": "x", "flag": true}': (1.0, {"speed": 0.5}),
        '{"first": 0.25, "second": 2}': (0.25, {"second": 2.0}),
        '{"reward": "1", "x": 1}': (0.0, {"x": 1.0}),
        '{"x": null, "y": 1}': (0.0, {"y": 1.0}),
        "[1]": (0.0, {}), "{}": (0.0, {}), "true": (0.0, {}), "NaN": (0.0, {}), "1": (1.0, {}),
        '{"reward": 1e9}': (0.0, {}), "[" * 9999: (0.0, {}),
    },
    "reward.txt": {"1\n": (1.0, {}), "0.5": (0.5, {}), "": (0.0, {}), "nan": (0.0, {})},
}  # fmt: skip


@pytest.mark.parametrize("name", REWARDS)
def test_read_reward_and_measures(name: str, tmp_path: Path) -> None:
    file = tmp_path / "logs/verifier" / name
    file.parent.mkdir(parents=True)
    upper = os.open(tmp_path, os.O_RDONLY)
    for text, (reward, others) in REWARDS[name].items():
        file.write_text(text)
        measures = {f"verifier_{key}": number for key, number in others.items()}
        assert read_reward(upper) == (reward, measures), text
    file.unlink()
    assert read_reward(upper) == (0.0, {})
    os.close(upper)


def test_agent_that_cannot_act_in_an_image_is_rejected() -> None:
    given = {"agent": {"kind": "answer"}, "env": {"kind": "harbor"}}
    config = TrainConfig.model_validate({"model": "m", "out_dir": "o", **given})
    with pytest.raises(ValueError, match=r"agent\.kind"):
        resolve(config)


def test_session_settings_that_the_task_decides_are_rejected() -> None:
    given = {"agent": {"kind": "code"}, "env": {"kind": "harbor"}, "sandbox": {"memory_mib": 512}}
    config = TrainConfig.model_validate({"model": "m", "out_dir": "o", **given})
    with pytest.raises(ValueError, match=r"sandbox\.memory_mib: 512 does nothing without another"):
        resolve(config)


REFUSED = {
    "environment.gpus": "[environment]\ngpus = 1",
    "environment.gpu_types": '[environment]\ngpu_types = ["H100"]',
    "environment.tpu": '[environment]\ntpu = {type = "v5"}',
    "environment.os": '[environment]\nos = "windows"',
    "environment.network_mode": '[environment]\nnetwork_mode = "allowlist"',
    "agent.allowed_hosts": '[agent]\nallowed_hosts = ["pypi.org"]',
    "environment.mcp_servers": '[[environment.mcp_servers]]\nname = "a"',
    "environment.healthcheck": '[environment.healthcheck]\ncommand = "true"',
    "environment.workdir": '[environment]\nworkdir = "app"',
    "environment.cpus": "[environment]\ncpus = 0",
    "environment.memory": '[environment]\nmemory = "much"',
    "environment.env.A": "[environment.env]\nA = 1",
    "agent.user": '[agent]\nuser = "me"',
    "agent.timeout_sec": "[agent]\ntimeout_sec = nan",
    "verifier.environment_mode": '[verifier]\nenvironment_mode = "separate"',
    "verifier.collect": '[[verifier.collect]]\npath = "/x"',
    "verifier.env: expected variables that are set and granted, got \\${KEY}": '[verifier.env]\nA = "x${KEY}"',
    "steps": '[[steps]]\nname = "a"',
    "agent: ": "agent = 1",
}


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_keys_are_rejected_by_name(tmp_path: Path, key: str) -> None:
    make_folder(tmp_path / "t", REFUSED[key])
    with pytest.raises(ValueError, match=key):
        read_task(tmp_path / "t")


@pytest.mark.parametrize("path", ["environment/docker-compose.yaml", "steps/a", "tests/Dockerfile"])
def test_unsupported_files_are_rejected_by_name(tmp_path: Path, path: str) -> None:
    make_folder(tmp_path / "t")
    (tmp_path / "t" / path).parent.mkdir(exist_ok=True)
    (tmp_path / "t" / path).write_text("")
    with pytest.raises(ValueError, match=path.split("/")[0 if "steps" in path else 1]):
        read_task(tmp_path / "t")


def test_limits_and_granted_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = '[environment]\nmemory = "2G"\nstorage = "500MB"\ncpus = 3\ngpus = 0\ntpu = ""\n[verifier.env]\nA = "${KEY}"\nB = "${KEY:-x}"\nC = "${NO:-y}"'
    make_folder(tmp_path / "t", toml.replace('tpu = ""\n', ""))
    monkeypatch.setenv("KEY", "k")
    task = read_task(tmp_path / "t", ["KEY"])
    assert (task.limits.memory_mib, task.limits.home_mib, task.limits.cpus) == (2048, 500, 3)
    assert task.verifier.env == {"A": "k", "B": "k", "C": "y"}
