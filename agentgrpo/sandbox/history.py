"""What a session was asked and what it showed, so that another can be brought to the same state."""

import re
from typing import NamedTuple

from agentgrpo.sandbox.errors import SandboxException
from agentgrpo.sandbox.host_tools import HostCall
from agentgrpo.sandbox.result import StepResult, StepStatus

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


class ReplayDiverged(SandboxException):
    """A session's steps cannot be repeated, or showed something else the second time."""


HISTORY_BYTES = 16 << 20
"""Of code that a session remembers for replay(); what is older than that much is forgotten."""


class Recorded(NamedTuple):
    """One step: what was sent, and a hash of what it showed."""

    fields: tuple[bytes, ...] | None
    """None if it was forgotten."""
    timeout_s: float
    status: StepStatus
    state_lost: bool
    digest: int
    calls: tuple[HostCall, ...] = ()
    """Of functions of the host, the refused ones too."""

    @property
    def repeatable(self) -> bool:
        """Whether it ran to its own end: an interrupt hits elsewhere the next time."""
        return (
            self.fields is not None
            and self.status in (StepStatus.OK, StepStatus.ERROR, StepStatus.EXIT)
            and not self.state_lost
        )


def digest(result: StepResult) -> int:
    """A hash, in this process, of what a policy could have been shown: addresses, times and costs
    do not count.
    """
    error = result.error
    name, value = (error.name, error.value) if error is not None else (None, None)
    told = (result.stdout, result.stderr, result.value, name, value)
    for text in told:
        if text and "0x" in text:
            told = tuple(text and _ADDRESS.sub("0x", text) for text in told)  # type: ignore[assignment]
            break
    return hash((str(result.status), result.state_lost, result.more, told))
