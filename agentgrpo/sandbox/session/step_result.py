"""The result of a step: what its code showed, and how it ended."""

import codecs
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from agentgrpo import _C
from agentgrpo.sandbox.inside.wire import Malformed, decode
from agentgrpo.sandbox.isolation.channels import SetupFailed
from agentgrpo.sandbox.isolation.limits import Limits

MAX_FIELDS = 64
CLOSED = "the session was closed"
"""StepResult.detail of a step that ran when its session was closed."""


class StepStatus(StrEnum):
    """How a step ended.

    ``ok``, ``error`` and ``exit`` are reported by the interpreter inside. All others are found by
    the host, the kernel or the session's init, and code inside cannot forge them.
    """

    OK = "ok"
    ERROR = "error"
    """The code raised an exception (``StepResult.error``). State is kept."""
    EXIT = "exit"
    """The code exited. State is kept after ``sys.exit()`` and lost after ``os._exit()``."""
    TIMEOUT = "timeout"
    """Interrupted at the deadline. State is kept."""
    TIMEOUT_KILLED = "timeout_killed"
    """The code ignored the interrupt, or the session's time was over."""
    OOM = "oom"
    """Killed by the memory limit."""
    SIGNAL = "signal"
    """A signal killed the interpreter (``StepResult.signal``), or the session's PID 1 ended."""
    OUTPUT_LIMIT = "output_limit"
    PROTOCOL_ERROR = "protocol_error"
    """The session sent a forged, extra or malformed answer, and was killed."""
    INFRA_ERROR = "infra_error"
    """The machine failed, on evidence from outside of the session: retry, or drop the sample.
    Never a reward of 0."""


@dataclass(frozen=True, slots=True)
class StepError:
    """An exception that reached the top of a step, as reported by the interpreter."""

    name: str
    value: str
    traceback: str


class HostCall(NamedTuple):
    """A call of a host function. A branch of the rollout gets its answer again without a call."""

    name: str
    arguments: bytes
    """``[positional, named]`` as JSON (inside/data.py)."""
    kind: str
    """returned, raised, or refused: over the budget, so not made, and stored without arguments."""
    answer: tuple[bytes, ...]
    """The value as JSON, or the exception's name and text."""
    seconds: float
    """How long the session waited."""

    @property
    def size(self) -> int:
        """Bytes of the arguments and the answer."""
        return len(self.arguments) + sum(map(len, self.answer))


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Output, value, status and cost of one step.

    Treat it as read-only. It is not frozen because that would take four times as long to create.
    """

    status: StepStatus
    stdout: str = ""
    """Output to descriptor 1 by any process of the session. Undecodable bytes are replaced. The
    middle of long output is replaced by a line with the number of missing bytes."""
    stderr: str = ""
    value: str | None = None
    """``repr()`` of the last expression; None if there is none or its value is None."""
    results: bytes = b""
    """What a notebook's cell displayed (inside/notebook.py)."""
    piece: bytes = b""
    """A piece of an answer to Session.ask()."""
    error: StepError | None = None
    exit_code: int | None = None
    """The interpreter's exit code, if it ended."""
    signal: int | None = None
    """The signal that killed the interpreter."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the interpreter during the step, without its children."""
    processes_left: int | None = None
    """Processes and threads that the code left running; None without a control group."""
    oom_kills: int = 0
    """Processes that the memory limit killed during the step."""
    truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    background: str = ""
    """Output between the previous step and this one (at most 4 KiB)."""
    more: bool = False
    """Whether a console's statement needs more lines."""
    degraded: bool = False
    """Whether the session ran without namespaces (``allow_degraded=True`` and no better rung)."""
    state_lost: bool = False
    """Whether the session has ended: its variables and files are lost."""
    host_calls: tuple[HostCall, ...] = ()
    """Calls of host functions, in order."""
    host_refused: int = 0
    """Calls of host functions that were refused because the budget was used up."""
    detail: str = ""
    """For statuses other than ok: one sentence for a human or a log."""


class Stream(NamedTuple):
    """Captured output: its start, its end, and the number of all bytes."""

    head: bytes
    tail: bytes
    total: int

    @property
    def omitted(self) -> int:
        """Bytes of the middle that were dropped."""
        return self.total - len(self.head) - len(self.tail)


class StepArguments(NamedTuple):
    """Arguments of ``_C.sandbox_run_step``."""

    channels: tuple[int, int, int, int, int]
    """(request, response, out, err, status)"""
    pidfds: tuple[int, int]
    """(init, interpreter)"""
    request: bytes
    number: int
    timeout_s: float
    grace_s: float
    keep: int
    """Bytes to keep of each end of a stream."""
    output_max: int
    answer_max: int
    listener: Callable[[int, bytes], object] | None
    on_answer: Callable[[bytes, bool], bytes | None] | None = None
    """Called with an answer and whether the step was interrupted. Returns the next request of the
    step, or None if the step has ended."""


class RawStep(NamedTuple):
    """Result of ``_C.sandbox_run_step``."""

    ending: int
    interrupted: bool
    wall_s: float
    out: Stream
    err: Stream
    background: bytes
    answer: bytes | None
    how: int
    """waitpid()'s status, or the setup step that failed."""
    cpu_us: int
    errno: int


class Ending(IntEnum):
    """``enum ending`` of csrc/sandbox_step.c."""

    RUNNING = 0
    ANSWERED = 1
    KILLED_AT_DEADLINE = 2
    OUTPUT_LIMIT = 3
    PROTOCOL = 4
    EXITED = 5
    LOST = 6
    SETUP_FAILED = 7
    HOST_FAILED = 8


