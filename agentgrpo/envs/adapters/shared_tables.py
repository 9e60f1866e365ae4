"""Databases that all episodes share, copied record by record when an episode accesses them.

Neither a reset nor a reward loads, copies or hashes a database (bench/results/worlds.jsonl).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any


class CopiedOnWrite(dict[str, Any]):
    """A table that copies a shared record when it is accessed by its key.

    Iteration yields shared records: the domains' tools only read while they iterate (a test replays
    all ground truths and finds the shared database unchanged).
    """

    def __init__(self, shared: Mapping[str, Any]) -> None:
        super().__init__(shared)
        self.copied_keys: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self.copied_keys:
            super().__setitem__(key, copy.deepcopy(super().__getitem__(key)))
            self.copied_keys.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.copied_keys.add(key)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - that is what this is


def copied_on_write(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap tables to copy records on access. Values that are not tables are copied now."""
    return {
        name: CopiedOnWrite(value) if isinstance(value, dict) else copy.deepcopy(value)
        for name, value in tables.items()
    }


def changed_records(tables: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, str]:
    """Return the records that differ from the shared tables: JSON by `table` or `table/key`.

    The results for two copies of a base are equal if and only if the copies are equal, including
    the types of numbers. A deleted record is "null".
    """
    changed: dict[str, str] = {}
    for name, value in tables.items():
        base_value = base[name]
        if not isinstance(value, CopiedOnWrite):
            pairs = [(name, value, base_value)]
        else:
            keys = value.copied_keys | (base_value.keys() - value.keys())
            pairs = [(f"{name}/{k}", dict.get(value, k), base_value.get(k)) for k in keys]
        for path, record, base_record in pairs:
            if (text := _json(record)) != _json(base_record):
                changed[path] = text
    return changed


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda record: record.model_dump(mode="json"))
