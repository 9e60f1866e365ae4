"""Every word that a command line may hold, asked of the commands' own parsers and of the config."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from agentgrpo.config import Section, TrainConfig
from agentgrpo.config.read import shipped_configs
from agentgrpo.config.readers import READS, reads
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.kernels.objective import LOSSES
from agentgrpo.registry import KINDS, REWARDS, class_of, options_of

NAMED = {
    "agent.kind": tuple(KINDS["agent"]),
    "env.kind": ("auto", *KINDS["env"]),
    "reward.kind": ("auto", *REWARDS),
    "loss.loss_type": tuple(LOSSES),
}
"""Settings that take a name which is shipped or the user's own, and those that are shipped."""
PLACES = {"config": "config", "run": "runs", "runs": "runs"}
"""Positional arguments that name something on disk."""


@dataclass(frozen=True, slots=True)
class Words:
    """What may follow a command."""

    words: tuple[str, ...]
    """Options, settings (`section.key=`, `section.key=value`), names of shipped configs."""
    place: str
    """"config": TOML files too; "runs": folders; "": any file where no word fits."""
    takes_value: tuple[str, ...]
    """Options that the next word belongs to."""


class _Asked(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Every parser raises itself instead of parsing."""

    def ask(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _Asked(parser)

    parse = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = ask  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]


def words_of(module: str) -> Words:
    """What may follow the command of this module."""
    try:
        with _asking():
            importlib.import_module(module).main([])
    except _Asked as asked:
        actions = list(_actions(asked.parser))
    else:
        raise AssertionError(f"{module}.main parses no arguments")
    known = {action.dest for action in actions if not action.option_strings}
    found = [name for action in actions for name in action.option_strings if name != "-h"]
    for action in actions:
        if not action.option_strings and action.choices:
            found += map(str, action.choices)
    if "config" in known:
        found += shipped_configs()
    if "overrides" in known:
        kind = RecipeConfig if module.startswith("agentgrpo.recipe") else TrainConfig
        command = module.rpartition(".")[2]
        found += (
            word
            for word in settings(kind)
            if command not in READS or reads(command, word.partition("=")[0])
        )
    return Words(
        words=tuple(dict.fromkeys(found)),
        place=next((PLACES[name] for name in PLACES if name in known), ""),
        takes_value=tuple(
            name for action in actions if action.nargs != 0 for name in action.option_strings
        ),
    )


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of a parser, and of the commands below it."""
    for action in parser._actions:
        if action.help is not argparse.SUPPRESS:
            yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def settings(section: type[Section], prefix: str = "") -> Iterator[str]:
    """`section.key=` of every setting, and `section.key=value` where the values are a few."""
    for key, field in section.model_fields.items():
        name, kind = prefix + key, field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from settings(kind, f"{name}.")
        elif key == "options" and prefix.rstrip(".") in KINDS:
            of = prefix.rstrip(".")
            for shipped in KINDS[of]:
                for option in options_of(of, class_of(of, shipped)):
                    yield from _with_values(f"{name}.{option.name}", choices(option.annotation))
        else:
            yield from _with_values(name, NAMED.get(name) or choices(kind))


def _with_values(name: str, values: Sequence[str]) -> list[str]:
    return [f"{name}=", *(f"{name}={value}" for value in values)]


def choices(kind: Any) -> list[str]:
    """The values of a type that has a few, as they are written on a command line."""
    origin = get_origin(kind)
    if kind is bool:
        return ["true", "false"]
    if origin is Literal:
        return [str(value).lower() if isinstance(value, bool) else str(value)
                for value in get_args(kind)]  # fmt: skip
    if origin in (Union, UnionType):
        return [value for part in get_args(kind) if part is not NoneType for value in choices(part)]
    if origin is Annotated:
        return choices(get_args(kind)[0])
    return []