def run_step(arguments: StepArguments) -> RawStep:
    """Call ``_C.sandbox_run_step`` and name its fields."""
    raw = RawStep._make(_C.sandbox_run_step(*arguments))
    return raw._replace(out=Stream._make(raw.out), err=Stream._make(raw.err))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _joined(stream: Stream) -> str:
    if not stream.omitted:
        return _text(stream.head + stream.tail)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    head = decoder.decode(stream.head)  # without an incomplete character at its end
    starts = (at for at, byte in enumerate(stream.tail[:4]) if byte & 0xC0 != 0x80)
    tail = stream.tail[next(starts, 0) :]
    num_kept = len(stream.head) - len(decoder.getstate()[0]) + len(tail)
    return f"{head}\n... {stream.total - num_kept} bytes left out ...\n{_text(tail)}"


def set_output(raw: RawStep, result: StepResult) -> None:
    """Copy the captured output into the result."""
    if raw.out.total:
        result.stdout, result.stdout_bytes = _joined(raw.out), raw.out.total
    if raw.err.total:
        result.stderr, result.stderr_bytes = _joined(raw.err), raw.err.total
    result.truncated = bool(raw.out.omitted or raw.err.omitted)
    if raw.background:
        result.background = _text(raw.background)


def set_answer(raw: RawStep, result: StepResult) -> None:
    """Parse the interpreter's answer into the result. Malformed if it is not one of repl.py."""
    _, (kind, *rest) = decode(raw.answer or b"", most=MAX_FIELDS)
    num_fields = {b"ok": 0, b"more": 0, b"error": 3, b"exit": 1}.get(kind)
    if num_fields is None or len(rest) < num_fields or (len(rest) - num_fields) % 2:
        raise Malformed(f"kind {kind[:20]!r} with {len(rest)} fields")
    status = {b"error": StepStatus.ERROR, b"exit": StepStatus.EXIT}.get(kind, StepStatus.OK)
    result.more = kind == b"more"
    if kind == b"error":
        result.error = StepError(*map(_text, rest[:3]))
    elif kind == b"exit":
        result.detail = f"SystemExit({_text(rest[0])}); the session goes on"
    if rest[num_fields:]:
        extras = dict(zip(rest[num_fields::2], rest[num_fields + 1 :: 2], strict=True))
        result.value = _text(extras[b"value"]) if b"value" in extras else None
        result.results, result.piece = extras.get(b"results", b""), extras.get(b"piece", b"")
    result.status = StepStatus.TIMEOUT if raw.interrupted else status


def classify_ending(
    raw: RawStep, limits: Limits, timeout_s: float, result: StepResult, failure: Callable[[], str]
) -> tuple[StepStatus, str]:
    """Status and one sentence for a step that ended its session. Sets signal or exit_code.

    infra_error needs evidence from outside of the session: a system call of this process failed,
    the session was never set up, or its zygote has failed. A session that is gone, its PID 1
    included, is no evidence: its code may have caused that. timeout_s is the step's own limit;
    result.oom_kills must be set.
    """
    ending, interrupted, how, error = raw.ending, raw.interrupted, raw.how, raw.errno
    if ending == Ending.HOST_FAILED:
        return StepStatus.INFRA_ERROR, f"a system call of the host failed: {os.strerror(error)}"
    if ending == Ending.SETUP_FAILED:
        return StepStatus.INFRA_ERROR, str(SetupFailed(how, error))
    killed = ending == Ending.LOST or (ending == Ending.EXITED and os.WIFSIGNALED(how))
    if killed and (reason := failure()):
        return StepStatus.INFRA_ERROR, reason
    memory = StepStatus.OOM, f"over {limits.memory_mib} MiB of memory"
    if ending == Ending.EXITED and interrupted:
        return StepStatus.TIMEOUT_KILLED, f"it ended at the interrupt at {timeout_s:g} s"
    if ending == Ending.EXITED and os.WIFSIGNALED(how):
        number = result.signal = os.WTERMSIG(how)
        if number == signal.SIGKILL and result.oom_kills:
            return memory
        name = signal.Signals(number).name if number < 32 else f"signal {number}"
        return StepStatus.SIGNAL, f"the interpreter was killed by {name}"
    if ending == Ending.EXITED:
        result.exit_code = os.WEXITSTATUS(how)
        return StepStatus.EXIT, f"the interpreter ended with exit code {result.exit_code}"
    if ending in (Ending.LOST, Ending.PROTOCOL) and result.oom_kills:
        return memory  # PROTOCOL: a killed interpreter's pipes close before its end is reported
    if ending == Ending.LOST:
        result.signal = signal.SIGKILL
    return {
        Ending.KILLED_AT_DEADLINE: (
            StepStatus.TIMEOUT_KILLED,
            f"still running {limits.grace_s:g} s after the interrupt at {timeout_s:g} s",
        ),
        Ending.OUTPUT_LIMIT: (
            StepStatus.OUTPUT_LIMIT,
            f"over {limits.output_max_mib} MiB of output in one step",
        ),
        Ending.PROTOCOL: (StepStatus.PROTOCOL_ERROR, "the session broke the protocol"),
        Ending.LOST: (StepStatus.SIGNAL, "the session's init ended, and with it the session"),
    }[Ending(ending)]
