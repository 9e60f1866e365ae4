"""SandboxPool: keeps sessions ready and limits how many are in use."""

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    SandboxBusy,
    SandboxException,
    SandboxInfraError,
    SandboxUnavailable,
)
from agentgrpo.sandbox.isolation.guards import ProcessBound, wraps_os_errors
from agentgrpo.sandbox.isolation.images import Image, get_image, hold, list_images
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.snapshots import remove
from agentgrpo.sandbox.isolation.template import Template, check_environment
from agentgrpo.sandbox.isolation.zygote import LADDER, Rung
from agentgrpo.sandbox.session.host_tools import HostCalls
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.spawner import CLOSED, Spawner
from agentgrpo.sandbox.session.step_result import StepResult, StepStatus
from agentgrpo.sandbox.session.watchdog import MemoryWatchdog

CLOCK_S = 1.0
"""Interval of the checks of limits.session_s."""
DEGRADED = (
    "sandbox degraded to 'bare': this machine has no namespaces, so isolation is weaker. "
    "SECURITY.md lists what is guaranteed, `agentgrpo sandbox doctor` what is missing"
)


def run_setup(session: Session, template: Template, exception: type[SandboxException]) -> None:
    """Run the template's setup. If it fails, close the session and raise the exception."""
    result = session.step(template.setup)
    if result.status is not StepStatus.OK:
        session.close()
        reason = result.error.traceback if result.error else result.detail
        raise exception(f"setup of template {template.name!r}: {reason}")


def _require(rungs: Sequence[Rung], max_live: int, min_idle: int, zygotes: int) -> None:
    if Rung.BARE in rungs:
        raise ValueError(f"rungs: {Rung.BARE} is weak isolation. Pass allow_degraded=True")
    for name, value, minimum in (
        ("max_live", max_live, 1), ("min_idle", min_idle, 0), ("zygotes", zygotes, 1),
    ):  # fmt: skip
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


