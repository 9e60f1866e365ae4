"""What the shipped agents share: the conversation's head, and acting between one pair of tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import pydantic
from pydantic import Field
from typing_extensions import TypedDict

from agentgrpo.actions import (
    Action,
    Finish,
    Malformed,
    Message,
    Observation,
    Schema,
    answer_in,
)
from agentgrpo.types import Task

Tag = Annotated[str, Field(min_length=1)]
Template = Annotated[str, Field(pattern=r"\{output\}")]
AfterMalformed = Literal["tell", "end"]


@pydantic.with_config(pydantic.ConfigDict(extra="forbid"))
class ExampleMessage(TypedDict):
    """One message of a worked example."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


Shots = Sequence[Sequence[ExampleMessage]]
"""Worked examples, each a list of messages."""


class TextAgent:
    """An agent that says nothing of its own and shows no tools: what all of them begin with.

    Args:
        system_prompt: "" says nothing.
        shots: worked examples, each a list of messages, shown before the task.
        after_malformed: what becomes of a turn that tried to act and got the form wrong: the policy
            is told and goes on, or ("end") the rollout ends there without an answer.
    """

    acts: ClassVar[tuple[str, ...]] = ()
    """What its environment must answer: "code", "lines" of a console, "tools" that the environment
    has, or a "search". An environment's class says in `answers` what it does."""
    home: ClassVar[str] = "python"
    """What env.kind = "auto" means."""
    stop: tuple[str, ...] = ()

    def __init__(
        self, system_prompt: str, shots: Shots, after_malformed: AfterMalformed = "tell"
    ) -> None:
        self._head: list[Message] = []
        if system_prompt:
            self._head.append({"role": "system", "content": system_prompt})
        self._head += [message for shot in shots for message in shot]
        self._ends = after_malformed == "end"

    def messages(self, task: Task) -> list[Message]:
        """System prompt, worked examples, then the task's own messages."""
        return [*self._head, *task.messages]

    def prefill(self, task: Task) -> str:
        """None: the policy begins its turn itself."""
        return ""

    def tools(self, task: Task) -> Sequence[Schema]:
        """None for the chat template: the prompt says what there is."""
        return ()

    def malformed(self, message: str) -> Action:
        """What a turn means whose form was wrong."""
        return Finish(None) if self._ends else Malformed(message)


class PairAgent(TextAgent):
    """An agent whose turn is an action between two tags, or else the answer after a prefix.

    Args:
        system_prompt: as TextAgent.
        shots: as TextAgent.
        after_malformed: as TextAgent.
        open_tag: begins an action.
        close_tag: ends an action, and the turn.
        answer_prefix: begins the answer of a turn without an action; "": all of it is.
        observation: how an answer of the world is shown; {output} is replaced by it.
    """

    error = "Error"
    """What the message of a malformed turn begins with."""

    def __init__(
        self,
        system_prompt: str,
        shots: Shots,
        after_malformed: AfterMalformed,
        *,
        open_tag: str,
        close_tag: str,
        answer_prefix: str,
        observation: str,
    ) -> None:
        super().__init__(system_prompt, shots, after_malformed)
        self._open, self._close, self._prefix = open_tag, close_tag, answer_prefix
        self._observation = observation
        self.stop = (close_tag,)

    def act(self, body: str) -> Action:
        """The action of what stands between the tags.

        Raises:
            ValueError: it is none; the message is for the policy.
        """
        raise NotImplementedError

    def parse(self, text: str) -> Action:
        """What is between the first open tag and the next close tag; else the answer, if any."""
        _, opened, rest = text.partition(self._open)
        body, closed, _ = rest.partition(self._close)
        try:
            if opened and closed:
                return self.act(body)
            if opened:
                raise ValueError(f"{self._open} without {self._close}")
            if self._close in text:
                raise ValueError(f"{self._close} without {self._open}")
        except ValueError as error:
            return self.malformed(f"{self.error}: {error}")
        return Finish(answer_in(text, self._prefix))

    def told(self, observation: Observation, **marks: str) -> str:
        """The world's answer as the policy is shown it, other {marks} than {output} filled in."""
        shown = self._observation
        for name, value in marks.items():
            shown = shown.replace(f"{{{name}}}", value)
        outputs = observation.outputs
        return shown.replace("{output}", "\n".join(outputs) if outputs else observation.text)
