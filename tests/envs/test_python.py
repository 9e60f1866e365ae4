"""What a policy sees of its code: as at a terminal; and whose fault a failure was."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentgrpo.actions import InfrastructureError, Observation, RunCode
from agentgrpo.envs.python import PythonEnv, PythonEpisode, render
from agentgrpo.sandbox import (
    SandboxInfraError,
    SandboxNotFoundException,
    StepError,
    StepResult,
    StepStatus,
)
from agentgrpo.types import Task

TASK = Task(id="t", messages=(), spec={})
DIVISION = StepError("ZeroDivisionError", "division by zero", "Traceback ...")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (StepResult(status=StepStatus.OK), "(no output)"),
        (StepResult(status=StepStatus.OK, stdout="42\n"), "42"),
        (StepResult(status=StepStatus.OK, value="42"), "42"),
        (StepResult(status=StepStatus.OK, stdout="a\n\n", stderr="b\n", value="c"), "a\nb\nc"),
        (StepResult(status=StepStatus.OK, stdout="  a"), "  a"),
        (
            StepResult(status=StepStatus.ERROR, stdout="so far\n", error=DIVISION),
            "so far\nZeroDivisionError: division by zero",
        ),
        (StepResult(status=StepStatus.ERROR, error=StepError("KeyError", "", "")), "KeyError"),
        (StepResult(status=StepStatus.TIMEOUT_KILLED), "Error: timeout killed"),
        (StepResult(status=StepStatus.OOM, stdout="x\n"), "x\nError: oom"),
    ],
)
def test_render_step_results(result: StepResult, text: str) -> None:
    assert render(result) == text


class FakePool:
    """Sessions that give prepared results, one after another."""

    def __init__(self, *results: StepResult | Exception) -> None:
        self.results = list(results)
        self.acquired = self.closed = 0

    host = None
    places = SimpleNamespace(image=None)

    def cpu_seconds(self) -> float:
        return 0.0

    def acquire(self, image: None, host: None) -> FakePool:
        if isinstance(self.results[0], Exception):
            raise self.results.pop(0)  # type: ignore[misc]
        self.acquired += 1
        return self

    def step(self, code: str, timeout_s: float) -> Any:
        assert timeout_s == 2.5
        return self.results.pop(0)

    def close(self) -> None:
        self.closed += 1


def said(observation: Observation) -> Observation:
    """Without what the step cost."""
    return replace(observation, counts={})


def episode(pool: FakePool) -> PythonEpisode:
    return PythonEnv(cast(Any, pool), 2.5).reset(TASK)


def test_dead_session_is_replaced_with_a_note_to_the_policy() -> None:
    lost = StepResult(status=StepStatus.TIMEOUT_KILLED, state_lost=True)
    pool = FakePool(lost, StepResult(status=StepStatus.OK, value="1"))
    played = episode(pool)
    assert said(played.step(RunCode("while 1: pass"))) == Observation(
        "Error: timeout killed\n(the interpreter was restarted: its variables are gone)",
        failed=True,
    )
    assert said(played.step(RunCode("1"))) == Observation("1")
    played.close()
    played.close()
    assert (pool.acquired, pool.closed) == (2, 2), "each session is closed once"


def test_failures_of_the_machine_are_infrastructure_errors() -> None:
    broken = StepResult(status=StepStatus.INFRA_ERROR, detail="vanished")
    for pool in (FakePool(broken, broken), FakePool(SandboxInfraError("no descriptors"))):
        with pytest.raises(InfrastructureError):
            episode(pool).step(RunCode("x"))


@pytest.mark.parametrize("lost", [True, False], ids=["the machine", "the session"])
def test_lost_file_is_an_infrastructure_error(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(_: FakePool) -> None:
        raise (SandboxInfraError if lost else SandboxNotFoundException)("over")

    monkeypatch.setattr(FakePool, "files", files, raising=False)
    pool = FakePool(StepResult(status=StepStatus.OK))
    task = Task(id="t", messages=(), spec={"expected_files": {"f": "x"}})
    played = PythonEnv(cast(Any, pool), 2.5).reset(task)
    played.step(RunCode("1"))
    if lost:
        with pytest.raises(InfrastructureError, match="over"):
            played.finish(None)
    else:
        assert played.finish(None) == {"files": 0.0}
