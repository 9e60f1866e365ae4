"""What a turn of the policy means, whatever the agent: one of three actions, answered or final."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentgrpo.types import Task


@dataclass(frozen=True, slots=True)
class RunCode:
    """The policy wants this code run."""

    code: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The policy is done."""

    answer: str | None
    """What it answered; None if it stopped without saying so in the asked form."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """The policy tried to act and got the form wrong; it is told how, and may try again."""

    message: str


Action = RunCode | Finish | Malformed


class Agent(Protocol):
    """Turns a task into messages, and sampled text into actions. Holds no state of a rollout."""

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end a turn."""

    def messages(self, task: Task) -> list[Mapping[str, str]]:
        """The conversation up to the policy's first turn."""

    def parse(self, text: str) -> Action:
        """The action of one sampled turn (its own text only, so a prompt can never act)."""

    def observe(self, output: str) -> Mapping[str, str]:
        """The message that tells the policy what its action did."""
