"""Pools shared by the sandbox tests. Where a machine cannot isolate they say so and skip.

AGENTGRPO_SANDBOX_REQUIRED=1 makes that an error: for machines where isolation is known to work.
"""

import os
from collections.abc import Iterator

import pytest

from agentgrpo.sandbox import Limits, SandboxPool, SandboxUnavailable, Session


@pytest.fixture(scope="session")
def pool() -> Iterator[SandboxPool]:
    try:
        made = SandboxPool(limits=Limits(timeout_s=5.0, memory_mib=128, processes=32))
    except SandboxUnavailable as reason:
        if os.environ.get("AGENTGRPO_SANDBOX_REQUIRED") == "1":
            raise
        pytest.skip(str(reason))
    with made:
        yield made


@pytest.fixture
def session(pool: SandboxPool) -> Iterator[Session]:
    with pool.acquire() as acquired:
        yield acquired
