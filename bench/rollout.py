"""Measure costs and savings of the rollout engine: `python -m bench.rollout MODEL_DIR [part ...]`.

barrier   64 rollouts with heavy-tailed tool times, without a barrier and with one per turn; engine,
          prompts, seeds, turn lengths, tool times are the same; wall time and idle share of engine
overhead  Python time outside the engine, with 256 live rollouts and tools that answer at once
sync      publish() with shared and with copied weights, against a plain copy of as many bytes
memory    memory that a learner adds to the process, with shared and with copied weights
start     from a fresh process to its first token
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from agentgrpo.actions import Action, Message, Observation, RunCode, Schema
from agentgrpo.config import EngineConfig, LearnerConfig, LossConfig, RolloutConfig
from agentgrpo.support.runtime import prepare_environment
from agentgrpo.types import Int32, Task
from bench.harness import append_row

if TYPE_CHECKING:
    from agentgrpo.engine.engine import Engine
    from agentgrpo.learn.learner import Learner
    from agentgrpo.types import Completion

TURNS = 4
"""The last one is an answer: its tool takes no time."""
REPEATS = 2
TOKENS = 8
"""Of a turn in the barrier part: from half to twice as many."""
ENGINE = EngineConfig(max_model_len=512, kv_cache_gib=1.0, max_num_seqs=256)


class EveryTurnCalls:
    """An agent that runs whatever the policy says, and is told a word."""

    stop: Sequence[str] = ()

    def messages(self, task: Task) -> Sequence[Message]:
        return task.messages

    def prefill(self, task: Task) -> str:
        return ""

    def tools(self, task: Task) -> Sequence[Schema]:
        return ()

    def parse(self, text: str, task: Task) -> Action:
        return RunCode(text)

    def observe(self, action: Action, observation: Observation) -> Sequence[Message]:
        return [{"role": "user", "content": observation.text}]


class Slow:
    """A world whose tools take as long as they are told, one call after another."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = list(seconds)

    def step(self, action: Action) -> Observation:
        time.sleep(self._seconds.pop(0))
        return Observation("ok")

    def finish(self, answer: str | None) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to give back."""


class Slowly:
    """Episode i has row i of `seconds`."""

    def __init__(self, seconds: Any) -> None:
        self._rows = iter(seconds)

    def reset(self, task: Task) -> Slow:
        return Slow(next(self._rows))


class FixedLengths:
    """The engine, with turns that end, whole, after a number of tokens that is theirs."""

    def __init__(self, engine: Engine, lengths: Any) -> None:
        self._engine, self._lengths = engine, lengths
        self.max_model_len = engine.max_model_len

    def add_request(self, request_id: str, prompt_ids: Int32, **options: Any) -> None:
        index, *_, turn = map(int, request_id.split("."))
        options["max_tokens"] = int(self._lengths[index, turn])
        self._engine.add_request(request_id, prompt_ids, **options)

    def step(self) -> list[Completion]:
        return [replace(turn, finish_reason="stop") for turn in self._engine.step()]

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort(request_ids)


def without_barrier(engine: Engine, chat: Any, seconds: Any, lengths: Any) -> tuple[float, float]:
    """Wall seconds and seconds in the engine."""
    from agentgrpo.rollout.sampler import Sampler

    count = len(seconds)
    config = RolloutConfig(max_turns=TURNS, max_turn_tokens=99)
    sampler = Sampler(
        FixedLengths(engine, lengths), EveryTurnCalls(), Slowly(seconds), chat, config,
        max_tool_threads=count,
    )  # fmt: skip
    _, stats = sampler.play(tasks(count), 1, seed=0)
    return stats.total_s, stats.decode_s


def with_barrier(engine: Engine, chat: Any, seconds: Any, lengths: Any) -> tuple[float, float]:
    """The same work, each turn of all before the tools of all before the next turn of all."""
    from agentgrpo.rollout.engine_protocol import request_seed

    count, decode_s = len(seconds), 0.0
    started = time.perf_counter()
    ids = [chat.prompt_ids(task.messages) for task in tasks(count)]
    told = chat.observation_ids([{"role": "user", "content": "ok"}], last_id=None)
    fixed = FixedLengths(engine, lengths)
    with ThreadPoolExecutor(count) as threads:
        for turn in range(TURNS):
            for index in range(count):
                fixed.add_request(
                    f"{index}.0.{turn}", ids[index], temperature=1.0,
                    seed=request_seed(0, index, 0, 0, turn, "turn"),
                )  # fmt: skip
            while engine.num_in_flight:
                began = time.perf_counter()
                done = fixed.step()
                decode_s += time.perf_counter() - began
                for completion in done:
                    index = int(completion.request_id.split(".")[0])
                    ids[index] = np.concatenate([ids[index], completion.token_ids, told])
            list(threads.map(time.sleep, seconds[:, turn].tolist()))
    return time.perf_counter() - started, decode_s


def tool_seconds(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Lognormal times with a mean of 1 s, half under 0.5 s, one in a hundred over 8 s.

    Its quantiles at even distances, shuffled: no draw has a longer tail than another.
    """
    count = shape[0] * shape[1]
    normal = NormalDist(mu=-0.72, sigma=1.2)
    times = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    return rng.permutation(times).reshape(shape)


