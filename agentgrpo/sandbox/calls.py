"""A step that calls functions of the host: it comes in parts, with a call between one and the next.

Each part is a run of csrc/sandbox_step.c. The step's own limits hold for all of them together, the
time of the calls included.
"""

import time
from typing import Any

from agentgrpo.sandbox.guest.wire import Malformed, decode, encode
from agentgrpo.sandbox.host_tools import MAX_REFUSED, HostCall, HostCalls, HostFailed
from agentgrpo.sandbox.limits import Limits
from agentgrpo.sandbox.outcome import MAX_FIELDS, Ending, RawStep, Stream
from agentgrpo.sandbox.result import CLOSED, StepStatus

SOON = 1e-6


class Conversation:
    """One step, its parts and its calls.

    Args:
        session: the session; functions that it calls cannot step it meanwhile.
        host: the calls of its rollout.
        arguments: of the first part, as Session.prepare() gives them.
        limits: of the session.
    """

    def __init__(
        self, session: Any, host: HostCalls, arguments: tuple[Any, ...], limits: Limits
    ) -> None:
        self._session, self._host, self._arguments = session, host, arguments
        self._began = time.monotonic()
        self._deadline = self._began + arguments[4]
        self._ends = self._deadline + limits.grace_s
        self._number = arguments[3]
        self._raw: RawStep | None = None
        self._asked: tuple[str, bytes] | None = None
        self._late = False
        """The step's time ended during a call: whether it is interrupted too is a race."""
        self.calls: list[HostCall] = []
        """Those that were made."""
        self.told: list[HostCall] = []
        """Those and the refused ones, in order."""
        self.over: tuple[StepStatus, str] | None = None
        """What ends the session: a failure of the machine, too many refused calls, its close()."""

    @property
    def refused(self) -> int:
        """Calls that the budget did not allow."""
        return len(self.told) - len(self.calls)

    def goes_on(self, part: RawStep) -> bool:
        """Take what a part came to; whether it asks for a call: then answer() is next."""
        before = self._raw
        if before is not None:
            keep = self._arguments[6]
            part = (
                part[0], before[1] or part[1], time.monotonic() - self._began,
                joined(before[3], part[3], keep), joined(before[4], part[4], keep),
                before[5], *part[6:],
            )  # fmt: skip
        self._raw = part
        self._asked = None if part[0] != Ending.ANSWERED else _call_in(part[6] or b"")
        return self._asked is not None

    def answer(self) -> tuple[Any, ...] | None:
        """Make the call; the arguments of the part that is told of it. None: the step is over."""
        assert self._raw is not None
        assert self._asked is not None
        left = self._deadline - time.monotonic()
        try:
            call, made = self._host.answer(
                *self._asked, len(self.calls), 0.0 if self._raw[1] else left,
                self._session, lambda: not self._session.alive or self._session.closing,
            )  # fmt: skip
        except Malformed:  # as what it is: an answer of no kind that ends a step
            return None
        except HostFailed as error:
            self.over = StepStatus.INFRA_ERROR, str(error)
            return None
        self._late |= time.monotonic() >= self._deadline
        self.told.append(call)
        if made:
            self.calls.append(call)
        if self._session.closing:  # which may not have ended the interpreter yet
            self.over = StepStatus.EXIT, CLOSED
            return None
        if not made and self.refused > MAX_REFUSED:
            status = StepStatus.TIMEOUT_KILLED if self.raw[1] else StepStatus.PROTOCOL_ERROR
            self.over = status, f"more than {MAX_REFUSED} calls over the budget"
            return None
        self._number += 1
        kind = b"returned" if call.kind == "returned" else b"raised"
        return self._next(encode(self._number, [kind, *call.told]))

    def _next(self, request: bytes) -> tuple[Any, ...]:
        """After an interrupt no other follows, only the end."""
        assert self._raw is not None
        now, interrupted = time.monotonic(), self._raw[1]
        channels, pidfds, _, _, _, grace, keep, output_max, *rest = self._arguments
        return (
            channels, pidfds, request, self._number,
            max(SOON, (self._ends if interrupted else self._deadline) - now),
            0.0 if interrupted else grace,
            keep, max(0, output_max - self._raw[3][2] - self._raw[4][2]), *rest, True,
        )  # fmt: skip

    @property
    def raw(self) -> RawStep:
        """All parts as one step."""
        assert self._raw is not None
        return self._raw[0], self._raw[1] or self._late, *self._raw[2:]

    @property
    def last_number(self) -> int:
        """Of the requests that were sent."""
        return int(self._number)


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

    >>> joined((b"ab", b"", 2), (b"cde", b"jkl", 10), 3)
    (b'abc', b'jkl', 12)
    """
    total = first[2] + then[2]
    head, before = first[:2]
    if len(head) + len(before) == first[2]:  # nothing of it is left out
        before = head + before
        head = (before + then[0])[:keep]
    whole = len(then[0]) + len(then[1]) == then[2]
    tail = before + then[0] + then[1] if whole else then[1]
    room = min(keep, total - len(head))
    return head, tail[-room:] if room else b"", total
