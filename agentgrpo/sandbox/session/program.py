"""Programs that the host starts in a session, beside its interpreter: commands and other languages.

They are children of the session's init, not of the interpreter, so that they neither depend on the
state of the untrusted interpreter nor end with a step. They live under the same limits and filter.
"""

import codecs
import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from agentgrpo.sandbox.inside.wire import ORDER, REPORT, REPORT_EXIT
from agentgrpo.sandbox.isolation.channels import (
    Channels,
    NoReport,
    SessionPipes,
    SetupFailed,
    await_ready,
    pid_of,
)
from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    SandboxException,
    SandboxInfraError,
    SandboxNotFoundException,
)
from agentgrpo.sandbox.isolation.guards import as_bytes

MAX_ORDER = 128 << 10
Listener = Callable[[str], object]
Decoder = codecs.IncrementalDecoder


def send_order(
    session: Channels,
    fds: Sequence[int],
    argv: Sequence[str],
    env: Mapping[str, str],
    directory: str,
) -> None:
    """Ask a session's init to run a program."""
    strings = [directory, *argv, *(f"{key}={value}" for key, value in env.items())]
    if any("\0" in text for text in strings):
        raise InvalidArgumentException("a command, directory or variable contains a NUL")
    text = b"".join(as_bytes(text) + b"\0" for text in strings)
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


def launch(
    session: Channels,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    directory: str,
    speaks: bool = False,
) -> Channels:
    """Start a program in a session. One that speaks has the step protocol's two pipes and no
    standard input; else the request pipe is that. Without argv nothing is started: the session
    outlives its interpreter from now on, and the result reaches this one alone.

    Raises:
        SandboxException: the session lets none start, which its own code can bring about (by
            processes, memory, descriptors under way, or by what keeps its init busy).
        SandboxInfraError: the machine failed.
    """
    try:
        with (
            open(os.devnull, "rb") as nothing,
            session.borrowed(),
            SessionPipes(session.owner) as pipes,
        ):
            null = nothing.fileno()
            status, request, response, out, err = pipes.theirs
            plain = (status, request, out, err) if argv else (status,)
            fds = (status, null, out, err, request, response) if speaks else plain
            if not argv:
                pipes.copy(session)
            send_order(session, fds, argv, env, directory)
            pipes.close_theirs()
            (pidfd,) = await_ready(pipes.status, 1)
            try:
                again = os.dup(pidfd)
            except OSError:
                os.close(pidfd)
                raise
            return pipes.detach(pidfd, again, session.supervisor, session.places)
    except (SetupFailed, NoReport) as error:
        if failure := session.supervisor.failure():
            raise SandboxInfraError(failure) from error
        if isinstance(error, SetupFailed) and error.errno == errno.EAGAIN:
            raise SandboxException("the session has as many processes as it may") from error
        raise SandboxException(f"the session lets no program start: {error}") from error
    except OSError as error:
        raise SandboxInfraError(f"no descriptors for a program: {error}") from error


