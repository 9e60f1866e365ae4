"""A run as the training loop records it: the real loop, sampler, reward and log, a scripted policy.

Only vLLM and the model are fakes.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from agentgrpo.actions import InfrastructureError, Observation
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_config
from agentgrpo.engine.agreement import Probes
from agentgrpo.learn.minibatches import Update
from agentgrpo.learn.step_record import ScoredBatch, StepRecord
from agentgrpo.records.metrics import RunLog
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.train.loop import train
from agentgrpo.train.plugins import decide_reward, make_reward
from agentgrpo.train.progress import Progress
from agentgrpo.types import Completion, Float32, Int32, Task
from tests.playing import CHAT, EOT, TOKENIZER
from tests.rollout.stubs import StubEngine, StubEnv, Turn
from tests.tiny import VOCAB

SMALL: dict[str, Any] = {
    "steps": 2, "eval_every": 1, "learner.decay": "constant", "engine.max_model_len": 400,
    "rollout.tasks_per_step": 2, "rollout.group_size": 4, "rollout.refill_below": 0,
    "rollout.max_refills": 0, "rollout.max_turn_tokens": 48, "rollout.max_turns": 3,
    "rollout.max_retries": 0, "data.num_heldout": 3, "sandbox.host_tools": ["world:called"],
}  # fmt: skip


class Engine(StubEngine):
    """StubEngine with realistic log-probabilities, sleep, wake and probes."""

    def step(self) -> list[Completion]:
        return [
            replace(turn, logprobs=-rng_of(turn).uniform(0.01, 3, len(turn.token_ids)).astype("f"))
            for turn in super().step()
        ]

    def wake(self) -> dict[str, float]:
        return {}

    def sleep(self) -> None: ...

    def probe(self, prompts: Sequence[Int32], num_tokens: int) -> list[Any]:
        ids, logprobs = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32)
        completion = SimpleNamespace(token_ids=ids, logprobs=logprobs, num_cached_tokens=0)
        return [completion for _ in prompts]


def rng_of(turn: Completion) -> np.random.Generator:
    return np.random.default_rng(turn.token_ids.tolist())


class Learner:
    """Scores an update's tokens like a policy that differs from the sampler's by rounding."""

    shares_prefixes = True

    def __init__(self, config: TrainConfig) -> None:
        self._config, self.step_count = config, 0

    def publish(self) -> dict[str, float]:
        return {}

    def score(self, token_ids: Int32) -> Float32:
        return np.zeros(len(token_ids) - 1, np.float32)

    def step(self, updates: Sequence[Update]) -> dict[str, float]:
        run, live = StepRecord(), [update for update in updates if update.batches]
        for index, update in enumerate(live):
            for batch in update.batches:
                rng = np.random.default_rng(batch.target_N.tolist())
                noise = rng.uniform(-5e-4, 5e-4, len(batch.row_N)).astype(np.float32)
                logp = np.minimum(batch.old_logp_N + noise, 0)
                p = np.exp(logp.astype(np.float64))
                rest = 1 - p + 1e-12
                entropy = -p * np.log(p) - rest * np.log(rest) + 0.7 * rest * np.log(VOCAB - 1)
                logp_N, entropy_N = torch.from_numpy(logp), torch.from_numpy(entropy).float()
                out: Any = SimpleNamespace(logp_N=logp_N, entropy_N=entropy_N)
                run.add_scores(ScoredBatch.of(index, batch, out))
                gap = (logp_N - torch.from_numpy(batch.old_logp_N)).abs()
                parts = {
                    "num_tokens": torch.tensor(float(len(logp))),
                    "entropy_mean": entropy_N.mean(),
                }
                run.kernel_metrics.append({**parts, "sampler_gap_max": gap.max()})
        metrics = run.metrics(self._config.loss)
        for index, sample_N, turn_N, fields in run.gather_fields():
            live[index].store_fields(sample_N, turn_N, **fields)
        self.step_count += 1
        rate = self._config.learner.learning_rate_at(self.step_count - 1, self._config.steps)
        tokens = sum(len(b.input_ids_T) for update in live for b in update.batches)
        return {"learning_rate": rate, "seconds": 0.1, "packed_tokens": float(tokens), **metrics}


class Tasks:
    """Numbered tasks."""

    steps_before = 0

    def __init__(self) -> None:
        self._drawn = 0

    def next(self, count: int) -> list[Task]:
        self._drawn += count
        return [a_task(f"t{self._drawn - count + i}") for i in range(count)]


def a_task(name: str) -> Task:
    question = {"role": "user", "content": f"What of {name}?"}
    return Task(id=name, messages=(question,), spec={"answer": 42})


def policy(rng: random.Random) -> Any:
    """Turns of every kind, right and wrong answers, some longer than max_turn_tokens."""

    def turn(number: int, prompt: str) -> Turn:
        code = f"<code>print({number})</code>{EOT}"
        others = [
            code, f"<code>fail {number}</code>", f"</code>{number}{EOT}", f"Answer: {number}{EOT}",
            f"{number}{EOT}", f"{number}" + "long " * 12,
        ]  # fmt: skip
        texts = [code] * 4 + [f"Answer: 42{EOT}"] * 6 + others
        broken = f"<code>{number} broken machine</code>"
        return Turn(broken if rng.random() < 0.05 else rng.choice(texts), steps=rng.randint(1, 4))

    return turn


def answer(code: str) -> Any:
    """The observation for a piece of code; an infrastructure error for "broken machine"."""
    if "broken machine" in code:
        return InfrastructureError("no session")
    failed = "fail" in code
    used = {"sandbox_wall_s": 0.5, "sandbox_cpu_s": 0.25, "sandbox_bytes": float(len(code))}
    called = {"host_calls": 2.0, "host_errors": 1.0, "host_s": 0.125}
    return Observation(
        f"out of {code}", failed, rewards={} if failed else {"ran": 0.25}, counts=used | called
    )


def record(
    folder: Path, *, seed: int = 0, engine: StubEngine | None = None, **overrides: Any
) -> TrainConfig:
    """Write a run with the engine's policy, by default policy(); returns its config."""
    settings = {**SMALL, **overrides}
    changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    config = load_config("quickstart", [*changes, f"out_dir={json.dumps(str(folder))}"])
    turns = policy(random.Random(seed)) if engine is None else engine.policy
    engine = Engine(TOKENIZER, turns, config.engine.max_model_len)
    agent, env = CodeAgent(system_prompt="S"), StubEnv(answer=answer)
    log, learner = RunLog(folder), Learner(config)
    log.write_run_json(
        config=config.model_dump(mode="json"), learner={"device": "cpu"}, vocab_size=VOCAB,
        reward=decide_reward(config.reward, judges=False).model_dump(mode="json"),
    )  # fmt: skip
    scoring = Scoring(
        make_reward(config.reward), config.reward, TOKENIZER.decode, total_steps=config.steps
    )
    parts = SimpleNamespace(
        engine=engine,
        learner=learner,
        sampler=Sampler(cast(Any, engine), agent, env, CHAT, config.rollout),
        tasks=Tasks(),
        log=log,
        progress=Progress(config.steps, Console(file=io.StringIO())),
        reward=scoring,
        heldout=[a_task(f"h{i}") for i in range(config.data.num_heldout)],
        probes=Probes([np.array([1, 2, 3], np.int32)]),
        agreement_threshold=1e-3,
        save=lambda _: log.offsets(),
    )
    train(config, cast(Any, parts))
    return config


