"""One session: a namespace of variables and files that untrusted code works in, step by step."""

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
from agentgrpo.sandbox.isolation.guards import ProcessBound, public
from agentgrpo.sandbox.isolation.images import Image
from agentgrpo.sandbox.isolation.jail import Places
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.snapshots import Keep, take
from agentgrpo.sandbox.isolation.template import check_environment
from agentgrpo.sandbox.session.calls import HostCallStep
from agentgrpo.sandbox.session.files import Files
from agentgrpo.sandbox.session.host_tools import HostCalls, within_a_call_of
from agentgrpo.sandbox.session.outcome import (
    Ending,
    RawStep,
    StepArguments,
    how_it_ended,
    run_step,
    show_answer,
    show_output,
)
from agentgrpo.sandbox.session.result import CLOSED, StepError, StepResult, StepStatus

MIB = 1 << 20
FRAME_OVERHEAD = 4096
EXCHANGE = (b"put", b"ask", b"get")
CALLING = (b"run", b"cell", b"push", b"ask")
"""Requests that run code of the session's, which may call functions of the host."""
ASK_MIB = 32
"""Of an answer to Session.ask()."""
ANSWERED = int(Ending.ANSWERED)
"""How nearly all steps end: a member of an enumeration takes longer to compare."""


def _flat(env: Mapping[str, str]) -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for pair in env.items() for text in pair]


def _pairs(code: str, env: Mapping[str, str] | None) -> list[bytes]:
    if not isinstance(code, str):
        raise TypeError(f"code must be str, got {type(code).__name__}")
    check_environment("env", env or {})
    return [code.encode("utf-8", "surrogatepass"), *_flat(env or {})]


