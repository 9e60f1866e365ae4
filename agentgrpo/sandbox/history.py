"""What a session was asked and what it showed, so that another can be brought to the same state."""

import hashlib
import re
from dataclasses import dataclass

from agentgrpo.sandbox.errors import SandboxException
from agentgrpo.sandbox.result import Status, StepResult

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


class ReplayDiverged(SandboxException):
    """A session's steps cannot be repeated, or showed something else the second time."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One step: what was sent, and a hash of what it showed."""

    fields: tuple[bytes, ...]
    timeout_s: float
    status: Status | None
    """None if a listener's exception hid how it ended."""
    state_lost: bool
    digest: str

    @property
    def repeatable(self) -> bool:
        """Whether it ran to its own end: an interrupt hits elsewhere the next time."""
        return self.status in (Status.OK, Status.ERROR, Status.EXIT) and not self.state_lost


def digest(result: StepResult) -> str:
    """A hash of what a policy could have been shown: addresses, times and costs do not count."""
    error = result.error
    shown = (
        result.status,
        f"{result.state_lost} {result.more} {result.value is None} {error is None}",
        result.stdout,
        result.stderr,
        result.value or "",
        error.name if error is not None else "",
        error.value if error is not None else "",
    )
    text = "\0".join(f"{len(part)} {part}" for part in shown)
    if "0x" in text:
        text = "\0".join(map(_without_addresses, shown))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _without_addresses(text: str) -> str:
    stripped = _ADDRESS.sub("0x", text)
    return f"{len(stripped)} {stripped}"
