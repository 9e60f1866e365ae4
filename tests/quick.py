"""Runs commands with a fake engine and learner, without vLLM and torch: a run takes a second.

Config, setup, sampler, scoring and records are real; the engine is scripted and the learner only
counts its steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import agentgrpo.train.build
import agentgrpo.train.loop
from agentgrpo import cli
from agentgrpo.config import TrainConfig
from agentgrpo.support.packages import installed
from agentgrpo.train.build import play_on
from agentgrpo.train.parts import Parts
from agentgrpo.types import Metrics
from tests.playing import EOT
from tests.rollout.stubs import StubEngine, Turn


class QuickEngine(StubEngine):
    """Runs code in its first turn, then answers."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        super().__init__(tokenizer, self._turn, max_model_len=max_model_len)

    def _turn(self, number: int, prompt: str) -> Turn:
        acted = prompt.rpartition("<|im_start|>user")[0].count("<|im_start|>assistant")
        return Turn(f"Answer: {number % 2}{EOT}" if acted else f"<code>{number}</code>{EOT}")

    @property
    def num_in_flight(self) -> int:
        return len(self.running)

    def abort_all(self) -> None:
        self.running.clear()

    def wake(self) -> Metrics:
        return {}

    def sleep(self) -> None: ...
    def shutdown(self) -> None: ...


class QuickLearner:
    shares_prefixes = True

    def __init__(self) -> None:
        self.step_count = 0
        self.policy = SimpleNamespace(save=lambda folder: (folder / "w").write_text("w"))

    def publish(self) -> Metrics:
        return {}

    def step(self, updates: Any) -> Metrics:
        self.step_count += 1
        return {"loss": 0.0, "seconds": 1.0, "packed_tokens": 1.0}

    def save_state(self, path: Path, **of: Any) -> None:
        path.write_text("{}")


def start_engine(config: TrainConfig, parts: Parts, *, trained: bool = False) -> None:
    engine: Any = QuickEngine(parts.chat.tokenizer, config.engine.max_model_len)
    play_on(engine, config, parts)


def add_learner(config: TrainConfig, parts: Parts) -> None:
    parts.log.write_run_json(
        config=config.model_dump(mode="json"), model=parts.played, vocab_size=10**6,
        reward=parts.resolved.reward.model_dump(mode="json"),
        engine={"device": "cpu"}, learner={"device": "cpu"}, versions=installed(), machine={},
    )  # fmt: skip
    parts.learner = cast(Any, QuickLearner())
    parts.probes, parts.agreement_threshold = cast(Any, None), 0.0


STAND_INS = {
    "agentgrpo.train.build.start_engine": start_engine,
    "agentgrpo.train.build._add_learner": add_learner,
    "agentgrpo.train.loop.check_agreement": lambda *_, **__: {"max_dlogp": 0.0},
}


def main(arguments: list[str]) -> int:
    """Run a command with the fakes in its own process."""
    agentgrpo.train.build.start_engine = start_engine
    agentgrpo.train.build._add_learner = add_learner
    agentgrpo.train.loop.check_agreement = STAND_INS["agentgrpo.train.loop.check_agreement"]  # type: ignore[assignment, attr-defined]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
