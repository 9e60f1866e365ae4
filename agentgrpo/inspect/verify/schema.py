"""The form of a line of rollouts.jsonl: every field of the types is there, of its type, no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agentgrpo.types import Rollout

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
PLACE = {"step": int, "split": str, "group": int, "index": int, "previous_hash": str}
"""What a line has besides the rollout's fields."""


def schema_faults(row: Mapping[str, Any]) -> Iterator[str]:
    """Where a line is not what records.rollout_record() makes of a rollout."""
    try:
        _line().model_validate(row)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            place = ".".join(str(part) for part in each["loc"])
            yield f"{place}: {each['msg']}, got {each['input']!r:.40}"


@cache
def _line() -> type[BaseModel]:
    made: type[BaseModel] = _as_json(Rollout, PLACE)
    return made


def _as_json(kind: Any, more: Mapping[str, Any] | None = None) -> Any:
    """The type of the JSON value that a value of this type is recorded as."""
    origin, inner = get_origin(kind), get_args(kind)
    listed: Any = list
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [f.name for f in fields(kind) if f.metadata.get("recorded", True)]
        made = {name: _as_json(hints[name]) for name in names} | dict(more or {})
        required: dict[str, Any] = {name: (hint, ...) for name, hint in made.items()}
        return create_model(kind.__name__, __config__=STRICT, **required)
    if origin is np.ndarray:
        (dtype,) = get_args(inner[1])
        return listed[int if dtype is np.int32 else float]
    if origin is UnionType:
        return _as_json(inner[0]) | None
    if origin in (list, tuple):
        return listed[_as_json(inner[0])]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return str
    return kind
