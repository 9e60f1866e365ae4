"""The interface of an engine that decodes; seeds of requests; counts of sampled tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentgrpo.types import Completion, Group, Int32, Metrics


class Decoder(Protocol):
    """The part of engine.Engine that rollouts need."""

    max_model_len: int

    def add_request(
        self, request_id: str, prompt_ids: Int32, *, max_tokens: int, temperature: float,
        seed: int | None, stop: Sequence[str], stop_token_ids: Sequence[int], top_logprobs: int,
        filters: Mapping[str, float],
    ) -> None: ...  # fmt: skip
    def step(self) -> list[Completion]: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...


Ended = Callable[[Group], None]
"""Told of a group whose last rollout has ended, on play's thread; nothing of it changes any more.
"""


def ignore(group: Group) -> None:
    """Tell nobody."""


@dataclass(slots=True)
class SamplerStats:
    """Where the time of sampling went, in seconds, and how much was sampled."""

    total_s: float = 0.0
    decode_s: float = 0.0
    """In the engine."""
    idle_s: float = 0.0
    """Waiting for tools with nothing to decode."""
    observe_s: float = 0.0
    """Making tokens of what environments answered."""
    engine_steps: int = 0
    total_sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    infra_failures: int = 0
    """Rollouts that the machine broke, those that were then played again included."""
    retries: int = 0
    branches: int = 0
    diverged_forks: int = 0
    """Branches whose replayed tools answered otherwise than before: started again, alone."""

    def metrics(self) -> Metrics:
        return {name: float(value) for name, value in dataclasses.asdict(self).items()}


def request_seed(seed: int, *place: int | str) -> int:
    """The seed of one thing that is drawn: another at each place, the same in every repetition.

    `seed`: of the call, itself a function of run and step (TrainConfig.seed_of). `place`: task,
    rollout, try, turn, and what is drawn.
    """
    named = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(named, "little") >> 1
