"""Writes a rollout as a JSON line that reads back exactly.

float32 numbers are written as the shortest decimals that read back as the same bits. The encoding
of a field follows from its type, so a new field of Rollout needs no change here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.types import Rollout, Task

PLACE = ("step", "split", "group", "index", "previous_hash", "flywheel")
"""Keys of a line besides the rollout's fields: its place in the run, or its origin."""


def name_of(place: Mapping[str, Any]) -> str:
    """A rollout's place in the run as text."""
    return "step {step} {split} group {group} rollout {index}".format(**place)


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """A rollout as JSON values, which read_rollout() restores exactly."""
    recorded = (f.name for f in fields(Rollout) if f.metadata.get("recorded", True))
    return {name: plain(getattr(rollout, name)) for name in recorded}


def require_recordable(task: Task) -> None:
    """Raise ValueError unless the task can be written as JSON."""
    for key, value in task.spec.items():
        try:
            json.dumps(encoded := plain({key: value}))
            for name in _keys(encoded):
                if not isinstance(name, str):
                    raise TypeError(f"expected keys of type str, got {name!r}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"task {task.id!r}: spec[{key!r}] cannot be recorded: {error}"
            ) from error


def read_rollout(record: dict[str, Any]) -> Rollout:
    """Restore a rollout from rollout_record(); missing fields get their defaults."""
    values = {key: value for key, value in record.items() if key not in PLACE}
    rollout: Rollout = _restore(Rollout, values, "rollout")
    return rollout


def read_rollouts(path: Path | str) -> Iterator[tuple[dict[str, Any], Rollout]]:
    """Yield (place, rollout) for each line of a rollouts.jsonl, except a half-written last one."""
    for number, record in numbered_rows(path, growing=True):
        try:
            place = {key: record[key] for key in PLACE if key in record}
            yield place, read_rollout(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error


# --- values and their types ---


def plain(value: Any) -> Any:
    """Convert a value to JSON types."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:
            return [float(str(number)) for number in value]
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [plain(item) for item in value]
    return dict(value) if hasattr(value, "items") else value


def _keys(value: Any) -> Iterator[Any]:
    """The keys of all nested dicts."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _keys(item)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _restore(kind: Any, value: Any, name: str) -> Any:
    """Inverse of plain() for a value of type `kind`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        options = [option for option in inner if option is not NoneType]
        return None if value is None else _restore(options[0], value, name)
    if origin is np.ndarray:
        (dtype,) = get_args(inner[1])
        return np.array(value, dtype)
    if origin is list:
        return [_restore(inner[0], item, f"{name}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        return tuple(value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        try:
            return kind(**{key: _restore(hints[key], item, key) for key, item in value.items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name}: not a {kind.__name__}: {error}") from error
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    return value
