"""One step ahead (engine.async_scheduling), on real vLLM: the same tokens, and nothing left over.

vLLM has it on CUDA only; stand_in.py takes the reasons away, and its CPU runner does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agentgrpo.config import EngineConfig
from agentgrpo.engine.engine import Engine
from agentgrpo.types import Completion
from tests.engine.stand_in import async_scheduling_on_cpu
from tests.engine.test_engine import finish, prompt


@pytest.fixture(scope="module")
def made(slow_setup: None, tiny_model: Path) -> Iterator[Engine]:
    with async_scheduling_on_cpu():
        config = EngineConfig(max_model_len=256, kv_cache_gib=1 / 16, async_scheduling=True)
        made = Engine(tiny_model, config)
        yield made
        made.shutdown()


@pytest.fixture
def ahead(made: Engine) -> Iterator[Engine]:
    assert made._core.batch_queue_size == 2
    made.reset_prefix_cache()
    saved = [(p, p.detach().clone()) for p in made.model.parameters()]
    yield made
    made.wake()
    made.abort_all()
    with torch.no_grad():
        for parameter, value in saved:
            parameter.copy_(value)


def told(turn: Completion) -> tuple[object, ...]:
    return turn.token_ids.tolist(), turn.finish_reason, turn.stop_reason, turn.num_cached_tokens


def serve(engine: Engine) -> dict[str, Completion]:
    """Turns of every kind of end, that join and leave while others decode."""
    done: dict[str, Completion] = {}
    for index in range(12):
        engine.add_request(
            str(index), prompt(20 + 7 * index, seed=index), max_tokens=4 + 3 * index, seed=index,
            temperature=1.0, stop_token_ids=range(30, 36) if index % 3 == 1 else (),
            stop=("a", "the", "e") if index % 3 == 2 else (), top_logprobs=5 * (index % 2),
            on_token=(lambda token: token % 5 == 0) if index % 3 == 0 else None,
        )  # fmt: skip
        done |= {turn.request_id: turn for turn in engine.step()}
        if index == 6:
            engine.abort(["5", "never was"])
            # the same id at once: what was scheduled ahead for the one that is gone is not its own
            engine.add_request("5", prompt(9), max_tokens=6, temperature=1.0, seed=99)
    return done | finish(engine)


def test_every_token_is_that_of_the_serial_engine(ahead: Engine, engine: Engine) -> None:
    seen, expected = serve(ahead), serve(engine)
    assert seen.keys() == expected.keys()
    assert {turn.finish_reason for turn in seen.values()} == {"stop", "length"}
    assert {type(turn.stop_reason) for turn in seen.values()} == {str, int, type(None)}
    for name, turn in seen.items():
        assert told(turn) == told(expected[name]), name
        assert len(turn.logprobs) == len(turn.token_ids)
        np.testing.assert_allclose(turn.logprobs, expected[name].logprobs, atol=1e-5)
        np.testing.assert_allclose(turn.entropies, expected[name].entropies, atol=1e-4)


def test_nothing_is_under_way_once_no_request_is(ahead: Engine) -> None:
    ahead.add_request("a", prompt(30), max_tokens=40, temperature=1.0, stop_token_ids=range(3, 90))
    ahead.step()
    assert ahead._core.batch_queue, "a step is scheduled ahead"
    assert len(finish(ahead)) == 1
    assert not ahead._core.batch_queue
    ahead.add_request("b", prompt(30), max_tokens=40, temperature=1.0)
    ahead.step()
    ahead.abort(["b"])
    assert not ahead._core.batch_queue
    assert ahead._core.scheduler.get_num_unfinished_requests() == 0
    ahead.add_request("c", prompt(30), max_tokens=40, temperature=1.0)
    ahead.step()
    assert ahead._core.batch_queue
    ahead.load_weights([])
    assert not ahead._core.batch_queue
