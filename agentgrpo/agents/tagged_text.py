"""Base classes of the shipped agents: prompt and examples; actions between a pair of tags."""

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
    """The text after the prefix, stripped; None without the prefix. A tag ends at its end tag.

    >>> answer_in("so Answer: 4", "Answer:"), answer_in("<answer>4</answer>.", "<answer>")
    ('4', '4')
    >>> answer_in(" all of it ", ""), answer_in("4", "Answer:")
    ('all of it', None)
    """
    _, separator, answer = text.partition(prefix) if prefix else ("", "all", text)
    if prefix.startswith("<") and prefix.endswith(">"):
        answer = answer.partition(f"</{prefix[1:]}")[0]
    return answer.strip() if separator else None


@dataclass(kw_only=True, eq=False)
class TextAgent:
    """Base class of all shipped agents: system prompt and worked examples, no tools, no prefill.

    Args:
        env: the environment. If it has a user, the user replies to turns without an action.
        system_prompt: the system message; "": none; None: the agent's own.
        shots: worked examples, each a list of messages, placed before the task.
        act_in_thoughts: carry out calls and code inside a thought too (<think>...</think>, or as
            the model's family writes it). False: only outside of thoughts, as vLLM does when it
            serves the model with a reasoning parser. An answer is always outside.
    """

    acts: ClassVar[tuple[str, ...]] = ()
    """Kinds of actions, all of which must be in the `answers` of the environment's class: "code",
    "lines" of a console, "tools", "search"."""
    home: ClassVar[str] = "python"
    """The environment that env.kind = "auto" chooses."""
    env: Any = None
    system_prompt: str | None = None
    shots: Shots = ()
    act_in_thoughts: bool = False

    @property
    def has_user(self) -> bool:
        return bool(getattr(self.env, "has_user", False))

    def talk(self, *acts: str) -> str:
        """A sentence for the prompt that explains how to reach the user; `acts`: tags of actions.

        "" if there is no user.
        """
        without = " or ".join(filter(None, acts))
        sentence = f" What you write without {without} is said to the user, who may reply."
        return sentence if self.has_user else ""

    @property
    def stop(self) -> tuple[str, ...]:
        return ()

    @property
    def marks(self) -> str:
        """Pattern of the start of an action, see split_thoughts(); here any text."""
        return r"\S"

    def prompt(self, task: Task) -> str:
        return ""

    def messages(self, task: Task) -> list[Message]:
        """System prompt, worked examples, then the task's own messages."""
        content = self.prompt(task) if self.system_prompt is None else self.system_prompt
        head: list[Message] = [{"role": "system", "content": content}] if content else []
        return [*head, *(message for shot in self.shots for message in shot), *task.messages]

    def prefill(self, task: Task) -> str:
        return ""

    def tools(self, task: Task) -> Sequence[Schema]:
        return ()

    def schemas(self, task: Task) -> Sequence[Schema]:
        """The environment's tools with references inlined."""
        return [inlined(tool) for tool in self.env.tools(task)]

    def parse(self, text: str, task: Task) -> Action:
        """The action of a turn, outside of its thoughts unless act_in_thoughts."""
        if self.act_in_thoughts:
            action = self.read(text, task)
            if not isinstance(action, Finish | Say):
                return action
        visible, thoughts, unclosed = split_thoughts(text, self.marks)
        if unclosed and any(stop in thoughts for stop in self.stop):
            return Malformed(IN_THOUGHT.format(THOUGHTS[unclosed]))
        return self.read(visible, task)

    def read(self, text: str, task: Task) -> Action:
        """The action of a turn's text; with act_in_thoughts of the whole turn."""
        return self.answer_or_say(text, "")

    def say_or_finish(self, text: str, answer: str | None = None) -> Action:
        """A turn without an action is a message to the user; without a user it ends the rollout.

        >>> TextAgent().say_or_finish("4", "4")
        Finish(answer='4')
        """
        if not self.has_user:
            return Finish(answer)
        return Say(text.strip(), answer)

    def answer_or_say(self, text: str, prefix: str) -> Action:
        """A turn without an action ends with the answer after `prefix`, else it is a message."""
        answer = answer_in(text, prefix)
        ends = bool(prefix) and answer is not None
        return Finish(answer) if ends else self.say_or_finish(text, answer)

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """The user's reply as a user message."""
        return [{"role": "user", "content": observation.text}]


@dataclass(kw_only=True, eq=False)
class PairAgent(TextAgent, ABC):
    """An agent whose turns are an action between two tags, or the answer after a prefix.

    Args:
        open_tag: starts an action.
        close_tag: ends an action and the turn.
        observation: format of the environment's output; {output} is replaced by it.
        answer_prefix: a turn with this text and without an action ends the rollout; the text after
            it is the answer. "": the whole turn. A turn without it goes to the user, if there is
            one.
    """

    error: ClassVar[str] = "Error"
    """Prefix of the message for a malformed turn."""
    open_tag: Tag = "<code>"
    close_tag: Tag = "</code>"
    observation: Template = "{output}"
    answer_prefix: str = "Answer:"

    @property
    def stop(self) -> tuple[str, ...]:
        return (self.close_tag,)

    @property
    def marks(self) -> str:
        return re.escape(self.open_tag)

    @abstractmethod
    def act(self, body: str, task: Task) -> Action:
        """The action that the text between the tags describes.

        Raises:
            ValueError: it describes none; the message is for the policy.
        """

    def read(self, text: str, task: Task) -> Action:
        """The action between the first open tag and the next close tag, else the answer."""
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
        return self.answer_or_say(text, self.answer_prefix)

    def format_output(self, observation: Observation, **fields: str) -> str:
        """Fill `self.observation` with the environment's output and other fields."""
        text = self.observation
        for name, value in fields.items():
            text = text.replace(f"{{{name}}}", value)
        # last, and by replace() instead of format(): an output may contain braces
        outputs = observation.outputs
        return text.replace("{output}", "\n".join(outputs) if outputs else observation.text)
