"""Collects the groups of one training step: plays, scores and, if needed, refills.

Dynamic sampling (DAPO, arXiv:2503.14476, 3.2) plays more tasks when too few groups carry a
gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from agentgrpo.config import TrainConfig
from agentgrpo.learn.advantages import assign_advantages, has_gradient, why_dead
from agentgrpo.support import parallel
from agentgrpo.train.evaluate import ScoredPlay, logged_means, summarize
from agentgrpo.train.parts import Parts
from agentgrpo.types import Group, Metrics, Task


def collect(config: TrainConfig, parts: Parts, step: int) -> tuple[list[Group], Metrics]:
    """Play and score groups; play more while fewer than rollout.refill_below carry a gradient."""
    rollout = config.rollout
    groups: list[Group] = []
    metrics: Metrics = {}
    for tasks, seed in _rounds(config, parts, step):
        with parts.progress.phase(f"playing {rollout.tasks_per_step} tasks x {rollout.group_size}"):
            player = ScoredPlay(parts.reward, step)
            played, stats = player.play(parts.sampler, tasks, rollout.group_size, seed=seed)
        groups += parallel.interleave(parallel.gather(played))
        num_live = _count_live(groups, config)
        for counts in parallel.gather(stats.metrics()):
            for name, value in counts.items():
                metrics[name] = metrics.get(name, 0.0) + value
        if num_live >= rollout.refill_below:
            break
    metrics |= Counter(f"dead_{reason}" for group in groups if (reason := why_dead(group)))
    metrics |= logged_means(parts.reward)
    return groups, {**summarize(groups), **metrics, "groups": len(groups), "live_groups": num_live}


def _rounds(config: TrainConfig, parts: Parts, step: int) -> Iterator[tuple[list[Task], int]]:
    """This rank's tasks and sampling seed, for the first round and each refill."""
    for refill in range(1 + config.rollout.max_refills):
        tasks = parallel.own_items(parts.tasks.next(config.rollout.tasks_per_step))
        seed = config.seed_of(parts.tasks.steps_before + step, refill)
        yield tasks, seed + parallel.RANK_SEED * parallel.rank()


def _count_live(groups: Sequence[Group], config: TrainConfig) -> int:
    """Set the advantages of all groups and count the groups that carry a gradient."""
    # of all groups each time: GDPO normalises over the step, so a refill changes earlier groups
    assign_advantages(groups, config.credited)
    if config.teacher.teaches:  # a teacher gives every sampled token a gradient
        return sum(any(r.in_baseline and r.num_sampled for r in group.rollouts) for group in groups)
    return sum(map(has_gradient, groups))
