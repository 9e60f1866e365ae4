"""assert_learns and assert_repeats decide as documented, in their own pytest with one engine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.support.atomic_files import write_lines
from agentgrpo.testing import learns
from agentgrpo.testing.learns import Learned
from agentgrpo.types import Status, Treatment
from tests import tiny
from tests.given import TASK as A_TASK
from tests.given import a_rollout
from tests.warm import Command


def test_probability_of_false_pass_is_at_most_the_risk() -> None:
    """Sums the probability of all passing outcomes under a fair coin."""
    for changed in range(1, 65):
        weight = [math.comb(changed, g) / 2**changed for g in range(changed + 1)]
        passes = sum(w for g, w in enumerate(weight) if learns.tail(g, changed, 0.5) <= 0.01)
        assert passes <= 0.01


def watched(
    monkeypatch: pytest.MonkeyPatch, shares: list[int], live: list[float], **of: Any
) -> tuple[str | None, int | None]:
    """A _Watch's failure and stopping step; `shares`: of 100 tasks solved at each evaluation."""
    stops: list[int] = []
    steps, every = len(live), len(live) // (len(shares) - 1)
    watch = learns._Watch(of.get("solved") or 0.0, 0.01, len(shares) - 1)
    trainer: Any = SimpleNamespace(config=SimpleNamespace(out_dir=Path(), steps=steps))
    for step in range(steps + 1):
        if stops and step > stops[0] + 1:  # a step is trained after a look that stops the run
            break
        trainer.stop = lambda step=step: stops.append(step)
        if step:
            watch.on_step_end(trainer, step, {"rollout/live_groups": live[step - 1]})
        if stops == [step]:
            break
        if step % every == 0:
            monkeypatch.setattr(learns, "_heldout", lambda run, at: {
                str(i): i < shares[at // every] for i in range(100)
            })  # fmt: skip
            watch.on_evaluate(trainer, step, {})
    why = None if isinstance(watch.outcome, Learned) else watch.outcome
    return why, stops[0] if stops else None


@pytest.mark.parametrize(
    ("shares", "live", "solved", "why", "stopped"),
    [
        ([40, 45, 60], [3.0] * 4, None, None, None),  # 20 gained, none lost
        ([40, 60, 60], [3.0] * 4, None, None, 2),  # at the first evaluation
        ([40, 60, 40], [3.0] * 2, None, None, 1),  # not revoked by the step after it
        ([40, 60, 60], [3.0] * 4, 0.9, "learned too little", None),
        ([40, 60, 84], [3.0] * 4, 0.9, None, None),  # 84 of 100 is not below 0.9 for certain
        ([40, 40, 45], [3.0] * 4, None, "did not learn", None),  # 5 gained: p = 0.03
        ([40, 40, 47], [3.0] * 4, None, "did not learn", None),  # p = 0.008 > 0.01 / 2
        ([40, 40, 20], [3.0] * 4, None, "did not learn", None),
        ([40, 40, 40], [0.0] * 4, None, "nothing to learn from: no group in 2 steps", 2),
    ],
)
def test_outcome_and_stopping_step(
    shares: list[int], live: list[float], solved: float | None, why: str | None,
    stopped: int | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    failure, step = watched(monkeypatch, shares, live, solved=solved)
    assert (failure or "").startswith(why or "")
    assert (failure is None) == (why is None)
    assert step == stopped


def test_timed_out_is_unsolved_and_infra_error_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, drop = {"split": "heldout", "step": 4}, {"treatment": Treatment.DROP}
    ends: Any = {"a": {"rewards": {"solved": 1.0}}, "b": {"status": Status.TIMED_OUT, **drop},
            "c": {"status": Status.INFRA_ERROR, **drop}}  # fmt: skip
    played = [(place, a_rollout(task=replace(A_TASK, id=n), **how)) for n, how in ends.items()]
    monkeypatch.setattr(learns, "read_rollouts", lambda path: played)
    assert learns._heldout(Path(), 4) == {"a": True, "b": False}


CONFIG = """
model = "model"
out_dir = "run"
steps = 8
agent.options.system_prompt = "S"
reward.kind = "my_task:without_code"
learner = { learning_rate = 1e-3, decay = "linear" }
engine = { max_model_len = 192, kv_cache_gib = 0.0625 }
data = { train = "rows.jsonl", heldout = "split", num_heldout = 32 }
sandbox.max_live = 32
[rollout]
tasks_per_step = 6
max_turns = 2
max_turn_tokens = 24
deterministic = true
"""
TASK = """
import random

def without_code(rollout):
    return {"answer": float(rollout.stats["tool_calls"] == 0)}

def nothing(rollout):
    return {"answer": 0.0}

def of_chance(rollout):
    return {"answer": float(random.SystemRandom().random() < 0.5)}
"""
TESTS = """
import pytest
from agentgrpo.testing import assert_learns, assert_repeats
from agentgrpo.engine.engine import Engine

engines = []

@pytest.fixture(autouse=True)
def counted(agentgrpo_engine, monkeypatch):
    init = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda *a, **k: (engines.append(1), init(*a, **k))[1])

def test_it_learns():
    result = assert_learns("sums.toml", solved=0.9)
    assert (result.before, result.steps) == (0.0, 4), "the first evaluation is enough"

def test_it_repeats_from_the_same_weights():
    assert_repeats("sums.toml", steps=1)

def test_what_does_not_repeat_is_named():
    with pytest.raises(AssertionError, match="group .* rollout .: rewards is"):
        assert_repeats("sums.toml", steps=1, reward={"kind": "my_task:of_chance"})

def test_what_pays_nothing_is_hopeless(tmp_path):
    with pytest.raises(AssertionError, match="no group in 4 steps had a gradient") as failed:
        assert_learns("sums.toml", reward={"kind": "my_task:nothing"}, keep=tmp_path / "kept")
    assert (tmp_path / "kept" / "view.html").exists()
    assert str(tmp_path / "kept") in str(failed.value)
    assert len(engines) == 1, "one engine for all tests"
"""


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.timeout(900)
def test_tests_of_training_share_an_engine(tmp_path: Path) -> None:
    tiny.make_agent_dir(tmp_path / "model")
    write_lines(tmp_path / "rows.jsonl", tiny.sums(120))
    for name, text in (("sums.toml", CONFIG), ("my_task.py", TASK), ("test_sums.py", TESTS)):
        (tmp_path / name).write_text(text)
    command = Command(
        "-m", "pytest", "-q", "-p", "agentgrpo.testing.plugin", "test_sums.py", cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    out, err = command.communicate(timeout=800)
    assert "4 passed" in out, out + err
