"""The engine interface that playing needs; statistics and seeds of sampling."""

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
"""Called on the sampler's thread with each complete group, which does not change any more."""


def ignore(group: Group) -> None:
    """An Ended callback that does nothing."""


@dataclass(slots=True)
class SamplerStats:
    """Time of sampling in seconds, and counts."""

    total_s: float = 0.0
    decode_s: float = 0.0
    """In the engine."""
    idle_s: float = 0.0
    """Waiting for tools with nothing to decode."""
    observe_s: float = 0.0
    """Encoding observations."""
    engine_steps: int = 0
    total_sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    infra_failures: int = 0
    """Rollouts that ended in an infrastructure error, including those played again."""
    retries: int = 0
    branches: int = 0
    diverged_forks: int = 0
    """Branches whose replayed tools gave other results: restarted from the prompt."""

    def metrics(self) -> Metrics:
        return {name: float(value) for name, value in dataclasses.asdict(self).items()}


def request_seed(seed: int, *place: int | str) -> int:
    """Derive a seed from a base seed and a place; different for each place, reproducible.

    `seed` is that of the call (TrainConfig.seed_of). `place`: task, rollout, attempt, turn and
    purpose.
    """
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
