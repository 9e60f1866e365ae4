"""What a rollout was worth, in named parts whose sum is the reward.

A reward is any callable that takes a finished rollout as a RolloutView (its task with the hidden
spec, the final answer, texts, status, counts) and returns {part: value}. Rollouts that the machine
broke are not scored.
A shipped one that compares answers has `expected`, its own reading of what a task's spec expects,
which raises what the reward would: every task is read by it before a run.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from agentgrpo.config import RewardConfig
from agentgrpo.rewards.answers import (
    exact_match,
    expected_mathematics,
    expected_numbers,
    expected_texts,
    f1,
    last_number,
    only_number,
    same_mathematics,
    words,
)
from agentgrpo.rewards.choices import chosen, expected_choices, options_of
from agentgrpo.rewards.rollout_view import RolloutView
from agentgrpo.support.user_calls import (
    UserCodeError,
    WrongResult,
    await_within,
    event_loop,
    name_of,
    named_numbers,
    user_call,
)
from agentgrpo.types import COUNTS, Group, Rollout, Segment, Status, Task

Made = TypeVar("Made")
Reward = Callable[[Any], Any]
"""Of a RolloutView, see the module's docstring; the user's own may be a coroutine function."""


def try_reward(reward: Reward, task: Task) -> None:
    """Score two attempts at a task that were never made: without an answer, and with the right one,
    each one turn that says nothing.
    """
    for answer in (None, str(task.spec.get("answer", ""))):
        prompt = Segment(np.zeros(1, np.int32))
        attempt = Rollout(
            task=task,
            segments=[prompt, Segment(np.zeros(1, np.int32), np.zeros(1, np.float32))],
            status=Status.COMPLETED,
            answer=answer,
            stats=dict.fromkeys(COUNTS, 0.0) | {"turns": 1.0},
        )
        try:
            score(Group(task=task, rollouts=[attempt]), reward)
        except UserCodeError as error:
            error.rollout = None
            error.failure += f" for the answer {answer!r:.80}"
            raise


def score(group: Group, reward: Reward) -> None:
    """As score_async(), waited for, by rewards that read no texts."""
    work = score_async(group, reward, functools.partial(RolloutView, decode=lambda ids: ""))
    asyncio.run_coroutine_threadsafe(work, event_loop("rewards")).result()


async def score_async(
    group: Group, reward: Reward, view: Callable[[Rollout], RolloutView], *,
    limit_s: float | None = None,
) -> None:  # fmt: skip
    """Add rewards to what the environment gave, of all rollouts that the machine did not break."""
    for index, rollout in enumerate(group.rollouts):
        if rollout.status is Status.INFRA_ERROR:
            continue
        call, task = functools.partial(reward, view(rollout)), group.task.id
        given = await ask(call, task, index, _given, limit_s=limit_s)
        if given.keys() & rollout.rewards.keys():
            raise ValueError(
                f"task {group.task.id}: both the environment and the reward give "
                f"{sorted(given.keys() & rollout.rewards.keys())}"
            )
        rollout.rewards |= given


def _given(parts: Any) -> dict[str, float]:
    given = named_numbers(parts)
    if given is None:
        raise WrongResult(f"expected {{name: finite number}}, got {parts!r:.80}")
    return given


async def ask(
    function: Callable[[], Any], task: str, index: int | None, read: Callable[[Any], Made], *,
    what: str = "", limit_s: float | None = None,
) -> Made:  # fmt: skip
    """What a reward function, a coroutine or not, says of a rollout, or of a group."""
    what = what or f"the reward {name_of(function)}"
    with user_call(function, what, task=task, rollout=index, limit_s=limit_s):
        value = function()
        if not inspect.isawaitable(value):
            return read(value)
    longest = limit_s and 2 * limit_s  # of one that keeps the loop for itself
    with user_call(function, what, task=task, rollout=index, limit_s=longest):
        return read(await await_within(limit_s, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericReward:
    """`answer` for the right number, `format` for getting to a number by running code.

    The number of an answer is its last one, so "12 * 3 = 36" answers 36 and so does "36 pens".
    The expected one is read in the same way, so that GSM8K's "...#### 72" is 72; of several in a
    list any will do.

    Raises (when called):
        ValueError: `task.spec["answer"]` is missing, or it or one of a list holds no number.
    """

    answer: float = 1.0
    """For an answer equal to `task.spec["answer"]`, or to one of a list there."""
    format: float = 0.1
    """For a number as answer, after code that ran without an error, with no malformed turn."""
    strict: bool = False
    """Accept only an answer that is a number and nothing else."""
    expected = staticmethod(expected_numbers)

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        """The parts `answer` and `format`, each its full value or 0.0."""
        expected = self.expected(rollout.task)
        read = only_number if self.strict else last_number
        number = None if rollout.answer is None else read(rollout.answer)
        well_formed = number is not None and _acted_well(rollout)
        return {
            "answer": rollout.weighted("answer", self.answer, number in expected),
            "format": rollout.weighted("format", self.format, well_formed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReward:
    """Nothing for the answer, which the environment judges; `format` for acting well."""

    answer: float = 1.0
    """Not read: the environment's own rewards count as they are."""
    format: float = 0.0

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        """The part `format` where it is worth anything."""
        if not self.format:
            return {}
        return {"format": rollout.weighted("format", self.format, _acted_well(rollout))}


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward:
    """`answer` for an answer equal to the expected one as mathematics, by the package math-verify.

    Raises (when called):
        ValueError: `task.spec["answer"]` is missing or empty, or there is no such package.
    """

    answer: float = 1.0
    format: float = 0.0
    expected = staticmethod(expected_mathematics)

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        """The parts `answer` and `format`, each its full value or 0.0."""
        said = rollout.answer or ""
        seen = [same_mathematics(said, gold) for gold in self.expected(rollout.task)]
        said_read = any(comparison.said_read for comparison in seen)
        return {
            "answer": rollout.weighted(
                "answer", self.answer, any(comparison.equal for comparison in seen)
            ),
            "format": rollout.weighted("format", self.format, said_read and _acted_well(rollout)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReward:
    """`answer` for naming the expected option of a multiple choice (rewards/choices.py)."""

    answer: float = 1.0
    format: float = 0.0
    expected = staticmethod(expected_choices)

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        """The parts `answer` and `format`, each its full value or 0.0."""
        label = chosen(rollout.answer or "", options_of(rollout.task))
        right, well_formed = label in self.expected(rollout.task), label and _acted_well(rollout)
        return {
            "answer": rollout.weighted("answer", self.answer, right),
            "format": rollout.weighted("format", self.format, bool(well_formed)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReward:
    """`answer` for an exact match, else `partial`: the share of it that the token F1 is (SQuAD's).

    Several expected answers in a list: the best counts. Compared without case, punctuation,
    articles and repeated space; another answer of more than max_words words is worth nothing, so
    that reciting everything does not pay.

    Raises (when called):
        ValueError: `task.spec["answer"]` is missing, or it or one of a list is empty.
    """

    answer: float = 1.0
    format: float = 0.0
    max_words: int = 32
    expected = staticmethod(expected_texts)

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        """The parts `answer` or `partial`, together in [0, answer], and `format`."""
        answer = rollout.answer or ""
        said, accepted = words(answer), self.expected(rollout.task)
        score, exact = f1(answer, accepted), bool(exact_match(answer, accepted))
        short = exact or len(said) <= self.max_words
        worth = rollout.weighted("answer", self.answer, score * short)
        well_formed = bool(said) and short and _acted_well(rollout)
        return {
            "answer": worth if exact else 0.0,
            "partial": 0.0 if exact else worth,
            "format": rollout.weighted("format", self.format, well_formed),
        }


def with_costs(reward: Reward, config: RewardConfig) -> Reward:
    """The reward, less what the rollout's calls and its use of the sandbox cost, as parts."""
    rates = {
        "tool_cost": config.tool_cost,
        "wall_cost": config.cost_per_wall_s,
        "cpu_cost": config.cost_per_cpu_s,
        "mib_cost": config.cost_per_mib,
    }
    if not any(rates.values()):
        return reward

    def with_cost(given: Mapping[str, float], rollout: Rollout) -> dict[str, float]:
        used = rollout.stats.get
        spent = {
            "tool_cost": rollout.num_calls,
            "wall_cost": used("sandbox_wall_s", 0.0),
            "cpu_cost": used("sandbox_cpu_s", 0.0),
            "mib_cost": used("sandbox_bytes", 0.0) / (1 << 20),
        }
        costs = {
            part: rollout.weighted(part, rate, -spent[part]) for part, rate in rates.items() if rate
        }
        return {**given, **costs}

    @functools.wraps(reward)
    def costed(rollout: Rollout) -> Any:
        parts = reward(rollout)
        return later(parts, rollout) if inspect.isawaitable(parts) else with_cost(parts, rollout)

    async def later(parts: Any, rollout: Rollout) -> dict[str, float]:
        return with_cost(await parts, rollout)

    return costed


def _acted_well(rollout: Rollout) -> bool:
    """An action that worked, no malformed turn, and an answer."""
    count = rollout.stats.get
    worked = count("tool_calls", 0.0) > count("tool_errors", 0.0)
    return worked and not count("malformed", 0.0) and rollout.answer is not None
