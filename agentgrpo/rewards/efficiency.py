"""A reward for correct answers with fewer tool calls and tokens than the group's average.

The reward of ET-Agent for rollout i of a group G that answers one question:

    f_tool = 2 / (1 + exp(sigma_tool * (n_i - mean n)))         n: tool calls
    f_len  = 2 / (1 + exp(sigma_length * z_i))                  z: tokens, standardised in G
    R      = answer * f_tool * f_len + (0 if well formed else -1)

The factors multiply, so a wrong answer gains nothing by being short. Both factors lie in (0, 2) and
are 1 for the group's average. The sigmas decay to 0 during a stage: efficiency first, then
accuracy. The change that the factors cause is a separate part, `answer_efficiency`, so that
`answer` still shows whether the answer was right. A reward's part `partial` is added to `answer`.

Unlike the released code, this counts only what the policy sampled: tool calls that were parsed and
executed (including calls of sandbox.host_tools by the policy's code), and sampled tokens. A long
document in a search result does not make a rollout long.
"""

from __future__ import annotations

from math import tanh
from statistics import fmean, pstdev

from agentgrpo.types import Group, Rollout, Status


def well_formed(rollout: Rollout) -> bool:
    """Whether the rollout completed with an answer and without a malformed turn."""
    answered = rollout.status is Status.COMPLETED and rollout.answer is not None
    return answered and not rollout.stats.get("malformed", 0.0)


def add_efficiency(group: Group, *, sigma_tool: float = 0.2, sigma_length: float = 0.5) -> None:
    """Add the part `answer_efficiency` to a scored group's rewards, and replace the part `format`.

    `format` becomes 0 for a well_formed() rollout and -1 for any other. Rollouts outside the
    baseline (Rollout.in_baseline) do not enter the means. sigma_tool: cost of a call above the
    group's mean. sigma_length: cost of a standard deviation of tokens above it. 0: no cost.
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
        # 2 / (1 + exp(x)) without overflow
        factor = 1.0 - tanh(sigma_tool * (rollout.num_calls - mean_calls) / 2)
        factor *= 1.0 - tanh(sigma_length * z / 2)
        earned = rollout.rewards["answer"] + rollout.rewards.get("partial", 0.0)
        rollout.rewards["answer_efficiency"] = earned * (factor - 1.0)
        rollout.rewards["format"] = rollout.weighted("format", 1.0, well_formed(rollout) - 1.0)


def decay(step: int, steps: int) -> float:
    """Return the sigmas' multiplier: 1 in the first step (0) of a stage, 0 in the last step."""
    return max(0.0, (steps - 1 - step) / (steps - 1)) if steps > 1 else 1.0
