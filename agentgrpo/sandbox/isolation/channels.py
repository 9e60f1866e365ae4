"""The descriptors that join the host to a process of a session, and the reports of its init."""

import contextlib
import errno
import math
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, pidfd_send_signal
from typing import Protocol, Self

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
    """A step of setting up a session or a program in it failed."""

    def __init__(self, step: int, code: int) -> None:
        self.step, self.errno = list(SETUP_STEPS.values())[step], code
        super().__init__(f"setup failed at {self.step}: {os.strerror(code)} (errno {code})")


class NoReport(SandboxInfraError):
    """The other side ended, or did not answer in time, without a word."""


def ready(fd: int, ms: float | None = 0) -> bool:
    """Whether a descriptor can be read, or the process of a pidfd has ended, after waiting for that
    for so many milliseconds; None: for as long as it takes.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(ms))


def pid_of(pidfd: int) -> int:
    """The process id behind a pidfd, as this process sees it; -1 if it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        return int(next(line.split()[1] for line in info if line.startswith("Pid:")))


def children_of(pid: int) -> list[int]:
    """The children of a process; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(*GONE):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb", 0) as file:
                found += map(int, file.read().split())
    return found


def process_tree(root: int, enough: float = math.inf) -> list[int]:
    """A process and its descendants, or enough. Orphans of a session are its init's children."""
    found = [root]
    for pid in found:
        found += children_of(pid) if len(found) <= enough else []
    return found


def tree_cpu_seconds(root: int, but: int) -> float:
    """CPU seconds of a process, its descendants and those that they have waited for; of one of them
    not its own.
    """
    ticks = 0
    for pid in process_tree(root):
        with contextlib.suppress(*GONE), open(f"/proc/{pid}/stat", "rb", 0) as file:
            behind_name = file.read().rpartition(b")")[2]  # which may hold anything
            user, system, *waited = map(int, behind_name.split()[11:15])
            ticks += sum(waited) + (0 if pid == but else user + system)
    return ticks / os.sysconf("SC_CLK_TCK")


class Owned:
    """Descriptors that belong to one object.

    Their numbers may be used only while they are borrowed. close() marks them: nobody can borrow
    them any more, and they are closed when the last borrower is done, so that no number is ever
    used for what the kernel has given it to since.
    """

    __slots__ = ("_borrowers", "_closed", "_descriptors", "_lock")

    def __init__(self, *descriptors: int) -> None:
        self._descriptors = descriptors
        self._lock = threading.Lock()
        self._borrowers, self._closed = 0, False

    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def borrow(self) -> bool:
        """Keep them open until give_back(). False if they are closed."""
        with self._lock:
            self._borrowers += not self._closed
            return not self._closed

    def give_back(self) -> None:
        """The end of a borrow()."""
        with self._lock:
            self._borrowers -= 1
            last = self._closed and self._borrowers == 0
        if last:
            self._let_go()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Self]:
        """borrow() and give_back()."""
        if not self.borrow():
            raise SandboxNotFoundException("it is over and was closed")
        try:
            yield self
        finally:
            self.give_back()

    def close(self) -> None:
        """See above. May be called any number of times, by any thread."""
        with self._lock:
            last = not self._closed and self._borrowers == 0
            self._closed = True
        if last:
            self._let_go()

    def _let_go(self) -> None:
        for fd in self._descriptors:
            os.close(fd)


class Supervisor(Protocol):
    """What keeps sessions alive from outside: a zygote and its jail."""

    def failure(self) -> str:
        """What of the host's own has failed, so that its sessions ended; "" if nothing has."""


