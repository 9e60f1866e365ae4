"""Benchmark rows name the measured code, and GPU stages end by themselves."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgrpo.kernels.linear_logp import linear_logp
from bench import harness, pages, teacher
from bench.__main__ import scripts
from bench.gpu import kernels, stages, step
from bench.gpu.stages import CALLS, STAGES
from bench.table import LINES, PAGE, TABLES, table

MIX = step.Mix("tiny", "tiny", 48, 2 / 3)


def test_each_script_is_listed_with_its_purpose() -> None:
    assert scripts()["bench.packing"].startswith("Time the packing of a step")
    assert all(scripts().values())


def test_benchmark_pages_have_newest_rows() -> None:
    text = table()
    for page, rows in ((PAGE, table(detail=False)), (TABLES, text)):
        assert pages.with_made(page.read_text(), "bench.table", rows) == page.read_text()
    assert all(line.what in text for line in LINES)
    taught = teacher.PAGE.read_text()
    assert pages.with_made(taught, "bench.teacher", teacher.table()) == taught


def test_outdated_extension_writes_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "bench/results")
    for name in ("csrc/old.c", "csrc/new.h", "agentgrpo/_C.abi3.so"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    built = (tmp_path / "agentgrpo/_C.abi3.so").stat().st_mtime
    for name, age in (("old.c", 10), ("new.h", 5)):
        os.utime(tmp_path / "csrc" / name, (built - age, built - age))
    (tmp_path / ".git").mkdir()
    harness.require_built()
    os.utime(tmp_path / "csrc/new.h", (built + 5, built + 5))
    with pytest.raises(RuntimeError, match=r"older than csrc/new\.h"):
        harness.append_row("name", "variant", [1.0], unit="s", shape={})
    assert not (tmp_path / "bench/results/name.jsonl").exists()


@pytest.mark.parametrize("of", ["values", "gradient"])
def test_kernels_with_nan_are_wrong(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    plain = linear_logp

    def spoilt(hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        logp, entropy = plain(hidden, *args, **options)
        first = torch.zeros_like(logp)
        first[0] = torch.nan
        return (logp + first if of == "values" else logp + hidden.sum() * 0 * torch.nan), entropy

    setting = kernels.Setting("cpu", 64, 509, (16,), 2, write=False)
    kernels.check(setting, 16)
    monkeypatch.setattr(kernels, "linear_logp", spoilt)
    with pytest.raises(SystemExit, match="the kernels are wrong on this machine"):
        kernels.check(setting, 16)


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_layout_with_nan_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    gradients = iter([(1.0, torch.ones(2)), (1.0, torch.ones(2)), (1.0, torch.ones(2))])
    nan = (torch.nan, torch.ones(2)) if spoilt == "loss" else (1.0, torch.tensor([1.0, torch.nan]))
    monkeypatch.setattr(step, "gradient_of", lambda *_: next(gradients, nan))
    monkeypatch.setattr(step, "passes_of", lambda *_: None)
    setting = step.Setting("cpu", torch.float32, {}, 512, 1e-4, 1e-4, 5, write=False)
    checks = step.check(setting, None, [], step.LAYOUTS)
    assert {layout: right for layout, (_, right) in checks.items()} == {
        "rows varlen": True, "rows flex": True, "tree": False,
    }  # fmt: skip


def test_wrong_layout_is_timed_with_its_error_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "check", lambda *_: dict.fromkeys(step.LAYOUTS[1:], (0.3, False)))
    rows: dict[str, float] = {}
    monkeypatch.setattr(
        step.Setting, "record", lambda _, name, values, *__: rows.setdefault(name, values[0])
    )
    setting = step.Setting("cpu", torch.float32, {"tiny": step.TINY}, 512, 1e-4, 1e-4, 1, True)
    with pytest.raises(step.Wrong, match="rows varlen, rows flex, tree: loss or gradient is not"):
        step.compare(setting, step.Case("tiny", "checkpointing", MIX))
    assert rows["tiny checkpointing, tree, WRONG, gradient's error"] == 0.3
    assert rows["tiny checkpointing, tree, WRONG"] > 0
    assert "tiny checkpointing, padded" in rows


def test_gpu_calls_have_known_stages_and_fit_15_minutes() -> None:
    called = [name for call in CALLS.values() for name in call]
    assert len(called) == len(set(called))
    assert sum(STAGES[name].seconds for name in called) + 20 * len(CALLS) <= 900
    assert stages.stages_of("3") == list(CALLS["3"])
    for group in (*stages.OWN, "step/4B/lora/tools"):
        assert stages.stages_of(group)
    with pytest.raises(SystemExit, match="error: no stage 'engin'"):
        stages.stages_of("engin")


class Parsed(Exception):
    """Stands in for the measurement."""


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("name", [name for name in STAGES if name != "tests"])
def test_every_bench_command_parses(name: str, walk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *arguments = [*STAGES[name].argv, *(STAGES[name].walk if walk else ())]
    loaded = importlib.import_module(module)

    def parse(method: str) -> Any:
        plain = getattr(argparse.ArgumentParser, method)

        def parsed(self: Any, *args: Any) -> None:
            raise Parsed(plain(self, *args))

        return parsed

    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, parse(method))
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
        loaded.main(*[arguments] * bool(inspect.signature(loaded.main).parameters))
