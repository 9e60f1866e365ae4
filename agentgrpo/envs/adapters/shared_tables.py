"""Databases that all episodes share and each copies record by record, as it touches them.

So that neither a reset nor a reward loads, copies or hashes one (bench/results/worlds.jsonl).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any


class CopiedOnWrite(dict[str, Any]):
    """A table of records that are shared until one is asked for by its key, and then its own.

    Iterating shows shared records: the domains' tools only read while they iterate (a test replays
    all ground truths and finds the shared database as it was).
    """

    def __init__(self, shared: Mapping[str, Any]) -> None:
        super().__init__(shared)
        self.own: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self.own:
            super().__setitem__(key, copy.deepcopy(super().__getitem__(key)))
            self.own.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.own.add(key)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """The record, its own from now on."""
        return self[key] if key in self else default  # noqa: SIM401 - that is what this is


def copied_on_write(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables whose records are shared until touched; what is no table is copied."""
    return {
        name: CopiedOnWrite(value) if isinstance(value, dict) else copy.deepcopy(value)
        for name, value in tables.items()
    }


def changed_records(tables: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, str]:
    """What differs from the tables that these were copied from: JSON by `table` or `table/key`.

    Equal for two copies of one base if and only if the copies are equal, types of numbers included;
    a record that is gone is "null".
    """
    changed: dict[str, str] = {}
    for name, value in tables.items():
        before = base[name]
        if not isinstance(value, CopiedOnWrite):
            pairs = [(name, value, before)]
        else:
            touched = value.own | (before.keys() - value.keys())
            pairs = [(f"{name}/{k}", dict.get(value, k), before.get(k)) for k in touched]
        for place, now, then in pairs:
            if (text := _json(now)) != _json(then):
                changed[place] = text
    return changed


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda record: record.model_dump(mode="json"))
