"""The pytest plugin: tests that train use one engine, which the session ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def agentgrpo_engine() -> Iterator[None]:
    """Makes all that trains in this session use one engine, as long as model and settings stay.

    A test that asks for it, or one after such a test, starts vLLM only if nobody has.
    """
    from agentgrpo.support.runtime import prepare_environment

    prepare_environment()  # here, since tests that do not train have no use for torch and vLLM
    from agentgrpo.testing.engines import SHARED, Engines

    SHARED.append(Engines())
    yield
    SHARED.pop().close()