# --- its files, changed

NAMES = ("rollouts", "metrics")


@dataclass
class Files:
    """A run's records, parsed."""

    rollouts: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    described: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, folder: Path) -> Files:
        rollouts, metrics = (read_lines(folder / f"{name}.jsonl") for name in NAMES)
        return cls(rollouts, metrics, json.loads((folder / "run.json").read_text()))

    def copy(self) -> Files:
        return copy.deepcopy(self)

    def with_row(self, name: str, number: int) -> tuple[Files, Any]:
        """A copy in which one row may be changed, and that row."""
        rows: list[Any] = list(getattr(self, name))
        rows[number] = copy.deepcopy(rows[number])
        if name == "rollouts":
            return Files(rows, self.metrics, self.described), rows[number]
        return Files(self.rollouts, rows, self.described), rows[number]

    def write(self, folder: Path, *, forged: bool) -> None:
        """Write them; forged: with all hashes recomputed."""
        files = self._forged() if forged else self
        for name in NAMES:
            (folder / f"{name}.jsonl").write_bytes(b"".join(map(as_line, getattr(files, name))))
        (folder / "run.json").write_text(json.dumps(files.described))

    def _forged(self) -> Files:
        ends: dict[Any, str] = {}
        rollouts, seal = chained(self.rollouts)
        for row, after in zip(rollouts, [*rollouts[1:], None], strict=False):
            last = seal["hash"] if after is None else after["previous_hash"]
            ends[row.get("step"), row.get("split")] = last
        metrics = []
        for row in self.metrics:
            split = "heldout" if "eval/rollouts" in row else "train"
            last = ends.get((row.get("step"), split), row.get("rollouts_hash"))
            metrics.append({**row, "rollouts_hash": last})
        metrics, other = chained(metrics)
        records = {"rollouts.jsonl": seal, "metrics.jsonl": other}
        return Files(rollouts, metrics, {**self.described, "records": records})


def chained(rows: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The rows, each with the hash of the row before, and the file's seal."""
    out: list[Any] = []
    last, size = digest(b""), 0
    for row in rows:
        out.append({**row, "previous_hash": last})
        line = as_line(out[-1])
        last, size = digest(line), size + len(line)
    return out, {"bytes": size, "hash": last}


def as_line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


def digest(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=16).hexdigest()
