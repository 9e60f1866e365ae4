"""The groups of one training step: played, scored while others play, and refilled.

Dynamic sampling (DAPO, arXiv:2503.14476, 3.2) plays more tasks where too few groups carry a
gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from agentgrpo.config import TrainConfig
from agentgrpo.learn.advantages import assign_advantages, has_gradient, why_dead
from agentgrpo.support import parallel
from agentgrpo.train.evaluate import ScoringCallback, logged, summarize
from agentgrpo.train.parts import Parts
from agentgrpo.types import Group, Metrics, Task


def collect(config: TrainConfig, parts: Parts, step: int) -> tuple[list[Group], Metrics]:
    """Play, score and compare groups; play more while too few of them carry a gradient."""
    c = config.rollout
    groups: list[Group] = []
    metrics: Metrics = {}
    for tasks, seed in _rounds(config, parts, step):
        with parts.progress.phase(f"playing {c.tasks_per_step} tasks x {c.group_size}"):
            scored = ScoringCallback(parts.reward, step)
            played, stats = scored.play(parts.sampler, tasks, c.group_size, seed=seed)
        groups += parallel.interleave(parallel.gather(played))
        live = _live(groups, config)
        for counts in parallel.gather(stats.metrics()):
            for name, value in counts.items():
                metrics[name] = metrics.get(name, 0.0) + value
        if live >= c.refill_below:
            break
    metrics |= Counter(f"dead_{reason}" for group in groups if (reason := why_dead(group)))
    metrics |= logged(parts.reward)
    return groups, {**summarize(groups), **metrics, "groups": len(groups), "live_groups": live}


def _rounds(config: TrainConfig, parts: Parts, step: int) -> Iterator[tuple[list[Task], int]]:
    """This rank's tasks, and the seed of all that is sampled in them."""
    for refill in range(1 + config.rollout.max_refills):
        tasks = parallel.mine(parts.tasks.next(config.rollout.tasks_per_step))
        seed = config.seed_of(parts.tasks.steps_before + step, refill)
        yield tasks, seed + parallel.RANK_SEED * parallel.rank()


def _live(groups: Sequence[Group], config: TrainConfig) -> int:
    """Groups with a gradient, after the advantages of all of them were set; a teacher has one for
    all that was sampled.
    """
    assign_advantages(groups, config.credited)
    if config.teacher.teaches:
        return sum(any(r.in_baseline and r.num_sampled for r in group.rollouts) for group in groups)
    return sum(map(has_gradient, groups))
