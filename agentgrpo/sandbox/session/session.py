"""Session: one isolated interpreter whose variables and files persist between steps."""

import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from agentgrpo.sandbox.inside.wire import Malformed, encode
from agentgrpo.sandbox.isolation.cgroup import ControlGroup
from agentgrpo.sandbox.isolation.channels import Channels, Root, pid_of, tree_cpu_seconds
from agentgrpo.sandbox.isolation.errors import InvalidArgumentException, NotSupportedException
from agentgrpo.sandbox.isolation.guards import ProcessBound, wraps_os_errors
from agentgrpo.sandbox.isolation.images import Image
from agentgrpo.sandbox.isolation.jail import Places
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.snapshots import Keep, take
from agentgrpo.sandbox.isolation.template import check_environment
from agentgrpo.sandbox.session.files import Files
from agentgrpo.sandbox.session.host_tools import HostCalls, HostCallStep, calling_session
from agentgrpo.sandbox.session.step_result import (
    CLOSED,
    Ending,
    RawStep,
    StepArguments,
    StepError,
    StepResult,
    StepStatus,
    classify_ending,
    run_step,
    set_answer,
    set_output,
)

MIB = 1 << 20
FRAME_OVERHEAD = 4096
UNCOUNTED = (b"put", b"ask", b"get", b"tools")
"""Requests that do not count against limits.steps."""
CALLING = (b"run", b"cell", b"push", b"ask")
"""Requests that run code, which may call host functions."""
ASK_MIB = 32
"""Size of an answer to Session.ask()."""
ANSWERED = int(Ending.ANSWERED)
"""As a plain int: comparing with an IntEnum member is slower, and nearly all steps end so."""


def _env_fields(env: Mapping[str, str]) -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for pair in env.items() for text in pair]


def _code_fields(code: str, env: Mapping[str, str] | None) -> list[bytes]:
    if not isinstance(code, str):
        raise TypeError(f"code must be str, got {type(code).__name__}")
    check_environment("env", env or {})
    return [code.encode("utf-8", "surrogatepass"), *_env_fields(env or {})]


