"""Schema of a line of rollouts.jsonl: exactly the fields of types.Rollout, with their types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agentgrpo.types import Rollout

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
PLACE = {"step": int, "split": str, "group": int, "index": int, "previous_hash": str}
"""Fields of a line besides the rollout's."""


def schema_faults(row: Mapping[str, Any]) -> Iterator[str]:
    """Where a line differs from what records.rollout_record() writes."""
    try:
        LINE.model_validate(row)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            place = ".".join(str(part) for part in item["loc"])
            yield f"{place}: {item['msg']}, got {item['input']!r:.40}"


def _as_json(kind: Any, more: Mapping[str, Any] | None = None) -> Any:
    """The JSON type in which a value of this type is recorded."""
    origin, inner = get_origin(kind), get_args(kind)
    listed: Any = list
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [f.name for f in fields(kind) if f.metadata.get("recorded", True)]
        columns = {name: _as_json(hints[name]) for name in names} | dict(more or {})
        required: dict[str, Any] = {name: (hint, ...) for name, hint in columns.items()}
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


LINE: type[BaseModel] = _as_json(Rollout, PLACE)
"""A line of rollouts.jsonl."""
