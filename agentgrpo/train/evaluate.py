"""Held-out tasks, played greedily: the number that says whether the policy learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from statistics import fmean
from types import MappingProxyType
from typing import Any

from agentgrpo.actions import InfrastructureError
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rollout.engine_protocol import SamplerStats
from agentgrpo.rollout.sampler import AnySampler
from agentgrpo.support import parallel
from agentgrpo.types import Group, Metrics, Status, Task


class ScoringCallback:
    """Groups are scored while others play."""

    def __init__(self, reward: Scoring, step: int | None = None) -> None:
        self._reward, self._step = reward, step
        self._begun: dict[int, tuple[Group, Future[None]]] = {}

    def play(
        self, sampler: AnySampler, tasks: Sequence[Task], group_size: int, **how: Any
    ) -> tuple[list[Group], SamplerStats]:
        """As AnySampler.play(), and score what was played."""
        try:
            played, stats = sampler.play(tasks, group_size, ended=self._ended, **how)
            rest = [group for group in played if id(group) not in self._begun]
            self._reward.score(rest, step=self._step)
            for group in played:
                if id(group) in self._begun:
                    self._begun[id(group)][1].result()
        finally:
            for _, future in self._begun.values():
                future.cancel()
        return played, stats

    def _ended(self, group: Group) -> None:
        """Begin to score it."""
        self._begun[id(group)] = group, self._reward.begin(group, step=self._step)


def evaluate(
    sampler: AnySampler,
    tasks: Sequence[Task],
    reward: Scoring,
    *,
    seed: int = 0,
    attempts: int = 1,
    temperature: float = 0.0,
    filters: Mapping[str, float] = MappingProxyType({}),
) -> tuple[list[Group], Metrics]:
    """Play each task, once and greedily if not told otherwise, and score it; every rank its share.

    Returns the groups (of `attempts` rollouts each), and their metrics. `solved` is the share of
    rollouts that were, left out where nobody says what that is; broken rollouts are counted apart.
    """
    own_seed = seed + parallel.RANK_SEED * parallel.rank()
    played, _ = ScoringCallback(reward).play(
        sampler, parallel.mine(tasks), attempts,
        seed=own_seed, temperature=temperature, filters=filters,
    )  # fmt: skip
    groups = parallel.interleave(parallel.gather(played))
    return groups, summarize(groups) | logged(reward)


def logged(reward: Scoring) -> Metrics:
    """What reward functions have logged since this was last asked: means over calls and ranks."""
    gathered = parallel.gather(reward.take_logged())
    every = [(name, value) for one in gathered for name, value in one.items()]
    names = sorted({name for name, _ in every})
    values = {name: [x for of, some in every if of == name for x in some] for name in names}
    return {f"log/{name}": fmean(some) for name, some in values.items()}


def summarize(groups: Sequence[Group]) -> Metrics:
    """Means over the rollouts of groups that the machine did not break.

    InfrastructureError: it, or code of the user's, broke more than half; such numbers mean nothing.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    valid = [rollout for rollout in rollouts if rollout.status is not Status.INFRA_ERROR]
    metrics: Metrics = {
        "rollouts": float(len(rollouts)),
        "infra_errors": float(len(rollouts) - len(valid)),
    }
    if 2 * len(valid) < len(rollouts):
        said = next((rollout.error for rollout in rollouts if rollout.error), "nothing")
        raise InfrastructureError(
            f"not the policy, the machine or your code broke {len(rollouts) - len(valid)} of "
            f"{len(rollouts)} rollouts; the first: {said}"
        )
    if not valid:
        return metrics
    metrics["reward"] = fmean(rollout.reward for rollout in valid)
    if any(rollout.solved is not None for rollout in valid):
        metrics["solved"] = fmean(bool(rollout.solved) for rollout in valid)
    metrics["answered"] = fmean(rollout.answer is not None for rollout in valid)
    metrics["sampled_tokens"] = fmean(rollout.num_sampled for rollout in valid)
    for name in dict.fromkeys(name for rollout in valid for name in rollout.stats):
        metrics[name] = fmean(rollout.stats.get(name, 0.0) for rollout in valid)
    for status in Status:
        metrics[f"status_{status}"] = fmean(rollout.status is status for rollout in valid)
    return metrics
