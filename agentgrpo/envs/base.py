"""What the world answers to an action. One episode per rollout, used by one thread at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentgrpo.agents.base import Action, Message
from agentgrpo.types import Task


class InfrastructureError(Exception):
    """The machine failed, not the policy: the rollout leaves its group and is never trained on."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the engine is to say in a second role: a customer, an opponent.

    It has the policy's weights as they are. What it says is no part of the rollout's tokens and is
    never trained on; the policy is shown what the episode makes of it.
    """

    messages: tuple[Message, ...]
    """The conversation as the second role sees it."""
    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an action did."""

    text: str
    """What the policy is shown."""
    failed: bool = False
    """The action did not work (an exception, a timeout, ...), by status and never by its text."""
    done: bool = False
    """The episode is over: nothing more is shown or sampled."""
    answer: str | None = None
    """With done: what the policy handed in as its answer by this action."""
    outputs: tuple[str, ...] = ()
    """One text per call of a CallTools, in its order; `text` is then not shown."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What this step was worth, by name: credited to the turn that caused it."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Added to the counts of the rollout (Rollout.stats)."""
    ask: Ask | None = None
    """The answer waits for this: step() is called again, with what was said as Heard, and only then
    gives the observation of the policy's action. Nothing else of this one is read."""


def require_observation(told: Any, by: object) -> None:
    """That what step() returned is an Observation whose rewards are numbers.

    Raises:
        TypeError: it is not; names the class of `by`, the episode.
    """
    name = type(by).__name__
    if not isinstance(told, Observation):
        raise TypeError(f"{name}.step: expected an Observation, got {told!r:.80}")
    if not isinstance(told.text, str):
        raise TypeError(f"{name}.step: expected a text, got {told.text!r:.80}")
    require_rewards(told.rewards, f"{name}.step")


def require_rewards(rewards: Any, by: str) -> None:
    """That rewards are finite numbers by name.

    Raises:
        TypeError: they are not; says whose they are.
    """
    if not isinstance(rewards, Mapping) or not all(
        isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)
        for name, value in rewards.items()
    ):
        raise TypeError(f"{by}: expected {{name: finite number}}, got {rewards!r:.80}")


class Episode(Protocol):
    """The world of one rollout."""

    def step(self, action: Action) -> Observation:
        """Carry the action out. May block; never raises for what the policy caused.

        Raises:
            InfrastructureError: see there.
        """

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """Rewards that the world itself gives, by name; may block.

        Called once, when the rollout has ended in whatever way but a failure of the machine.

        Args:
            answer: what the policy answered in the end, if it did.

        Raises:
            InfrastructureError: see there.
        """

    def close(self) -> None:
        """Give everything back. Called once, also after an error."""


class AsyncEpisode(Protocol):
    """An Episode whose methods are coroutines: all of a run wait on one thread's event loop."""

    async def step(self, action: Action) -> Observation: ...
    async def finish(self, answer: str | None) -> Mapping[str, float]: ...
    async def close(self) -> None: ...


AnyEpisode = Episode | AsyncEpisode


class Environment(Protocol):
    """Makes episodes."""

    def reset(self, task: Task) -> Any:
        """A fresh Episode or AsyncEpisode of a task.

        Cheap: what is dear waits for the first step().
        """
