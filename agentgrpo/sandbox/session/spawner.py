"""Starts sessions on the strongest way of isolating (rung) that works on this machine.

The rungs are zygote-userns, then zygote-root; if neither works, nothing runs. A rung works only if
a session started on it has, inspected from outside, the expected namespaces and user, no
capabilities, and a system call filter.
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence

from agentgrpo.sandbox.isolation.cgroup import Cgroups, CgroupsUnavailable, ControlGroup
from agentgrpo.sandbox.isolation.channels import Channels, pid_of
from agentgrpo.sandbox.isolation.errors import (
    RungFailure,
    SandboxException,
    SandboxInfraError,
    SandboxUnavailable,
    TemplateUnavailable,
)
from agentgrpo.sandbox.isolation.hints import OTHERWISE, masked_proc, remedy
from agentgrpo.sandbox.isolation.images import Image
from agentgrpo.sandbox.isolation.jail import FIRST_UID, has_own_ids
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.template import Template
from agentgrpo.sandbox.isolation.zygote import LADDER, Rung, Zygote
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepStatus

CLOSED = "the pool is closed"
NO_PROC = "parts of this container's /proc are covered, so no other can be mounted"
NSJAIL_HEAD = re.compile(r"^\[[A-Z]\]\[\S+\] ")
"""The prefix of nsjail's log lines: level, time and process."""
CAPABILITIES = ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd")
NAMESPACES = ("pid", "mnt", "net", "ipc", "uts")


ROOT_CAPABILITIES = 0x404FB
"""Nine capabilities that an image's root has over its own user namespace: csrc/sandbox_spawn.c."""


def verify(channels: Channels, rung: Rung, own_network: bool = True) -> None:
    """Check the isolation of a session from outside, where its code cannot fake it."""
    allowed = 0 if channels.places.image is None else ROOT_CAPABILITIES
    for role, pidfd in (("init", channels.init), ("interpreter", channels.interpreter)):
        pid = pid_of(pidfd)
        with open(f"/proc/{pid}/status", errors="replace") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        # a user without capabilities cannot empty the bounding set, and cannot use it either
        kinds = CAPABILITIES[:4] if rung is Rung.BARE and os.geteuid() else CAPABILITIES
        problems = [f"{key} is {status[key]}" for key in kinds if int(status[key], 16) & ~allowed]
        if status["NoNewPrivs"] != "1":
            problems.append("new privileges can be gained")
        if role == "interpreter" and status["Seccomp"] != "2":
            problems.append("no system call filter is installed")
        uid = int(status["Uid"].split()[0])
        own_user = has_own_ids() or (rung is Rung.BARE and os.geteuid() == 0)
        if uid == 0 or (own_user and uid < FIRST_UID):
            problems.append(f"it runs as user {uid} of the machine")
        private = {Rung.BARE: (), Rung.ZYGOTE_ROOT: NAMESPACES}.get(rung, (*NAMESPACES, "user"))
        problems += [
            f"it shares the {name} namespace with the host"
            for name in private
            if (name != "net" or own_network)
            and os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}")
        ]
        if problems:
            raise SandboxUnavailable(f"{rung}: the {role} is not isolated: {'; '.join(problems)}")


def describe_failure(message: str) -> RungFailure:
    """The reason on one line, without the prefixes of nsjail's log, and the remedy."""
    lines = (NSJAIL_HEAD.sub("", line) for line in message.splitlines())
    return RungFailure("; ".join(lines), remedy(message))


def failures_text(failures: Mapping[str, RungFailure]) -> str:
    """List why each rung failed: each reason once, on one line, with its remedy."""
    lines = []
    for failure in dict.fromkeys(failures.values()):
        rungs = ", ".join(rung for rung, other in failures.items() if other == failure)
        lines.append(f"  {rungs}: {failure.reason}")
        lines += [f"  remedy: {failure.remedy}"] if failure.remedy else []
    return "\n".join(lines)


