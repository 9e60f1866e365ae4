"""What a user's environment, agent or sampler gives of a rollout, checked when it is given."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from agentgrpo.actions import Observation
from agentgrpo.support.user_calls import WrongResult, named_numbers
from agentgrpo.types import Status

PLAYED = (
    *("turns", "said", "asked", "asked_tokens", "branched_by_snapshot", "branched_by_replay"),
)
"""What the sampler alone counts: no environment adds to it."""
OWN_NUMBERS = frozenset(
    {
        *("rollouts", "infra_errors", "reward", "solved", "answered", "sampled_tokens"),
        *(f"status_{status}" for status in Status),
        *("groups", "live_groups", "dead_broken", "dead_silent", "dead_all_solved"),
        *("dead_all_equal", "total_s", "decode_s", "idle_s", "observe_s", "engine_steps"),
        *("total_sampled_tokens", "prompt_tokens", "cached_tokens", "infra_failures", "retries"),
        *("branches", "diverged_forks"),
        *("model", "seed", "tasks", "measures", "kinds", "left_out", "per_task"),
    }
)
"""Beside the means of the counts in a line of metrics.jsonl or a report: a count of such a name
would take its place."""


def checked_observation(told: Any) -> Observation:
    """What step() returned, an Observation, with its rewards and counts as floats."""
    if not isinstance(told, Observation):
        raise WrongResult(f"expected an Observation, got {told!r:.80}")
    for text in (told.text, *told.outputs):
        if not isinstance(text, str):
            raise WrongResult(f"expected a text, got {text!r:.80}")
    return replace(
        told, failed=bool(told.failed), answer=checked_answer(told.answer),
        rewards=checked_rewards(told.rewards), counts=checked_counts(told.counts, PLAYED),
    )  # fmt: skip


def checked_answer(answer: Any) -> str | None:
    """A text, or None."""
    if not isinstance(answer, str | None):
        raise WrongResult(f"answer: expected a text or None, got {answer!r:.80}")
    return answer


def checked_counts(counts: Any, taken: Collection[str] = ()) -> dict[str, float]:
    """Counts of a rollout by name, as floats."""
    made = checked_rewards(counts)
    for name in made:
        if name in OWN_NUMBERS or name in taken or "/" in name:
            raise WrongResult(f"counts: {name!r} is a number of the run's own; choose another name")
    return made


def checked_rewards(rewards: Any) -> dict[str, float]:
    """Finite numbers by name, as floats."""
    made = named_numbers(rewards)
    if made is None:
        raise WrongResult(f"expected {{name: finite number}}, got {rewards!r:.80}")
    return made
