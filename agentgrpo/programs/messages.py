"""Messages of clients in one form, in which they are compared and rendered.

A client sends its whole conversation with every request. To find the policy's turns in it, its
messages are compared with delivered messages, never with text rendered from token ids: clients drop
thoughts, reformat JSON, and send null instead of "".
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator

from agentgrpo.actions import shallow

ROLES = {"developer": "system", "function": "tool"}
"""Old and new names of roles."""
TEXTS = (None, "text", "input_text", "output_text", "reasoning_text")
"""Types of content parts that are text."""


PIECE = 16
"""Two texts that share that many letters in sequence were copied from each other."""
STRINGS = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')
"""Strings in JSON. The second group matches after keys."""


class BadRequest(ValueError):
    """A request that is refused, with the reason for the client."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call in an assistant message."""

    id: str
    name: str
    arguments: str
    """Text as the policy wrote it: valid JSON or not."""


@dataclass(frozen=True)
class Message:
    """A message of a conversation."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    call_id: str = ""
    """The id of the call to which a tool message belongs."""
    name: str = ""

    @cached_property
    def key(self) -> Hashable:
        """Equal for messages that may be the same. It ignores what clients drop or rewrite:
        reasoning, ids of calls, text next to calls, trailing spaces.
        """
        calls = tuple((call.name, json_key(call.arguments)) for call in self.calls)
        content = "" if calls else self._stripped if self.role == "assistant" else self.content
        # a tool message's name is copied from the call, or made up by the client
        name = "" if self.role == "tool" else self.name
        return self.role, content, calls, self.call_id, name

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(call.id for call in self.calls)

    @property
    def _stripped(self) -> str:
        return "\n".join(map(str.rstrip, self.content.strip().splitlines()))

    def may_be(self, delivered: Message) -> bool:
        """Whether this message, with an equal key, may be `delivered` as a client sends it back.

        Some clients drop the text next to calls (crewai, semantic-kernel): the ids identify the
        message. Others make new ids: the text identifies it.
        """
        has_same_reasoning = self.reasoning is None or self.reasoning == (delivered.reasoning or "")
        has_only_calls = not self.content and self.ids == delivered.ids
        return has_same_reasoning and (self._stripped == delivered._stripped or has_only_calls)

    def for_template(self) -> dict[str, Any]:
        template_message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            template_message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": parse_arguments(call.arguments)},
                }
                for call in self.calls
            ]
        if self.reasoning:
            template_message["reasoning_content"] = self.reasoning
        if self.role == "tool":
            template_message |= {"tool_call_id": self.call_id} if self.call_id else {}
        if self.name:
            template_message["name"] = self.name
        return template_message


def parse_arguments(arguments: str) -> Any:
    """Parse arguments to an object for a template. Returns the text if they are not an object
    that actions.shallow() accepts.
    """
    try:
        value = shallow(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def json_key(text: str) -> str:
    """Return equal keys for texts with the same JSON value. Other texts are their own key, also
    those nested deeper than actions.shallow() accepts.

    The order of keys, spaces and escapes do not matter. 1 equals 1.0, since some clients convert
    one to the other. True is not 1.

    >>> json_key('{"b": 2,  "a":1.0}') == json_key('{"a":1,"b":2}')
    True
    >>> json_key('[true]') == json_key('[1]')
    False
    """
    try:
        return json.dumps(_value(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(_value(text), dict)
    except (ValueError, RecursionError):
        return False


def _value(text: str) -> Any:
    return shallow(json.loads(text, parse_int=float, parse_constant=_reject_constant))


def _reject_constant(name: str) -> None:
    raise ValueError(name)


def pieces(text: str, least: int = PIECE) -> list[str]:
    """Fragments that a text copied from this one contains: PIECE letters and digits in sequence, or
    all of a shorter text with at least `least`. Case and quoting are ignored.
    """
    normalized = letters(text)
    if len(normalized) < PIECE:
        return [normalized] if len(normalized) >= least else []
    return [
        normalized[i : i + PIECE]
        for i in range(0, len(normalized) - PIECE + 1, 1 + len(normalized) // 2048)
    ]


def letters(text: str) -> str:
    """The letters and digits of a text, in lower case."""
    return re.sub(r"[\W_]+", "", text.casefold())


def text_of(content: Any) -> str:
    """Convert a content to text: a text, null, or a list of text parts, which are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("expected text or parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or kind not in TEXTS:
            raise ValueError("only text is understood")
        texts.append(text)
    return "".join(texts)


# --- as chat completions write them

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Text = Annotated[str, BeforeValidator(text_of)]


def _as_text(arguments: Any) -> Any:
    """Convert arguments to text. Data sets and some clients write them as an object."""
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class _ChatFunction(BaseModel):
    name: str
    arguments: Annotated[str | None, BeforeValidator(_as_text)] = ""


class _ChatCall(BaseModel):
    id: str | None = None
    function: _ChatFunction


class ChatMessage(BaseModel):
    """A message of a chat completions request. Templates do not use other fields."""

    role: Role
    content: Text = ""
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def to_message(self) -> Message:
        role = ROLES.get(self.role, self.role)
        if role != "assistant":
            call_id = self.tool_call_id if role == "tool" else None
            return Message(role, self.content, call_id=call_id or "", name=self.name or "")
        calls = tuple(
            Call(call.id or "", call.function.name, call.function.arguments or "")
            for call in self.tool_calls or ()
        )
        thoughts = self.reasoning_content if self.reasoning is None else self.reasoning
        return Message(role, self.content, calls, thoughts)


def with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Set the `name` of tool messages to the function of the call to which they belong."""
    names: dict[str, str] = {}
    result = []
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        if message.role == "tool" and not message.name:
            message = replace(message, name=names.get(message.call_id, ""))
        result.append(message)
    return tuple(result)
