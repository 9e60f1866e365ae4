"""Where the time went: named parts, and a rest, that add up to the wall clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from agentgrpo.types import Metrics


class Stopwatch:
    """Time of named parts since the last lap, in seconds.

    A part inside another is its own and not the outer one's, so that nothing counts twice.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, rest: str = "other"
    ) -> None:
        self._clock, self._rest = clock, rest
        self._lap_began = self._since = clock()
        self._spent: dict[str, float] = {}
        self._open: list[str] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside under this name."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def lap(self) -> Metrics:
        """`NAME_s` of every part since the last lap, and `total_s`, which is their sum."""
        self._count()
        spent = {f"{name}_s": seconds for name, seconds in self._spent.items()}
        total = self._since - self._lap_began
        self._spent, self._lap_began, self._rest = {}, self._since, "other"
        return {**spent, "total_s": total}

    def _count(self) -> None:
        now = self._clock()
        name = self._open[-1] if self._open else self._rest
        self._spent[name] = self._spent.get(name, 0.0) + now - self._since
        self._since = now
