"""Bounds a session as a whole, its memory above all, where no control group does.

The kernel's limit of address space holds for each process; ten of them may use ten times as much.
A thread adds up what the processes of each session use, its files, which lie in memory, and its
sockets as if they were full, and kills a session that is over its limit. It looks every 50 ms, less
often when looking at all of them takes long. What it cannot count (kernel memory of descriptors and
mappings) makes the machine's memory fall below a floor: then the largest session is ended.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from agentgrpo import _C
from agentgrpo.sandbox.isolation.channels import GONE, process_tree
from agentgrpo.sandbox.isolation.jail import PRIVATE
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepStatus
from agentgrpo.support.control_groups import lines_of, memory_bounds

log = logging.getLogger(__name__)
INTERVAL_S = 0.05
SHARE = 0.1
"""Share of the time spent looking at memory, as long as MAX_PAUSE_S allows it."""
MAX_PAUSE_S = 0.25
"""Longest time between two looks. A session that forks constantly can make one look take a second;
others must be watched all the same."""
STOPS = 8
"""How often a tree is listed until all its processes are stopped."""
FLOOR = 0.02
"""Of the machine's memory: with less available, the largest session is ended."""
SOCKET_KIB = 2 * 208
"""What a socket holds at most, sent and received: policy.py lets none of its buffers be enlarged,
and csrc/sandbox_spawn.c sets what TCP's grow to."""


def sockets_kib(pid: int) -> int:
    """What the sockets of a process's network namespace hold at most, those too that nobody has
    accepted.
    """
    with contextlib.suppress(*GONE):
        used = Path(f"/proc/{pid}/net/sockstat").read_text().split(maxsplit=3)[2]
        return int(used) * SOCKET_KIB
    return 0


def files_kib(pid: int, directories: Iterable[str] = PRIVATE) -> int:
    """What lies in a session's private directories, deleted files that are open included."""
    total = 0
    with contextlib.suppress(*GONE):
        for directory in directories:
            found = os.statvfs(f"/proc/{pid}/root{directory}")
            total += (found.f_blocks - found.f_bfree) * found.f_frsize
    return total >> 10


def tasks(pids: list[int]) -> int:
    """Processes and threads, which the kernel counts by user: not all sessions have their own."""
    total = 0
    for pid in pids:
        with contextlib.suppress(*GONE):
            total += os.stat(f"/proc/{pid}/task").st_nlink - 2  # one link for each, . and ..
    return total


def used_kib(session: Session, enough_kib: int) -> int:
    """What a session uses, its processes together; not exact while it is below enough_kib, where
    that costs too much: forks share pages, so that their sum is an upper bound. Without namespaces
    of its own, what its processes have mapped.
    """
    own = (
        0
        if session.degraded
        else (sockets_kib(session.pid) + files_kib(session.pid, session.places.private))
    )
    most = session.limits.processes
    return own + _C.sandbox_tree_kib(session.init_pid, most, enough_kib - own)


def stopped_kib(session: Session, enough_kib: int) -> int:
    """used_kib() while its processes are stopped: of those that come and go none counts twice. What
    forks faster than it can be stopped is counted as it runs.
    """
    stopped: list[int] = []
    try:
        for _ in range(STOPS):
            tree = process_tree(session.init_pid, session.limits.processes)
            if not (new := [pid for pid in tree if pid not in stopped]):
                break
            stopped += new
            _signal(new, signal.SIGSTOP)
        return used_kib(session, enough_kib)
    finally:
        _signal(stopped[::-1], signal.SIGCONT)  # no shell sees that its child was stopped


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def available() -> float:
    """The part of the memory that this process may use, of the machine's or of a control group's
    around it, that is available.
    """
    facts = dict(line.split(":", 1) for line in lines_of("/proc/meminfo"))
    total, left = (int(facts[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    return min([left / total, *((limit - used) / limit for limit, used in memory_bounds())])


def keep_polite(pid: int, niceness: int) -> None:
    """The kernel groups what setsid() sets apart, and weighs the groups by a niceness of their own
    (sched(7), autogroup), which the process's counts for nothing against.
    """
    with contextlib.suppress(OSError):  # it has ended; not in this kernel; ten times a second
        group = Path(f"/proc/{pid}/autogroup")
        if group.read_text().endswith(" nice 0\n"):
            group.write_text(str(niceness))


class MemoryWatchdog:
    """Watches sessions until close()."""

    def __init__(self, limit_mib: int, sessions: Callable[[], Iterable[Session]]) -> None:
        self._limit_kib, self._sessions = limit_mib << 10, sessions
        self._told = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sandbox-memory", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        pause = INTERVAL_S
        while not self._stop.wait(pause):
            started = time.thread_time()
            try:
                self._look()
            except OSError as error:  # no descriptors: there may be some for the next look
                self._tell(f"the memory of sessions was not looked at: {error}")
            pause = min(MAX_PAUSE_S, max(INTERVAL_S, (time.thread_time() - started) / SHARE))

    def _tell(self, text: str) -> None:
        if text != self._told:  # not twenty times a second
            self._told = text
            log.warning(text)

    def _look(self) -> None:
        largest: tuple[int, Session] | None = None
        for session in self._sessions():
            most = session.limits.processes
            try:
                pids = process_tree(session.init_pid, most)
                for pid in pids[1:]:
                    keep_polite(pid, session.limits.niceness)
                many = session.degraded and os.geteuid() != 0 and tasks(pids) > most
                used = 0 if many else used_kib(session, self._limit_kib)
                if used > self._limit_kib:
                    used = stopped_kib(session, self._limit_kib)
            except PermissionError:  # its program is a file that nobody may read
                session.end_by(StepStatus.OOM, "it does not let its memory be counted")
                continue
            if not session.healthy():  # what had its number may be another's by now
                continue
            if many:
                session.end_by(StepStatus.SIGNAL, f"over {most} processes and threads together")
            elif used > self._limit_kib:
                limit = f"over {self._limit_kib >> 10} MiB of memory, all processes together"
                session.end_by(StepStatus.OOM, limit)
            elif largest is None or used > largest[0]:
                largest = used, session
        if largest is not None and available() < FLOOR:
            largest[1].end_by(StepStatus.OOM, "the machine has no memory left, and it used most")

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()
