"""Registers attacks that need more than the rows of one session."""

from __future__ import annotations

from collections.abc import Callable

from agentgrpo.sandbox.selftest import CASES, Case
from agentgrpo.sandbox.session.pool import SandboxPool


def on_pool(attack: Callable[[SandboxPool], None]) -> Callable[[SandboxPool], None]:
    """Register a case that opens its own sessions. Its docstring is its name."""
    assert attack.__doc__
    name = attack.__doc__.strip().splitlines()[0].rstrip(".")
    CASES.append(Case(name, attack.__module__.rpartition(".")[2], attack, alone=True))
    return attack
