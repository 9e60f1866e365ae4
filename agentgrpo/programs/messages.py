"""What a client sends, in the one form in which messages are compared and rendered.

A client sends its conversation whole with every request. Which of the policy's turns it contains is
found by comparing its messages with those that were answered, never with text that is rendered from
ids: clients drop thoughts, write JSON in another way, and send null where "" was sent.
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
"""Roles that are another by an older or newer name."""
TEXTS = (None, "text", "input_text", "output_text", "reasoning_text")
"""Types of a content's parts that are text."""


PIECE = 16
"""Letters in sequence that two texts share only if one was made from the other."""
STRINGS = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')
"""In JSON; what follows keys."""


class BadRequest(ValueError):
    """A request that is not answered; what is wrong with it, for the client."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool in an assistant's message."""

    id: str
    name: str
    arguments: str
    """As text: JSON, if the policy wrote it well."""


@dataclass(frozen=True)
class Message:
    """A message of a conversation."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None
    call_id: str = ""
    """Which call a tool's message answers."""
    name: str = ""

    @cached_property
    def key(self) -> Hashable:
        """Equal for messages that may mean the same. What clients leave out or rewrite is no part:
        reasoning, ids of calls, text beside calls, white space around an answer's lines.
        """
        calls = tuple((call.name, json_key(call.arguments)) for call in self.calls)
        content = "" if calls else self._bare if self.role == "assistant" else self.content
        name = "" if self.role == "tool" else self.name  # filled in from the call, or made up
        return self.role, content, calls, self.call_id, name

    @property
    def ids(self) -> tuple[str, ...]:
        """Those of its calls."""
        return tuple(call.id for call in self.calls)

    @property
    def _bare(self) -> str:
        return "\n".join(map(str.rstrip, self.content.strip().splitlines()))

    def is_of(self, answered: Message) -> bool:
        """Whether a client that was given `answered` may send it back as this, which has its key.

        The ids of calls identify an answer without the text beside them (crewai, semantic-kernel),
        the text one whose ids a client makes anew.
        """
        kept = self.reasoning is None or self.reasoning == (answered.reasoning or "")
        dropped = not self.content and self.ids == answered.ids
        return kept and (self._bare == answered._bare or dropped)

    def shown(self) -> dict[str, Any]:
        """For a chat template."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": parsed(call.arguments)},
                }
                for call in self.calls
            ]
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.role == "tool":
            shown |= {"tool_call_id": self.call_id} if self.call_id else {}
        if self.name:
            shown["name"] = self.name
        return shown


def parsed(arguments: str) -> Any:
    """The arguments of a call as templates want them: an object, if they are one, of what
    actions.shallow() takes.
    """
    try:
        value = shallow(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def json_key(text: str) -> str:
    """Equal for texts that are the same JSON value; other text, and what is nested deeper than
    actions.shallow() takes, is compared as it is.

    Order of keys, spaces and escapes do not matter, nor does 1 against 1.0, which some clients
    write for each other. True is not 1.

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
    """Whether text is a JSON object."""
    try:
        return isinstance(_value(text), dict)
    except (ValueError, RecursionError):
        return False


def _value(text: str) -> Any:
    return shallow(json.loads(text, parse_int=float, parse_constant=_no_number))


def _no_number(name: str) -> None:
    raise ValueError(name)


def pieces(text: str, least: int = PIECE) -> list[str]:
    """What other text has if it was made from this: any PIECE of its letters and digits, or all of
    a shorter one of at least `least`. Case and quoting do not matter.
    """
    plain = letters(text)
    if len(plain) < PIECE:
        return [plain] if len(plain) >= least else []
    return [plain[i : i + PIECE] for i in range(0, len(plain) - PIECE + 1, 1 + len(plain) // 2048)]


def letters(text: str) -> str:
    """The letters and digits of a text, in lower case."""
    return re.sub(r"[\W_]+", "", text.casefold())


def text_of(content: Any) -> str:
    """A content: text, nothing, or parts that are text, which are joined."""
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
    """Arguments as text, which data and some clients write as an object."""
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class _ChatFunction(BaseModel):
    name: str
    arguments: Annotated[str | None, BeforeValidator(_as_text)] = ""


class _ChatCall(BaseModel):
    id: str | None = None
    function: _ChatFunction


class ChatMessage(BaseModel):
    """A message of a request; what is not here says nothing to a template."""

    role: Role
    content: Text = ""
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def read(self) -> Message:
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


def named(messages: Sequence[Message]) -> tuple[Message, ...]:
    """A conversation, its tools' messages named after the calls that they answer."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        if message.role == "tool" and not message.name:
            message = replace(message, name=names.get(message.call_id, ""))
        made.append(message)
    return tuple(made)
