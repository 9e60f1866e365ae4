"""The normaliser of the GRPO objective: what one sampled token of a rollout weighs in the loss.

The loss of a step is sum(weight * token loss). Weights are taken over every rollout of the step
that the machine did not break, also those without an advantage, so that neither dropping dead
groups nor splitting a step into batches changes a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agentgrpo.types import Group, Status

LossType = Literal["grpo", "dr_grpo", "dapo"]


def token_weights(
    groups: Sequence[Group], loss_type: LossType, max_sampled_tokens: int
) -> list[float]:
    """One weight per rollout, in group and rollout order, for each of its sampled tokens.

    Args:
        groups: all groups of the step.
        loss_type: `dapo`: 1 / all sampled tokens of the step (arXiv:2503.14476); `grpo`: the mean
            over rollouts of each rollout's mean (arXiv:2402.03300), which favours short ones;
            `dr_grpo`: 1 / (rollouts * max_sampled_tokens), a constant (arXiv:2503.20783).
        max_sampled_tokens: the budget of one rollout, for dr_grpo.

    Returns:
        Weights; 0.0 for rollouts with Status.INFRA_ERROR and those that sampled nothing.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [0 if r.status is Status.INFRA_ERROR else r.num_sampled for r in rollouts]
    num_rollouts, num_tokens = sum(length > 0 for length in lengths), sum(lengths)

    def weight(length: int) -> float:
        if length == 0:
            return 0.0
        if loss_type == "dapo":
            return 1.0 / num_tokens
        if loss_type == "grpo":
            return 1.0 / (num_rollouts * length)
        return 1.0 / (num_rollouts * max_sampled_tokens)

    return [weight(length) for length in lengths]
