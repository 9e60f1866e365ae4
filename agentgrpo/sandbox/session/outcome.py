"""What a step that ran came to: the facts of csrc/sandbox_step.c, and the session's own answer."""

import codecs
import os
import signal
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from agentgrpo import _C
from agentgrpo.sandbox.inside.wire import Malformed, decode
from agentgrpo.sandbox.isolation.channels import SetupFailed, Supervisor
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.session.result import StepError, StepResult, StepStatus

MAX_FIELDS = 64


class Stream(NamedTuple):
    """What was kept of its start and of its end, and how many bytes there were."""

    head: bytes
    tail: bytes
    total: int

    @property
    def left_out(self) -> int:
        """Bytes from the middle that were not kept."""
        return self.total - len(self.head) - len(self.tail)


class StepArguments(NamedTuple):
    """What ``_C.sandbox_run_step`` takes."""

    channels: tuple[int, int, int, int, int]
    """(request, response, out, err, status)"""
    pidfds: tuple[int, int]
    """(init, interpreter)"""
    request: bytes
    number: int
    timeout_s: float
    grace_s: float
    keep: int
    """Bytes of each end of a stream."""
    output_max: int
    answer_max: int
    listener: Callable[[int, bytes], object] | None
    on_answer: Callable[[bytes, bool], bytes | None] | None = None
    """Called with an answer, and whether the step was interrupted: the request that it goes on
    with, or None if it is over."""


class RawStep(NamedTuple):
    """What ``_C.sandbox_run_step`` returns."""

    ending: int
    interrupted: bool
    wall_s: float
    out: Stream
    err: Stream
    background: bytes
    answer: bytes | None
    how: int
    """waitpid()'s status, or the step of the setup that failed."""
    max_rss_kib: int
    cpu_us: int
    errno: int


def run_step(arguments: StepArguments) -> RawStep:
    """Run a step."""
    raw = RawStep._make(_C.sandbox_run_step(*arguments))
    return raw._replace(out=Stream._make(raw.out), err=Stream._make(raw.err))


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


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _joined(stream: Stream) -> str:
    if not stream.left_out:
        return _text(stream.head + stream.tail)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    head = decoder.decode(stream.head)  # without the part of a character at its end
    starts = (at for at, byte in enumerate(stream.tail[:4]) if byte & 0xC0 != 0x80)
    tail = stream.tail[next(starts, 0) :]
    kept = len(stream.head) - len(decoder.getstate()[0]) + len(tail)
    return f"{head}\n... {stream.total - kept} bytes left out ...\n{_text(tail)}"


def show_output(raw: RawStep, result: StepResult) -> None:
    """What arrived on the streams."""
    if raw.out.total:
        result.stdout, result.stdout_bytes = _joined(raw.out), raw.out.total
    if raw.err.total:
        result.stderr, result.stderr_bytes = _joined(raw.err), raw.err.total
    result.truncated = bool(raw.out.left_out or raw.err.left_out)
    if raw.background:
        result.background = _text(raw.background)


def show_answer(raw: RawStep, result: StepResult) -> None:
    """What the interpreter says of the step, whose length and number have been checked already;
    Malformed if it is not of the form that inside/repl.py sends.
    """
    _, (kind, *rest) = decode(raw.answer or b"", most=MAX_FIELDS)
    fields = {b"ok": 0, b"more": 0, b"error": 3, b"exit": 1}.get(kind)
    if fields is None or len(rest) < fields or (len(rest) - fields) % 2:
        raise Malformed(f"kind {kind[:20]!r} with {len(rest)} fields")
    status = {b"error": StepStatus.ERROR, b"exit": StepStatus.EXIT}.get(kind, StepStatus.OK)
    result.more = kind == b"more"
    if kind == b"error":
        result.error = StepError(*map(_text, rest[:3]))
    elif kind == b"exit":
        result.detail = f"SystemExit({_text(rest[0])}); the session goes on"
    if rest[fields:]:
        shown = dict(zip(rest[fields::2], rest[fields + 1 :: 2], strict=True))
        result.value = _text(shown[b"value"]) if b"value" in shown else None
        result.results, result.piece = shown.get(b"results", b""), shown.get(b"piece", b"")
    result.status = StepStatus.TIMEOUT if raw.interrupted else status


def how_it_ended(
    raw: RawStep, limits: Limits, asked_s: float, result: StepResult, supervisor: Supervisor
) -> tuple[StepStatus, str]:
    """For a session that is over: its status and a sentence, from what its init and the kernel say.

    It is infra_error only on evidence from outside of the session: a descriptor or the memory of
    this process has failed, the session was never set up, or what keeps sessions is not well. That
    a session is gone, its PID 1 included, is no evidence: its code may have had a hand in it.
    The result gets the signal or the exit code, and has the processes killed for memory; asked_s is
    the step's own time.
    """
    ending, interrupted, how, detail = raw.ending, raw.interrupted, raw.how, raw.errno
    if ending == Ending.HOST_FAILED:
        return StepStatus.INFRA_ERROR, f"the host's own side failed: {os.strerror(detail)}"
    if ending == Ending.SETUP_FAILED:
        return StepStatus.INFRA_ERROR, str(SetupFailed(how, detail))
    killed = ending == Ending.LOST or (ending == Ending.EXITED and os.WIFSIGNALED(how))
    if killed and (failure := supervisor.failure()):
        return StepStatus.INFRA_ERROR, failure
    memory = StepStatus.OOM, f"over {limits.memory_mib} MiB of memory"
    if ending == Ending.EXITED and interrupted:
        return StepStatus.TIMEOUT_KILLED, f"it ended at the interrupt at {asked_s:g} s"
    if ending == Ending.EXITED and os.WIFSIGNALED(how):
        number = result.signal = os.WTERMSIG(how)
        if number == signal.SIGKILL and result.oom_kills:
            return memory
        name = signal.Signals(number).name if number < 32 else f"signal {number}"
        return StepStatus.SIGNAL, f"the interpreter was killed by {name}"
    if ending == Ending.EXITED:
        result.exit_code = os.WEXITSTATUS(how)
        return StepStatus.EXIT, f"the interpreter ended with exit code {result.exit_code}"
    if (
        ending in (Ending.LOST, Ending.PROTOCOL) and result.oom_kills
    ):  # its pipes close before it ends
        return memory
    if ending == Ending.LOST:
        result.signal = signal.SIGKILL
    return {
        Ending.KILLED_AT_DEADLINE: (
            StepStatus.TIMEOUT_KILLED,
            f"still running {limits.grace_s:g} s after the interrupt at {asked_s:g} s",
        ),
        Ending.OUTPUT_LIMIT: (
            StepStatus.OUTPUT_LIMIT,
            f"over {limits.output_max_mib} MiB of output in one step",
        ),
        Ending.PROTOCOL: (StepStatus.PROTOCOL_ERROR, "the session broke the protocol"),
        Ending.LOST: (StepStatus.SIGNAL, "the session's init ended, and all of it with it"),
    }[Ending(ending)]
