"""What is counted while groups are played."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from agentgrpo.types import Metrics


@dataclass(slots=True)
class SamplerStats:
    """Where the time of sampling went, in seconds, and how much was sampled."""

    total_s: float = 0.0
    decode_s: float = 0.0
    """In the engine."""
    idle_s: float = 0.0
    """Waiting for tools with nothing to decode."""
    observe_s: float = 0.0
    """Making tokens of what worlds answered."""
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
        """The numbers, by name."""
        return {name: float(value) for name, value in dataclasses.asdict(self).items()}