class Channels(Owned):
    """The host's descriptors of one live interpreter.

    Args:
        init: pidfd of what to kill to be rid of it: PID 1 of a session.
        interpreter: pidfd of the process that runs the untrusted code.
        supervisor: who knows whether the host's side is well.
        owner: user id that files and pipes of the session are given to; None if this process is
            not root and has no choice.
        places: where the session finds things.
        upper: the directory of the changes to its image, -1 if it has none.
    """

    __slots__ = (
        "err", "init", "interpreter", "out", "owner", "places", "request", "response", "status",
        "supervisor", "upper",
    )  # fmt: skip

    def __init__(
        self,
        request: int,
        response: int,
        out: int,
        err: int,
        status: int,
        init: int,
        interpreter: int,
        *,
        supervisor: Supervisor,
        owner: int | None,
        places: Places,
        upper: int = -1,
    ) -> None:
        own = (request, response, out, err, status, init, interpreter)
        super().__init__(*own, *([upper] if upper >= 0 else []))
        self.upper = upper
        self.request, self.response, self.out, self.err = request, response, out, err
        self.status, self.init, self.interpreter = status, init, interpreter
        self.supervisor, self.owner, self.places = supervisor, owner, places

    def heard(self, fd: int) -> bool:
        """Whether one of its descriptors is ready(); True once they are closed."""
        if not self.borrow():
            return True
        try:
            return ready(fd)
        finally:
            self.give_back()

    def signal(self) -> bool:
        """Kill the process and all it started. False if it has ended."""
        if not self.borrow():
            return False
        try:
            pidfd_send_signal(self.init, SIGKILL)
            with contextlib.suppress(OSError):  # without namespaces; a storm starves the zygote
                os.killpg(pid_of(self.init), SIGKILL)
        except ProcessLookupError:  # it has ended by itself
            return False
        finally:
            self.give_back()
        return True

    def kill(self) -> None:
        """signal(), then close()."""
        self.signal()
        self.close()


class Root(Owned):
    """The root directory of a live session, as it sees it, or its home where it has no other.

    It holds the session's mount namespace: without, its mounts would be gone with its last process,
    and names would lead to what lay beneath them, which other sessions have lain upon as well.
    """

    __slots__ = ("_pidfd", "_supervisor", "directory", "owner", "places")

    def __init__(self, channels: Channels, pid: int) -> None:
        self._supervisor, self.places = channels.supervisor, channels.places
        held: list[int] = []
        with contextlib.ExitStack() as made:

            def keep(fd: int) -> int:
                made.callback(os.close, fd)
                return fd

            try:
                self._pidfd = keep(os.dup(channels.init))
                flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
                if channels.places.own_root:
                    held.append(keep(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)))
                    self.directory = keep(os.open(f"/proc/{pid}/root", flags))
                else:
                    self.directory = keep(os.open(channels.places.home, flags))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise SandboxInfraError(
                        f"no descriptors for a session's files: {error}"
                    ) from error
                raise self._over() from error
            if ready(channels.interpreter):
                raise self._over()
            # it lives: the number was its own, and not a successor's
            made.pop_all()
        self.owner = channels.owner
        super().__init__(self._pidfd, self.directory, *held)

    def path_of(self, name: str) -> str:
        """A name of a file as the session's code finds it; a relative one starts at its home."""
        places = self.places
        if not places.own_root and Path(name).is_relative_to(HOME):
            name = os.path.relpath(name, HOME)
        path = os.path.join(places.home, name)
        if not places.own_root and not Path(os.path.normpath(path)).is_relative_to(places.home):
            raise NotSupportedException(f"{name}: without namespaces a session has its home only")
        return path

    def beneath(self, path: str) -> str:
        """A path_of(), as it is found from directory."""
        home = self.places.home
        return path if self.places.own_root else "/" + os.path.relpath(path, home)

    def require_alive(self) -> None:
        """Raises what __init__() does if the session has ended."""
        if ready(self._pidfd):
            raise self._over()

    def _over(self) -> SandboxException:
        failure = self._supervisor.failure()
        if failure:
            return SandboxInfraError(failure)
        return SandboxNotFoundException("the session is over")


class SessionPipes:
    """Both ends of the pipes and the status socket of a process to be; closes what is not taken."""

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
        """(status, request, response, out, err) of the other side."""
        return tuple(self._theirs)

    def copy(self, channels: Channels) -> None:
        """Take copies of our ends of another process's pipes instead."""
        self._close(self._mine)
        for fd in (channels.request, channels.response, channels.out, channels.err):
            self._mine.append(os.dup(fd))

    @staticmethod
    def _close(fds: list[int]) -> None:
        while fds:
            os.close(fds.pop())

    def close_theirs(self) -> None:
        """Once sent: so that the end of the other side shows as end of file here."""
        self._close(self._theirs)

    def detach(
        self, init: int, interpreter: int, supervisor: Supervisor, places: Places, upper: int = -1
    ) -> Channels:
        """Hand our ends to the caller."""
        ours = (*self._mine, self.status.detach(), init, interpreter)
        self._mine.clear()
        return Channels(*ours, supervisor=supervisor, owner=self._owner, places=places, upper=upper)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close(self._mine)
        self._close(self._theirs)
        self.status.close()


def await_ready(status: socket.socket, num_fds: int) -> list[int]:
    """The pidfds of PID 1 and PID 2 (of an image also the directory of changes), or of one program,
    once init has started them.
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
