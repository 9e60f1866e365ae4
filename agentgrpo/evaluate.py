"""Held-out tasks, played greedily: the number that says whether the policy learned."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentgrpo.rewards import Reward, apply_reward
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.types import Group, Metrics, Status, Task


def evaluate(
    sampler: Sampler, tasks: Sequence[Task], reward: Reward, *, seed: int = 0
) -> tuple[list[Group], Metrics]:
    """Play each task once at temperature 0 and score it.

    Returns:
        The groups (of one rollout each), and their metrics; `solved` is the share of tasks whose
        answer was right. Rollouts that the machine broke are counted and left out of the shares.
    """
    groups, _ = sampler.play(tasks, 1, seed=seed, temperature=0.0)
    apply_reward(reward, groups)
    return groups, summarize(groups)


def summarize(groups: Sequence[Group]) -> Metrics:
    """Means over the rollouts of groups that the machine did not break."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    valid = [rollout for rollout in rollouts if rollout.status is not Status.INFRA_ERROR]
    metrics: Metrics = {
        "rollouts": float(len(rollouts)),
        "infra_errors": float(len(rollouts) - len(valid)),
    }
    if not valid:
        return metrics
    metrics["reward"] = fmean(rollout.reward for rollout in valid)
    metrics["solved"] = fmean(rollout.rewards.get("correct", 0.0) > 0 for rollout in valid)
    metrics["answered"] = fmean(rollout.answer is not None for rollout in valid)
    metrics["sampled_tokens"] = fmean(rollout.num_sampled for rollout in valid)
    for name in valid[0].stats:
        metrics[name] = fmean(rollout.stats[name] for rollout in valid)
    for status in Status:
        metrics[f"status_{status}"] = fmean(rollout.status is status for rollout in valid)
    return metrics
