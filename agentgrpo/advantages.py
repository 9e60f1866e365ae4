"""Rewards of a group -> advantages: how much better each rollout did than its siblings.

A rollout that the machine broke (Status.INFRA_ERROR) is not a sibling: it leaves the baseline and
keeps advantage 0. A group without contrast teaches nothing and gets exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

from agentgrpo.types import Group, Status

Estimator = Literal["grpo", "dr_grpo", "leave_one_out"]

EQUAL_WITHIN = 1e-6
"""Rewards closer than this are equal: a deviation of rounding errors must not become a gradient."""


def group_advantages(
    rewards: Sequence[float], *, estimator: Estimator = "grpo", eps: float = 1e-4
) -> list[float]:
    """How much better each reward is than its group's baseline.

    Args:
        rewards: one per rollout of a group, any unit, finite.
        estimator: `grpo` is DeepSeekMath's z-score (arXiv:2402.03300, sec. 4.1.2) with the sample
            deviation and `eps` as TRL computes it; `dr_grpo` is the plain difference to the mean
            (arXiv:2503.20783), which does not favour groups that are nearly all right or all wrong;
            `leave_one_out` is the difference to the mean of the others (RLOO, arXiv:2402.14740).
        eps: added to the deviation, in reward units; read by `grpo` only.

    Returns:
        One number per reward, in order, summing to 0 up to rounding; exactly 0.0 each with fewer
        than 2 rewards or when all of them are equal (within EQUAL_WITHIN).

    Raises:
        ValueError: a reward is not finite, or the estimator is unknown.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], estimator="dr_grpo")
    [0.5, -0.5, -0.5, 0.5]
    >>> group_advantages([1.0, 0.0, 0.0], estimator="leave_one_out")
    [1.0, -0.5, -0.5]
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if len(rewards) < 2 or max(rewards) - min(rewards) <= EQUAL_WITHIN:
        return [0.0] * len(rewards)
    if estimator == "grpo":
        scale = 1.0 / (stdev(rewards) + eps)
    elif estimator == "dr_grpo":
        scale = 1.0
    elif estimator == "leave_one_out":
        # r - mean of the others = (r - mean of all) * n / (n - 1)
        scale = len(rewards) / (len(rewards) - 1)
    else:
        raise ValueError(f"estimator: expected grpo, dr_grpo or leave_one_out, got {estimator!r}")
    mean = fmean(rewards)
    return [(reward - mean) * scale for reward in rewards]


def assign_advantages(group: Group, *, estimator: Estimator = "grpo", eps: float = 1e-4) -> None:
    """Set every rollout's advantage, relative to those that the machine did not break.

    Raises:
        ValueError: a reward is not finite; the message names the task.
    """
    scored = [rollout for rollout in group.rollouts if rollout.status is not Status.INFRA_ERROR]
    try:
        advantages = group_advantages([r.reward for r in scored], estimator=estimator, eps=eps)
    except ValueError as error:
        raise ValueError(f"task {group.task.id}: {error}") from None
    for rollout in group.rollouts:
        rollout.advantage = 0.0
    for rollout, advantage in zip(scored, advantages, strict=True):
        rollout.advantage = advantage


def has_gradient(group: Group) -> bool:
    """Whether training on the group moves anything: some sampled token has an advantage.

    Reads the advantages that `assign_advantages` set.
    """
    return any(rollout.advantage and rollout.num_sampled for rollout in group.rollouts)
