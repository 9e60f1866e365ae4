"""Formats the settings as text: docs/config.md, and commented config files.

The descriptions come from config/ and from the docstrings of agents and environments.
`python -m agentgrpo.train.config_docs > docs/config.md` regenerates the page; a test compares it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys
import textwrap
from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

from agentgrpo.config import EndpointConfig, Section, TrainConfig
from agentgrpo.config.section import is_section, walk
from agentgrpo.train.plugins import KINDS, class_of, options_of

PREFACE = """
# Settings

All settings of a config (TOML). Generated from `agentgrpo/config/` and the classes of agents and
environments: change them there, then run `python -m agentgrpo.train.config_docs > docs/config.md`.

A file has what differs from the defaults, or from another file: `extends = "quickstart"`, or a path
relative to its own folder. Tables are merged, except `options` where another `kind` is named. A
path that begins with `{here}/` is relative to the folder of the file. On the command line write
`section.key=value`. An unknown key or a value of another type (true is no number, 200.0 no whole
number) is an error that names the nearest key. "none" unsets a key that takes it, as in
`learner.trained_layers=none`; the descriptions call this value None.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One config key."""

    section: str
    """Dotted; "" for the top-level keys."""
    key: str
    kind: str
    """Type and bounds, in words."""
    default: Any
    """None for a required key."""
    required: bool
    text: str
    """Description: the attribute's docstring."""


def settings(
    section: type[Section] = TrainConfig, prefix: str = "", kinds: Mapping[str, str] | None = None
) -> Iterator[Setting]:
    """Yield every key in the order of config/, a section's own keys before its inner sections.

    `kinds` maps a section to a shipped kind, {"agent": "code"}: the kind's options then replace the
    key `options`.
    """
    inner, shipped_kind = [], (kinds or {}).get(prefix.rstrip("."))
    for key, field in section.model_fields.items():
        if is_section(field.annotation):
            inner.append((key, field.annotation))
            continue
        if shipped_kind and key == "options":
            continue
        yield Setting(
            section=prefix.rstrip("."),
            key=key,
            kind=_kind(field),
            default=None if field.is_required() else field.get_default(call_default_factory=True),
            required=field.is_required(),
            text=" ".join((field.description or "").split()),
        )
    if shipped_kind:
        yield from options(prefix.rstrip("."), shipped_kind)
    for key, kind in inner:
        yield from settings(kind, f"{prefix}{key}.", kinds)


def options(section: str, kind: str) -> Iterator[Setting]:
    """Yield the options of a shipped kind."""
    for option in options_of(section, class_of(section, kind)):
        required = option.default is inspect.Parameter.empty
        yield Setting(
            section=f"{section}.options",
            key=option.name,
            kind=_named(option.annotation),
            default=None if required else option.default,
            required=required,
            text=option.text,
        )


def sections() -> dict[str, str]:
    """The description of each section, by name."""
    inner = {key: field.annotation for key, field in walk(TrainConfig)}
    kinds = {"": TrainConfig, **{key: kind for key, kind in inner.items() if is_section(kind)}}
    return {name: (kind.__doc__ or "").strip() for name, kind in kinds.items()}


def as_markdown() -> str:
    """The text of docs/config.md."""
    descriptions = sections()
    lines = [PREFACE.strip()]
    endpoints = settings(EndpointConfig, "endpoints.NAME.")
    descriptions["endpoints.NAME"] = EndpointConfig.__doc__ or ""
    rows = itertools.chain(settings(), endpoints)
    for name, keys in itertools.groupby(rows, lambda setting: setting.section):
        title = f"[{name}]" if name else "The run"
        lines += ["", f"## {title}", "", inspect.cleandoc(descriptions[name]), "", *_table(keys)]
        listed: dict[str, list[Setting]] = {}
        for kind in KINDS.get(name, ()):
            if any(options(name, kind)):
                lines += ["", f"### [{name}.options] of `{kind}`", ""]
                lines += _kind_page(name, kind, listed)
    return "\n".join(lines) + "\n"


