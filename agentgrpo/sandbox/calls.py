"""A step that calls functions of the host: it comes in parts, with a call between one and the next.

Each part is a run of csrc/sandbox_step.c. The step's own limits hold for all of them together, the
time of the calls included.
"""

import time
from typing import Any

from agentgrpo.sandbox.guest.wire import Malformed, decode, encode
from agentgrpo.sandbox.host_tools import MAX_REFUSED, HostCall, HostCalls, HostFailed
from agentgrpo.sandbox.outcome import MAX_FIELDS, Ending, RawStep, StepArguments, Stream
from agentgrpo.sandbox.result import CLOSED, StepStatus

SOON = 1e-6


class HostCallStep:
    """One step, its parts and its calls. arguments: of the part that is next."""

    def __init__(self, session: Any, host: HostCalls, arguments: StepArguments) -> None:
        self._session, self._host, self.arguments = session, host, arguments
        self._began = time.monotonic()
        self._deadline = self._began + arguments.timeout_s
        self._ends = self._deadline + arguments.grace_s
        self._output_max = arguments.output_max
        self._raw: RawStep | None = None
        self._asked: tuple[str, bytes] | None = None
        self._late = False
        """The step's time ended during a call: whether it is interrupted too is a race."""
        self.calls: list[HostCall] = []
        """Those that were made."""
        self.refused = 0
        """Calls that the budget did not allow."""
        self.over: tuple[StepStatus, str] | None = None
        """What ends the session: a failure of the machine, too many refused calls, its close()."""

    def needs_host_call(self, part: RawStep) -> bool:
        """Take what a part came to; whether it asks for a call: then answer() is next."""
        before, keep = self._raw, self.arguments.keep
        if before is not None:
            part = part._replace(
                interrupted=before.interrupted or part.interrupted,
                wall_s=time.monotonic() - self._began,
                out=joined(before.out, part.out, keep),
                err=joined(before.err, part.err, keep),
                background=before.background,
            )
        self._raw = part
        self._asked = None if part.ending != Ending.ANSWERED else _call_in(part.answer or b"")
        return self._asked is not None

    def answer(self) -> bool:
        """Make the call; whether there is another part, which is told of it."""
        assert self._raw is not None
        assert self._asked is not None
        left = 0.0 if self._raw.interrupted else self._deadline - time.monotonic()
        try:
            call = self._host.answer(
                *self._asked, len(self.calls), left,
                self._session, lambda: not self._session.alive or self._session.closing,
            )  # fmt: skip
        except Malformed:  # as what it is: an answer of no kind that ends a step
            return False
        except HostFailed as error:
            self.over = StepStatus.INFRA_ERROR, str(error)
            return False
        self._late |= time.monotonic() >= self._deadline
        if call.kind == "refused":
            self.refused += 1
        else:
            self.calls.append(call)
        if self._session.closing:  # which may not have ended the interpreter yet
            self.over = StepStatus.EXIT, CLOSED
        elif self.refused > MAX_REFUSED:
            status = (
                StepStatus.TIMEOUT_KILLED if self.raw.interrupted else StepStatus.PROTOCOL_ERROR
            )
            self.over = status, f"more than {MAX_REFUSED} calls over the budget"
        else:
            self._go_on([b"returned" if call.kind == "returned" else b"raised", *call.told])
        return self.over is None

    def _go_on(self, fields: list[bytes]) -> None:
        """The next part. After an interrupt no other follows, only the end."""
        raw, last = self.raw, self.arguments
        ends = self._ends if raw.interrupted else self._deadline
        self.arguments = last._replace(
            request=encode(last.number + 1, fields),
            number=last.number + 1,
            timeout_s=max(SOON, ends - time.monotonic()),
            grace_s=0.0 if raw.interrupted else last.grace_s,
            output_max=max(0, self._output_max - raw.out.total - raw.err.total),
            goes_on=True,
        )

    @property
    def raw(self) -> RawStep:
        """All parts as one step."""
        assert self._raw is not None
        return self._raw._replace(interrupted=self._raw.interrupted or self._late)


def _call_in(answer: bytes) -> tuple[str, bytes] | None:
    """The name and the arguments of a call, if an answer is one."""
    try:
        _, found = decode(answer, most=MAX_FIELDS)
        if len(found) == 3 and found[0] == b"call":
            return found[1].decode(), found[2]
    except (Malformed, UnicodeDecodeError):  # which the end of the step will say
        pass
    return None


def joined(first: Stream, then: Stream, keep: int) -> Stream:
    """Two pieces of output, one after the other, as one of which both ends are kept.

    >>> tuple(joined(Stream(b"ab", b"", 2), Stream(b"cde", b"jkl", 10), 3))
    (b'abc', b'jkl', 12)
    """
    total = first.total + then.total
    head, before = first.head, first.tail
    if not first.left_out:
        before = head + before
        head = (before + then.head)[:keep]
    tail = then.tail if then.left_out else before + then.head + then.tail
    room = min(keep, total - len(head))
    return Stream(head, tail[-room:] if room else b"", total)
