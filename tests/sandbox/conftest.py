"""Pools shared by the sandbox tests. Where a machine cannot isolate, they say so and skip."""

from collections.abc import Iterator

import pytest

from agentgrpo.sandbox import Limits, SandboxPool, SandboxUnavailable, Session


@pytest.fixture(scope="session")
def pool() -> Iterator[SandboxPool]:
    try:
        made = SandboxPool(limits=Limits(timeout_s=5.0, memory_mib=128, processes=32))
    except SandboxUnavailable as reason:
        pytest.skip(f"this machine cannot isolate: {reason}")
    with made:
        yield made


@pytest.fixture
def session(pool: SandboxPool) -> Iterator[Session]:
    with pool.acquire() as acquired:
        yield acquired
