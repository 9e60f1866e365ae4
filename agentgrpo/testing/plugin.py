"""The pytest plugin: a fixture that shares one engine between tests that train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def agentgrpo_engine() -> Iterator[None]:
    """Share one engine between the tests of this session, while model and settings are the same.

    Also affects later tests that do not request the fixture.
    """
    from agentgrpo.support.runtime import prepare_environment

    prepare_environment()  # imported here: other tests do not need torch and vLLM
    from agentgrpo.testing.engines import SHARED, Engines

    SHARED.append(Engines())
    yield
    SHARED.pop().close()