def barrier(model: str) -> None:
    engine, chat = make_engine(model), make_chat(model)
    engine.prepack_frozen_linears(())  # as where an adapter is trained
    count, seen = 64, defaultdict(list)
    for seed in range(REPEATS):
        rng = np.random.default_rng(seed)
        seconds = np.zeros((count, TURNS))
        seconds[:, :-1] = tool_seconds(rng, (count, TURNS - 1))
        lengths = rng.integers(TOKENS // 2, 2 * TOKENS, size=(count, TURNS))
        for name, play in (("none", without_barrier), ("each turn", with_barrier)):
            engine.reset_prefix_cache()
            wall, decode = play(engine, chat, seconds, lengths)
            seen[f"barrier: {name}"].append(wall)
            seen[f"idle: barrier {name}"].append(100 * (1 - decode / wall))
    shape = {"rollouts": count, "turns": TURNS, "tokens_per_turn": round(lengths.mean())}
    tools = seconds[:, :-1]
    note = f"tools: mean {tools.mean():.2f} s, longest {tools.max():.1f} s"
    for variant, values in seen.items():
        unit = "%" if variant.startswith("idle") else "s"
        append_row("rollout", variant, values, unit=unit, shape=shape, note=note)
    engine.shutdown()


def overhead(model: str) -> None:
    from agentgrpo.rollout.sampler import Sampler

    engine, chat = make_engine(model), make_chat(model)
    count, turns = 256, 2
    lengths = np.random.default_rng(0).integers(4, 13, size=(count, turns))
    shares = []
    for _ in range(REPEATS):
        engine.reset_prefix_cache()
        sampler = Sampler(
            FixedLengths(engine, lengths), EveryTurnCalls(), Slowly(np.zeros((count, turns))),
            chat, RolloutConfig(max_turns=turns, max_turn_tokens=99),
        )  # fmt: skip
        _, stats = sampler.play(tasks(count), 1, seed=0)
        python = stats.total_s - stats.decode_s - stats.idle_s
        shares.append(100 * python / stats.decode_s)
    append_row(
        "rollout", "python outside of the engine", shares, unit="% of engine",
        shape={"rollouts": count, "turns": turns, "tokens": int(lengths.sum())},
    )  # fmt: skip
    engine.shutdown()


def sync(model: str) -> None:
    import torch

    engine = make_engine(model)
    for weights in ("shared", "copy"):
        learner = make_learner(model, engine, weights)
        learner.publish()
        published = [learner.publish() for _ in range(20)]
        millis = [1e3 * metrics["publish_s"] for metrics in published]
        size = sum(p.nbytes for p in learner.model.parameters())
        shape = {"mib": size // 2**20}
        append_row("rollout", f"publish: {weights}", millis, unit="ms", shape=shape)
        if weights == "copy":
            rates = [metrics["publish_gb_per_s"] for metrics in published]
            append_row("rollout", "publish: copy", rates, unit="GB/s", shape=shape)
            a, b = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
            plain = []
            for _ in range(20):
                began = time.perf_counter()
                b.copy_(a)
                plain.append(size / 1e9 / (time.perf_counter() - began))
            append_row("rollout", "publish: one plain copy", plain, unit="GB/s", shape=shape)
    engine.shutdown()


def memory(model: str) -> None:
    from agentgrpo.support.memory import release, rss_bytes

    for weights in ("shared", "copy"):
        if len(sys.argv) > 3:  # in the child: one kind, so that nothing is left of the other
            weights = sys.argv[3]
            engine = make_engine(model)
            release()
            before = rss_bytes()
            learner = make_learner(model, engine, weights)
            release()
            print((rss_bytes() - before) / 2**20, sum(p.nbytes for p in learner.model.parameters()))
            engine.shutdown()
            return
        child = [sys.executable, "-m", "bench.rollout", model, "memory", weights]
        added, size = [], 0
        for _ in range(REPEATS):
            said = subprocess.run(child, capture_output=True, text=True, check=True).stdout.split()
            added.append(float(said[-2]))
            size = int(said[-1])
        append_row(
            "rollout", f"a learner's memory: {weights}", added, unit="MiB",
            shape={"model_mib": size // 2**20},
        )  # fmt: skip


FIRST_TOKEN = """
import sys
from agentgrpo.support.runtime import prepare_environment
prepare_environment()
import numpy as np
from agentgrpo.config import EngineConfig
from agentgrpo.engine.engine import Engine
engine = Engine(sys.argv[1], EngineConfig(max_model_len=512))
engine.add_request("a", np.arange(9, dtype=np.int32), max_tokens=1, temperature=1.0, seed=0)
while engine.num_in_flight:
    engine.step()
import os
os._exit(0)
"""


def start(model: str) -> None:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", FIRST_TOKEN, model], check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    load = f"load average {os.getloadavg()[0]:.1f}"
    append_row("rollout", "start to first token", seconds, unit="s", shape={}, note=load)


def tasks(count: int) -> list[Task]:
    return [
        Task(id=str(i), messages=({"role": "user", "content": f"Count to {i}."},), spec={})
        for i in range(count)
    ]


def make_engine(model: str) -> Engine:
    from agentgrpo.engine.engine import Engine

    return Engine(model, ENGINE)


def make_chat(model: str) -> Any:
    from transformers import AutoTokenizer

    from agentgrpo.models.chat import ChatTemplate

    return ChatTemplate(AutoTokenizer.from_pretrained(model))


def make_learner(model: str, engine: Engine, weights: str) -> Learner:
    from agentgrpo.learn.learner import Learner
    from agentgrpo.learn.weight_sync import policy_on

    config = LearnerConfig(gradient_checkpointing=False)
    return Learner(
        *policy_on(engine, model, config, weights=weights), config, LossConfig(),
        total_steps=1, temperature=1.0, dlogp_limit=1.0,
    )  # fmt: skip


PARTS: dict[str, Callable[[str], None]] = {
    "barrier": barrier,
    "overhead": overhead,
    "sync": sync,
    "memory": memory,
    "start": start,
}

if __name__ == "__main__":
    prepare_environment()
    for part in sys.argv[2:3] or PARTS:
        PARTS[part](sys.argv[1])
