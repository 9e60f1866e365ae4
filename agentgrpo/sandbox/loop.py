"""Steps of many sessions, run by one thread and handed back as they end."""

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from agentgrpo import _C
from agentgrpo.sandbox.boundary import Held, public
from agentgrpo.sandbox.calls import Conversation
from agentgrpo.sandbox.outcome import RawStep
from agentgrpo.sandbox.result import StepResult
from agentgrpo.sandbox.session import Session

CALLS_S = 0.005
"""How soon a step goes on after a call of a function of the host."""


@public
class StepLoop(Held):
    """One epoll set (C, without the GIL) over the running steps of any number of sessions.

    A loop and the sessions in it belong to one thread. A session has at most one step in a loop at
    a time, and may be closed by another thread only while it has none.

        loop = StepLoop()
        for session in sessions:
            loop.submit(session, "x += 1")
        while len(loop):
            for tag, result in loop.wait():
                ...
    """

    def __init__(self) -> None:
        self._loop = _C.sandbox_loop_new()
        self._running: dict[int, Session] = {}
        self._busy: set[int] = set()
        self._ready: deque[tuple[int, StepResult]] = deque()
        self._talks: dict[int, Conversation] = {}
        self._answered: SimpleQueue[tuple[int, tuple[Any, ...] | BaseException | None]]
        self._answered = SimpleQueue()
        self._calling = 0
        self._next = 0

    def submit(
        self,
        session: Session,
        code: str,
        timeout_s: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Start a step; its tag. Arguments and errors are those of ``Session.step()``.

        Raises:
            ValueError: the session has a step in this loop already.
        """
        if id(session) in self._busy:
            raise ValueError("the session has a step in this loop already")
        self._next += 1
        wanted = session.request_of(code, timeout_s, env)
        if isinstance(wanted, StepResult):
            self._ready.append((self._next, wanted))
            return self._next
        arguments = session.prepare(*wanted)
        if arguments is None:
            self._ready.append((self._next, session.step(code)))
            return self._next
        try:
            _C.sandbox_loop_submit(self._loop, self._next, arguments)
        except BaseException:
            session.abandon()
            raise
        self._running[self._next] = session
        if session.host is not None:
            self._talks[self._next] = session.conversation(arguments)
        self._busy.add(id(session))
        return self._next

    def wait(self, timeout_s: float | None = None) -> list[tuple[int, StepResult]]:
        """Block until at least one step is over; (tag, result) of those that are, in that order.

        Empty if nothing runs or timeout_s have passed. What fails in a call of a function of the
        host, and is not that function's, is raised; that session is over, and the others go on.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = 0.0 if self._ready else max(0.0, until - time.monotonic())
            calling = self._calling
            raw = _C.sandbox_loop_wait(self._loop, min(left, CALLS_S) if calling else left)
            for tag, step in raw:
                self._take(tag, step)
            if calling:
                self._go_on(min(left, CALLS_S))
            if self._ready or left == 0 or not self._running:  # a signal ends no waiting
                break
        ended = list(self._ready)
        self._ready.clear()
        return ended

    def _take(self, tag: int, step: RawStep) -> None:
        """What the C side says of a step: it is over, or calls a function of the host."""
        talk = self._talks.get(tag)
        if talk is None or not talk.goes_on(step):
            self._end(tag, step if talk is None else talk.raw)
            return
        self._calling += 1
        put = self._answered.put

        def answer() -> None:
            try:
                put((tag, talk.answer()))
            except BaseException as error:  # wait() raises it: nobody looks at this thread
                put((tag, error))

        try:
            Thread(target=answer, name="host-call", daemon=True).start()
        except RuntimeError as error:  # no thread
            put((tag, error))

    def _go_on(self, patience: float) -> None:
        """Go on with the steps whose calls are answered. Waits for one only where nothing else
        could end.
        """
        others = len(self._running) > self._calling
        found = False
        with suppress(Empty):
            while self._calling:
                wait = not (others or found) and patience > 0
                tag, arguments = self._answered.get(wait, patience if wait else None)
                found = True
                self._calling -= 1
                if arguments is None:
                    self._end(tag, self._talks[tag].raw)
                    continue
                try:
                    if isinstance(arguments, BaseException):
                        raise arguments
                    _C.sandbox_loop_submit(self._loop, tag, arguments)
                except BaseException:
                    self._drop(tag)
                    raise

    def _drop(self, tag: int) -> None:
        """What the step came to cannot be had: its session is over."""
        session = self._running.pop(tag)
        self._busy.discard(id(session))
        self._talks.pop(tag, None)
        session.abandon()

    def _end(self, tag: int, step: RawStep) -> None:
        session = self._running.pop(tag)
        self._busy.discard(id(session))
        self._ready.append((tag, session.conclude(step, self._talks.pop(tag, None))))

    def close(self) -> None:
        """End the sessions whose steps have not ended."""
        self._loop = _C.sandbox_loop_new()
        while self._running:
            self._running.popitem()[1].abandon()
        self._busy.clear()
        self._talks, self._calling, self._answered = {}, 0, SimpleQueue()

    def __len__(self) -> int:
        return len(self._running) + len(self._ready)
