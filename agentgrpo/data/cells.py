"""Reads the cells of a row: dotted paths, chat messages, expected answers."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError

from agentgrpo.programs.messages import ROLES, ChatMessage, Message, Role, with_tool_names

MISSING = object()
"""Value of a column or field that a row does not have."""
PART = re.compile(r"\{([^{}]+)\}")
KEYS = {"from": "role", "value": "content"}
NAMES = {
    **ROLES, **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("tool_response", "ipython"), "tool"),
}  # fmt: skip
"""Keys and roles of ShareGPT and others, with their standard names."""
CHAT_TEXT = re.compile(
    r"""\s*(?:array\()?\[\s*\{.*['"](?:role|from)['"]\s*:\s*['"](?:user|human|system)['"].*[\])]\s*""",
    re.DOTALL,
)
"""Matches messages as text that is no literal, such as NumPy prints."""


def cell(row: dict[str, Any], path: str) -> Any:
    """The value of a column, or of `column.field`, `column.0`, `column.-1.field` within it.

    A field of a list is the list of its objects' fields. Text that is a JSON or Python literal of
    an object or list is parsed. `{context} {question}` joins several cells to one text.
    """
    if path in row:
        return row[path]
    if PART.search(path):
        return PART.sub(lambda part: _text(row, part), path)
    value: Any = row
    for name in path.split("."):
        value = _field(_decoded(value), name)
    return value


def _text(row: dict[str, Any], part: re.Match[str]) -> str:
    if part[1] not in row and not re.fullmatch(r"[\w.-]+", part[1]):
        return part[0]  # braces that name no column, such as an example of JSON
    value = require_cell(row, part[1])
    if isinstance(value, dict | list):
        inner = f"{part[1]}.{next(iter(value), '') if isinstance(value, dict) else 0}"
        raise ValueError(f"column {part[1]!r}: expected text, got {value!r:.80}. Use {inner!r}")
    return str(value)


def require_cell(row: dict[str, Any], path: str) -> Any:
    """Like cell(). ValueError: the value is missing, null or NaN."""
    value = cell(row, path)
    if value is MISSING or value is None or value != value:  # NaN, by which pandas marks nulls
        what = "no column" if value is MISSING else "null in column"
        raise ValueError(f"{what} {path!r}; the row has {sorted(_paths(row))}")
    return value


def _field(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name, MISSING)
    if not isinstance(value, list):
        return MISSING
    if re.fullmatch(r"-?\d+", name):
        return value[int(name)] if -len(value) <= int(name) < len(value) else MISSING
    cells = [inner for each in value if (inner := _field(each, name)) not in (MISSING, None)]
    flat = [item for inner in cells for item in (inner if isinstance(inner, list) else [inner])]
    return flat or MISSING


def _decoded(value: Any) -> Any:
    """Parse text that is a JSON or Python literal of an object or list."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return parse(value.strip())
    return value


def _paths(row: dict[str, Any]) -> list[str]:
    """The columns of a row, and the fields of columns with objects."""
    paths = []
    for name, value in row.items():
        inner = _decoded(value)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        paths += [f"{name}.{key}" for key in inner] if isinstance(inner, dict) else [name]
    return paths


def require_plain(answer: Any, column: str) -> None:
    """Raise ValueError for an expected answer that is an object, instead of comparing its text."""
    for value in answer if isinstance(answer, list) else [answer]:
        if not isinstance(value, str | int | float):
            remedy = f". Use one of {_paths({column: value})}" * isinstance(value, dict)
            raise ValueError(
                f"data.answer = {column!r}: expected text, a number, true or false, or a list of "
                f"these, got {value!r:.80}{remedy}"
            )


def messages_of(question: Any, column: str, *, drop_last: bool) -> list[Message]:
    """The chat messages of a question. `drop_last`: without the assistant's messages at its end."""
    raw = _decoded(question)
    is_chat = isinstance(raw, list) and bool(raw) and all(map(_is_message, raw))
    if isinstance(question, str) and not is_chat:
        if CHAT_TEXT.fullmatch(question):
            raise ValueError(
                f"column {column!r}: expected text or messages, got messages that are neither JSON "
                f"nor a Python literal: {question!r:.80}"
            )
        raw = [{"role": "user", "content": question}]
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"column {column!r}: expected text or messages, got {question!r:.80}")
    messages = [message_of(m, f"column {column!r}, message {i + 1}") for i, m in enumerate(raw)]
    while drop_last and messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages or messages[-1].role == "assistant":
        raise ValueError(
            f"column {column!r}: the last message is the assistant's, which the policy has to "
            "write. data.drop_last_message = true leaves it out; data.answer can refer to it, "
            f'data.answer = "{column}.-1.{"value" if "value" in raw[-1] else "content"}"'
        )
    return [*with_tool_names(messages)]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and bool({"role", "from"} & value.keys())


def message_of(raw: Any, where: str) -> Message:
    """Convert a message of any common form. ValueError: information would be lost.

    `where` names the message in errors.
    """
    if not _is_message(raw):
        raise ValueError(f"{where}: expected {{'role': text, 'content': text}}, got {raw!r:.80}")
    fields = {KEYS.get(key, key): value for key, value in _without_nulls(raw).items()}
    name = str(fields.get("role"))
    role = NAMES.get(name.strip().lower(), name.strip().lower())
    role, known_role = (role, role) if role in get_args(Role) else (name, "user")
    try:
        parsed = ChatMessage.model_validate({**fields, "role": known_role}).to_message()
    except ValidationError as error:
        key, reason = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise ValueError(f"{where}: {'.'.join(map(str, key))}: {reason}, got {raw!r:.80}") from None
    message = replace(parsed, role=role)
    for key in fields.keys() - ChatMessage.model_fields.keys():
        if isinstance(fields[key], str | list | dict) and fields[key]:
            raise ValueError(f"{where}: expected no key {key!r}, which no chat template renders")
    if role == "user" and not message.content.strip():
        raise ValueError(f"{where}: expected text, got {raw!r:.80}")
    return message


def _without_nulls(value: Any) -> Any:
    """Remove the null keys that `datasets` adds to give all objects of a column the same keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
