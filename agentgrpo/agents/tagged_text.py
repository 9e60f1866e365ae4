"""What the shipped agents share: the conversation's head, and acting between one pair of tags."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field
from typing_extensions import TypedDict

from agentgrpo.actions import (
    THOUGHTS,
    Action,
    Finish,
    Malformed,
    Message,
    Observation,
    Say,
    Schema,
    inlined,
    split_thoughts,
)
from agentgrpo.types import Task

Tag = Annotated[str, Field(min_length=1)]
Template = Annotated[str, Field(pattern=r"\{output\}")]


@pydantic.with_config(pydantic.ConfigDict(extra="forbid"))
class ExampleMessage(TypedDict):
    """One message of a worked example."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


Shots = Sequence[Sequence[ExampleMessage]]
"""Worked examples, each a list of messages."""
IN_THOUGHT = "Error: nothing inside a thought is carried out; first close it with {}"


def answer_in(text: str, prefix: str) -> str | None:
    """What follows the prefix, stripped; None if it is not there. A tag ends at its end tag.

    >>> answer_in("so Answer: 4", "Answer:"), answer_in("<answer>4</answer>.", "<answer>")
    ('4', '4')
    >>> answer_in(" all of it ", ""), answer_in("4", "Answer:")
    ('all of it', None)
    """
    _, found, answer = text.partition(prefix) if prefix else ("", "all", text)
    if prefix.startswith("<") and prefix.endswith(">"):
        answer = answer.partition(f"</{prefix[1:]}")[0]
    return answer.strip() if found else None


@dataclass(kw_only=True, eq=False)
class TextAgent:
    """What every shipped agent begins with: a prompt and worked examples, no tools, no prefill.

    Args:
        env: what it acts in. If that has a user, it answers what is said.
        system_prompt: what the policy is told first; "" is nothing, None what the agent says of
            itself.
        shots: worked examples, each a list of messages, shown before the task.
        act_in_thoughts: carry out calls and code inside a thought (<think>...</think>, or as the
            model's family writes it) too. False: only text outside of thoughts, as where vLLM
            serves the model with a reasoning parser. An answer is always outside.
    """

    acts: ClassVar[tuple[str, ...]] = ()
    """What its environment must answer: "code", "lines" of a console, "tools" that the environment
    has, or a "search". An environment's class says in `answers` what it does."""
    home: ClassVar[str] = "python"
    """What env.kind = "auto" means."""
    env: Any = None
    system_prompt: str | None = None
    shots: Shots = ()
    act_in_thoughts: bool = False

    @property
    def has_user(self) -> bool:
        """Whether there is a user to talk with."""
        return bool(getattr(self.env, "has_user", False))

    def talk(self, *acts: str) -> str:
        """What the prompt says of the user, if there is one; `acts` are for somebody else."""
        without = " or ".join(filter(None, acts))
        said = f" What you write without {without} is said to the user, who may reply."
        return said if self.has_user else ""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn."""
        return ()

    @property
    def marks(self) -> str:
        """Pattern of what begins an action, see split_thoughts(). Any text."""
        return r"\S"

    def prompt(self, task: Task) -> str:
        """What the agent says of itself."""
        return ""

    def messages(self, task: Task) -> list[Message]:
        """System prompt, worked examples, then the task's own messages."""
        said = self.prompt(task) if self.system_prompt is None else self.system_prompt
        head: list[Message] = [{"role": "system", "content": said}] if said else []
        return [*head, *(message for shot in self.shots for message in shot), *task.messages]

    def prefill(self, task: Task) -> str:
        """None: the policy begins its turn itself."""
        return ""

    def tools(self, task: Task) -> Sequence[Schema]:
        """None for the chat template: the prompt says what there is."""
        return ()

    def schemas(self, task: Task) -> Sequence[Schema]:
        """The environment's tools, without references."""
        return [inlined(tool) for tool in self.env.tools(task)]

    def parse(self, text: str, task: Task) -> Action:
        """The action of what a turn says outside of its thoughts; see act_in_thoughts."""
        if self.act_in_thoughts:
            action = self.read(text, task)
            if not isinstance(action, Finish | Say):
                return action
        acted_on, thoughts, inside = split_thoughts(text, self.marks)
        if inside and any(stop in thoughts for stop in self.stop):
            return Malformed(IN_THOUGHT.format(THOUGHTS[inside]))
        return self.read(acted_on, task)

    def read(self, text: str, task: Task) -> Action:
        """The action of a text that is acted on: the whole turn, or what follows its thoughts."""
        return self.answered(text, "")

    def said(self, text: str, answer: str | None = None) -> Action:
        """What a turn without an action means: it is said to the user; if there is none, the end.

        >>> TextAgent().said("4", "4")
        Finish(answer='4')
        """
        if not self.has_user:
            return Finish(answer)
        return Say(text.strip(), answer)

    def answered(self, text: str, prefix: str) -> Action:
        """What a text without an action means: an answer, or what is said."""
        answer = answer_in(text, prefix)
        ends = bool(prefix) and answer is not None
        return Finish(answer) if ends else self.said(text, answer)

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """What the user replies, as a message of theirs."""
        return [{"role": "user", "content": observation.text}]


@dataclass(kw_only=True, eq=False)
class PairAgent(TextAgent, ABC):
    """An agent whose turn is an action between two tags, or else the answer after a prefix.

    Args:
        open_tag: begins an action.
        close_tag: ends an action, and the turn.
        observation: how the environment's answer is shown; {output} is replaced by it.
        answer_prefix: a reply that has this text and no action ends the rollout; what follows is
            the answer. "": the whole reply is. What lacks it is said to the user, if there is one.
    """

    error: ClassVar[str] = "Error"
    """What the message of a malformed turn begins with."""
    open_tag: Tag = "<code>"
    close_tag: Tag = "</code>"
    observation: Template = "{output}"
    answer_prefix: str = "Answer:"

    @property
    def stop(self) -> tuple[str, ...]:
        """The tag that ends an action."""
        return (self.close_tag,)

    @property
    def marks(self) -> str:
        return re.escape(self.open_tag)

    @abstractmethod
    def act(self, body: str, task: Task) -> Action:
        """The action of what stands between the tags.

        Raises:
            ValueError: it is none; the message is for the policy.
        """

    def read(self, text: str, task: Task) -> Action:
        """What is between the first open tag and the next close tag; else the answer, if any."""
        _, opened, rest = text.partition(self.open_tag)
        body, closed, _ = rest.partition(self.close_tag)
        try:
            if opened and closed:
                return self.act(body, task)
            if opened:
                raise ValueError(f"{self.open_tag} without {self.close_tag}")
            if self.close_tag in text:
                raise ValueError(f"{self.close_tag} without {self.open_tag}")
        except ValueError as error:
            return Malformed(f"{self.error}: {error}")
        return self.answered(text, self.answer_prefix)

    def shown(self, observation: Observation, **marks: str) -> str:
        """The environment's answer as it is shown, other {marks} than {output} filled in."""
        shown = self.observation
        for name, value in marks.items():
            shown = shown.replace(f"{{{name}}}", value)
        outputs = observation.outputs
        return shown.replace("{output}", "\n".join(outputs) if outputs else observation.text)
