"""Bounds a session's memory as a whole where no control group does.

The address space limit holds for each process; ten of them may use ten times as much. A thread adds
up what the processes of each session use, what its sockets hold and its files, which lie in memory,
and kills a session that is over its limit. It looks every 50 ms, less often when looking at all of
them takes long. Where processes end while it looks, it stops all of the session for another look:
memory that is handed from process to process faster than they can be looked at would else never be
seen whole.
"""

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from weakref import WeakKeyDictionary

from agentgrpo.sandbox.channels import process_tree
from agentgrpo.sandbox.jail import PRIVATE
from agentgrpo.sandbox.session import Session

log = logging.getLogger(__name__)
INTERVAL_S = 0.05
SHARE = 0.1
"""Of the time, at most this much is spent looking."""
ENDING_S, LOOKS_AT_REST = 0.02, 3
"""For processes that were ending when all others were stopped: so long, and so many looks."""
EVASIONS = 5
"""Looks in a row that a session may keep from counting it, though it was stopped for them."""
GONE = (FileNotFoundError, ProcessLookupError)
WATCH_BYTES = 224
"""Of the kernel's memory for one watch of an epoll, by measurement (6.18)."""
SOCKET_BYTES, TIME_WAIT_BYTES = 4096, 256
"""Of the kernel's memory for one internet socket, which needs no descriptor while nobody has
accepted it, by measurement (6.18); and for what it remembers of one that was closed."""
TIME_WAIT_TIMER = "03:"
PAGE_KIB = os.sysconf("SC_PAGESIZE") >> 10


@functools.cache
def unix_kib() -> int:
    """What a unix socket can hold at most: how much it does, the kernel does not tell. A socket is
    asked, as only the first network namespace had a file for it before Linux 6.11.
    """
    with socket.socket(socket.AF_UNIX) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >> 10


def private_kib(pid: int) -> int | None:
    """Memory of a process that no file backs, pages shared with its parent counted in full.

    None if it has ended. A process outlives its main thread, of which the kernel then says 0: any
    other thread says it.
    """
    try:
        for thread in (pid, *map(int, os.listdir(f"/proc/{pid}/task"))):
            resident, shared = Path(f"/proc/{pid}/task/{thread}/statm").read_text().split()[1:3]
            if resident != "0":
                return (int(resident) - int(shared)) * PAGE_KIB
    except GONE:
        return None
    return 0


