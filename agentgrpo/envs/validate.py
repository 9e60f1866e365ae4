"""Checks of values that a user's environment, agent or sampler returns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from agentgrpo.actions import Observation
from agentgrpo.support.user_calls import WrongResult, named_numbers
from agentgrpo.types import Status

SAMPLER_COUNTS = (
    *("turns", "said", "asked", "asked_tokens", "branched_by_snapshot", "branched_by_replay"),
)
"""Counts of the sampler, which an environment must not return."""
RESERVED_NAMES = frozenset(
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
"""Keys of a line of metrics.jsonl or of a report. A count with such a name would overwrite one."""


def checked_observation(observation: Any) -> Observation:
    """Check the return value of step() and convert its rewards and counts to floats."""
    if not isinstance(observation, Observation):
        raise WrongResult(f"expected an Observation, got {observation!r:.80}")
    for text in (observation.text, *observation.outputs):
        if not isinstance(text, str):
            raise WrongResult(f"expected a text, got {text!r:.80}")
    return replace(
        observation, failed=bool(observation.failed), answer=checked_answer(observation.answer),
        rewards=named_numbers(observation.rewards),
        counts=checked_counts(observation.counts, SAMPLER_COUNTS),
    )  # fmt: skip


def checked_answer(answer: Any) -> str | None:
    """Check that an answer is a text or None."""
    if not isinstance(answer, str | None):
        raise WrongResult(f"answer: expected a text or None, got {answer!r:.80}")
    return answer


def checked_counts(counts: Any, reserved: Collection[str] = ()) -> dict[str, float]:
    """Check counts by name and convert them to floats. `reserved`: further forbidden names."""
    numbers = named_numbers(counts)
    for name in numbers:
        if name in RESERVED_NAMES or name in reserved or "/" in name:
            raise WrongResult(
                f"counts: {name!r} is a name of the run's metrics; choose another name"
            )
    return numbers
