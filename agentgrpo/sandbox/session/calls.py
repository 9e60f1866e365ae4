"""A step that calls functions of the host: its answers are calls, and it goes on with what they
come to, until one is none. The step's own limits hold, the time of the calls included.
"""

import time
from typing import Any

from agentgrpo.sandbox.inside.wire import Malformed, decode, encode
from agentgrpo.sandbox.session.host_tools import MAX_REFUSED, HostCall, HostCalls, HostFailed
from agentgrpo.sandbox.session.outcome import MAX_FIELDS, StepArguments
from agentgrpo.sandbox.session.result import CLOSED, StepStatus


class HostCallStep:
    """The calls of one step, with these arguments."""

    def __init__(self, session: Any, host: HostCalls, arguments: StepArguments) -> None:
        self._session, self._host = session, host
        self._deadline = time.monotonic() + arguments.timeout_s
        self.number = arguments.number
        """Of the request that was sent last."""
        self.calls: list[HostCall] = []
        """Those that were made."""
        self.refused = 0
        """Calls that the budget did not allow."""
        self.over: tuple[StepStatus, str] | None = None
        """What ends the session: a failure of the machine, too many refused calls, its close()."""

    def answer(self, told: bytes, interrupted: bool) -> bytes | None:
        """Make the call that the session asks for; what the step goes on with. None if it asks for
        none, or is over.
        """
        asked = _call_in(told)
        if asked is None:
            return None
        left = 0.0 if interrupted else self._deadline - time.monotonic()
        try:
            call = self._host.answer(
                *asked, len(self.calls), left,
                self._session, lambda: not self._session.alive or self._session.closing,
            )  # fmt: skip
        except Malformed:  # as what it is: an answer of no kind that ends a step
            return None
        except HostFailed as error:
            self.over = StepStatus.INFRA_ERROR, str(error)
            return None
        if call.kind == "refused":
            self.refused += 1
        else:
            self.calls.append(call)
        if self._session.closing:  # which may not have ended the interpreter yet
            self.over = StepStatus.EXIT, CLOSED
        elif self.refused > MAX_REFUSED:
            status = StepStatus.TIMEOUT_KILLED if interrupted else StepStatus.PROTOCOL_ERROR
            self.over = status, f"more than {MAX_REFUSED} calls over the budget"
        if self.over is not None:
            return None
        self.number += 1
        kind = b"returned" if call.kind == "returned" else b"raised"
        return encode(self.number, [kind, *call.told])


def _call_in(answer: bytes) -> tuple[str, bytes] | None:
    """The name and the arguments of a call, if an answer is one."""
    try:
        _, found = decode(answer, most=MAX_FIELDS)
        if len(found) == 3 and found[0] == b"call":
            return found[1].decode(), found[2]
    except (Malformed, UnicodeDecodeError):  # which the end of the step will say
        pass
    return None
