"""The pytest plugin: tests that train use one engine, which the session ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # torch and vLLM, which tests that do not train have no use for
    from agentgrpo.testing.engines import Engines
    from agentgrpo.trainer import Trainer


@pytest.fixture(scope="session")
def agentgrpo_engine() -> Iterator[Engines]:
    """Makes all that trains in this session use one engine, as long as model and settings stay.

    A test that asks for it, or one after such a test, starts vLLM only if nobody has.
    """
    from agentgrpo.machine.runtime import prepare_environment

    prepare_environment()
    from agentgrpo.testing.engines import KEPT, Engines

    engines = Engines()
    KEPT.append(engines)
    yield engines
    KEPT.remove(engines)
    engines.close()


@pytest.fixture
def agentgrpo_trainer(
    agentgrpo_engine: Engines, tmp_path: Path
) -> Iterator[Callable[..., Trainer]]:
    """Makes a Trainer of a config and settings, on the session's engine; closed after the test."""
    from agentgrpo.config.read import config_of
    from agentgrpo.testing.engines import trainer_of

    made: list[Trainer] = []

    def make(config: Any, **settings: Any) -> Trainer:
        given = {"out_dir": str(tmp_path / f"run{len(made)}"), **settings}
        made.append(trainer_of(config_of(config, given)))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
