"""Programs that the host starts in a session, beside its interpreter: commands and other languages.

They are children of the session's init, not of the interpreter, so that they neither depend on the
state of the untrusted interpreter nor end with a step. They live under the same limits and filter.
"""

import contextlib
import errno
import os
import select
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from agentgrpo.sandbox.channels import (
    Channels,
    Ends,
    SetupFailed,
    await_ready,
    pid_of,
)
from agentgrpo.sandbox.errors import (
    InvalidArgumentException,
    SandboxException,
    SandboxNotFoundException,
)
from agentgrpo.sandbox.guest.wire import ORDER, REPORT, REPORT_EXIT, REPORT_READY

MAX_ORDER = 128 << 10
Listener = Callable[[str], object]


def send_order(
    session: Channels,
    fds: Sequence[int],
    argv: Sequence[str],
    env: Mapping[str, str],
    directory: str,
) -> None:
    """Ask a session's init to run a program.

    Raises:
        InvalidArgumentException: a string has a NUL in it, or all together are too long.
        SandboxNotFoundException: the session is over.
    """
    strings = [directory, *argv, *(f"{key}={value}" for key, value in env.items())]
    if any("\0" in text for text in strings):
        raise InvalidArgumentException("a command, directory or variable contains a NUL")
    text = b"".join(os.fsencode(text) + b"\0" for text in strings)
    if len(text) > MAX_ORDER:
        raise InvalidArgumentException(
            f"command and environment are {len(text)} bytes, at most {MAX_ORDER} can be passed"
        )
    control = socket.socket(fileno=os.dup(session.status))
    with control:
        control.settimeout(1.0)
        try:
            socket.send_fds(control, [ORDER.pack(len(argv), len(env)) + text], list(fds))
        except OSError as error:
            raise SandboxNotFoundException(f"the session is over: {error}") from error


class Orders:
    """Signals to every process of a session but its init, through descriptors made beforehand: so
    that what is stopped can be continued when there are no more to be had.

    Raises:
        OSError: no descriptors.
    """

    PATIENCE_S = 1.0

    def __init__(self, session: Channels) -> None:
        with contextlib.ExitStack() as made:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._ours, self._theirs = (made.enter_context(end) for end in pair)
            self._control = made.enter_context(socket.socket(fileno=os.dup(session.status)))
            for end in (self._ours, self._control):
                end.settimeout(self.PATIENCE_S)
            self._open = made.pop_all()

    def signal(self, number: int) -> bool:
        """Send it; whether the init took the order."""
        try:
            socket.send_fds(self._control, [ORDER.pack(0, number)], [self._theirs.fileno()])
        except OSError:  # the session is over
            return False
        return True

    def signalled(self) -> bool:
        """Wait until the init has done what it was told; whether it did."""
        try:
            kind, *_ = REPORT.unpack(self._ours.recv(REPORT.size))
        except (OSError, struct.error):
            return False
        return bool(kind == REPORT_READY)

    def close(self) -> None:
        """Let go of the descriptors."""
        self._open.close()


def launch(
    session: Channels,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    directory: str,
    owner: int | None,
    speaks: bool = False,
) -> Channels:
    """Start a program in a session.

    Args:
        session: the session's own descriptors.
        argv: what to run.
        env: all of its environment.
        directory: where to run it.
        owner: user id to give the output pipes to, None to leave them.
        speaks: it has the step protocol's two pipes and no standard input; else the request pipe is
            its standard input.

    Raises:
        InvalidArgumentException, SandboxNotFoundException: as send_order().
        SandboxException: what the session's code has started leaves no process for it.
        SandboxInfraError: the session ended.
    """
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with Ends(owner) as ends:
            status, request, response, out, err = ends.theirs
            plain = (status, request, out, err)
            fds = (status, null, out, err, request, response) if speaks else plain
            send_order(session, fds, argv, env, directory)
            ends.close_theirs()
            (pidfd,) = await_ready(ends.status, 1)
            return ends.detach(pidfd, os.dup(pidfd))
    except SetupFailed as error:
        if error.errno == errno.EAGAIN:
            raise SandboxException("the session has as many processes as it may") from error
        raise
    finally:
        os.close(null)


