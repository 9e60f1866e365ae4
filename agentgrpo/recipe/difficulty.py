"""Drawing tasks by how often the policy solves them now: pools of difficulty over a fixed list.

A task never seen, or solved sometimes, is in the normal pool; one solved almost always in the easy
pool, one solved almost never in the hard pool. Each draw takes the easy pool with probability
easy_share, the hard one with hard_share, else the normal one (an empty pool leaves its share to
the normal one, an empty normal pool to the hard one, else to the easy one), and the least recently
drawn task of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

from agentgrpo.data.tasks import Tasks
from agentgrpo.types import Group, Status, Task

EASY_AT, HARD_AT = 0.875, 0.125
"""Share of right rollouts from which on a task is easy, and up to which it is hard."""
SMOOTHING = 0.5
"""Weight of the newest group in a task's running share of right rollouts."""


class DifficultyTasks(Tasks):
    """An endless stream of tasks that follows the policy.

    Args:
        rows: what there is to draw, with different ids.
        source: names the rows in a checkpoint.
        easy_share, hard_share: in [0, 1], together at most 1.
        seed: another seed, other draws.

    Raises:
        ValueError: no rows, equal ids, or shares out of range.
    """

    STATE = ("drawn", "rate", "last")

    def __init__(
        self,
        rows: Sequence[Task],
        *,
        source: str,
        easy_share: float = 0.1,
        hard_share: float = 0.2,
        seed: int = 0,
    ) -> None:
        if not rows or len({task.id for task in rows}) != len(rows):
            raise ValueError(f"rows: expected tasks with different ids, got {len(rows)} tasks")
        if min(easy_share, hard_share) < 0 or easy_share + hard_share > 1:
            raise ValueError(
                f"easy_share, hard_share: expected shares of at most 1 together, "
                f"got {easy_share}, {hard_share}"
            )
        self.rows = list(rows)
        self.source = source
        self._shares = (easy_share, hard_share)
        self._seed = seed
        self._by_id = {task.id: task for task in rows}
        self._rate: dict[str, float] = {}
        self._last = {task.id: -1 for task in rows}

    def pools(self) -> dict[str, list[str]]:
        """Ids by pool: easy, hard, normal."""
        pools: dict[str, list[str]] = {"easy": [], "hard": [], "normal": []}
        for name in self._by_id:
            rate = self._rate.get(name, 0.5)
            pool = "easy" if rate >= EASY_AT else "hard" if rate <= HARD_AT else "normal"
            pools[pool].append(name)
        return pools

    def feedback(self, groups: Sequence[Group]) -> None:
        for group in groups:
            outcomes = [
                float(bool(r.solved)) for r in group.rollouts if r.status is not Status.INFRA_ERROR
            ]
            if outcomes:
                before = self._rate.get(group.task.id, fmean(outcomes))
                gain = SMOOTHING * (fmean(outcomes) - before)
                self._rate[group.task.id] = before + gain

    def _draw(self) -> Task:
        rng = random.Random(f"{self._seed}/draw {self._drawn}")
        pools, (easy, hard) = self.pools(), self._shares
        luck = rng.random()
        wanted = "easy" if luck < easy else "hard" if luck < easy + hard else "normal"
        pool = pools[wanted] or pools["normal"] or pools["hard"] or pools["easy"]
        oldest = min(self._last[name] for name in pool)
        name = rng.choice([name for name in pool if self._last[name] == oldest])
        self._last[name] = self._drawn
        self._drawn += 1
        return self._by_id[name]

    def _source(self) -> str:
        return f"{len(self.rows)} tasks of {self.source}"
