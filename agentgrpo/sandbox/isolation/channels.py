"""Descriptors between the host and a process of a session, and the reports of its init."""

import contextlib
import errno
import math
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGKILL, pidfd_send_signal
from typing import Self

from agentgrpo.sandbox.inside.wire import REPORT, REPORT_READY, SETUP_STEPS
from agentgrpo.sandbox.isolation.errors import (
    NotSupportedException,
    SandboxException,
    SandboxInfraError,
    SandboxNotFoundException,
)
from agentgrpo.sandbox.isolation.jail import HOME, Places

READY_TIMEOUT_S = 10.0
GONE = (FileNotFoundError, ProcessLookupError)


class SetupFailed(SandboxInfraError):
    """A setup step of a session or of a program in it failed."""

    def __init__(self, step: int, code: int) -> None:
        self.step, self.errno = list(SETUP_STEPS.values())[step], code
        super().__init__(f"setup failed at {self.step}: {os.strerror(code)} (errno {code})")


class NoReport(SandboxInfraError):
    """The other side ended or did not answer in time."""


def ready(fd: int, ms: float | None = 0) -> bool:
    """Wait until a descriptor is readable or the process of a pidfd has ended, at most ms
    milliseconds (None: no limit). Returns whether it is.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(ms))


def pid_of(pidfd: int) -> int:
    """The process id of a pidfd, as this process sees it; -1 if the process has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        return int(next(line.split()[1] for line in info if line.startswith("Pid:")))


def children_of(pid: int) -> list[int]:
    """The children of a process; empty if it has ended."""
    children: list[int] = []
    with contextlib.suppress(*GONE):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb", 0) as file:
                children += map(int, file.read().split())
    return children


def process_tree(root: int, limit: float = math.inf) -> list[int]:
    """A process and its descendants, orphans included. Stops soon after limit processes."""
    pids = [root]
    for pid in pids:  # the loop appends to the list
        pids += children_of(pid) if len(pids) <= limit else []
    return pids


def tree_cpu_seconds(root: int, exclude: int) -> float:
    """CPU seconds of a process, its descendants, and the children that these have waited for.

    Of process exclude only the children count, not its own time.
    """
    ticks = 0
    for pid in process_tree(root):
        with contextlib.suppress(*GONE), open(f"/proc/{pid}/stat", "rb", 0) as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may have any bytes
            user, system, *waited = map(int, fields[11:15])
            ticks += sum(waited) + (0 if pid == exclude else user + system)
    return ticks / os.sysconf("SC_CLK_TCK")


class Owned:
    """Descriptors that belong to one object and are used by several threads.

    They may be used only while they are borrowed. After close() they cannot be borrowed, and they
    are closed when the last borrower has given them back. So a thread never uses a descriptor
    number that the kernel has reused.
    """

    __slots__ = ("_borrowers", "_closed", "_descriptors", "_lock")

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors
        self._lock = threading.Lock()
        self._borrowers, self._closed = 0, False

    def is_closed(self) -> bool:
        return self._closed

    def borrow(self) -> bool:
        """Keep them open until give_back(). False if they are closed."""
        with self._lock:
            self._borrowers += not self._closed
            return not self._closed

    def give_back(self) -> None:
        """End a borrow()."""
        with self._lock:
            self._borrowers -= 1
            is_last = self._closed and self._borrowers == 0
        if is_last:
            self._close_descriptors()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Self]:
        if not self.borrow():
            raise SandboxNotFoundException("the session has ended and was closed")
        try:
            yield self
        finally:
            self.give_back()

    def close(self) -> None:
        """Close them, or let the last borrower close them. Idempotent, thread-safe."""
        with self._lock:
            is_last = not self._closed and self._borrowers == 0
            self._closed = True
        if is_last:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in set(self._descriptors):  # a program is both init and interpreter
            os.close(fd)