class Program:
    """A running program. Its output is read while somebody waits, up to output_max bytes."""

    def __init__(
        self,
        session: Channels,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        directory: str,
        output_max: int,
        owner: int | None,
    ) -> None:
        self._channels = launch(session, argv, env=env, directory=directory, owner=owner)
        self.pid = _inner_pid(pid_of(self._channels.interpreter))
        self._budget = output_max
        self.stdout, self.stderr = bytearray(), bytearray()
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.error = ""
        self._selector = selectors.DefaultSelector()
        for fd, into in (
            (self._channels.out, self.stdout),
            (self._channels.err, self.stderr),
            (self._channels.status, None),
        ):
            self._selector.register(fd, selectors.EVENT_READ, into)

    def wait(
        self,
        timeout_s: float | None,
        on_stdout: Listener | None = None,
        on_stderr: Listener | None = None,
    ) -> bool:
        """Read output until the program ends. False if the time was over first."""
        listeners = {id(self.stdout): on_stdout, id(self.stderr): on_stderr}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.exit_code is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            # output first: the report of the end finds all that was written before it
            for key, _ in sorted(self._selector.select(left), key=lambda e: e[0].data is None):
                if key.data is None:
                    self._drain(listeners)
                    self._take_report()
                else:
                    self._read(key.fd, key.data, listeners[id(key.data)])
        return True

    def _read(self, fd: int, into: bytearray, listener: Listener | None) -> bool:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(fd)
            return False
        self._budget -= len(data)
        if self._budget < 0:
            self.error = "too much output"
            self.kill()
            return False
        into += data
        if listener is not None:
            listener(data.decode("utf-8", "replace"))
        return True

    def _drain(self, listeners: Mapping[int, Listener | None]) -> None:
        open_fds = {key.fd for key in self._selector.get_map().values()}
        for fd, into in ((self._channels.out, self.stdout), (self._channels.err, self.stderr)):
            while fd in open_fds and self._read(fd, into, listeners[id(into)]):
                pass

    def _take_report(self) -> None:
        try:
            message = os.read(self._channels.status, REPORT.size)
        except BlockingIOError:
            return
        if len(message) != REPORT.size:
            self.error = self.error or "the session ended"
            self.exit_code = -1
            return
        kind, how, _, _, _, _ = REPORT.unpack(message)
        if kind != REPORT_EXIT:  # after READY: only the exec itself can still fail
            self.error = f"could not be run: {os.strerror(_errno(message))}"
            return
        if os.WIFSIGNALED(how):
            self.signal = os.WTERMSIG(how)
            self.exit_code = 128 + self.signal
        else:
            self.exit_code = os.WEXITSTATUS(how)

    def ended(self) -> bool:
        """Whether it has ended, without reading its output."""
        if self.exit_code is not None or self._selector.get_map() is None:
            return True
        return bool(select.select([self._channels.interpreter], [], [], 0)[0])

    def send_stdin(self, data: bytes) -> None:
        """Write to its standard input, waiting while it does not read.

        Raises:
            SandboxNotFoundException: it has closed its standard input, or ended.
        """
        os.set_blocking(self._channels.request, True)
        try:
            while data:
                data = data[os.write(self._channels.request, data) :]
        except OSError as error:
            raise SandboxNotFoundException(f"process {self.pid} does not read: {error}") from error

    def offer_stdin(self, data: bytes) -> None:
        """Let it read data and then the end; written by a thread, for it may never read."""
        fd = os.dup(self._channels.request)
        self.close_stdin()
        os.set_blocking(fd, True)

        def write() -> None:
            with contextlib.suppress(BrokenPipeError), open(fd, "wb", buffering=0) as pipe:
                pipe.write(data)

        threading.Thread(target=write, daemon=True).start()

    def close_stdin(self) -> None:
        """Let it read the end of its standard input."""
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, self._channels.request, inheritable=False)
        os.close(null)

    def kill(self) -> bool:
        """SIGKILL. False if it had ended already."""
        try:
            signal.pidfd_send_signal(self._channels.interpreter, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Kill it if it runs, and let go of its descriptors. May be called twice."""
        if self._selector.get_map() is not None:
            self._selector.close()
            self._channels.kill()


def _errno(message: bytes) -> int:
    return int(REPORT.unpack(message)[2])


def _inner_pid(pid: int) -> int:
    """The number of a process inside its session; -1 if it has ended already."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return int(next(line for line in status if line.startswith("NSpid:")).split()[-1])
    except (OSError, StopIteration):
        return -1
