"""Rollouts that wait for their worlds: who has been answered, and what is to follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

from agentgrpo.actions import InfrastructureError
from agentgrpo.envs.runner import Abandoned

Then = Callable[[int, Any], None]
"""What is to be done with a world's answer, and to which rollout."""


class Waiting:
    """The futures of worlds that work, by rollout. Used on one thread; worlds answer on others.

    Args:
        together: take all answers at once, when the last one is there.
    """

    def __init__(self, *, together: bool) -> None:
        self._together = together
        self._futures: dict[int, tuple[Future[Any], Then]] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._begun: dict[int, Then] = {}
        self.idle_s = 0.0
        """Seconds spent waiting."""

    def add(self, index: int, future: Future[Any], then: Then) -> None:
        """Wait for a rollout's world, for one thing at a time."""
        self._futures[index] = (future, then)
        future.add_done_callback(lambda _: self._answered.put(index))

    def take(self, *, block: bool) -> Iterator[tuple[int, Future[Any], Then]]:
        """Stop waiting for those that were answered, by a result or by an InfrastructureError.

        Args:
            block: if there are none, wait for one.

        Raises:
            Exception: any other that a world raised, for which it goes on waiting: see cancel().
        """
        if not self._futures:
            return
        for index in self._ready(block):
            future, then = self._futures[index]
            error = future.exception()
            if error is not None and not isinstance(error, InfrastructureError):
                raise error
            del self._futures[index]
            yield index, future, then

    def _ready(self, block: bool) -> list[int]:
        started = time.perf_counter()
        if self._together:
            ready = sorted(self._answered.get() for _ in range(len(self._futures)))
        else:
            ready = [self._answered.get()] if block else []
        if self._together or block:
            self.idle_s += time.perf_counter() - started
        while not self._together and not self._answered.empty():
            ready.append(self._answered.get())
        return ready

    def cancel(self) -> dict[int, Then]:
        """Take back what has not begun; returns what was to follow the rest, done or not."""
        for index, (future, then) in self._futures.items():
            if not future.cancel():
                self._begun[index] = then
        return self._begun

    @property
    def abandoned(self) -> set[int]:
        """Of all that was waited for: those whose worlds have not come back, after wait()."""
        done = {i: f for i, (f, _) in self._futures.items() if f.done() and not f.cancelled()}
        return {i for i, future in done.items() if isinstance(future.exception(), Abandoned)}

    def wait(self) -> None:
        """For all that cancel() could not take back."""
        wait([self._futures[index][0] for index in self._begun])