@public
class Session(ProcessBound):
    """A live session of a pool. Used by one thread at a time; different sessions are independent.

    After anything that ends it (``state_lost``), every further step says how it ended.
    The channels are its own from then on, also if it cannot be made; on_close is called once.
    guest_of: the session that it is a further interpreter of (interpreters.py).
    snapshots: of its pool, to which snapshot() adds.
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
        """Its control group, if there is one."""
        self._on_close = [on_close] if on_close is not None else []
        self._ends_at: float = math.inf if guest_of is None else guest_of._ends_at
        """It has all the time until it is handed out, see begin()."""
        self._steps = self._sent = 0
        self._answer_max = (
            10 * (limits.value_kib << 10) + (limits.traceback_kib << 10) + FRAME_OVERHEAD * 2
        )
        self.host: HostCalls | None = None
        """The functions of the host that its code may call, see attach_host_tools()."""
        self.end_contexts: Callable[[StepStatus, str], bool] | None = None
        """Of a session that outlives its interpreters: ends these and its commands in its place,
        and returns whether one was there."""
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
            """Of the interpreter, as the machine numbers it; init_pid is PID 1's."""
            self.init_pid = pid_of(channels.init)
        except BaseException:  # no descriptor is left, or the pool is closed meanwhile
            channels.kill()
            for done in self._on_close:
                done()
            raise

    def step(
        self, code: str, timeout_s: float | None = None, *, env: Mapping[str, str] | None = None
    ) -> StepResult:
        """Run code in the session's namespace and say what happened.

        Args:
            code: Python source. What it does, and its size, are data: nothing of it is raised.
            timeout_s: wall time, limits.timeout_s if None.
            env: environment variables for this step only.

        Raises:
            ValueError: timeout_s is not a positive, finite number of seconds, or env is malformed.
            TypeError: code is not text.
        """
        return self._request([b"run", *_pairs(code, env)], timeout_s)

    def evaluate(self, code: str) -> StepResult:
        """Run code as step() does, not counted by limits.steps."""
        over = self._over()
        if over is None:
            over = self._run(
                [b"run", code.encode("utf-8", "surrogatepass")], self.limits.timeout_s, None
            )
            self._steps -= 1
        return over

    def cell(
        self,
        code: str,
        timeout_s: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
        listener: Callable[[int, bytes], object] | None = None,
    ) -> StepResult:
        """Like step(), by the template's notebook if it has IPython, with what is displayed in
        ``results``. A listener is called with (0 for stdout or 1 for stderr, data) as output
        arrives; what it raises is raised here, after the step.
        """
        return self._request([b"cell", *_pairs(code, env)], timeout_s, listener)

    def ask(
        self, question: Sequence[bytes], timeout_s: float | None = None
    ) -> tuple[StepResult, list[bytes]]:
        """Put a question of inside/exchange.py and take the answer, unread and in pieces. Not
        counted by limits.steps: one call of a test can need many.

        Returns:
            How it went, and if it went well the answer, of up to ASK_MIB.
        """
        deadline = time.monotonic() + self._check(timeout_s)
        size = self.limits.code_kib << 9
        pieces = (whole[at : at + size] for whole in question for at in range(0, len(whole), size))
        *first, last = [*pieces] or [b""]
        requests = deque([*([b"put", piece] for piece in first), [b"ask", last]])
        answer: list[bytes] = []
        room = ASK_MIB * MIB
        while requests:
            if time.monotonic() >= deadline:
                late = "its time was over before its answer"
                return self._end(StepStatus.TIMEOUT_KILLED, late), []
            fields = requests.popleft()
            result = self._request(fields, max(1e-3, deadline - time.monotonic()))
            if result.status is not StepStatus.OK:
                return result, []
            piece = result.piece
            if fields[0] != b"put":  # whose answer is empty, and no part of it
                answer.append(piece)
            if result.more:
                if fields[0] == b"put" or len(piece) != self.limits.value_kib << 10:
                    broken = "a piece of an answer, cut short"
                    return self._end(StepStatus.PROTOCOL_ERROR, broken), []
                requests.append([b"get"])
            room -= len(piece)
            if room < 0:
                return self._end(StepStatus.OUTPUT_LIMIT, f"over {ASK_MIB} MiB of an answer"), []
        return result, answer

    def make_console(self) -> None:
        """Join both streams, as on a terminal (console.Console)."""
        self._request([b"console"], None)

    def push(self, line: str, timeout_s: float | None = None) -> StepResult:
        """Type one line at the interactive prompt; ``more`` says that it needs further ones."""
        return self._request([b"push", *_pairs(line, None)], timeout_s)

    def set_env(self, env: Mapping[str, str]) -> StepResult:
        """Set environment variables for the rest of the session; they never pass the zygote."""
        check_environment("env", env)
        return self._request([b"env", *_flat(env)], None)

    def attach_host_tools(self, host: HostCalls) -> StepResult:
        """Let its code call functions of the host, by their names, from now on."""
        if not isinstance(host, HostCalls):
            raise TypeError(f"host must be HostCalls, as HostTools.begin() gives, got {host!r:.80}")
        self.host = host
        most_asked, most_told = host.tools.sizes
        self._answer_max = max(self._answer_max, most_asked + FRAME_OVERHEAD)
        fields = [b"tools", b"%d" % most_asked, b"%d" % most_told]
        for tool in host.tools.by_name.values():
            fields += [tool.name.encode(), f"{tool.line}\n{tool.doc}".rstrip("\n:").encode()]
        told = self._run(fields, self.limits.timeout_s, None)
        self._steps -= 1
        return told

    @property
    def closing(self) -> bool:
        """Whether somebody has begun to close it."""
        return self._closed

    def _check(self, timeout_s: float | None) -> float:
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
        timeout = self._check(timeout_s)
        return self._over() or self._refuse(fields) or self._run(fields, timeout, listener)

    def _over(self) -> StepResult | None:
        """How the session ended, if it has. A copy: the caller may do with it what it likes."""
        return None if self._ended is None else replace(self._ended)

    def _refuse(self, fields: list[bytes]) -> StepResult | None:
        """An answer without running anything, if a budget of the session is used up."""
        if sum(map(len, fields)) > self.limits.code_kib << 10:
            return self._result(
                status=StepStatus.ERROR,
                error=StepError("CodeTooLong", f"over {self.limits.code_kib} KiB of code", ""),
            )
        if self._steps >= self.limits.steps:
            return self._end(StepStatus.TIMEOUT_KILLED, f"over {self.limits.steps} steps")
        if self.seconds_left() <= 0:
            return self._end(StepStatus.TIMEOUT_KILLED, self._lived())
        return None

    def _result(self, **facts: Any) -> StepResult:
        return StepResult(degraded=self.degraded, **facts)

    def seconds_left(self) -> float:
        """Of limits.session_s."""
        return self._ends_at - time.monotonic()

    def cpu_seconds(self) -> float:
        """CPU time of all its processes, on a clock that began before it. Where it has no control
        group, of those that live or that a living one has waited for.
        """
        if self._ended is not None:
            return self._cpu_at_end
        if self.group is not None and (told := self.group.cpu_s()) is not None:
            return told
        return tree_cpu_seconds(self.init_pid, self.pid) + self._cpu_seconds()

    def _end(self, status: StepStatus, detail: str) -> StepResult:
        if self.group is not None:  # which may be another session's in a moment
            self._cpu_at_end = self.group.cpu_s() or 0.0
        self._ended = self._result(status=status, state_lost=True, detail=detail)
        self.close()
        return replace(self._ended)

    def _run(
        self, fields: list[bytes], timeout: float, listener: Callable[[int, bytes], object] | None
    ) -> StepResult:
        raised: list[BaseException] = []

        def tell(stream: int, data: bytes) -> None:
            try:
                if listener is not None and not raised:
                    listener(stream, data)
            except BaseException as error:
                raised.append(error)
                if not isinstance(error, Exception):  # Ctrl-C: nobody waits for the code any more
                    self._channels.signal()

        arguments = self._prepare(fields, timeout, None if listener is None else tell)
        if arguments is None:
            over = self._over()
            assert over is not None
            return over
        try:
            if self.host is None or fields[0] not in CALLING:
                result = self._interpret(run_step(arguments))
            else:
                result = self._run_with_calls(HostCallStep(self, self.host, arguments), arguments)
        except BaseException:  # a signal's handler (Ctrl-C): nobody waits for the code any more
            self._end(StepStatus.EXIT, "the host stopped waiting for a step")
            raise
        finally:
            self._running = False
            self._channels.give_back()
            self._busy.release()
        if raised:
            raise raised[0]
        return result

    def _run_with_calls(self, step: HostCallStep, arguments: StepArguments) -> StepResult:
        raw = run_step(arguments._replace(on_answer=step.answer))
        self._sent, self._ended_by = step.number, step.over or self._ended_by
        result = self._interpret(raw)
        result.host_calls, result.host_refused = tuple(step.calls), step.refused
        return result

    def _prepare(
        self,
        fields: list[bytes],
        timeout: float,
        listener: Callable[[int, bytes], object] | None = None,
    ) -> StepArguments | None:
        """What to run, and the session is busy; None if it is over. ValueError in a listener or a
        signal's handler of a step of its own thread.
        """
        if self.host is not None and within_a_call_of(self):
            raise InvalidArgumentException("the session waits for the function that would step it")
        self._busy.acquire()
        if self._running:
            self._busy.release()
            raise InvalidArgumentException("this thread runs a step of the session already")
        channels, limits = self._channels, self.limits
        if not channels.borrow():
            self._busy.release()
            return None
        self._running = True
        self._steps += fields[0] not in EXCHANGE
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
        show_output(raw, result)
        self._count_processes(result)
        if self._ended_by is not None:
            status, detail = self._ended_by
        elif ending == ANSWERED:
            result.cpu_s = max(0.0, self._cpu_seconds() - self._cpu_before)
            try:
                show_answer(raw, result)
                return result
            except Malformed as error:
                status, detail = StepStatus.PROTOCOL_ERROR, f"malformed answer: {error}"
        elif self._closed:
            status, detail = StepStatus.EXIT, CLOSED
        else:
            supervisor = self._channels.supervisor
            status, detail = how_it_ended(raw, self.limits, self._timeout_s, result, supervisor)
            if self._guest_of is not None and ending == Ending.SETUP_FAILED:
                status = StepStatus.EXIT  # the session has run code, which may be why
        if ending == Ending.EXITED and not (self._closed or interrupted):
            result.cpu_s = max(0.0, raw.cpu_us / 1e6 - self._cpu_before)
        self._end(status, detail)
        result.status, result.detail, result.state_lost = status, detail, True
        return result

    def _count_processes(self, result: StepResult) -> None:
        """What the control group says of the step: processes killed for memory, or left behind."""
        if self.group is None:
            return
        killed, processes = self.group.counts()
        result.oom_kills, self._oom_before = killed - self._oom_before, killed
        result.processes_left = max(0, processes - 2)

    def _cpu_seconds(self) -> float:
        try:  # the clock of another process, see clock_getcpuclockid(3)
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:  # it has ended
            return 0.0

    def interrupt(self) -> None:
        """From another thread: interrupt the step that runs, if one does, as its deadline would."""
        if self._running and self._channels.borrow():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(self._channels.interpreter, signal.SIGINT)
            self._channels.give_back()

    def end_by(self, status: StepStatus, detail: str) -> bool:
        """For the watchdog and for graders: kill it; its next result says why. Returns False if it
        had ended.
        """
        if self.end_contexts is not None and self.end_contexts(status, detail):
            return True
        self._ended_by = status, detail
        return self._channels.signal()

    def expire(self) -> None:
        """For the pool: its time is over. A step that runs ends by itself, as it has no more."""
        if self._busy.acquire(blocking=False):
            try:
                if self._ended is None:
                    self._end(StepStatus.TIMEOUT_KILLED, self._lived())
            finally:
                self._busy.release()

    def _lived(self) -> str:
        return f"the session lived {self.limits.session_s:g} s"

    def begin(self, on_close: Callable[[], None]) -> None:
        """Hand the session to a user: its time starts now, on_close() is called when it is over."""
        self._ends_at = time.monotonic() + self.limits.session_s
        self._steps = self._sent = 0
        self._on_close.append(on_close)

    def warm_up(self, timeout_s: float | None = None) -> StepResult:
        """Run an empty step: the first one of a fork takes its page faults, some 2 ms."""
        return self._request([b"env"], timeout_s)

    def healthy(self) -> bool:
        """Whether nothing has been heard of an end of this session."""
        return not self._channels.heard(self._channels.status)

    @property
    def places(self) -> Places:
        """Where its code finds things."""
        return self._channels.places

    @property
    def channels(self) -> Channels | None:
        """The descriptors, to be borrowed; None after close(). They stay the session's."""
        return None if self._channels.is_closed() else self._channels

    def files(self) -> Files:
        """Its files, for as long as it lives; the caller closes them, or close() does.

        Raises:
            SandboxNotFoundException: it is over.
        """
        with self._channels.borrowed() as channels:
            root = Root(channels, self.pid)
            self._roots -= {old for old in [*self._roots] if old.is_closed()}
            self._roots.add(root)
        if self._channels.is_closed():
            root.close()
        return Files(root, self._channels, max(self.limits.private_mib) * MIB)

    def snapshot(
        self, name: str | None = None, *, keep: Keep | None = None, since: Image | None = None
    ) -> Image:
        """Copy what it has changed of its image's files. The session goes on. Until the pool is
        closed, pool.acquire(snapshot) starts others from the copy; one with a name is an image of
        the store from then on. Processes are not copied. keep: which entries; None: all. since:
        where the session's image is a snapshot, what that was taken of: copy all changes since.

        Raises:
            NotSupportedException: it has no image.
            SandboxException: the changes are more or deeper than can be kept.
            SandboxNotFoundException: it was closed.
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
        """Whether another step can run."""
        return self._ended is None

    def close(self) -> None:
        """End the session: its processes, its files. May be called twice, and by any thread.

        A step that runs in another thread ends at once and says that the session was closed. Not
        done in a process that was forked off: the session is its parent's.
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
            for done in self._on_close:
                done()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
