"""Trackers get every number of metrics.jsonl; a missing library is named at the start."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentgrpo.records.metrics import HASHES, RunLog
from agentgrpo.records.trackers import open_trackers, require
from agentgrpo.support.atomic_files import read_lines


class FakeService(ModuleType):
    """The functions that wandb and trackio share."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def log(self, data: dict[str, float], *, step: int) -> None:
        self.calls.append(("log", (step, data)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.fixture(params=["wandb", "trackio"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeService:
    module = FakeService(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_service_gets_every_line_and_finish(service: FakeService, tmp_path: Path) -> None:
    opened = open_trackers([service.__name__], tmp_path, {"steps": 2}, 0)
    log = RunLog(tmp_path, opened)
    log.write(0, eval={"solved": 0.5})
    log.write(0, rollout={"reward": 1.0}, learner={"loss": 0.25})
    log.close()
    names = [name for name, _ in service.calls]
    assert names == ["init", "log", "log", "finish"]
    options = service.calls[0][1]
    assert options["config"] == {"steps": 2}
    assert options["resume"] == "allow"
    assert service.calls[2][1] == (0, {"step": 0, "rollout/reward": 1.0, "learner/loss": 0.25})
    written = [
        {name: value for name, value in row.items() if name not in HASHES}
        for row in read_lines(tmp_path / "metrics.jsonl")
    ]
    assert [call[1][1] for call in service.calls[1:3]] == written


def test_resumed_run_continues_its_curves(service: FakeService, tmp_path: Path) -> None:
    for step in (0, 3):
        open_trackers([service.__name__], tmp_path, {}, step)
    first, second = (options for _, options in service.calls)
    assert first == second
    other = tmp_path / "other"
    other.mkdir()
    open_trackers([service.__name__], other, {}, 0)
    assert service.calls[2][1]["name"] != first["name"]


def test_failing_tracker_does_not_stop_the_run_and_is_reported_once(
    service: FakeService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: Any, **of: Any) -> None:
        raise ConnectionError(f"away {of}")

    log = RunLog(tmp_path, open_trackers([service.__name__], tmp_path, {}, 0))
    for step, away in enumerate([True, True, False, True]):
        with monkeypatch.context() as patch:
            if away:
                patch.setattr(service, "log", fails)
            log.write(step, eval={"solved": 0.5})
    monkeypatch.setattr(service, "finish", fails)
    log.close()
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [name for name, _ in service.calls] == ["init", "log"]
    name, remedy = service.__name__, "the run continues, metrics.jsonl has its numbers"
    assert capfd.readouterr().err.splitlines() == [
        f"trackers: {name!r} raised ConnectionError: away {{'step': {step}}} (at step {step}); "
        f"{remedy}"
        for step in (0, 3)
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"trackers: '{name}': .* is not installed; .*agentgrpo\[{name}\]"
    with pytest.raises(ValueError, match=message):
        require([name])


def test_tensorboard_reads_back_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard to try it")
    events = "tensorboard.backend.event_processing.event_accumulator"
    accumulator: Any = importlib.import_module(events).EventAccumulator
    (opened,) = open_trackers(["tensorboard"], tmp_path, {"steps": 2}, 0)
    opened.write(1, {"rollout/reward": 0.5})
    opened.close()
    read = accumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in read.Scalars("rollout/reward")] == [(1, 0.5)]
