"""The suite for cards, as far as a CPU shows it: what ends alone, and what a call may choose."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from bench.gpu import step

MIX = step.Mix("tiny", "tiny", 48, 2 / 3)


def test_a_case_that_fails_ends_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {"full": step.Wrong("tree computes something else"), "lora": torch.OutOfMemoryError()}
    done: list[str] = []

    def check(setting: step.Setting, model: object, groups: object) -> None:
        if fault := faults.get(done[-1]):
            raise fault

    make_model = step.make_model

    def noted(setting: step.Setting, shape: dict[str, int], option: str) -> object:
        done.append(option)
        return make_model(setting, shape, option)

    monkeypatch.setattr(step, "check", check)
    monkeypatch.setattr(step, "make_model", noted)
    setting = step.Setting("cpu", torch.float32, {"tiny": step.TINY}, 512, 1e-4, 1, write=False)
    failed = step.every(setting, step.cases_of(["tiny"], [MIX]))
    assert done == ["full", "checkpointing", "lora"]
    assert failed == [
        "tiny/full/tiny: Wrong: tree computes something else",
        "tiny/lora/tiny: OutOfMemoryError: ",
    ]
    assert "-> tree is" in capsys.readouterr().out, "the one between them was timed"


def test_a_layout_that_takes_long_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = step.Setting("cpu", torch.float32, {}, 512, 1e-4, 5, write=False)
    monkeypatch.setattr(step, "passes_of", lambda *_: lambda: 0.0)
    model = torch.nn.Linear(1, 1)
    assert len(step.time_layout(setting, model, [], "tree")[0]) == 5
    monkeypatch.setattr(step, "ENOUGH", 0.0)
    assert len(step.time_layout(setting, model, [], "tree")[0]) == 2


def test_every_case_has_a_process_and_a_limit_of_its_own(tmp_path: Path) -> None:
    """run.sh with a Python that only notes how it was called."""
    root = Path(__file__).parents[1]
    fake = tmp_path / "python"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        'case "$*" in *--list) echo a/full/x; echo b/lora/y;; *a/full/x) exec sleep 60;; esac\n'
    )
    fake.chmod(0o755)
    ran = subprocess.run(
        ["sh", str(root / "bench/gpu/run.sh"), "step", "step/c/full/z"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(fake), "BENCH_LIMIT": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (tmp_path / "calls").read_text().splitlines() == [
        "-m bench.gpu.step --list",
        "-m bench.gpu.step --cases a/full/x",
        "-m bench.gpu.step --cases b/lora/y",
        "-m bench.gpu.step --cases c/full/z",
    ]
    assert ran.returncode == 1
    assert ran.stderr == "failed: a/full/x\n"