class Channels(Owned):
    """The host's descriptors of one live interpreter.

    Args:
        fds: request, response, out, err and status; then the pidfd of the process to kill to end
            it (init: PID 1 of a session) and of the process that runs the untrusted code; with an
            image also the directory with the changes to it.
        failure: returns the failure outside of the session that has ended it; "" if there is none.
        owner: user id that owns files and pipes of the session; None if this process is not root.
        places: paths inside the session.
    """

    __slots__ = (
        "err", "failure", "init", "interpreter", "out", "owner", "places", "request", "response",
        "status", "upper",
    )  # fmt: skip

    def __init__(
        self, fds: Sequence[int], failure: Callable[[], str], owner: int | None, places: Places
    ) -> None:
        super().__init__(*fds)
        self.request, self.response, self.out, self.err, self.status, *received = fds
        self.init, self.interpreter, self.upper = (*received, -1)[:3]
        self.failure, self.owner, self.places = failure, owner, places

    def heard(self, fd: int) -> bool:
        """Whether one of the descriptors is ready(); True after close()."""
        if not self.borrow():
            return True
        try:
            return ready(fd)
        finally:
            self.give_back()

    def signal(self) -> bool:
        """Kill the process and all processes that it started. False if it had ended."""
        if not self.borrow():
            return False
        try:
            pidfd_send_signal(self.init, SIGKILL)
            # Without namespaces the group must be killed too: the zygote would do it at init's end,
            # but a fork bomb can starve it.
            with contextlib.suppress(OSError):
                os.killpg(pid_of(self.init), SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            self.give_back()
        return True

    def kill(self) -> None:
        self.signal()
        self.close()


class Root(Owned):
    """The root directory of a live session; without namespaces its home.

    It keeps the session's mount namespace open. Otherwise the mounts would disappear with the last
    process, and paths would lead to the directories below them, which other sessions share.
    """

    __slots__ = ("_failure", "_pidfd", "directory", "owner", "places")

    def __init__(self, channels: Channels, pid: int) -> None:
        self._failure, self.places = channels.failure, channels.places
        namespace: list[int] = []
        with contextlib.ExitStack() as opened:

            def keep(fd: int) -> int:
                opened.callback(os.close, fd)
                return fd

            try:
                self._pidfd = keep(os.dup(channels.init))
                flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
                if channels.places.own_root:
                    fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
                    namespace.append(keep(fd))
                    self.directory = keep(os.open(f"/proc/{pid}/root", flags))
                else:
                    self.directory = keep(os.open(channels.places.home, flags))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise SandboxInfraError(
                        f"no descriptors for a session's files: {error}"
                    ) from error
                raise self._end_error() from error
            if ready(channels.interpreter):
                raise self._end_error()
            # The interpreter is alive after /proc/PID was opened: PID was not reused.
            opened.pop_all()
        self.owner = channels.owner
        super().__init__(self._pidfd, self.directory, *namespace)

    def path_of(self, name: str) -> str:
        """The path inside the session; a relative name starts at its home."""
        places = self.places
        if not places.own_root and Path(name).is_relative_to(HOME):
            name = os.path.relpath(name, HOME)
        path = os.path.join(places.home, name)
        if not places.own_root and not Path(os.path.normpath(path)).is_relative_to(places.home):
            raise NotSupportedException(f"{name}: without namespaces a session has only its home")
        return path

    def beneath(self, path: str) -> str:
        """A path inside the session, relative to directory."""
        home = self.places.home
        return path if self.places.own_root else "/" + os.path.relpath(path, home)

    def require_alive(self) -> None:
        """Raise SandboxNotFoundException or SandboxInfraError if the session has ended."""
        if ready(self._pidfd):
            raise self._end_error()

    def _end_error(self) -> SandboxException:
        if failure := self._failure():
            return SandboxInfraError(failure)
        return SandboxNotFoundException("the session has ended")


class SessionPipes:
    """Both ends of the pipes and of the status socket of a new process. Closes those not taken."""

    def __init__(self, owner: int | None = None) -> None:
        self._owner = owner
        self._mine: list[int] = []
        self._theirs: list[int] = []
        try:
            for ours_first in (False, False, True, True):
                read, write = os.pipe()
                self._mine.append(read if ours_first else write)
                self._theirs.append(write if ours_first else read)
            self._mine[1], self._theirs[1] = self._theirs[1], self._mine[1]  # the response
            self.status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._close(self._mine)
            self._close(self._theirs)
            raise SandboxInfraError(
                f"no descriptors for another session: {error}; remedy: ulimit -n 65536"
            ) from error
        self._theirs.insert(0, theirs.detach())
        for fd in self._mine:
            os.set_blocking(fd, False)
        if owner is not None:
            for fd in self._theirs[3:]:
                os.fchown(fd, owner, owner)

    @property
    def theirs(self) -> tuple[int, ...]:
        """(status, request, response, out, err) for the new process."""
        return tuple(self._theirs)

    def copy(self, channels: Channels) -> None:
        """Replace our ends by duplicates of our ends of another process's pipes."""
        self._close(self._mine)
        for fd in (channels.request, channels.response, channels.out, channels.err):
            self._mine.append(os.dup(fd))

    @staticmethod
    def _close(fds: list[int]) -> None:
        while fds:
            os.close(fds.pop())

    def close_theirs(self) -> None:
        """Close the ends that were sent. Only then the process's end shows as end of file here."""
        self._close(self._theirs)

    def detach(
        self, received: Sequence[int], failure: Callable[[], str], places: Places
    ) -> Channels:
        """Move our ends, and the descriptors that init has sent, into Channels."""
        fds = (*self._mine, self.status.detach(), *received)
        self._mine.clear()
        return Channels(fds, failure, self._owner, places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close(self._mine)
        self._close(self._theirs)
        self.status.close()


def await_ready(status: socket.socket, num_fds: int) -> list[int]:
    """Wait until init has started the processes. Returns the pidfds of PID 1 and PID 2 (with an
    image also the directory of changes), or of one program.
    """
    if not ready(status.fileno(), READY_TIMEOUT_S * 1e3):
        raise NoReport("a new process did not report in time")
    try:
        message, fds, _, _ = socket.recv_fds(status, REPORT.size, num_fds)
    except OSError as error:
        raise NoReport(f"a new process did not report: {error}") from error
    finally:
        status.settimeout(0)
    if len(message) != REPORT.size:
        raise NoReport("a new process ended before it reported")
    kind, step, code, *_ = REPORT.unpack(message)
    if kind == REPORT_READY and len(fds) == num_fds:
        return list(fds)
    for fd in fds:
        os.close(fd)
    raise SetupFailed(step, code)
