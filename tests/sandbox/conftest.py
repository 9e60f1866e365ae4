"""A pool shared by the sandbox tests, and the sanitizer in the jail if they run under it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from agentgrpo.sandbox import Limits, SandboxPool, Session
from agentgrpo.sandbox.isolation import jail
from tests.sandbox.session.hosted import release, seen

if "libasan" in os.environ.get("LD_PRELOAD", ""):  # csrc/run_sanitized.sh: into the jail as well
    _names = ("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS", "PYTHONMALLOC")
    _sanitizer = {name: os.environ[name] for name in _names}
    _spawn = os.posix_spawn

    def _spawn_sanitized(path: str, argv: Any, env: Any, **options: Any) -> int:
        return _spawn(path, argv, {**env, **_sanitizer}, **options)

    os.posix_spawn = _spawn_sanitized  # type: ignore[assignment]
    jail.ENVIRONMENT.update(_sanitizer)


@pytest.fixture(scope="session")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(limits=Limits(timeout_s=5.0, memory_mib=128, processes=32)) as made:
        yield made


@pytest.fixture
def session(pool: SandboxPool) -> Iterator[Session]:
    with pool.acquire() as acquired:
        yield acquired


@pytest.fixture
def hosted() -> Iterator[None]:
    """The functions of tests/sandbox/session/hosted.py have not been called, and none hangs
    afterwards.
    """
    seen.clear()
    release.clear()
    yield
    release.set()
