"""The shipped rewards. A reward consists of named parts; their sum is the rollout's reward.

A reward is any callable that takes a finished rollout as a RolloutView (its task with the hidden
spec, the final answer, texts, status, counts) and returns {part: value}. Rollouts that failed with
an infrastructure error are not scored.
A shipped reward that compares answers has a function `expected`, which parses the expected answer
of a task's spec and raises what the reward would raise. Every task is checked with it before a run.
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
from agentgrpo.rewards.choices import chosen_option, expected_choices, options_of
from agentgrpo.rewards.rollout_view import RolloutView
from agentgrpo.support.user_calls import (
    UserCodeError,
    await_within,
    event_loop,
    name_of,
    named_numbers,
    user_call,
)
from agentgrpo.types import COUNTS, Group, Rollout, Segment, Status, Task

T = TypeVar("T")
Reward = Callable[[Any], Any]
"""RolloutView -> {part: value}. A user's reward may be a coroutine function."""


def try_reward(reward: Reward, task: Task) -> None:
    """Score two dummy rollouts of a task, one without an answer and one with the right answer.

    Each has one empty turn. Raises UserCodeError if the reward cannot score them.
    """
    for answer in (None, str(task.spec.get("answer", ""))):
        prompt = Segment(np.zeros(1, np.int32))
        rollout = Rollout(
            task=task,
            segments=[prompt, Segment(np.zeros(1, np.int32), np.zeros(1, np.float32))],
            status=Status.COMPLETED,
            answer=answer,
            stats=dict.fromkeys(COUNTS, 0.0) | {"turns": 1.0},
        )
        try:
            score(Group(task=task, rollouts=[rollout]), reward)
        except UserCodeError as error:
            error.rollout = None
            error.failure += f" for the answer {answer!r:.80}"
            raise


def score(group: Group, reward: Reward) -> None:
    """Run score_async() and wait for it. For rewards that read no texts."""
    coroutine = score_async(group, reward, functools.partial(RolloutView, decode=lambda ids: ""))
    asyncio.run_coroutine_threadsafe(coroutine, event_loop("rewards")).result()


async def score_async(
    group: Group, reward: Reward, view: Callable[[Rollout], RolloutView], *,
    limit_s: float | None = None,
) -> None:  # fmt: skip
    """Add the reward's parts to those of the environment, without infrastructure errors."""
    for index, rollout in enumerate(group.rollouts):
        if rollout.status is Status.INFRA_ERROR:
            continue
        call, task = functools.partial(reward, view(rollout)), group.task.id
        parts = await ask(call, task, index, named_numbers, limit_s=limit_s)
        if parts.keys() & rollout.rewards.keys():
            raise ValueError(
                f"task {group.task.id}: both the environment and the reward return the parts "
                f"{sorted(parts.keys() & rollout.rewards.keys())}"
            )
        rollout.rewards |= parts


