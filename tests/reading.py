"""Which settings a command reads: noted while it works, by key."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agentgrpo.config import EndpointConfig, Section
from agentgrpo.config.recipe import RecipeConfig

CHECKS = ("agentgrpo.config", "agentgrpo.machine.footprint", "agentgrpo.room", "pydantic")
"""Modules that read settings to hold them against one another, and do nothing with them."""


def keys_of(section: type[Section] = RecipeConfig, prefix: str = "") -> Iterator[tuple[type, str]]:
    """Each section's class and what its keys begin with."""
    yield section, prefix
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from keys_of(kind, f"{prefix}{name}.")


PREFIX = {section.__name__: prefix for section, prefix in keys_of()}
PREFIX |= {"TrainConfig": "", EndpointConfig.__name__: "endpoints.*."}


@contextmanager
def noted() -> Iterator[set[str]]:
    """Notes the keys that are read inside; of a copy only those that it was not given anew."""
    read: set[str] = set()
    copy, kept = Section.model_copy, list[Section]()
    anew: dict[int, frozenset[str]] = {}
    """By the id of a section: its keys whose values are the command's own."""

    def get(self: Any, name: str) -> Any:
        if name in type(self).model_fields:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            kind = type(self).model_fields[name].annotation
            inner = isinstance(kind, type) and issubclass(kind, Section)
            own = name in anew.get(id(self), ())
            if not inner and not own and not caller.startswith(CHECKS):
                read.add(PREFIX[type(self).__name__] + name)
        return object.__getattribute__(self, name)

    def copied(self: Any, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Any:
        made = copy(self, update=update, deep=deep)
        given = dict(update or {})
        inner = [value for value in given.values() if isinstance(value, Section)]
        anew[id(made)] = anew.get(id(self), frozenset()) | given.keys()
        for section in inner:
            anew.setdefault(id(section), frozenset(type(section).model_fields))
        kept.extend([made, *inner])  # so that no other gets the id
        return made

    Section.__getattribute__, Section.model_copy = get, copied  # type: ignore[method-assign]
    try:
        yield read
    finally:
        del Section.__getattribute__, Section.model_copy
