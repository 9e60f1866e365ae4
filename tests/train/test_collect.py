"""Groups are scored while others play; more tasks are played where too few carry a gradient."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import RewardConfig, RolloutConfig
from agentgrpo.envs.validate import RESERVED_NAMES
from agentgrpo.recipe.report import report
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.train.collect import collect
from agentgrpo.train.parts import Parts
from agentgrpo.types import Group, Rollout, Task
from tests.given import a_config
from tests.playing import CHAT, EOT, scripted, tasks
from tests.rollout.stubs import StubEngine, StubEnv, Turn

RAN: list[tuple[str, str]] = []
"""Which rollout was scored, and on which thread."""


@pytest.fixture(autouse=True)
def _mine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward functions of a user's."""

    def noted(view: Any) -> float:
        RAN.append((view.text, threading.current_thread().name))
        return float(len(view.text) % 7)

    async def awaited(view: Any) -> float:
        return 0.5 * noted(view)

    def fails(view: Any) -> float:
        if "2" in view.text:
            raise OSError(f"no judge for {view.text}")
        return 1.0

    RAN.clear()
    mine = SimpleNamespace(noted=noted, awaited=awaited, fails=fails)
    monkeypatch.setitem(sys.modules, "mine", cast(Any, mine))


class Stream:
    """Tasks t0, t1, ..."""

    steps_before = 0

    def __init__(self) -> None:
        self.drawn = 0

    def next(self, count: int) -> list[Task]:
        self.drawn += count
        return tasks(self.drawn)[-count:]


class Quiet:
    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        yield


def live_for(*names: str) -> Any:
    """The base reward: rollouts of these tasks differ, those of all others are equal."""

    def base(r: Rollout) -> dict[str, float]:
        odd = CHAT.decode(r.segments[-1].token_ids).startswith("odd")
        return {"answer": float(r.task.id in names and odd)}

    return base


def steps_of(number: int, prompt: str) -> Turn:
    """The first task of a round takes long."""
    said = "odd" if number % 2 else f"even {number}"
    return Turn(f"{said}{EOT}", steps=50 if "Q0" in prompt or "Q3" in prompt else 1)


def collected(
    base: Any, *overrides: str, functions: dict[str, float] | None = None,
    on_step: Any = lambda step: None, sigma_tool: float = 0.0, step: int = 0, **settings: Any,
) -> tuple[list[Group], dict[str, float], StubEngine, Stream]:  # fmt: skip
    engine = scripted(steps_of, on_step=on_step)
    config = RolloutConfig(max_turns=3, max_turn_tokens=99, max_observation_tokens=99, **settings)
    sampler = Sampler(cast(Any, engine), CodeAgent(), StubEnv(), CHAT, config)
    reward = RewardConfig(
        functions=functions or {},
        on_error="raise" if functions else "drop",
        sigma_tool=sigma_tool,
    )
    scoring = Scoring(base, reward, CHAT.tokenizer.decode, total_steps=3)
    stream = Stream()
    parts = SimpleNamespace(sampler=sampler, tasks=stream, reward=scoring, progress=Quiet())
    run = a_config("rollout.tasks_per_step=3", "rollout.group_size=2", *overrides)
    groups, metrics = collect(run, cast(Parts, parts), step)
    return groups, metrics, engine, stream


def result(groups: Sequence[Group]) -> list[Any]:
    """What training reads of them."""

    def of(r: Rollout) -> Any:
        counted = {k: v for k, v in r.stats.items() if not k.endswith("_s")}
        return r.task.id, r.token_ids.tolist(), r.rewards, r.advantage, counted

    return [of(r) for group in groups for r in group.rollouts]


def test_environment_count_with_a_reserved_metric_name_is_an_error() -> None:
    groups, metrics, *_ = collected(live_for("t1"))
    counted = {name for group in groups for rollout in group.rollouts for name in rollout.stats}
    assert "dead_all_equal" in metrics
    others = {*report([], model="m", seed=0, **metrics)} - counted
    assert others - RESERVED_NAMES == set()


def test_groups_are_scored_while_others_play() -> None:
    """On another thread, before the slow group has ended."""
    scored_at: dict[int, int] = {}

    def look(step: int) -> None:
        time.sleep(0.001)  # a step takes a while: what has ended is noticed meanwhile
        until = time.monotonic() + 10
        while step == 40 and len(RAN) < 4 and time.monotonic() < until:
            time.sleep(0.001)
        scored_at[step] = len(RAN)

    collected(live_for("t1"), functions={"mine:noted": 1.0}, on_step=look)
    assert scored_at[40] == 4, "of the two short groups"
    assert {thread for _, thread in RAN} == {"rewards"}


def test_efficiency_cost_decreases_with_the_step() -> None:
    """One of two siblings calls a tool once, both are right: 2 / (1 + exp(half of the sigma))."""

    def right(r: Rollout) -> dict[str, float]:
        r.stats["tool_calls"] = float(CHAT.decode(r.segments[-1].token_ids).startswith("odd"))
        return {"answer": 1.0}

    for step, sigma in enumerate((2.0, 1.0, 0.0)):
        groups, *_ = collected(right, sigma_tool=2.0, step=step)
        least = min(r.rewards["answer_efficiency"] for group in groups for r in group.rollouts)
        assert least == pytest.approx(2 / (1 + math.exp(sigma / 2)) - 1)


def test_reward_error_in_the_background_is_raised_unchanged() -> None:
    """The first in the groups' order, whichever group ended first."""

    def base(rollout: Rollout) -> dict[str, float]:
        if rollout.task.id in ("t0", "t2"):
            raise ValueError(f"task {rollout.task.id}: no answer")
        return {"answer": 1.0}

    with pytest.raises(UserCodeError, match="task t0: no answer"):
        collected(base)
    with pytest.raises(
        UserCodeError, match=r"reward function fails raised OSError: .*task 't\d', rollout \d, at"
    ):
        collected(live_for(), functions={"mine:fails": 1.0})


def test_with_a_teacher_every_sampled_group_is_live() -> None:
    _, metrics, _, stream = collected(
        live_for(), "rollout.refill_below=3", "rollout.max_refills=2", "teacher.feedback=errors"
    )
    assert (stream.drawn, metrics["live_groups"]) == (3, 3)