def proportional_kib(pid: int) -> int | None:
    """Memory of a process, each page divided by the number of processes that share it.

    None if it has ended; private_kib(), which is no less, if its main thread has, or if this user
    may not know.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (*GONE, PermissionError):
        return private_kib(pid)
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss:", "SwapPss:")))


def socket_kib(pid: int) -> int:
    """What sockets of a process's network namespace hold, unix sockets at most: no process has it
    mapped. 0 without such a namespace, as the sockets of the machine are not the session's.
    """
    try:
        if os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            return 0
        unix = Path(f"/proc/{pid}/net/unix").read_bytes().count(b"\n") - 1
    except GONE:
        return 0
    total = unix * unix_kib() << 10
    for name in ("tcp", "tcp6", "udp", "udp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except GONE:
            continue
        for line in lines:
            queues, timer = line.split()[4:6]
            waits = timer.startswith(TIME_WAIT_TIMER)
            total += TIME_WAIT_BYTES if waits else SOCKET_BYTES
            total += sum(int(queue, 16) for queue in queues.split(":"))
    return total >> 10


def files_kib(pid: int) -> int:
    """What lies in a session's private directories, deleted files that are open included. 0 without
    a mount namespace of its own, whose directories are on disk.
    """
    total = 0
    try:
        if os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
            return 0
        for directory in PRIVATE:
            found = os.statvfs(f"/proc/{pid}/root{directory}")
            total += (found.f_blocks - found.f_bfree) * found.f_frsize
    except GONE:
        return 0
    return total >> 10


def watches_kib(pid: int) -> int | None:
    """What the kernel keeps for what a process watches by epoll, of which it bounds only how much
    all processes of a user may have. An epoll that was inherited counts for each that has it.

    A process outlives its main thread, which then shows none of its descriptors: any other thread
    does (policy.py: all have the same). None if it does not let us look: it was made by executing a
    file that nobody may read.
    """
    with contextlib.suppress(*GONE):
        for thread in (pid, *map(int, os.listdir(f"/proc/{pid}/task"))):
            path = f"/proc/{pid}/task/{thread}"
            try:
                fds = os.listdir(f"{path}/fd")
            except PermissionError:
                if Path(f"{path}/statm").read_text().split()[1] != "0":  # it has not ended
                    return None
                continue
            if fds:
                return sum(_watches(path, fd) for fd in fds) * WATCH_BYTES >> 10
    return 0


def _watches(thread: str, fd: str) -> int:
    with contextlib.suppress(*GONE, PermissionError):  # closed meanwhile, or the thread has ended
        if os.readlink(f"{thread}/fd/{fd}") == "anon_inode:[eventpoll]":
            return Path(f"{thread}/fdinfo/{fd}").read_bytes().count(b"tfd:")
    return 0


def used_kib(init: int, enough_kib: int) -> int | None:
    """What a session uses; not exact while it is below enough_kib, where exactness costs too much.

    Forks share pages: their sum is an upper bound, which is cheap; only if that is too much is
    every page counted once. None if a process ended or started meanwhile: its memory may be its
    child's now, and that child started too late to be counted. None, too, if one cannot be seen.

    Raises:
        OSError: no descriptors are left to look.
    """
    pids = process_tree(init)
    watches = [watches_kib(pid) for pid in pids[1:]]
    if None in watches:
        return None
    unmapped = socket_kib(init) + files_kib(init) + sum(filter(None, watches))
    for measure in (private_kib, proportional_kib):
        each = [measure(pid) for pid in pids]
        if None in each or process_tree(init) != pids:
            return None
        used = unmapped + sum(filter(None, each))
        if used <= enough_kib:
            break
    return used


class MemoryWatchdog:
    """Watches sessions until close().

    Args:
        limit_mib: what the processes of one session may use together.
        sessions: those that live now.
    """

    def __init__(self, limit_mib: int, sessions: Callable[[], Iterable[Session]]) -> None:
        self._limit_kib, self._sessions = limit_mib << 10, sessions
        self._told = ""
        self._evasions: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sandbox-memory", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        pause = INTERVAL_S
        while not self._stop.wait(pause):
            started = time.thread_time()
            for session in self._sessions():
                try:
                    self._look(session)
                except OSError as error:  # no descriptors: there may be some for the next look
                    if not session.healthy():  # or it is ending, which hides what it was
                        continue
                    self._tell(f"a session's memory was not looked at: {error}")
            pause = max(INTERVAL_S, (time.thread_time() - started) / SHARE)

    def _tell(self, text: str) -> None:
        if text != self._told:  # not twenty times a second
            self._told = text
            log.warning(text)

    def _look(self, session: Session) -> None:
        used = used_kib(session.init_pid, self._limit_kib)
        if not session.healthy():  # what had its number may be another's by now
            return
        if used is None:
            used = self._at_rest(session)
        else:
            self._evasions.pop(session, None)
        if used is None and self._evasions.get(session, 0) >= EVASIONS:
            session.end_for_memory("its processes keep their memory from being counted", None)
        if used is not None and used > self._limit_kib:
            limit = f"over {self._limit_kib >> 10} MiB of memory, all processes together"
            session.end_for_memory(limit, used)

    def _at_rest(self, session: Session) -> int | None:
        """used_kib() with nothing running; what was ending already gets some time for it. None if
        that was not to be had, which counts as an evasion if the session had been stopped.
        """
        deadline = time.monotonic() + ENDING_S
        with session.held() as held:
            looks = 0
            while held and (looks < LOOKS_AT_REST or time.monotonic() < deadline):
                used = used_kib(session.init_pid, self._limit_kib)
                if used is not None:
                    self._evasions.pop(session, None)
                    return used
                looks += 1
                time.sleep(0.001)
            if held:
                self._evasions[session] = self._evasions.get(session, 0) + 1
        return None

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()
