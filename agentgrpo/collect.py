"""The groups of one training step: played, scored while others play, and refilled.

Dynamic sampling (DAPO, arXiv:2503.14476, 3.2) plays more tasks where too few groups carry a
gradient. A round of more tasks begins as soon as it is known that it is needed: when too few would,
even if every group that is not scored yet did. So the same rounds are played, of the same tasks and
with the same seeds, as if each began after the one before had ended. It does begin then where
rollout.deterministic is set, on several ranks, and with a sampler of the user's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from agentgrpo import parallel
from agentgrpo.config import TrainConfig
from agentgrpo.evaluate import ScoringCallback, logged, summarize
from agentgrpo.learn.advantages import assign_advantages, has_gradient, why_dead
from agentgrpo.setup.build import Parts
from agentgrpo.types import Group, Metrics, Task

Round = tuple[Sequence[Task], int]
"""This rank's tasks, and the seed of all that is sampled in them."""


def collect(config: TrainConfig, parts: Parts, step: int) -> tuple[list[Group], Metrics]:
    """Play, score and compare groups; play more while too few of them carry a gradient."""
    c = config.rollout
    groups: list[Group] = []
    metrics: Metrics = {}
    rounds = _rounds(config, parts, step)
    for tasks, seed in rounds:
        with parts.progress.phase(f"playing {c.tasks_per_step} tasks x {c.group_size}"):
            callback = RefillCallback(config, parts, step, rounds, groups, len(tasks))
            played, stats = callback.play(parts.sampler, tasks, c.group_size, seed=seed)
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


def _rounds(config: TrainConfig, parts: Parts, step: int) -> Iterator[Round]:
    """At most as many as may be; each is drawn when it is asked for."""
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


class RefillCallback(ScoringCallback):
    """Adds a round while others play."""

    def __init__(
        self, config: TrainConfig, parts: Parts, step: int, rounds: Iterator[Round],
        before: Sequence[Group], playing: int,
    ) -> None:  # fmt: skip
        super().__init__(parts.reward, step)
        self._config, self._rounds = config, rounds
        self._before, self._playing = before, playing
        self._known = -1

    def more(self) -> Round | None:
        """A round, if one is needed whatever the groups will be that are not scored yet."""
        wanted = self._config.rollout.refill_below
        scored = self.scored
        if not wanted or parallel.world_size() > 1 or len(scored) == self._known:
            return None
        at_best = _live([*self._before, *scored], self._config) + self._playing - len(scored)
        added = next(self._rounds, None) if at_best < wanted else None
        if added is None:
            self._known = len(scored)  # nothing changes until there are more
        else:
            self._playing += len(added[0])
        return added
