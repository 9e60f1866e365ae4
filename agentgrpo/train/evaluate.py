"""Evaluation on held-out tasks, and the metrics of played groups."""

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


class ScoredPlay:
    """Plays tasks and scores each finished group while the others still play."""

    def __init__(self, reward: Scoring, step: int | None = None) -> None:
        self._reward, self._step = reward, step
        # by id(group); the group is held too, so that no id is reused
        self._scoring: dict[int, tuple[Group, Future[None]]] = {}

    def play(
        self, sampler: AnySampler, tasks: Sequence[Task], group_size: int, **options: Any
    ) -> tuple[list[Group], SamplerStats]:
        """Like AnySampler.play(); the returned groups are scored."""
        try:
            played, stats = sampler.play(tasks, group_size, ended=self._start_scoring, **options)
            rest = [group for group in played if id(group) not in self._scoring]
            self._reward.score(rest, step=self._step)  # whose end the sampler did not report
            for group in played:
                if id(group) in self._scoring:
                    self._scoring[id(group)][1].result()
        finally:
            for _, future in self._scoring.values():
                future.cancel()
        return played, stats

    def _start_scoring(self, group: Group) -> None:
        self._scoring[id(group)] = group, self._reward.begin(group, step=self._step)


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
    """Play and score each task, by default once and greedily. Each rank plays its share.

    Returns the groups (of `attempts` rollouts each) and their metrics. `solved` is the share of
    solved rollouts, absent if nothing defines it. Broken rollouts are excluded from all means.
    """
    rank_seed = seed + parallel.RANK_SEED * parallel.rank()
    played, _ = ScoredPlay(reward).play(
        sampler, parallel.own_items(tasks), attempts,
        seed=rank_seed, temperature=temperature, filters=filters,
    )  # fmt: skip
    groups = parallel.interleave(parallel.gather(played))
    return groups, summarize(groups) | logged_means(reward)


def logged_means(reward: Scoring) -> Metrics:
    """Means, over calls and ranks, of what reward functions logged since the last call."""
    values: dict[str, list[float]] = {}
    for logged in parallel.gather(reward.take_logged()):
        for name, numbers in logged.items():
            values.setdefault(name, []).extend(numbers)
    return {f"log/{name}": fmean(values[name]) for name in sorted(values)}


def summarize(groups: Sequence[Group]) -> Metrics:
    """Means over the rollouts that did not end with an infrastructure error.

    Raises:
        InfrastructureError: more than half of them did: means over the rest would mislead.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    valid = [rollout for rollout in rollouts if rollout.status is not Status.INFRA_ERROR]
    metrics: Metrics = {
        "rollouts": float(len(rollouts)),
        "infra_errors": float(len(rollouts) - len(valid)),
    }
    if 2 * len(valid) < len(rollouts):
        first_error = next((rollout.error for rollout in rollouts if rollout.error), "nothing")
        raise InfrastructureError(
            f"this machine or your code, not the policy, broke {len(rollouts) - len(valid)} of "
            f"{len(rollouts)} rollouts; the first: {first_error}"
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
