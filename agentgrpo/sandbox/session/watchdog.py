"""Limits the memory of a session as a whole where there is no control group.

The kernel's limit of address space holds for each process, so ten processes can use ten times as
much. A thread sums the memory of the processes of each session, its files, which are in memory, and
its sockets as if they were full, and kills a session over its limit. It checks every 50 ms, less
often if a check of all sessions takes long. It cannot count kernel memory of descriptors and
mappings. So when the machine's available memory falls below a floor, it kills the largest session.
"""

import contextlib
import ctypes
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
"""Share of the time spent in checks, as far as MAX_PAUSE_S allows."""
MAX_PAUSE_S = 0.25
"""Longest time between two checks. A session that forks constantly can make one check take a
second; the others must still be checked."""
STOPS = 8
"""Attempts to list and stop all processes of a session."""
SYS_KCMP, KCMP_VM = 312, 1
"""kcmp(2) on x86-64: 0 if two processes have the same memory."""
_LIBC = ctypes.CDLL(None)
FLOOR = 0.02
"""Share of the machine's memory: with less available, the largest session is killed."""
SOCKET_KIB = 2 * 208
"""Maximum size of a socket's two buffers: policy.py denies larger ones, and csrc/sandbox_spawn.c
sets the maximum of TCP's."""


def sockets_kib(pid: int) -> int:
    """Maximum buffers of all sockets in a process's network namespace, also those not accepted."""
    with contextlib.suppress(*GONE):
        used = Path(f"/proc/{pid}/net/sockstat").read_text().split(maxsplit=3)[2]
        return int(used) * SOCKET_KIB
    return 0


def files_kib(pid: int, directories: Iterable[str] = PRIVATE) -> int:
    """Size of a session's private directories, including deleted files that are open."""
    total = 0
    with contextlib.suppress(*GONE):
        for directory in directories:
            info = os.statvfs(f"/proc/{pid}/root{directory}")
            total += (info.f_blocks - info.f_bfree) * info.f_frsize
    return total >> 10


def tasks(pids: list[int]) -> int:
    """Number of processes and threads. The kernel's own count is per user, not per session."""
    total = 0
    for pid in pids:
        with contextlib.suppress(*GONE):
            total += os.stat(f"/proc/{pid}/task").st_nlink - 2  # one link for each, . and ..
    return total


def used_kib(session: Session, enough_kib: int) -> int:
    """Memory of a session. Up to enough_kib an upper bound, because an exact count costs too much:
    pages that forks share count for each. Without namespaces, only the memory of its processes.
    """
    other_kib = (
        0
        if session.degraded
        else (sockets_kib(session.pid) + files_kib(session.pid, session.places.private))
    )
    max_processes = session.limits.processes
    return other_kib + _C.sandbox_tree_kib(session.init_pid, max_processes, enough_kib - other_kib)


def stopped_kib(session: Session, enough_kib: int) -> int:
    """used_kib() while the session's processes are stopped, so that none counts twice together with
    its successor. Processes that fork faster than they can be stopped are counted as they run.
    """
    stopped: list[int] = []
    try:
        for _ in range(STOPS):
            tree = process_tree(session.init_pid, session.limits.processes)
            if not (new := [pid for pid in tree if pid not in stopped]):
                break
            stopped += new
            _signal(new, signal.SIGSTOP)
        return used_kib(session, enough_kib) - _vforked_kib(stopped)
    finally:
        _signal(stopped[::-1], signal.SIGCONT)  # children first: no shell sees a stopped child


def _vforked_kib(pids: list[int]) -> int:
    """Memory of processes between vfork() and exec(): it is their parent's, which counts it too."""
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent in pids and _LIBC.syscall(SYS_KCMP, pid, parent, KCMP_VM, 0, 0) == 0:
                fields = [line.split() for line in lines_of(f"/proc/{pid}/smaps_rollup")]
                kib += next(int(field[1]) for field in fields if field[0] == "Pss:")
    return kib


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def available() -> float:
    """Available share of the memory, of the machine or of a control group around this process."""
    fields = dict(line.split(":", 1) for line in lines_of("/proc/meminfo"))
    total, free = (int(fields[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    return min([free / total, *((limit - used) / limit for limit, used in memory_bounds())])


def set_autogroup_niceness(pid: int, niceness: int) -> None:
    """Set the niceness of a process's autogroup. setsid() makes a new autogroup, and between groups
    the kernel ignores the niceness of the processes (sched(7)).
    """
    with contextlib.suppress(OSError):  # ended; no autogroups; EAGAIN above ten times a second
        group = Path(f"/proc/{pid}/autogroup")
        if group.read_text().endswith(" nice 0\n"):
            group.write_text(str(niceness))


class MemoryWatchdog:
    """Watches sessions until close()."""

    def __init__(self, limit_mib: int, sessions: Callable[[], Iterable[Session]]) -> None:
        self._limit_kib, self._sessions = limit_mib << 10, sessions
        self._last_warning = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sandbox-memory", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        pause = INTERVAL_S
        while not self._stop.wait(pause):
            started = time.thread_time()
            try:
                self._check()
            except OSError as error:  # for example no free descriptor: try again at the next check
                text = f"the memory of sessions was not checked: {error}"
                if text != self._last_warning:  # not twenty times per second
                    self._last_warning = text
                    log.warning(text)
            pause = min(MAX_PAUSE_S, max(INTERVAL_S, (time.thread_time() - started) / SHARE))

    def _check(self) -> None:
        largest: tuple[int, Session] | None = None
        for session in self._sessions():
            max_processes = session.limits.processes
            try:
                pids = process_tree(session.init_pid, max_processes)
                for pid in pids[1:]:
                    set_autogroup_niceness(pid, session.limits.niceness)
                count_tasks = session.degraded and os.geteuid() != 0
                too_many = count_tasks and tasks(pids) > max_processes
                used = 0 if too_many else used_kib(session, self._limit_kib)
                if used > self._limit_kib:
                    used = stopped_kib(session, self._limit_kib)
            except PermissionError:  # the process runs a file without read permission
                session.end_by(StepStatus.OOM, "its memory cannot be counted")
                continue
            if not session.healthy():  # its pids may belong to another session now
                continue
            if too_many:
                detail = f"over {max_processes} processes and threads together"
                session.end_by(StepStatus.SIGNAL, detail)
            elif used > self._limit_kib:
                limit = f"over {self._limit_kib >> 10} MiB of memory, all processes together"
                session.end_by(StepStatus.OOM, limit)
            elif largest is None or used > largest[0]:
                largest = used, session
        if largest is not None and available() < FLOOR:
            detail = "the machine has no memory left, and this session used the most"
            largest[1].end_by(StepStatus.OOM, detail)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