@wraps_os_errors
class Session(ProcessBound):
    """A session of a pool. One thread uses it at a time; different sessions are independent.

    After the session has ended (``state_lost``), every further step returns how it ended.

    Args:
        channels: its descriptors. The session owns them, also if this constructor raises.
        on_close: called once, when the session has ended.
        guest_of: the session in which this is another interpreter (interpreters.py).
        snapshots: the pool's list, to which snapshot() appends.
    """

    def __init__(
        self,
        channels: Channels,
        limits: Limits,
        *,
        group: ControlGroup | None = None,
        on_close: Callable[[], None] | None = None,
        degraded: bool = False,
        guest_of: "Session | None" = None,
        snapshots: list[Image] | None = None,
    ) -> None:
        self.limits, self.degraded, self._guest_of = limits, degraded, guest_of
        self._channels = channels
        self._snapshots = [] if snapshots is None else snapshots
        self.group = group
        """The session's control group, if it has one."""
        self._on_close = [on_close] if on_close is not None else []
        self._ends_at: float = math.inf if guest_of is None else guest_of._ends_at
        """Without a limit until a user gets the session, see begin()."""
        self._steps = self._sent = 0
        self._answer_max = (
            10 * (limits.value_kib << 10) + (limits.traceback_kib << 10) + FRAME_OVERHEAD * 2
        )
        self.host: HostCalls | None = None
        """The host functions that its code can call, see attach_host_tools()."""
        self.end_contexts: Callable[[StepStatus, str], bool] | None = None
        """For a session that outlives its interpreters: ends these and the commands instead of the
        session, and returns whether there was one."""
        self._ended: StepResult | None = None
        self._busy = threading.RLock()
        self._running = False
        self._closed = False
        self._roots: set[Root] = set()
        self._timeout_s = self._cpu_before = 0.0
        self._ended_by: tuple[StepStatus, str] | None = None
        self._cpu_at_end = 0.0
        try:
            self._oom_before = group.counts()[0] if group is not None else 0
            self.pid = pid_of(channels.interpreter)
            """The interpreter's pid outside of the session; init_pid is that of its PID 1."""
            self.init_pid = pid_of(channels.init)
        except BaseException:  # no descriptor is free, or another thread closes the pool
            channels.kill()
            for callback in self._on_close:
                callback()
            raise

    def step(
        self, code: str, timeout_s: float | None = None, *, env: Mapping[str, str] | None = None
    ) -> StepResult:
        """Run code in the session's namespace.

        Args:
            code: Python source. Its errors and its size are reported in the result, never raised.
            timeout_s: wall time; None: limits.timeout_s.
            env: environment variables for this step only.

        Raises:
            ValueError: timeout_s is not a positive, finite number of seconds, or env is malformed.
            TypeError: code is not text.
        """
        return self._request([b"run", *_code_fields(code, env)], timeout_s)

    def evaluate(self, code: str) -> StepResult:
        """Like step(), without counting against limits.steps."""
        result = self._end_result()
        if result is None:
            result = self._run(
                [b"run", code.encode("utf-8", "surrogatepass")], self.limits.timeout_s, None
            )
            self._steps -= 1
        return result

    def cell(
        self,
        code: str,
        timeout_s: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
        listener: Callable[[int, bytes], object] | None = None,
    ) -> StepResult:
        """Like step(), in a notebook if the template has IPython; ``results`` has the displays.

        listener is called with (0 for stdout or 1 for stderr, data) as output arrives. An exception
        of the listener is raised here, after the step.
        """
        return self._request([b"cell", *_code_fields(code, env)], timeout_s, listener)

    def ask(
        self, question: Sequence[bytes], timeout_s: float | None = None
    ) -> tuple[StepResult, list[bytes]]:
        """Send a question of inside/exchange.py and receive the answer, in pieces and not parsed.

        Does not count against limits.steps, because one call in a test can need many.

        Returns:
            The result of the exchange, and if it is ok the answer, of at most ASK_MIB.
        """
        deadline = time.monotonic() + self._check_timeout(timeout_s)
        size = self.limits.code_kib << 9
        pieces = (part[at : at + size] for part in question for at in range(0, len(part), size))
        *first, last = [*pieces] or [b""]
        requests = deque([*([b"put", piece] for piece in first), [b"ask", last]])
        answer: list[bytes] = []
        room = ASK_MIB * MIB
        while requests:
            if time.monotonic() >= deadline:
                return self._end(StepStatus.TIMEOUT_KILLED, "the time was over without answer"), []
            fields = requests.popleft()
            result = self._request(fields, max(1e-3, deadline - time.monotonic()))
            if result.status is not StepStatus.OK:
                return result, []
            piece = result.piece
            if fields[0] != b"put":  # the replies to put are empty and not part of the answer
                answer.append(piece)
            if result.more:
                if fields[0] == b"put" or len(piece) != self.limits.value_kib << 10:
                    detail = "an incomplete piece of an answer"
                    return self._end(StepStatus.PROTOCOL_ERROR, detail), []
                requests.append([b"get"])
            room -= len(piece)
            if room < 0:
                return self._end(StepStatus.OUTPUT_LIMIT, f"over {ASK_MIB} MiB of an answer"), []
        return result, answer

    def make_console(self) -> None:
        """Join both streams, as on a terminal (console.Console)."""
        self._request([b"console"], None)

    def push(self, line: str, timeout_s: float | None = None) -> StepResult:
        """Type one line at the interactive prompt. ``more``: the statement needs more lines."""
        return self._request([b"push", *_code_fields(line, None)], timeout_s)

    def set_env(self, env: Mapping[str, str]) -> StepResult:
        """Set environment variables for the rest of the session. The zygote never sees them."""
        check_environment("env", env)
        return self._request([b"env", *_env_fields(env)], None)

    def attach_host_tools(self, host: HostCalls) -> StepResult:
        """Make host functions callable by name in the session."""
        if not isinstance(host, HostCalls):
            raise TypeError(f"host: expected HostCalls (HostTools.begin()), got {host!r:.80}")
        self.host = host
        max_arguments, max_answer = host.tools.max_sizes
        self._answer_max = max(self._answer_max, max_arguments + FRAME_OVERHEAD)
        fields = [b"tools", b"%d" % max_arguments, b"%d" % max_answer]
        for tool in host.tools.by_name.values():
            fields += [tool.name.encode(), f"{tool.line}\n{tool.doc}".rstrip("\n:").encode()]
        return self._run(fields, self.limits.timeout_s, None)

    @property
    def closing(self) -> bool:
        """Whether close() was called, also if it has not finished."""
        return self._closed

    def _check_timeout(self, timeout_s: float | None) -> float:
        timeout = self.limits.timeout_s if timeout_s is None else timeout_s
        if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e6:
            raise InvalidArgumentException(
                f"timeout_s must be positive and below 1e6 seconds, got {timeout!r}"
            )
        return timeout

    def _request(
        self,
        fields: list[bytes],
        timeout_s: float | None,
        listener: Callable[[int, bytes], object] | None = None,
    ) -> StepResult:
        timeout = self._check_timeout(timeout_s)
        return (
            self._end_result() or self._check_limits(fields) or self._run(fields, timeout, listener)
        )

    def _end_result(self) -> StepResult | None:
        """The result of the session's end, if it has ended. A copy: the caller may change it."""
        return None if self._ended is None else replace(self._ended)

    def _check_limits(self, fields: list[bytes]) -> StepResult | None:
        """The result of a step that must not run because a limit is reached."""
        if sum(map(len, fields)) > self.limits.code_kib << 10:
            return self._result(
                status=StepStatus.ERROR,
                error=StepError("CodeTooLong", f"over {self.limits.code_kib} KiB of code", ""),
            )
        if self._steps >= self.limits.steps:
            return self._end(StepStatus.TIMEOUT_KILLED, f"over {self.limits.steps} steps")
        if self.seconds_left() <= 0:
            return self._end(StepStatus.TIMEOUT_KILLED, self._time_over())
        return None

    def _result(self, **facts: Any) -> StepResult:
        return StepResult(degraded=self.degraded, **facts)

    def seconds_left(self) -> float:
        """The rest of limits.session_s."""
        return self._ends_at - time.monotonic()

    def cpu_seconds(self) -> float:
        """CPU time of all processes of the session, on a clock that started before it.

        Without a control group: of the processes that are alive or that a live one has waited for.
        """
        if self._ended is not None:
            return self._cpu_at_end
        if self.group is not None and (seconds := self.group.cpu_s()) is not None:
            return seconds
        return tree_cpu_seconds(self.init_pid, self.pid) + self._cpu_seconds()

    def _end(self, status: StepStatus, detail: str) -> StepResult:
        if self.group is not None:  # read it now: after close() another session gets the group
            self._cpu_at_end = self.group.cpu_s() or 0.0
        self._ended = self._result(status=status, state_lost=True, detail=detail)
        self.close()
        return replace(self._ended)

    def _run(
        self, fields: list[bytes], timeout: float, listener: Callable[[int, bytes], object] | None
    ) -> StepResult:
        errors: list[BaseException] = []

        def notify(stream: int, data: bytes) -> None:
            try:
                if listener is not None and not errors:
                    listener(stream, data)
            except BaseException as error:
                errors.append(error)
                if not isinstance(error, Exception):  # Ctrl-C: no one waits for the step any more
                    self._channels.signal()

        arguments = self._prepare(fields, timeout, None if listener is None else notify)
        if arguments is None:
            result = self._end_result()
            assert result is not None
            return result
        try:
            if self.host is None or fields[0] not in CALLING:
                result = self._interpret(run_step(arguments))
            else:
                result = self._run_with_calls(HostCallStep(self, self.host, arguments), arguments)
        except BaseException:  # Ctrl-C in the C call: no one waits for the step any more
            self._end(StepStatus.EXIT, "the host stopped waiting for a step")
            raise
        finally:
            self._running = False
            self._channels.give_back()
            self._busy.release()
        if errors:
            raise errors[0]
        return result

    def _run_with_calls(self, step: HostCallStep, arguments: StepArguments) -> StepResult:
        raw = run_step(arguments._replace(on_answer=step.answer))
        self._sent, self._ended_by = step.number, step.failure or self._ended_by
        result = self._interpret(raw)
        result.host_calls, result.host_refused = tuple(step.calls), step.refused
        return result

    def _prepare(
        self,
        fields: list[bytes],
        timeout: float,
        listener: Callable[[int, bytes], object] | None = None,
    ) -> StepArguments | None:
        """Lock the session and return the arguments of the step; None if the session has ended.

        Raises:
            InvalidArgumentException: called from a host function, a listener or a signal handler
                during a step of this session.
        """
        if calling_session.get() is self:
            raise InvalidArgumentException(
                "a host function cannot step the session that waits for it"
            )
        self._busy.acquire()
        if self._running:  # the lock is reentrant: this thread is inside a step
            self._busy.release()
            raise InvalidArgumentException("this thread is already running a step of the session")
        channels, limits = self._channels, self.limits
        if not channels.borrow():
            self._busy.release()
            return None
        self._running = True
        self._steps += fields[0] not in UNCOUNTED
        self._sent += 1
        self._timeout_s, self._cpu_before = timeout, self._cpu_seconds()
        return StepArguments(
            (channels.request, channels.response, channels.out, channels.err, channels.status),
            (channels.init, channels.interpreter),
            encode(self._sent, fields),
            self._sent,
            max(1e-3, min(timeout, self.seconds_left())),
            limits.grace_s,
            limits.output_kib << 9,
            limits.output_max_mib * MIB,
            self._answer_max,
            listener,
        )

    def _interpret(self, raw: RawStep) -> StepResult:
        ending, interrupted = raw.ending, raw.interrupted
        result = self._result(status=StepStatus.OK, wall_s=raw.wall_s)
        set_output(raw, result)
        self._count_processes(result)
        if self._ended_by is not None:
            status, detail = self._ended_by
        elif ending == ANSWERED:
            result.cpu_s = max(0.0, self._cpu_seconds() - self._cpu_before)
            try:
                set_answer(raw, result)
                return result
            except Malformed as error:
                status, detail = StepStatus.PROTOCOL_ERROR, f"malformed answer: {error}"
        elif self._closed:
            status, detail = StepStatus.EXIT, CLOSED
        else:
            failure = self._channels.failure
            status, detail = classify_ending(raw, self.limits, self._timeout_s, result, failure)
            if self._guest_of is not None and ending == Ending.SETUP_FAILED:
                status = StepStatus.EXIT  # code that ran in the session before may be the cause
        if ending == Ending.EXITED and not (self._closed or interrupted):
            result.cpu_s = max(0.0, raw.cpu_us / 1e6 - self._cpu_before)
        self._end(status, detail)
        result.status, result.detail, result.state_lost = status, detail, True
        return result

    def _count_processes(self, result: StepResult) -> None:
        """Read from the control group: processes killed for memory, and processes left running."""
        if self.group is None:
            return
        killed, processes = self.group.counts()
        result.oom_kills, self._oom_before = killed - self._oom_before, killed
        result.processes_left = max(0, processes - 2)

    def _cpu_seconds(self) -> float:
        try:  # the CPU clock id of another process, see clock_getcpuclockid(3)
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:  # the process has ended
            return 0.0

    def interrupt(self) -> None:
        """Interrupt the running step, if any, as its deadline would. For another thread."""
        if self._running and self._channels.borrow():
            with contextlib.suppress(ProcessLookupError):  # the interpreter has ended
                signal.pidfd_send_signal(self._channels.interpreter, signal.SIGINT)
            self._channels.give_back()

    def end_by(self, status: StepStatus, detail: str) -> bool:
        """Kill the session; its result has this status and detail. False if it had ended."""
        if self.end_contexts is not None and self.end_contexts(status, detail):
            return True
        self._ended_by = status, detail
        return self._channels.signal()

    def expire(self) -> None:
        """End the session between steps because its time is over. A running step ends by itself:
        its time limit is at most seconds_left().
        """
        if self._busy.acquire(blocking=False):
            try:
                if self._ended is None:
                    self._end(StepStatus.TIMEOUT_KILLED, self._time_over())
            finally:
                self._busy.release()

    def _time_over(self) -> str:
        return f"the session lived {self.limits.session_s:g} s"

    def begin(self, on_close: Callable[[], None]) -> None:
        """Start the session's time, for the pool. on_close() is called when the session ends."""
        self._ends_at = time.monotonic() + self.limits.session_s
        self._steps = self._sent = 0
        self._on_close.append(on_close)

    def warm_up(self, timeout_s: float | None = None) -> StepResult:
        """Run an empty step: the first step after a fork has page faults of about 2 ms."""
        return self._request([b"env"], timeout_s)

    def healthy(self) -> bool:
        """Whether the session's init has reported no end."""
        return not self._channels.heard(self._channels.status)

    @property
    def places(self) -> Places:
        return self._channels.places

    @property
    def channels(self) -> Channels | None:
        """The descriptors, which the session owns and others borrow; None after close()."""
        return None if self._channels.is_closed() else self._channels

    def files(self) -> Files:
        """Open the session's file system. The caller or close() closes it."""
        with self._channels.borrowed() as channels:
            root = Root(channels, self.pid)
            self._roots -= {closed for closed in [*self._roots] if closed.is_closed()}
            self._roots.add(root)
        if self._channels.is_closed():
            root.close()
        return Files(root, self._channels, max(self.limits.private_mib) * MIB)

    def snapshot(
        self, name: str | None = None, *, keep: Keep | None = None, since: Image | None = None
    ) -> Image:
        """Copy the files that the session has changed in its image; processes are not copied.

        pool.acquire(snapshot) starts sessions from the copy until the pool is closed.

        Args:
            name: also add the snapshot to the store, as an image of this name.
            keep: decides which entries to copy; None: all.
            since: if the session's image is a snapshot, an earlier image that it is based on:
                copy all changes since that one.

        Raises:
            NotSupportedException: the session has no image.
            SandboxException: the changes exceed a limit of size, number or depth.
            SandboxNotFoundException: the session was closed.
        """
        image = self.places.image
        if image is None:
            raise NotSupportedException(
                "snapshot(): the session has no image (Template(image=...))"
            )
        with self._channels.borrowed() as channels:
            snapshot = take(channels.upper, image, self.limits, channels.owner, name, keep, since)
        self._snapshots.append(snapshot)
        return snapshot

    @property
    def alive(self) -> bool:
        return self._ended is None

    def close(self) -> None:
        """End the session's processes and delete its files. Idempotent, from any thread.

        A step that runs in another thread returns at once with the detail "the session was closed".
        Does nothing in a forked child process: the session belongs to the parent.
        """
        channels = self._channels
        if channels.is_closed():
            return
        self._closed = True
        channels.signal()
        with self._busy:
            if channels.is_closed():
                return
            channels.close()
            for root in list(self._roots):
                root.close()
            if self._ended is None:
                self._ended = self._result(status=StepStatus.EXIT, state_lost=True, detail=CLOSED)
            for callback in self._on_close:
                callback()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
