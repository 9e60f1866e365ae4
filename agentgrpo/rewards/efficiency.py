"""A reward for being right with few tool calls and few tokens, compared with one's own siblings.

The reward of ET-Agent for rollout i of a group G that answers one question:

    f_tool = 2 / (1 + exp(sigma_tool * (n_i - mean n)))         n: tool calls
    f_len  = 2 / (1 + exp(sigma_length * z_i))                  z: tokens, standardised in G
    R      = answer * f_tool * f_len + (0 if well formed else -1)

It multiplies, so a wrong answer gains nothing by being short. Both factors lie in (0, 2) and are 1
for the group's average. Sigmas decay to 0 in the course of a stage: efficient first, then accurate.
What the factors add or take away is a part of its own, `answer_efficiency`, so that `answer` still
says whether the answer was right. The part `partial`, where a reward has one, counts with `answer`.

Unlike the released code, only what the policy sampled is counted: a tool call is one that was
parsed and carried out (one of sandbox.host_tools by the policy's code is another), and a long
document that a search returned makes no rollout long.
"""

from __future__ import annotations

from math import exp
from statistics import fmean, pstdev

from agentgrpo.types import Group, Rollout, Status


def well_formed(rollout: Rollout) -> bool:
    """It ended by answering in the asked form, and no turn of it was malformed."""
    answered = rollout.status is Status.COMPLETED and rollout.answer is not None
    return answered and not rollout.stats.get("malformed", 0.0)


def add_efficiency(
    group: Group,
    *,
    sigma_tool: float = 0.2,
    sigma_length: float = 0.5,
) -> None:
    """Add the part `answer_efficiency` to a scored group's rewards, and replace the part `format`.

    The part `format` is -1 of a rollout that is not well_formed(), else 0. Rollouts that do not
    count (Rollout.in_baseline) have no part in means. The sigmas: how much a call, or a standard
    deviation of tokens, above the group's mean costs; 0: nothing.
    """
    for name, sigma in (("sigma_tool", sigma_tool), ("sigma_length", sigma_length)):
        if not sigma >= 0:
            raise ValueError(f"{name}: expected 0 or more, got {sigma}")
    rollouts = [r for r in group.rollouts if r.in_baseline]
    if not rollouts:
        return
    mean_calls = fmean(rollout.num_calls for rollout in rollouts)
    lengths = [rollout.num_sampled for rollout in rollouts]
    mean_length, deviation = fmean(lengths), pstdev(lengths)
    for rollout in rollouts:
        if "answer" not in rollout.rewards:
            raise ValueError(
                f"task {group.task.id}: efficiency needs a reward with the part 'answer', "
                f"got {sorted(rollout.rewards)}"
            )
        z = (rollout.num_sampled - mean_length) / deviation if deviation else 0.0
        factor = _factor(sigma_tool * (rollout.num_calls - mean_calls))
        factor *= _factor(sigma_length * z)
        worth = rollout.rewards["answer"] + rollout.rewards.get("partial", 0.0)
        rollout.rewards["answer_efficiency"] = worth * (factor - 1.0)
        rollout.rewards["format"] = rollout.weighted("format", 1.0, well_formed(rollout) - 1.0)


def decay(step: int, steps: int) -> float:
    """What the sigmas are multiplied by: 1 in the first step (0) of a stage, 0 in the last."""
    return max(0.0, (steps - 1 - step) / (steps - 1)) if steps > 1 else 1.0


def _factor(excess: float) -> float:
    """2 / (1 + exp(excess)), without overflow."""
    if excess > 0:
        small = exp(-excess)
        return 2.0 * small / (1.0 + small)
    return 2.0 / (1.0 + exp(excess))
