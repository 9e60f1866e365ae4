"""What several attacks ask of the session afterwards."""

from __future__ import annotations

from agentgrpo.sandbox.selftest import GOES_ON, _take
from agentgrpo.sandbox.session.session import Session


def still_works(session: Session) -> None:
    """The session goes on, with its state."""
    _take(session, GOES_ON)
