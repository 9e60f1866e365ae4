"""A real sandbox for agents' and environments' tests; where a machine cannot isolate they skip."""

from collections.abc import Iterator

import pytest

from agentgrpo.sandbox import Limits, SandboxPool, SandboxUnavailable


@pytest.fixture(scope="session")
def pool() -> Iterator[SandboxPool]:
    """Sessions of plain Python; a step may take 5 seconds."""
    try:
        made = SandboxPool(limits=Limits(timeout_s=5.0), max_live=32, min_idle=2, zygotes=1)
    except SandboxUnavailable as reason:
        pytest.skip(f"this machine cannot isolate: {reason}")
    with made:
        yield made
