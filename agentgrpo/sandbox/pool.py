"""A pool of sessions over its zygotes: the part of the sandbox that the trainer talks to."""

import threading
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from agentgrpo.sandbox.errors import SandboxBusy, SandboxException
from agentgrpo.sandbox.limits import Limits
from agentgrpo.sandbox.session import Session
from agentgrpo.sandbox.template import Template
from agentgrpo.sandbox.zygote import Zygote


class SandboxPool:
    """Sessions for untrusted code. All methods may be called from any thread.

    Args:
        limits: what each session may use.
        template: the environment the sessions find.
        max_live: sessions that may be live at once; ``acquire()`` waits for a free one.
        nsjail: path of the nsjail binary; None looks for it.

    Raises:
        SandboxUnavailable: this machine cannot isolate; nothing runs unprotected instead.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        template: Template | None = None,
        max_live: int = 256,
        nsjail: str | None = None,
    ) -> None:
        if max_live < 1:
            raise ValueError(f"max_live must be at least 1, got {max_live}")
        self.limits = limits or Limits()
        self.template = template or Template()
        self.max_live = max_live
        self._zygote = Zygote(self.template, self.limits, nsjail=nsjail)
        self._free = threading.Semaphore(max_live)
        self._lock = threading.Lock()
        self._live: set[Session] = set()
        self._closed = False

    def acquire(self, timeout_s: float = 60.0) -> Session:
        """A fresh session, waiting up to timeout_s while max_live sessions are in use.

        Raises:
            SandboxBusy: none became free in time.
            SandboxInfraError: the sandbox itself failed.
        """
        if self._closed:
            raise SandboxException("the pool is closed")
        if not self._free.acquire(timeout=timeout_s):
            raise SandboxBusy(
                f"{self.max_live} sessions were in use for {timeout_s:g} s; remedy: close sessions "
                "that are done, or raise max_live"
            )
        try:
            session = Session(self._zygote.spawn(), self.limits, self._released)
        except BaseException:
            self._free.release()
            raise
        with self._lock:
            self._live.add(session)
        return session

    def _released(self, session: Session) -> None:
        with self._lock:
            self._live.discard(session)
        self._free.release()

    def describe(self) -> dict[str, Any]:
        """What was chosen: for the log of whoever runs untrusted code."""
        return {
            "rung": "zygote-userns",
            "nsjail": self._zygote.nsjail,
            "python": self._zygote.python_version,
            "template": self.template.name,
            "max_live": self.max_live,
            "limits": asdict(self.limits),
        }

    def close(self) -> None:
        """End every session and the zygotes. May be called twice."""
        self._closed = True
        with self._lock:
            live = list(self._live)
        for session in live:
            session.close()
        self._zygote.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
