"""What a client sends, in the one form in which messages are compared and rendered.

A client sends its conversation whole with every request. Which of the policy's turns it contains is
found by comparing its messages with those that were answered, never with text that is rendered from
ids: clients drop thoughts, write JSON in another way, and send null where "" was sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from agentgrpo.actions import shallow

ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip
TEXTS = (None, "text", "input_text", "output_text", "reasoning_text")
"""Types of a content's parts that are text."""


class BadRequest(ValueError):
    """A request that is not answered; what is wrong with it, for the client."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param

    @classmethod
    def expected(cls, what: str, *, param: str, got: Any) -> Self:
        """Of a part that has the wrong form."""
        return cls(f"{param}: expected {what}, got {got!r:.80}", param=param)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool in an assistant's message."""

    id: str
    name: str
    arguments: str
    """As text: JSON, if the policy wrote it well."""

    @property
    def key(self) -> Hashable:
        return self.id, self.name, json_key(self.arguments)


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

    @property
    def key(self) -> Hashable:
        """Equal for messages that mean the same; what clients leave out (reasoning) is no part.

        Made once, and without functools.cached_property, whose lock is one for all messages.
        """
        made: Hashable = self.__dict__.get("_key")
        if made is None:
            made = self.__dict__["_key"] = self._make_key()
        return made

    def _make_key(self) -> Hashable:
        calls = tuple(call.key for call in self.calls)
        name = "" if self.role == "tool" else self.name  # filled in from the call, or made up
        return self.role, self.content, calls, self.call_id, name

    def is_of(self, answered: Message) -> bool:
        """Whether a client that was given `answered` may send it back as this."""
        kept = self.reasoning is None or self.reasoning == (answered.reasoning or "")
        return kept and self.key == answered.key

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


def json_key(text: str) -> Hashable:
    """Equal for texts that are the same JSON value; other text, and what is nested deeper than
    actions.shallow() takes, is compared as it is.

    Order of keys, spaces and escapes do not matter, nor does 1 against 1.0, which some clients
    write for each other. True is not 1.

    >>> json_key('{"b": 2,  "a":1.0}') == json_key('{"a":1,"b":2}')
    True
    >>> json_key('[true]') == json_key('[1]'), json_key('{"a":1,"a":1}') == json_key('{"a":1}')
    (False, False)
    """
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        return _value_key(shallow(value))
    except (ValueError, RecursionError):
        return "text", text


def is_object(text: str) -> bool:
    """Whether text is a JSON object that other JSON of the same values is equal to."""
    key = json_key(text)
    return isinstance(key, tuple) and key[0] == "object"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key twice")
    return made


def _no_number(name: str) -> None:
    raise ValueError(name)


def _value_key(value: Any) -> Hashable:
    if isinstance(value, dict):
        return "object", frozenset((name, _value_key(one)) for name, one in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_value_key, value))
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        raise ValueError("too large")
    return type(value) is bool, value


def read_messages(given: Any) -> list[Message]:
    """The messages of a chat completion's request.

    Raises:
        BadRequest: one of them is none, or holds what is no text.
    """
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise BadRequest("messages: expected a list of at least one message", param="messages")
    return named([_read(message, f"messages[{place}]") for place, message in enumerate(given)])


def named(messages: Sequence[Message]) -> list[Message]:
    """A conversation, its tools' messages named after the calls that they answer."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        if message.role == "tool" and not message.name:
            message = replace(message, name=names.get(message.call_id, ""))
        made.append(message)
    return made


def _read(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise BadRequest.expected("an object", param=where, got=message)
    role = read_role(message.get("role"), where)
    content = text_of(message.get("content"), f"{where}.content")
    if role != "assistant":
        call_id = message.get("tool_call_id") if role == "tool" else None
        name = message.get("name")
        return Message(role, content, call_id=str(call_id or ""), name=str(name or ""))
    thoughts = message.get("reasoning")
    if thoughts is None:
        thoughts = message.get("reasoning_content")
    reasoning = None if thoughts is None else text_of(thoughts, f"{where}.reasoning")
    given = message.get("tool_calls") or ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise BadRequest(f"{where}.tool_calls: expected a list, got {given!r:.80}", param=where)
    calls = tuple(
        read_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(given)
    )
    return Message(role, content, calls, reasoning)


def read_role(said: Any, where: str) -> str:
    """The role of a message, as messages are compared by it.

    Raises:
        BadRequest: there is no such role.
    """
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise BadRequest.expected(f"one of {', '.join(ROLES)}", param=f"{where}.role", got=said)
    return role


def read_call(call: Any, where: str) -> Call:
    """A call of an assistant's message.

    Raises:
        BadRequest: it has no name, or arguments that are no text.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest.expected("a function with a name", param=where, got=call)
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        raise BadRequest(
            f"{where}.function.arguments: expected text, got {arguments!r:.80}", param=where
        )
    return Call(str(call.get("id") or ""), function["name"], arguments)


def text_of(content: Any, where: str) -> str:
    """A content: text, nothing, or parts that are text, which are joined.

    Raises:
        BadRequest: it is another thing, as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise BadRequest.expected("text or parts", param=where, got=content)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str) or kind not in TEXTS:
            raise BadRequest(f"{where}: only text is understood, got {part!r:.80}", param=where)
        texts.append(text)
    return "".join(texts)
