"""The protocol of agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentgrpo.actions import Action, Message, Observation, Schema
from agentgrpo.types import Task


class Agent(Protocol):
    """Turns a task into messages and sampled text into actions. Has no state of a rollout.

    The shipped agents share a base class in agents/tagged_text.py.
    """

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end a turn."""

    def messages(self, task: Task) -> Sequence[Message]:
        """The conversation up to the policy's first turn."""

    def prefill(self, task: Task) -> str:
        """Text with which the policy's first turn begins, not sampled; usually ""."""

    def tools(self, task: Task) -> Sequence[Schema]:
        """Tools for the chat template; usually none."""

    def parse(self, text: str, task: Task) -> Action:
        """The action of one sampled turn. It sees only sampled text, so a prompt can never act.

        Args:
            text: the sampled text.
            task: the rollout's task, whose tools it may call.
        """

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """Format an observation for the policy.

        Args:
            action: the policy's action. A Malformed one was not carried out; its message is the
                observation's text.
            observation: the result, its texts clipped to rollout.max_observation_tokens.

        Returns:
            Messages, which close the policy's message and are rendered by the chat template; a last
            message of role assistant becomes the start of the policy's next one, not sampled. Or a
            str, which is appended unchanged to the policy's message, which then continues.
        """