class Program:
    """A running program. Its output is read while somebody waits, up to output_max bytes.

    Its descriptors are closed when its end has been read, or by close(). All methods may be called
    by any thread, at any time.
    """

    def __init__(
        self,
        session: Channels,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        directory: str,
        output_max: int,
    ) -> None:
        self._channels = launch(session, argv, env=env, directory=directory)
        try:
            self.pid = _inner_pid(pid_of(self._channels.interpreter))
        except OSError as error:
            self._channels.kill()
            raise SandboxInfraError(f"no descriptors for a program: {error}") from error
        self._budget = output_max
        self.stdout, self.stderr = bytearray(), bytearray()
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.error = ""
        self.machine_failed = ""
        """What of the machine failed, so that it ended; "" if it ended otherwise."""
        self._reading = threading.Lock()
        self._decoders = (text_decoder(), text_decoder())

    def wait(
        self,
        timeout_s: float | None,
        on_stdout: Listener | None = None,
        on_stderr: Listener | None = None,
    ) -> bool:
        """Read output until the program ends. False if the time was over first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._reading.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return self.exit_code is not None
        try:
            if self.exit_code is None:
                with self._channels.borrowed():
                    self._read_until(deadline, on_stdout, on_stderr)
            if self.exit_code is None:
                return False
            self._channels.close()
            return True
        finally:
            self._reading.release()

    def _read_until(
        self, deadline: float | None, on_stdout: Listener | None, on_stderr: Listener | None
    ) -> None:
        status = self._channels.status
        streams = {
            self._channels.out: (self.stdout, self._decoders[0], on_stdout),
            self._channels.err: (self.stderr, self._decoders[1], on_stderr),
        }
        poll = select.poll()
        for fd in (*streams, status):
            poll.register(fd, select.POLLIN)
        while self.exit_code is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            ready = {fd for fd, _ in poll.poll(None if left is None else left * 1e3)}
            # output first: the report of the end finds all that was written before it
            for fd in list(streams):
                if fd in ready or status in ready:
                    more = self._read(fd, *streams[fd])
                    while more and status in ready:
                        more = self._read(fd, *streams[fd])
                    if more is None:
                        poll.unregister(fd)
                        del streams[fd]
            if status in ready:
                self._take_report()
        for _, decoder, listener in streams.values():
            _tell(listener, decoder.decode(b"", True))

    def _read(
        self, fd: int, into: bytearray, decoder: Decoder, listener: Listener | None
    ) -> bool | None:
        """Whether there was something to read; None at the end."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            _tell(listener, decoder.decode(b"", True))
            return None
        self._budget -= len(data)
        if self._budget < 0:
            self.error = "too much output"
            self._channels.signal()
            return False
        into += data
        _tell(listener, decoder.decode(data))
        return True

    def _take_report(self) -> None:
        try:
            message = os.read(self._channels.status, REPORT.size)
        except BlockingIOError:
            return
        except ConnectionResetError:  # its end, with an order left unread
            message = b""
        if len(message) != REPORT.size:
            self.machine_failed = self._channels.supervisor.failure()
            self.error = self.machine_failed or self.error or "the session ended"
            self.exit_code = -1
            return
        kind, how, code, _, _, _ = REPORT.unpack(message)
        if kind != REPORT_EXIT:  # after READY: only the exec itself can still fail
            self.error = f"could not be run: {os.strerror(code)}"
            return
        if os.WIFSIGNALED(how):
            self.signal = os.WTERMSIG(how)
            self.exit_code = 128 + self.signal
            self.machine_failed = self._channels.supervisor.failure()
        else:
            self.exit_code = os.WEXITSTATUS(how)

    def ended(self) -> bool:
        """Whether it has ended, without reading its output."""
        return self.exit_code is not None or self._channels.heard(self._channels.interpreter)

    def send_stdin(self, data: bytes) -> None:
        """Write to its standard input, waiting while it does not read."""
        with self._channels.borrowed() as channels:
            poll = select.poll()
            poll.register(channels.request, select.POLLOUT)
            poll.register(channels.interpreter, select.POLLIN)
            try:
                while data:
                    if any(fd == channels.interpreter for fd, _ in poll.poll()):
                        raise SandboxNotFoundException(f"process {self.pid} has ended")
                    with contextlib.suppress(BlockingIOError):  # another thread filled it
                        data = data[os.write(channels.request, data) :]
            except OSError as error:
                raise SandboxNotFoundException(
                    f"process {self.pid} does not read: {error}"
                ) from error

    def offer_stdin(self, data: bytes) -> None:
        """Let it read data and then the end; written by a thread, for it may never read."""
        with self._channels.borrowed() as channels:
            fd = os.dup(channels.request)
        self.close_stdin()
        os.set_blocking(fd, True)

        def write() -> None:
            with contextlib.suppress(BrokenPipeError), open(fd, "wb", buffering=0) as pipe:
                pipe.write(data)

        threading.Thread(target=write, daemon=True).start()

    def close_stdin(self) -> None:
        """Let it read the end of its standard input."""
        with self._channels.borrowed() as channels, open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), channels.request, inheritable=False)

    def kill(self) -> bool:
        """SIGKILL. False if it had ended already."""
        return self._channels.signal()

    def close(self) -> None:
        """Kill it if it runs, and let go of its descriptors. May be called twice."""
        self._channels.kill()


def text_decoder() -> Decoder:
    """Of output in pieces: a character may come in two of them."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _tell(listener: Listener | None, text: str) -> None:
    if listener is not None and text:
        listener(text)


def _inner_pid(pid: int) -> int:
    """The number of a process inside its session; -1 if it has ended already."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:  # its name may be any bytes
            return int(next(line for line in status if line.startswith(b"NSpid:")).split()[-1])
    except (OSError, StopIteration):
        return -1