class Spawner:
    """Starts sessions of one template on the strongest rung that works. Thread-safe.

    Raises:
        SandboxUnavailable: no rung works; the message has the reason of each.
        TemplateUnavailable: the template cannot be loaded.
    """

    def __init__(
        self,
        template: Template,
        limits: Limits,
        *,
        zygotes: int = 2,
        rungs: Sequence[Rung] = LADDER,
        nsjail: str | None = None,
        all_cpus: float | None = None,
        image: Image | None = None,
        own_network: bool = True,
    ) -> None:
        self._template, self._limits, self._nsjail = template, limits, nsjail
        self._image, self._own_network = image, own_network
        self._lock = threading.Lock()
        self._zygotes: list[Zygote] = []
        self._next = 0
        self._closed = False
        self.restarts = 0
        self.cgroups: Cgroups | None = None
        self.cgroups_missing = ""
        try:
            self.cgroups = Cgroups(limits, all_cpus)
        except CgroupsUnavailable as reason:
            self.cgroups_missing = str(reason)
        self.failures: dict[str, RungFailure] = {}
        self.own_proc = True
        try:
            self.rung = self._select_rung(rungs)
            self._zygotes += [self._start() for _ in range(zygotes - len(self._zygotes))]
        except BaseException:
            self.close()
            raise

    def _select_rung(self, rungs: Sequence[Rung]) -> Rung:
        for rung in rungs:
            if rung is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
                self.failures[rung] = describe_failure("needs root")
                continue
            self.rung = rung
            if self._works():
                return rung
            if masked_proc() and rung is not Rung.BARE:
                self.own_proc = False  # the kernel refuses a new /proc: try without one
                if self._works():
                    return rung
                self.own_proc = True
        raise SandboxUnavailable(
            f"this machine cannot isolate untrusted code, so none will be run:\n"
            f"{failures_text(self.failures)}\n"
            + ("" if Rung.BARE in rungs or self._template.image else f"{OTHERWISE}\n")
            + "`agentgrpo sandbox doctor` checks this machine in detail.",
            failures=self.failures,
        )

    def _works(self) -> bool:
        """Whether self.rung isolates; if not, self.failures has the reason."""
        try:
            self._start_and_verify()
        except TemplateUnavailable:  # the template would fail on every other rung too
            raise
        except (SandboxUnavailable, SandboxInfraError, OSError) as reason:
            self.failures[self.rung] = describe_failure(str(reason))
            while self._zygotes:
                self._zygotes.pop().close()
            return False
        self.failures.pop(self.rung, None)
        return True

    def _start_and_verify(self) -> None:
        """Start one session on self.rung and check its isolation."""
        self._zygotes.append(self._start())
        channels, _, release = self.spawn()
        session = Session(channels, self._limits, on_close=release)
        try:
            if session.warm_up().status is not StepStatus.OK:
                raise SandboxUnavailable("a session started but did not answer")
            verify(channels, self.rung, self._own_network)
        finally:
            session.close()

    def _start(self) -> Zygote:
        if self._closed:
            raise SandboxException(CLOSED)
        return Zygote(
            self._template,
            self._limits,
            rung=self.rung,
            nsjail=self._nsjail,
            bound_address_space=self.cgroups is None,
            own_proc=self.own_proc,
            own_network=self._own_network,
        )

    def spawn(
        self, image: Image | None = None
    ) -> tuple[Channels, ControlGroup | None, Callable[[], None]]:
        """Start a session; image replaces the template's. Returns its descriptors, its control
        group, and a function to call when it has ended.
        """
        if self._closed:
            raise SandboxException(CLOSED)
        group = None
        with contextlib.ExitStack() as release:
            try:
                if self.cgroups is not None:
                    group = self.cgroups.take()
                    release.callback(self.cgroups.give_back, group)
                channels, clear_up = self._spawn_in(group, image or self._image)
            except OSError as error:
                raise SandboxInfraError(f"no further session could be started: {error}") from error
            release.callback(clear_up)
            return channels, group, release.pop_all().close

    def _spawn_in(
        self, group: ControlGroup | None, image: Image | None
    ) -> tuple[Channels, Callable[[], None]]:
        with self._lock:
            self._next = (self._next + 1) % len(self._zygotes)
            zygote = self._zygotes[self._next]
        try:
            return zygote.spawn(group, image)
        except SandboxInfraError:
            if zygote.answers():  # the zygote works: only this session could not be set up
                raise
            return self._replace(zygote).spawn(group, image)

    def _replace(self, dead: Zygote) -> Zygote:
        """Replace a zygote that does not answer, once. Its sessions end with it."""
        with self._lock:
            if dead in self._zygotes:  # else another thread has replaced it already
                fresh = self._start()
                self._zygotes[self._zygotes.index(dead)] = fresh
                self.restarts += 1
                dead.give_up()
                return fresh
            return self._zygotes[self._next]

    def describe(self) -> dict[str, object]:
        """The rung, and which isolation and limits are in effect."""
        memory = (
            f"control group (v{self.cgroups.version}) per session"
            if self.cgroups is not None
            else f"per process, a watchdog over all; no control group: {self.cgroups_missing}"
        )
        own_ids = has_own_ids() and not (self._template.tree or self._template.image)
        return {
            "rung": str(self.rung),
            "stronger_rungs_failed": {str(rung): f.reason for rung, f in self.failures.items()},
            "degraded": self.rung is Rung.BARE,
            "users": "one per session" if own_ids else "one for all sessions",
            "proc": self._proc(),
            "memory_limit": memory,
            "processors": self._processors(),
            "zygote_restarts": self.restarts,
            "nsjail": self._zygotes[0].nsjail,
            "python": self._zygotes[0].python_version,
        }

    def _processors(self) -> str:
        groups = self.cgroups
        missing = f"; {groups.cpu_missing}" if groups is not None and groups.cpu_missing else ""
        if groups is None or missing:
            return f"niceness{missing}"
        return f"{groups.all_cpus:g} for all sessions, {self._limits.cpus:g} for each"

    def _proc(self) -> str:
        if self.rung is Rung.BARE:
            return "the machine's, as far as Landlock does not hide it"
        return "its own processes" if self.own_proc else f"none: {NO_PROC}"

    def close(self) -> None:
        """End the zygotes and all sessions, and remove the control groups."""
        with self._lock:  # wait for a thread that is starting a zygote
            self._closed = True
            zygotes = [*self._zygotes]
        for zygote in zygotes:
            zygote.close()
        if self.cgroups is not None:
            self.cgroups.close()
