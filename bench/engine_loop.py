"""Measure the CPU time of a decoding step without the model: `python -m bench.engine_loop`.

vLLM's scheduler, its output processing and our own code drive a model that answers at once, with as
many rollouts as a row's shape says. On a GPU this time is hidden behind the model if
engine.async_scheduling is on, and added to it if it is off, as here. In milliseconds:

step     an Engine.step() in which no turn ends, and its parts: `schedule` and `update`, vLLM's
         scheduler before and after the model; `core`, the rest of vLLM; `ours`
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentgrpo.config import EngineConfig
from agentgrpo.support.runtime import prepare_environment
from bench.harness import append_row

if TYPE_CHECKING:
    from agentgrpo.engine.engine import Engine

RUNNING = (128, 256, 512, 1024)
STEPS, WARM = 60, 5
PROMPT = 256
SILENT = "--no-rows" in sys.argv


@dataclass
class Clock:
    """CPU seconds of this thread inside functions, without those inside others of them."""

    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inside: float = 0.0

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Count what a method of an object takes."""
        setattr(owner, method, self.timed(getattr(owner, method), name))

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, 0.0
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - began
                self.spent[name] += took - self._inside
                self._inside = before + took

        return run


class FakeExecutor:
    """Answers each step at once, with the same token for all; in place of a model."""

    def __init__(self, engine: Engine) -> None:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

        self._logprobs, self._output = LogprobsLists, ModelRunnerOutput
        self._nothing = EMPTY_MODEL_RUNNER_OUTPUT
        # a card's runner is vLLM's newer one, which is sent less
        engine._core.scheduler.use_v2_model_runner = True
        self._scheduled: Any = None

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Future[Any]:
        self._scheduled = scheduled
        return _done(None if scheduled.total_num_scheduled_tokens else self._nothing)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        ids = list(self._scheduled.num_scheduled_tokens)
        column, ones = np.full((len(ids), 1), 5, np.int32), np.ones(len(ids), np.int32)
        output = self._output(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=column.tolist(),
            logprobs=self._logprobs(column, -np.ones((len(ids), 1), np.float32), ones, None),
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        return _done(output) if non_block else output


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def make(model: Path, running: int) -> tuple[Engine, Clock]:
    """An engine of the tiny model that is never run, and where its time goes."""
    from agentgrpo.engine.engine import Engine

    config = EngineConfig(
        max_model_len=1024, kv_cache_gib=1.0, max_num_seqs=running, async_scheduling=False
    )
    engine = Engine(model, config)
    fake, clock = FakeExecutor(engine), Clock()
    core = engine._core
    for name in ("execute_model", "sample_tokens"):
        setattr(core.model_executor, name, clock.timed(getattr(fake, name), "model"))
    clock.wrap(core.scheduler, "schedule", "schedule")
    clock.wrap(core.scheduler, "update_from_output", "update")
    clock.wrap(engine._engine.engine_core, "get_output", "core")
    return engine, clock


def steps(engine: Engine, clock: Clock, running: int) -> None:
    """Rows of steps in which all decode on."""
    rng = np.random.default_rng(0)
    for index in range(running):
        ids = rng.integers(6, 200, PROMPT).astype(np.int32)
        engine.add_request(str(index), ids, max_tokens=600, temperature=1.0, seed=index)
    scheduler = engine._core.scheduler
    while len(scheduler.running) < running:
        engine.step()
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(WARM + STEPS):
        clock.spent.clear()
        clock.timed(engine.step, "ours")()
        for name in ("schedule", "update", "core", "ours"):
            parts[name].append(1e3 * clock.spent[name])
    engine.abort_all()
    total = np.sum(list(parts.values()), axis=0)
    for name, values in {"all": total, **parts}.items():
        row(f"step, serial: {name}", values[WARM:], running)


def row(variant: str, values: Any, running: int) -> None:
    if SILENT:
        print(f"{variant:32s} {running:5d} {np.median(values):8.3f} ms")
    else:
        append_row("engine_loop", variant, list(values), unit="ms CPU", shape={"running": running})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-rows", action="store_true", help="print and write nothing")
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING)
    arguments = parser.parse_args()
    prepare_environment()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    from tests import tiny

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.make_model_dir(Path(folder))
        for running in arguments.running:
            engine, clock = make(model, running)
            steps(engine, clock, running)
            engine.shutdown()


if __name__ == "__main__":
    main()
