"""What the world answers to an action. One episode per rollout, used by one thread at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentgrpo.agents.base import RunCode
from agentgrpo.types import Task


class InfrastructureError(Exception):
    """The machine failed, not the policy: the rollout leaves its group and is never trained on."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an action did."""

    text: str
    """What the policy is shown."""
    failed: bool = False
    """The action did not work (an exception, a timeout, ...), by status and never by its text."""


class Episode(Protocol):
    """The world of one rollout."""

    def step(self, action: RunCode) -> Observation:
        """Carry the action out. May block; never raises for what the policy caused.

        Raises:
            InfrastructureError: see there.
        """

    def close(self) -> None:
        """Give everything back. Called once, also after an error."""


class Environment(Protocol):
    """Makes episodes."""

    def reset(self, task: Task) -> Episode:
        """A fresh episode of a task. Cheap: what is dear waits for the first step()."""
