"""Checks that several attacks share."""

from __future__ import annotations

from agentgrpo.sandbox.selftest import ALIVE, _run_step
from agentgrpo.sandbox.session.session import Session


def still_works(session: Session) -> None:
    """The session goes on, with its state."""
    _run_step(session, ALIVE)
