"""The pytest plugin: tests that train use one engine, which the session ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # torch and vLLM, which tests that do not train have no use for
    from agentgrpo.testing.engines import Engines


@pytest.fixture(scope="session")
def agentgrpo_engine() -> Iterator[Engines]:
    """Makes all that trains in this session use one engine, as long as model and settings stay.

    A test that asks for it, or one after such a test, starts vLLM only if nobody has.
    """
    from agentgrpo.machine.runtime import prepare_environment

    prepare_environment()
    from agentgrpo.testing.engines import SHARED, Engines

    engines = Engines()
    SHARED.append(engines)
    yield engines
    SHARED.remove(engines)
    engines.close()
