"""Programs that the host starts in a session: commands, and interpreters of other languages.

They are children of the session's init, not of its interpreter, so they do not depend on the state
of the untrusted interpreter and do not end with a step. The same limits and filter apply.
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
    """Send a session's init the order to run a program."""
    strings = [directory, *argv, *(f"{key}={value}" for key, value in env.items())]
    if any("\0" in text for text in strings):
        raise InvalidArgumentException("a command, directory or variable contains a NUL")
    text = b"".join(as_bytes(text) + b"\0" for text in strings)
    if len(text) > MAX_ORDER:
        raise InvalidArgumentException(
            f"command and environment: expected at most {MAX_ORDER} bytes, got {len(text)}"
        )
    control = socket.socket(fileno=os.dup(session.status))
    with control:
        control.settimeout(1.0)
        try:
            socket.send_fds(control, [ORDER.pack(len(argv), len(env)) + text], list(fds))
        except OSError as error:
            raise SandboxNotFoundException(f"the session has ended: {error}") from error


def launch(
    session: Channels,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    directory: str,
    has_protocol: bool = False,
) -> Channels:
    """Start a program in a session.

    With an empty argv nothing is started: the session then outlives its interpreter, and the result
    has the channels of that interpreter. With has_protocol the program gets the two pipes of the
    step protocol and no standard input; otherwise the request pipe is its standard input.

    Raises:
        SandboxException: no program can start, which the session's code can cause (by processes,
            memory, descriptors in flight, or by keeping its init busy).
        SandboxInfraError: the machine failed.
    """
    try:
        with (
            open(os.devnull, "rb") as null_file,
            session.borrowed(),
            SessionPipes(session.owner) as pipes,
        ):
            null = null_file.fileno()
            status, request, response, out, err = pipes.theirs
            fds: tuple[int, ...] = (status, request, out, err) if argv else (status,)
            if has_protocol:
                fds = (status, null, out, err, request, response)
            if not argv:
                pipes.copy(session)
            send_order(session, fds, argv, env, directory)
            pipes.close_theirs()
            (pidfd,) = await_ready(pipes.status, 1)
            return pipes.detach((pidfd, pidfd), session.failure, session.places)
    except (SetupFailed, NoReport) as error:
        if failure := session.failure():
            raise SandboxInfraError(failure) from error
        if isinstance(error, SetupFailed) and error.errno == errno.EAGAIN:
            raise SandboxException("the session has reached limits.processes") from error
        raise SandboxException(f"the session cannot start a program: {error}") from error
    except OSError as error:
        raise SandboxInfraError(f"no descriptors for a program: {error}") from error


class Program:
    """A running program. wait() reads its output, up to output_max bytes.

    Its descriptors are closed when wait() has seen its end, or by close(). Thread-safe.
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
        """The failure of the machine that ended the program; "" if there was none."""
        self._reading = threading.Lock()
        self._decoders = (text_decoder(), text_decoder())

    def wait(
        self,
        timeout_s: float | None,
        on_stdout: Listener | None = None,
        on_stderr: Listener | None = None,
    ) -> bool:
        """Read output until the program ends. False after a timeout."""
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
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return
            ready = {fd for fd, _ in poll.poll(None if remaining is None else remaining * 1e3)}
            # output before the report: all output was written before the program ended
            for fd in list(streams):
                if fd in ready or status in ready:
                    has_data = self._read(fd, *streams[fd])
                    while has_data and status in ready:
                        has_data = self._read(fd, *streams[fd])
                    if has_data is None:
                        poll.unregister(fd)
                        del streams[fd]
            if status in ready:
                self._read_report()
        for _, decoder, listener in streams.values():
            _notify(listener, decoder.decode(b"", True))

    def _read(
        self, fd: int, output: bytearray, decoder: Decoder, listener: Listener | None
    ) -> bool | None:
        """Read a stream. Returns whether it had data; None at its end."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            _notify(listener, decoder.decode(b"", True))
            return None
        self._budget -= len(data)
        if self._budget < 0:
            self.error = "too much output"
            self._channels.signal()
            return False
        output += data
        _notify(listener, decoder.decode(data))
        return True

    def _read_report(self) -> None:
        try:
            message = os.read(self._channels.status, REPORT.size)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the session ended with an unread order
            message = b""
        if len(message) != REPORT.size:
            self.machine_failed = self._channels.failure()
            self.error = self.machine_failed or self.error or "the session ended"
            self.exit_code = -1
            return
        kind, how, code, _, _ = REPORT.unpack(message)
        if kind != REPORT_EXIT:  # after READY only exec can fail
            self.error = f"could not be run: {os.strerror(code)}"
            return
        if os.WIFSIGNALED(how):
            self.signal = os.WTERMSIG(how)
            self.exit_code = 128 + self.signal
            self.machine_failed = self._channels.failure()
        else:
            self.exit_code = os.WEXITSTATUS(how)

    def ended(self) -> bool:
        return self.exit_code is not None or self._channels.heard(self._channels.interpreter)

    def send_stdin(self, data: bytes) -> None:
        """Write to standard input. Blocks while the program does not read."""
        with self._channels.borrowed() as channels:
            poll = select.poll()
            poll.register(channels.request, select.POLLOUT)
            poll.register(channels.interpreter, select.POLLIN)
            try:
                while data:
                    if any(fd == channels.interpreter for fd, _ in poll.poll()):
                        raise SandboxNotFoundException(f"process {self.pid} has ended")
                    with contextlib.suppress(BlockingIOError):  # another thread filled the pipe
                        data = data[os.write(channels.request, data) :]
            except OSError as error:
                raise SandboxNotFoundException(
                    f"process {self.pid} does not read: {error}"
                ) from error

    def offer_stdin(self, data: bytes) -> None:
        """Write data to standard input and close it, in a thread: the program may never read."""
        with self._channels.borrowed() as channels:
            fd = os.dup(channels.request)
        self.close_stdin()
        os.set_blocking(fd, True)

        def write() -> None:
            with contextlib.suppress(BrokenPipeError), open(fd, "wb", buffering=0) as pipe:
                pipe.write(data)

        threading.Thread(target=write, daemon=True).start()

    def close_stdin(self) -> None:
        with self._channels.borrowed() as channels, open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), channels.request, inheritable=False)

    def kill(self) -> bool:
        """Send SIGKILL. False if the program had ended."""
        return self._channels.signal()

    def close(self) -> None:
        """Kill the program if it runs, and close its descriptors. Idempotent."""
        self._channels.kill()


def text_decoder() -> Decoder:
    """Decodes output in pieces: a character may be split between two."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _notify(listener: Listener | None, text: str) -> None:
    if listener is not None and text:
        listener(text)


def _inner_pid(pid: int) -> int:
    """The pid of a process inside its session; -1 if it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:  # the process name may not be UTF-8
            return int(next(line for line in status if line.startswith(b"NSpid:")).split()[-1])
    except (OSError, StopIteration):
        return -1