async def ask(
    function: Callable[[], Any], task: str, index: int | None, read: Callable[[Any], T], *,
    what: str = "", limit_s: float | None = None,
) -> T:  # fmt: skip
    """Call a reward function (async or not) for a rollout or a group; return `read` of its result.

    `limit_s` applies to the call, and to each wait for a coroutine.
    """
    what = what or f"the reward {name_of(function)}"
    with user_call(function, what, task=task, rollout=index, limit_s=limit_s):
        value = function()
        if not inspect.isawaitable(value):
            return read(value)
    # within() cancels a coroutine that waits too long. One that blocks the event loop cannot be
    # cancelled: user_call() ends the command then, after twice the limit.
    longest = limit_s and 2 * limit_s
    with user_call(function, what, task=task, rollout=index, limit_s=longest):
        return read(await await_within(limit_s, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReward:
    """Base class of the rewards that compare the answer with `task.spec["answer"]`."""

    answer: float = 1.0
    """Value of the expected answer, or of one in a list of expected answers."""
    format: float = 0.0
    """Value of an answer after code that ran without an error, with no malformed turn."""

    def parts(self, rollout: Rollout, share: float, *, well_formed: bool) -> dict[str, float]:
        """The parts `answer` (the share of its value) and `format`."""
        has_format = well_formed and _acted_well(rollout)
        return {
            "answer": rollout.weighted("answer", self.answer, share),
            "format": rollout.weighted("format", self.format, has_format),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericReward(AnswerReward):
    """`answer` for the right number, `format` for a number that was found by running code.

    The last number in an answer counts: "12 * 3 = 36" and "36 pens" are both 36. The expected
    answer is parsed in the same way, so GSM8K's "...#### 72" is 72. In a list of expected answers,
    any one is accepted.

    Raises (when called):
        ValueError: `task.spec["answer"]` is missing, or it or an element of a list has no number.
    """

    format: float = 0.1
    strict: bool = False
    """Accept only an answer that is a number and nothing else."""
    expected = staticmethod(expected_numbers)

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        expected = self.expected(rollout.task)
        read = only_number if self.strict else last_number
        number = None if rollout.answer is None else read(rollout.answer)
        return self.parts(rollout, number in expected, well_formed=number is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReward:
    """No part for the answer, since the environment scores it; `format` for correct tool use."""

    answer: float = 1.0
    """Ignored: the environment's rewards count unchanged."""
    format: float = 0.0

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        if not self.format:
            return {}
        return {"format": rollout.weighted("format", self.format, _acted_well(rollout))}


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward(AnswerReward):
    """`answer` for an answer that is mathematically equal to the expected one (math-verify).

    Raises (when called):
        ValueError: `task.spec["answer"]` is missing or empty, or math-verify is not installed.
    """

    expected = staticmethod(expected_mathematics)

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        answer = rollout.answer or ""
        results = [same_mathematics(answer, gold) for gold in self.expected(rollout.task)]
        right, parsed = (any(r.equal for r in results), any(r.answer_parsed for r in results))
        return self.parts(rollout, right, well_formed=parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReward(AnswerReward):
    """`answer` for the expected option of a multiple-choice question (rewards/choices.py)."""

    expected = staticmethod(expected_choices)

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        label = chosen_option(rollout.answer or "", options_of(rollout.task))
        right = label in self.expected(rollout.task)
        return self.parts(rollout, right, well_formed=label is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReward(AnswerReward):
    """`answer` for an exact match, else `partial`: SQuAD's token F1 times `answer`.

    In a list of expected answers, the best match counts. Case, punctuation, articles and repeated
    spaces are ignored. An inexact answer of more than max_words words scores 0, so that listing
    everything does not pay.

    Raises (when called):
        ValueError: `task.spec["answer"]` is missing, or it or an element of a list is empty.
    """

    max_words: int = 32
    expected = staticmethod(expected_texts)

    def __call__(self, rollout: Rollout) -> dict[str, float]:
        """The parts `answer` or `partial`, together in [0, answer], and `format`."""
        answer = rollout.answer or ""
        answer_words, accepted = words(answer), self.expected(rollout.task)
        score, exact = f1(answer, accepted), bool(exact_match(answer, accepted))
        is_short = exact or len(answer_words) <= self.max_words
        well_formed = bool(answer_words) and is_short
        parts = self.parts(rollout, score * is_short, well_formed=well_formed)
        partial = 0.0 if exact else parts["answer"]
        return {**parts, "answer": parts["answer"] - partial, "partial": partial}


def with_costs(reward: Reward, config: RewardConfig) -> Reward:
    """Wrap a reward to add negative parts for tool calls and for use of the sandbox."""
    rates = {
        "tool_cost": config.tool_cost,
        "wall_cost": config.cost_per_wall_s,
        "cpu_cost": config.cost_per_cpu_s,
        "mib_cost": config.cost_per_mib,
    }
    if not any(rates.values()):
        return reward

    def add_costs(parts: Mapping[str, float], rollout: Rollout) -> dict[str, float]:
        count = rollout.stats.get
        spent = {
            "tool_cost": rollout.num_calls,
            "wall_cost": count("sandbox_wall_s", 0.0),
            "cpu_cost": count("sandbox_cpu_s", 0.0),
            "mib_cost": count("sandbox_bytes", 0.0) / (1 << 20),
        }
        costs = {
            part: rollout.weighted(part, rate, -spent[part]) for part, rate in rates.items() if rate
        }
        return {**parts, **costs}

    @functools.wraps(reward)
    def costed(rollout: Rollout) -> Any:
        parts = reward(rollout)
        return (
            add_later(parts, rollout) if inspect.isawaitable(parts) else add_costs(parts, rollout)
        )

    async def add_later(parts: Any, rollout: Rollout) -> dict[str, float]:
        return add_costs(await parts, rollout)

    return costed


def _acted_well(rollout: Rollout) -> bool:
    """At least one tool call without an error, no malformed turn, and an answer."""
    count = rollout.stats.get
    some_call_worked = count("tool_calls", 0.0) > count("tool_errors", 0.0)
    return some_call_worked and not count("malformed", 0.0) and rollout.answer is not None
