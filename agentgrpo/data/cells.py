"""What a row's columns hold: fields named by a dotted path, chat messages, expected answers."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError

from agentgrpo.programs.messages import ROLES, ChatMessage, Message, Role, named

MISSING = object()
"""The cell of a column or field that a row does not have."""
PART = re.compile(r"\{([^{}]+)\}")
KEYS, NAMES = {"from": "role", "value": "content"}, {**ROLES, "human": "user", "gpt": "assistant"}
"""ShareGPT's keys and roles, and other names of roles."""


def cell(row: dict[str, Any], path: str) -> Any:
    """The cell of a column, or within it: `column.field`, `column.0`, `column.-1.field`.

    A field of a list is that of each of its objects. Text of an object or list is read, as JSON or
    Python writes it. `{context} {question}` is a text made of several cells.
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
        return part[0]  # such as an example of JSON
    value = require_cell(row, part[1])
    if isinstance(value, dict | list):
        inner = f"{part[1]}.{next(iter(value), '') if isinstance(value, dict) else 0}"
        raise ValueError(f"column {part[1]!r}: expected text, got {value!r:.80}; name {inner!r}")
    return str(value)


def require_cell(row: dict[str, Any], path: str) -> Any:
    """As cell(). ValueError: missing, null or not a number."""
    value = cell(row, path)
    if value is MISSING or value is None or value != value:
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
    flat = [one for inner in cells for one in (inner if isinstance(inner, list) else [inner])]
    return flat or MISSING


def _decoded(value: Any) -> Any:
    """A value, or the object or list that it is the text of."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(value.strip())
    return value


def _paths(row: dict[str, Any]) -> list[str]:
    """The columns of a row; of a column of objects, its fields."""
    paths = []
    for name, value in row.items():
        inner = _decoded(value)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        paths += [f"{name}.{key}" for key in inner] if isinstance(inner, dict) else [name]
    return paths


def require_plain(answer: Any, column: str) -> None:
    """Refuse an expected answer that is an object: its text would be taken for the answer."""
    for value in answer if isinstance(answer, list) else [answer]:
        if not isinstance(value, str | int | float):
            remedy = f". Remedy: name one of {_paths({column: value})}" * isinstance(value, dict)
            raise ValueError(
                f"data.answer = {column!r}: expected text, a number, true or false, or a list of "
                f"these, got {value!r:.80}{remedy}"
            )


def messages_of(question: Any, column: str, *, drop_last: bool) -> list[Message]:
    """The chat messages of a question. `drop_last`: without the assistant's at its end."""
    said = _decoded(question)
    read = isinstance(said, list) and bool(said) and all(map(_is_message, said))
    if isinstance(question, str) and not read:
        said = [{"role": "user", "content": question}]
    if not isinstance(said, list) or not said:
        raise ValueError(f"column {column!r}: expected text or messages, got {question!r:.80}")
    messages = [message_of(m, f"column {column!r}, message {i + 1}") for i, m in enumerate(said)]
    while drop_last and messages and messages[-1].role == "assistant":
        messages.pop()
    if not messages or messages[-1].role == "assistant":
        raise ValueError(
            f"column {column!r}: the last message is the assistant's, that the policy is to write. "
            "Remedy: data.drop_last_message = true leaves it out; the answer can be read from it, "
            f'data.answer = "{column}.-1.{"value" if "value" in said[-1] else "content"}"'
        )
    return [*named(messages)]


def _is_message(said: Any) -> bool:
    return isinstance(said, dict) and bool({"role", "from"} & said.keys())


def message_of(said: Any, where: str) -> Message:
    """One chat message, as people write it. ValueError: it would lose something."""
    if not _is_message(said):
        raise ValueError(f"{where}: expected {{'role': text, 'content': text}}, got {said!r:.80}")
    given = {KEYS.get(key, key): value for key, value in _without_nulls(said).items()}
    name = str(given.get("role"))
    role = NAMES.get(name.lower(), name.lower())
    role, known = (role, role) if role in get_args(Role) else (name, "user")
    try:
        message = replace(ChatMessage.model_validate({**given, "role": known}).read(), role=role)
    except ValidationError as error:
        key, reason = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise ValueError(
            f"{where}: {'.'.join(map(str, key))}: {reason}, got {said!r:.80}"
        ) from None
    for key in given.keys() - ChatMessage.model_fields.keys():
        if isinstance(given[key], str | list | dict) and given[key]:
            raise ValueError(f"{where}: expected no key {key!r}, which no template is shown")
    if role == "user" and not message.content.strip():
        raise ValueError(f"{where}: expected text, got {said!r:.80}")
    return message


def _without_nulls(value: Any) -> Any:
    """Without the keys that `datasets` adds to make all objects of a column alike."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