@wraps_os_errors
class SandboxPool(ProcessBound):
    """A pool of sessions for untrusted code. All methods are thread-safe.

    Args:
        limits: limits of each session; None: the template's, or the defaults.
        template: environment of the sessions. With an image, the pool can start any image.
        max_live: sessions in use at the same time; ``acquire()`` waits for a free place.
        min_idle: sessions to keep ready in addition, started in the background. 0: start each
            session in ``acquire()``.
        zygotes: processes that fork the sessions. If one dies, its sessions end.
        rungs: acceptable ways of isolating, best first.
        allow_degraded: if none of them works, run code without namespaces (Rung.BARE) and set
            ``degraded`` in every result.
        nsjail: path of the nsjail binary; None: search for it.
        all_cpus: processors that all sessions together may keep busy; None: half the machine.
        own_network: False: sessions share this machine's network, including its loopback services.
            Only for building images whose authors you trust.

    Raises:
        SandboxUnavailable: this machine cannot isolate code. Nothing runs unprotected.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        template: Template | None = None,
        max_live: int = 256,
        min_idle: int = 4,
        zygotes: int = 2,
        rungs: Sequence[Rung] = LADDER,
        allow_degraded: bool = False,
        nsjail: str | None = None,
        all_cpus: float | None = None,
        own_network: bool = True,
    ) -> None:
        _require(rungs, max_live, min_idle, zygotes)
        self.template = template or Template()
        self.limits = limits or self.template.limits or Limits()
        if not own_network and not self.template.image:
            raise ValueError("own_network: expected True without template.image, got False")
        self.max_live, self.min_idle, self.all_cpus = max_live, min_idle, all_cpus
        self._store_lock = contextlib.ExitStack()
        if self.template.image:
            self._store_lock.enter_context(hold())
        self._spawner = Spawner(
            self.template,
            self.limits,
            zygotes=zygotes,
            rungs=(*rungs, Rung.BARE) if allow_degraded else rungs,
            nsjail=nsjail,
            all_cpus=all_cpus,
            image=self._image_of(self.template.image) if self.template.image else None,
            own_network=own_network,
        )
        self._snapshots: list[Image] = []
        self.degraded = self._spawner.rung is Rung.BARE
        if self.degraded:
            warnings.warn(DEGRADED, stacklevel=2)
        self._free = threading.Semaphore(max_live)
        self._lock, self._pairing = threading.Lock(), threading.Lock()
        self._live: list[Session] = []
        self._idle: deque[Session] = deque()
        self._refill_needed = threading.Event()
        self._closed = False
        self._counts = {"acquired": 0, "from_idle": 0, "waited": 0, "live": 0}
        self._watchdog: MemoryWatchdog | None = None
        if self._spawner.cgroups is None:
            self._watchdog = MemoryWatchdog(self.limits.memory_mib, self._copy_of_live)
        self._closing = threading.Event()
        self._clock = threading.Thread(target=self._expire, name="sandbox-clock", daemon=True)
        self._refiller = threading.Thread(target=self._refill, name="sandbox-refill", daemon=True)
        if self.template.setup:  # once here, so that an error does not first show in acquire()
            try:
                self._start().close()
            except SandboxInfraError as error:
                self.close()
                raise SandboxUnavailable(str(error)) from error
        self._clock.start()
        if min_idle:
            self._refill_needed.set()
            self._refiller.start()

    def acquire(
        self,
        image: str | Image | float | None = None,
        timeout_s: float = 60.0,
        *,
        env: Mapping[str, str] | None = None,
        host: HostCalls | None = None,
    ) -> Session:
        """Get a new session. Waits up to timeout_s while max_live sessions are in use.

        Args:
            image: name of an image, or a snapshot, to use instead of the template's image. Needs a
                template with an image. A number means timeout_s.
            timeout_s: how long to wait for a place.
            env: environment variables of the session, in addition to the template's.
            host: functions of this process that the session's code can call.

        Raises:
            SandboxBusy: no place became free in time.
            SandboxInfraError: the sandbox itself failed.
            ValueError: env is malformed, or the template has no image.
            NotFoundException: there is no image with that name.
        """
        check_environment("env", env or {})
        if host is not None and self.template.image:
            raise InvalidArgumentException(
                "host: expected None, because bash in an image cannot call functions, got HostCalls"
            )
        if isinstance(image, (int, float)):
            timeout_s, image = image, None
        other_image = None if image is None else self._image_of(image)
        self._take_place(timeout_s)
        try:
            if other_image:  # idle sessions have the template's image
                session = self._start(other_image)
            else:
                session = self._take_idle() or self._start()
        except BaseException as error:
            self._free_place()
            if self._closed and isinstance(error, Exception):
                raise SandboxException(CLOSED) from error
            raise
        session.begin(self._free_place)
        if env and session.set_env(env).status is not StepStatus.OK:
            session.close()
            raise SandboxInfraError("setting environment variables failed in a new session")
        if host is not None and session.attach_host_tools(host).status is not StepStatus.OK:
            session.close()
            raise SandboxInfraError("attaching host functions failed in a new session")
        return session

    def acquire_pair(self, timeout_s: float = 60.0) -> tuple[Session, Session]:
        """Get two new sessions, without the deadlock of callers that each hold one and wait for
        the second.

        Raises:
            ValueError: max_live is 1.
            SandboxBusy, SandboxInfraError: as acquire().
        """
        if self.max_live < 2:
            raise ValueError("max_live: expected at least 2 for two sessions at once, got 1")
        with self._pairing:  # one caller at a time takes its second place
            first = self.acquire(timeout_s=timeout_s)
            try:
                return first, self.acquire(timeout_s=timeout_s)
            except BaseException:
                first.close()
                raise

    def run(
        self,
        code: str,
        timeout_s: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
        wait_s: float = 60.0,
    ) -> StepResult:
        """Run code in a new session and close it. Waits up to wait_s seconds for a place."""
        with self.acquire(timeout_s=wait_s) as session:
            return session.step(code, timeout_s, env=env)

    def _take_place(self, timeout_s: float) -> None:
        if self._closed:
            raise SandboxException(CLOSED)
        if not self._free.acquire(blocking=False):
            with self._lock:
                self._counts["waited"] += 1
            if not self._free.acquire(timeout=timeout_s):
                raise SandboxBusy(
                    f"{self.max_live} sessions were in use for {timeout_s:g} s; remedy: close "
                    "sessions after use, or raise max_live"
                )
        with self._lock:
            self._counts["acquired"] += 1
            self._counts["live"] += 1

    def _free_place(self) -> None:
        with self._lock:
            self._counts["live"] -= 1
        self._free.release()

    def _take_idle(self) -> Session | None:
        try:
            while True:
                session = self._idle.popleft()
                self._refill_needed.set()
                if session.healthy():
                    with self._lock:
                        self._counts["from_idle"] += 1
                    return session
                session.close()
        except IndexError:
            return None

    def _image_of(self, image: str | Image) -> Image:
        if not self.template.image:
            raise InvalidArgumentException(
                f"image: expected None, because the pool's template {self.template.name!r} has no "
                f"image, got {image!r:.99}. Make the pool with Template(image=NAME)"
            )
        if isinstance(image, str):
            return get_image(image)
        if not isinstance(image, Image):
            raise InvalidArgumentException(
                f"image: expected a name or a snapshot, got {image!r:.99}"
            )
        return image

    def _start(self, image: Image | None = None) -> Session:
        channels, group, release = self._spawner.spawn(image)
        session = Session(
            channels, self.limits, group=group, on_close=release,
            degraded=self.degraded, snapshots=self._snapshots,
        )  # fmt: skip
        with self._lock:
            self._live.append(session)
        if self.template.setup:
            run_setup(session, self.template, SandboxInfraError)
        return session

    def _expire(self) -> None:
        """Thread: end sessions whose time is over, also between their steps."""
        while not self._closing.wait(CLOCK_S):
            for session in self._copy_of_live():
                if session.seconds_left() <= 0:
                    session.expire()

    def _copy_of_live(self) -> list[Session]:
        with self._lock:
            self._live = [session for session in self._live if session.channels is not None]
            return [*self._live]

    def _refill(self) -> None:
        """Thread: keep min_idle sessions ready, warmed up."""
        while not self._closed:
            self._refill_needed.wait()
            self._refill_needed.clear()
            while not self._closed and len(self._idle) < self.min_idle:
                try:
                    session = self._start()
                except SandboxException:
                    break  # acquire() will meet the same error and raise it
                session.warm_up()
                self._idle.append(session)

    def discard(self, snapshot: Image) -> None:
        """Delete an unnamed snapshot. No session and no other snapshot may use it."""
        self._snapshots.remove(snapshot)
        remove(snapshot)

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the current numbers of sessions."""
        return {**self._counts, "idle": len(self._idle), "zygote_restarts": self._spawner.restarts}

    def describe(self) -> dict[str, Any]:
        """The isolation, limits and template in use, for logs."""
        return {
            **self._spawner.describe(),
            "template": self.template.image or self.template.name,
            "max_live": self.max_live,
            "limits": asdict(self.limits),
        }

    def close(self) -> None:
        """End all sessions and zygotes. Idempotent. Does nothing in a forked child process."""
        if self._closed:
            return
        self._closed = True
        self._refill_needed.set()  # wake the thread, so that it sees _closed
        if self._refiller.ident is not None:
            self._refiller.join()
        self._closing.set()
        if self._clock.ident is not None:
            self._clock.join()
        if self._watchdog is not None:
            self._watchdog.close()
        for session in self._copy_of_live():
            session.close()
        self._spawner.close()
        self._store_lock.close()
        if self._snapshots:
            used = {layer for image in list_images() for layer in image.layers}
            for snapshot in self._snapshots:
                if snapshot.layers[-1] not in used:
                    remove(snapshot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
