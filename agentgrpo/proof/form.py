"""The form of a record: every field of the types is there, of its type, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

NUMBERS: Mapping[Any, frozenset[type]] = {
    np.int32: frozenset({int}),
    np.float32: frozenset({int, float}),
    int: frozenset({int}),
    float: frozenset({int, float}),
}
"""JSON's numbers; a bool is none of them."""


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    recorded = (part.name for part in fields(kind) if part.metadata.get("recorded", True))
    return {name: hints[name] for name in recorded}


@cache
def _taken_apart(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def form_faults(kind: Any, value: Any, name: str) -> Iterator[str]:
    """Where a JSON value is not what records.rollout_record() makes of a value of this type."""
    origin, inner = _taken_apart(kind)
    if origin is UnionType:
        if value is not None:
            yield from form_faults(next(k for k in inner if k is not NoneType), value, name)
    elif isinstance(kind, type) and is_dataclass(kind):
        yield from _fields_faults(_hints(kind), value, name)
    elif origin is np.ndarray:
        yield from _list_faults(get_args(inner[1])[0], value, name)
    elif origin in (list, tuple):
        yield from _list_faults(inner[0], value, name)
    elif isinstance(value, dict) and inner:  # a mapping
        for key, item in value.items():
            yield from form_faults(inner[1], item, f"{name}.{key}")
    elif kind in NUMBERS:
        if type(value) not in NUMBERS[kind] or not math.isfinite(value):
            yield f"{name}: {value!r:.40} is not a finite {kind.__name__}"
    elif kind is bool:
        if type(value) is not bool:
            yield f"{name}: {value!r:.40} is not true or false"
    elif kind is not Any and not isinstance(value, str if _is_text(kind) else dict):
        yield f"{name}: {value!r:.40} is not of its type"


def _is_text(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, str | StrEnum)


def _fields_faults(hints: Mapping[str, Any], value: Any, name: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{name}: {value!r:.40} is not an object"
        return
    for key in sorted(hints.keys() ^ value.keys()):
        yield f"{name}: {'lacks' if key in hints else 'has a field of no meaning,'} {key!r}"
    for key in hints.keys() & value.keys():
        yield from form_faults(hints[key], value[key], f"{name}.{key}")


def _list_faults(kind: Any, value: Any, name: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{name}: {value!r:.40} is not a list"
    elif kind in NUMBERS:  # thousands of tokens: what is finite is looked at as an array
        if not set(map(type, value)) <= NUMBERS[kind]:
            yield f"{name}: holds what is not a number"
    else:
        for number, item in enumerate(value):
            yield from form_faults(kind, item, f"{name}[{number}]")