def _kind_page(section: str, kind: str, listed: dict[str, list[Setting]]) -> list[str]:
    """A kind's options. An option equal to one of an earlier kind is only named."""
    factory = class_of(section, kind)
    paragraphs = [inspect.cleandoc(sys.modules[factory.__module__].__doc__ or "").split("\n\n")[0]]
    rows = list(options(section, kind))
    for other, other_rows in listed.items():
        if same := [f"`{row.key}`" for row in rows if row in other_rows]:
            paragraphs.append(f"Same as for `{other}`: {', '.join(same)}.")
            rows = [row for row in rows if row not in other_rows]
    listed[kind] = rows
    return [*textwrap.wrap(" ".join(paragraphs), 100), *(["", *_table(rows)] if rows else ())]


def _table(rows: Iterable[Setting]) -> Iterator[str]:
    yield from ("| key | type | default | description |", "|---|---|---|---|")
    for row in rows:
        default = "required" if row.required else f"`{_cell(toml(row.default))}`"
        yield f"| {' | '.join([f'`{row.key}`', _cell(row.kind), default, _cell(row.text)])} |"


def as_toml(values: Mapping[str, Any], kinds: Mapping[str, str] | None = None) -> str:
    """A config file that sets `values` ("section.key") and has all other keys as comments.

    KeyError: unknown key.
    """
    remaining, descriptions, lines = dict(values), sections(), []
    current = ""
    for setting in settings(kinds=kinds):
        if setting.section != current:
            current = setting.section
            text = " ".join(descriptions.get(current, "Options of the kind above.").split())
            lines += ["", f"[{current}]", *(f"# {line}" for line in textwrap.wrap(text, 96))]
        name = f"{current}.{setting.key}".lstrip(".")
        lines += ["", *(f"# {line}" for line in textwrap.wrap(setting.text, 96))]
        if name in remaining:
            lines.append(f"{setting.key} = {toml(remaining.pop(name))}")
        elif setting.default is None:
            lines.append(f"# {setting.key} = ({setting.kind}; not set)")
        else:
            lines.append(f"# {setting.key} = {toml(setting.default)}")
    if remaining:
        raise KeyError(f"unknown settings: {sorted(remaining)}")
    return "\n".join(lines).strip() + "\n"


def toml(value: Any) -> str:
    """Format a value as TOML. None, which TOML lacks, becomes the string "none"."""
    if value is None:
        return toml("none")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        # JSON strings are valid TOML except for DEL, which TOML requires to be escaped
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {toml(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, BaseModel):
        return toml(value.model_dump())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return str(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)


def _kind(field: FieldInfo) -> str:
    """A field's type and bounds, in words."""
    bounds = _bounds(field.metadata)
    base = _named(field.annotation)
    return f"{base} {bounds}" if bounds else base


def _named(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = _bounds([piece for extra in arguments[1:] for piece in _pieces(extra)])
        return f"{_named(arguments[0])} {bounds}".strip()
    if origin is Literal:
        return " or ".join(map(toml, arguments))
    if origin in (UnionType, Union):
        text = " or ".join(_named(part) for part in arguments if part is not NoneType)
        return f"{text}, or {toml(None)}" if NoneType in arguments else text
    if origin in (tuple, list, abc.Sequence):
        return f"list of: {_named(arguments[0])}"
    if origin in (dict, abc.Mapping) or is_typeddict(kind):
        return "table"
    if origin is abc.Callable:
        return "function"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"table of: {', '.join(kind.model_fields)}"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}
    if kind in names:
        return names[kind]
    return kind.__name__.lower() if isinstance(kind, type) else str(kind)


def _pieces(extra: Any) -> list[Any]:
    return list(extra.metadata) if isinstance(extra, FieldInfo) else [extra]


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(piece, name)}"
        for piece in metadata
        for name, sign in signs.items()
        if getattr(piece, name, None) is not None
    ]
    return ", ".join(bounds)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
