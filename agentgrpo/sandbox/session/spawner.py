"""Where sessions come from: the strongest way of isolating that works here, proven before use.

The ladder is zygote-userns, zygote-root; where neither works nothing runs. A rung counts
as working only when a session started on it is seen, from outside, to have the namespaces, the
user, the missing capabilities and the filter that it should have.
"""

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentgrpo.sandbox.isolation.cgroup import Cgroups, CgroupsUnavailable, ControlGroup
from agentgrpo.sandbox.isolation.channels import Channels, pid_of
from agentgrpo.sandbox.isolation.errors import (
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
from agentgrpo.sandbox.session.result import StepStatus
from agentgrpo.sandbox.session.session import Session

CLOSED = "the pool is closed"
NO_PROC = "parts of this container's /proc are covered, so that no other may be mounted"
NSJAIL_HEAD = re.compile(r"^\[[A-Z]\]\[\S+\] ")
"""What its lines begin with: level, time and process."""
CAPABILITIES = ("CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd")
NAMESPACES = ("pid", "mnt", "net", "ipc", "uts")


@dataclass(frozen=True, slots=True)
class Spawned:
    """A started session: its descriptors, its control group, what to call when it is over."""

    channels: Channels
    group: ControlGroup | None
    release: Callable[[], None]


ROOT_CAPABILITIES = 0x404FB
"""Nine, of the root of an image over its own user namespace: csrc/sandbox_spawn.c."""


def verify(channels: Channels, rung: Rung, own_network: bool = True) -> None:
    """Look at a session from outside, where it cannot lie."""
    allowed = 0 if channels.places.image is None else ROOT_CAPABILITIES
    for what, pidfd in (("init", channels.init), ("interpreter", channels.interpreter)):
        pid = pid_of(pidfd)
        with open(f"/proc/{pid}/status", errors="replace") as status:
            found = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
        # a user without capabilities cannot empty the bounding set, and cannot use it either
        kinds = CAPABILITIES[:4] if rung is Rung.BARE and os.geteuid() else CAPABILITIES
        problems = [f"{key} is {found[key]}" for key in kinds if int(found[key], 16) & ~allowed]
        if found["NoNewPrivs"] != "1":
            problems.append("new privileges can be gained")
        if what == "interpreter" and found["Seccomp"] != "2":
            problems.append("no system call filter is installed")
        uid = int(found["Uid"].split()[0])
        own_user = has_own_ids() or (rung is Rung.BARE and os.geteuid() == 0)
        if uid == 0 or (own_user and uid < FIRST_UID):
            problems.append(f"it runs as user {uid} of the machine")
        wanted = {Rung.BARE: (), Rung.ZYGOTE_ROOT: NAMESPACES}.get(rung, (*NAMESPACES, "user"))
        problems += [
            f"it shares the {name} namespace with the host"
            for name in wanted
            if (name != "net" or own_network)
            and os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}")
        ]
        if problems:
            raise SandboxUnavailable(f"{rung}: the {what} is not isolated: {'; '.join(problems)}")


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
        self.failures: dict[Rung, str] = {}
        self.own_proc = True
        self.python_version = ""
        self.nsjail = ""
        try:
            self.rung = self._select_rung(rungs)
            self._zygotes += [self._start() for _ in range(zygotes - len(self._zygotes))]
        except BaseException:
            self.close()
            raise

    def _select_rung(self, rungs: Sequence[Rung]) -> Rung:
        for rung in rungs:
            if rung is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
                self.failures[rung] = "needs root"
                continue
            self.rung = rung
            if self._works():
                return rung
            if masked_proc() and rung is not Rung.BARE:
                self.own_proc = False  # the kernel lets nobody mount one; do without
                if self._works():
                    return rung
                self.own_proc = True
        raise SandboxUnavailable(
            f"this machine cannot isolate untrusted code, so none will be run:\n"
            f"{self.failures_text()}\n"
            + ("" if Rung.BARE in rungs or self._template.image else f"{OTHERWISE}\n")
            + "`agentgrpo sandbox doctor` looks at this machine in detail."
        )

    def failures_text(self) -> str:
        """Why the rungs that were tried did not do, each reason once on a line, with its remedy."""
        rungs: dict[str, list[str]] = {}
        for rung, why in self.failures.items():
            rungs.setdefault(why, []).append(rung)
        lines = []
        for why, tried in rungs.items():
            said = "; ".join(NSJAIL_HEAD.sub("", line) for line in why.splitlines())
            lines.append(f"  {', '.join(tried)}: {said}")
            lines += [f"  remedy: {cure}"] if (cure := remedy(why)) else []
        return "\n".join(lines)

    def _works(self) -> bool:
        """Whether self.rung isolates; if not, self.failures has the reason."""
        try:
            self._prove()
        except TemplateUnavailable:  # it would be on every other rung
            raise
        except (SandboxUnavailable, SandboxInfraError, OSError) as reason:
            self.failures[self.rung] = str(reason)
            while self._zygotes:
                self._zygotes.pop().close()
            return False
        self.failures.pop(self.rung, None)
        return True

    def _prove(self) -> None:
        """Start one session on self.rung and look at it."""
        self._zygotes.append(self._start())
        spawned = self.spawn()
        session = Session(spawned.channels, self._limits, on_close=spawned.release)
        try:
            if session.warm_up().status is not StepStatus.OK:
                raise SandboxUnavailable("a session started but did not answer")
            verify(spawned.channels, self.rung, self._own_network)
        finally:
            session.close()

    def _start(self) -> Zygote:
        if self._closed:
            raise SandboxException(CLOSED)
        zygote = Zygote(
            self._template,
            self._limits,
            rung=self.rung,
            nsjail=self._nsjail,
            bound_address_space=self.cgroups is None,
            own_proc=self.own_proc,
            own_network=self._own_network,
        )
        self.python_version, self.nsjail = zygote.python_version, zygote.nsjail
        return zygote

    def spawn(self, image: Image | None = None) -> Spawned:
        """Start a session, of this image instead of the template's."""
        if self._closed:
            raise SandboxException(CLOSED)
        group = self._take_group()
        try:
            channels, clear_up = self._spawn_in(group, image or self._image)
        except BaseException as error:
            self._give_back(group)
            if isinstance(error, OSError):
                raise SandboxInfraError(f"no further session could be started: {error}") from error
            raise

        def release() -> None:
            clear_up()
            self._give_back(group)

        return Spawned(channels, group, release)

    def _take_group(self) -> ControlGroup | None:
        try:
            return self.cgroups.take() if self.cgroups is not None else None
        except OSError as error:
            raise SandboxInfraError(f"no control group for another session: {error}") from error

    def _spawn_in(
        self, group: ControlGroup | None, image: Image | None
    ) -> tuple[Channels, Callable[[], None]]:
        """A session's descriptors, and what to call when it is over."""
        zygote = self._pick()
        try:
            return zygote.spawn(group, image)
        except SandboxInfraError:
            if zygote.answers():  # it is well; this session could not be set up
                raise
            return self._replace(zygote).spawn(group, image)

    def _give_back(self, group: ControlGroup | None) -> None:
        if self.cgroups is not None and group is not None:
            self.cgroups.give_back(group)

    def _pick(self) -> Zygote:
        with self._lock:
            self._next = (self._next + 1) % len(self._zygotes)
            return self._zygotes[self._next]

    def _replace(self, dead: Zygote) -> Zygote:
        """A new zygote instead of one that does not answer; several threads may have met the same.
        Its sessions end with it.
        """
        with self._lock:
            if dead in self._zygotes:
                fresh = self._start()
                self._zygotes[self._zygotes.index(dead)] = fresh
                self.restarts += 1
                dead.give_up()
                return fresh
            return self._zygotes[self._next]

    def describe(self) -> dict[str, object]:
        """What was chosen and what was not to be had."""
        memory = (
            f"control group (v{self.cgroups.version}) per session"
            if self.cgroups is not None
            else f"per process, a watchdog over all; no control group: {self.cgroups_missing}"
        )
        own = has_own_ids() and not (self._template.tree or self._template.image)
        return {
            "rung": str(self.rung),
            "stronger_rungs_failed": {str(rung): why for rung, why in self.failures.items()},
            "degraded": self.rung is Rung.BARE,
            "users": "one per session" if own else "one for all sessions",
            "proc": self._proc(),
            "memory_limit": memory,
            "processors": self._processors(),
            "zygote_restarts": self.restarts,
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
        """End the zygotes, with them every session, and remove the control groups."""
        with self._lock:  # no thread is starting another
            self._closed = True
            zygotes = [*self._zygotes]
        for zygote in zygotes:
            zygote.close()
        if self.cgroups is not None:
            self.cgroups.close()
