"""Checks that several attacks share."""

from __future__ import annotations

from collections.abc import Callable

from agentgrpo.sandbox.selftest import ALIVE, CASES, Case, _run_step
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.session import Session


def on_pool(attack: Callable[[SandboxPool], None]) -> Callable[[SandboxPool], None]:
    """Register a case that opens its own sessions. Its docstring is its name."""
    assert attack.__doc__
    name = attack.__doc__.strip().splitlines()[0].rstrip(".")
    CASES.append(Case(name, attack.__module__.rpartition(".")[2], attack, alone=True))
    return attack


def still_works(session: Session) -> None:
    """The session goes on, with its state."""
    _run_step(session, ALIVE)
