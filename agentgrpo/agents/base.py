"""What a turn of the policy means, and how the environment's answer is said to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentgrpo.actions import Action, Message, Observation, Schema
from agentgrpo.types import Task


class Agent(Protocol):
    """Turns a task into messages, and sampled text into actions. Holds no state of a rollout.

    agents/tagged_text.py has what the shipped ones share.
    """

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end a turn."""

    def messages(self, task: Task) -> Sequence[Message]:
        """The conversation up to the policy's first turn."""

    def prefill(self, task: Task) -> str:
        """Text that the policy's first turn begins with, given and not sampled; mostly ""."""

    def tools(self, task: Task) -> Sequence[Schema]:
        """Tools that the chat template shows the policy; mostly none."""

    def parse(self, text: str, task: Task) -> Action:
        """The action of one sampled turn (its own text only, so a prompt can never act).

        Args:
            text: what was sampled.
            task: whose tools it may call.
        """

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """How the policy is told what its action did.

        Args:
            action: what was done; a Malformed one was not, and the observation holds its message.
            observation: the result, its texts clipped to the run's budget.

        Returns:
            Messages close the policy's turn and are rendered by the chat template before the next;
            with the content of a last one of role assistant the next begins, given and not sampled.
            A str is appended as it is to the same assistant message, and the turn goes on.
        """
