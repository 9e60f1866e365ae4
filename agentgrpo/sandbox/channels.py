"""The descriptors that join the host to a process of a session, and the reports of its init."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, pidfd_send_signal
from typing import Self

from agentgrpo.sandbox.errors import SandboxInfraError
from agentgrpo.sandbox.guest.wire import REPORT, REPORT_READY, SETUP_STEPS

READY_TIMEOUT_S = 10.0


class SetupFailed(SandboxInfraError):
    """A step of setting up a session or a program in it failed."""

    def __init__(self, step: int, code: int) -> None:
        self.step, self.errno = list(SETUP_STEPS.values())[step], code
        super().__init__(f"setup failed at {self.step}: {os.strerror(code)} (errno {code})")


def pid_of(pidfd: int) -> int:
    """The process id behind a pidfd, as this process sees it; -1 if it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        return int(next(line.split()[1] for line in info if line.startswith("Pid:")))


def process_tree(root: int) -> list[int]:
    """A process and all its descendants. Orphans of a session are its init's children.

    Raises:
        OSError: no descriptors are left to look.
    """
    found = [root]
    for pid in found:
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                text = Path(f"/proc/{pid}/task/{task}/children").read_text()
                found += map(int, text.split())
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return found


@dataclass(frozen=True, slots=True)
class Channels:
    """The host's descriptors of one live interpreter. Whoever holds this closes them."""

    request: int
    response: int
    out: int
    err: int
    status: int
    init: int
    """pidfd of what to kill to be rid of it: PID 1 of a session"""
    interpreter: int
    """pidfd of the process that runs the untrusted code"""

    def signal(self) -> None:
        """Kill the process and all it started."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            pidfd_send_signal(self.init, SIGKILL)

    def kill(self) -> None:
        """signal(), then close()."""
        self.signal()
        self.close()

    def close(self) -> None:
        """Close all seven."""
        for fd in {getattr(self, name) for name in self.__slots__}:
            os.close(fd)


class Ends:
    """Both ends of the pipes and the status socket of a process to be; closes what is not taken.

    Args:
        owner: user id that the output pipes are given to, so that the code may open /dev/stdout;
            None leaves them.

    Raises:
        SandboxInfraError: out of descriptors.
    """

    def __init__(self, owner: int | None = None) -> None:
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

    @staticmethod
    def _close(fds: list[int]) -> None:
        while fds:
            os.close(fds.pop())

    def close_theirs(self) -> None:
        """Once sent: so that the end of the other side shows as end of file here."""
        self._close(self._theirs)

    def detach(self, init: int, interpreter: int) -> Channels:
        """Hand our ends to the caller."""
        request, response, out, err = self._mine
        self._mine.clear()
        return Channels(request, response, out, err, self.status.detach(), init, interpreter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close(self._mine)
        self._close(self._theirs)
        self.status.close()


def await_ready(status: socket.socket, num_fds: int) -> list[int]:
    """The pidfds of PID 1 and PID 2, or of one program, once init has started them.

    Raises:
        SetupFailed: at the step it names.
        SandboxInfraError: the other side ended without a word.
    """
    status.settimeout(READY_TIMEOUT_S)
    try:
        message, fds, _, _ = socket.recv_fds(status, REPORT.size, num_fds)
    except OSError as error:
        raise SandboxInfraError(f"a new process did not report: {error}") from error
    finally:
        status.settimeout(0)
    if len(message) != REPORT.size:
        raise SandboxInfraError("a new session ended before it reported: is its zygote alive?")
    kind, step, code, *_ = REPORT.unpack(message)
    if kind == REPORT_READY and len(fds) == num_fds:
        return list(fds)
    for fd in fds:
        os.close(fd)
    raise SetupFailed(step, code)
