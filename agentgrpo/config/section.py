"""The base class and number types of config sections; checks of unused keys."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from agentgrpo.support.files import expanded


def _not_empty(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():  # Path("") is the current directory
        raise PydanticCustomError("empty_path", "expected a path")
    return value


NotEmpty = pydantic.BeforeValidator(_not_empty)
PathOrName = Annotated[str, NotEmpty, pydantic.AfterValidator(expanded)]
UserPath = Annotated[Path, NotEmpty, pydantic.AfterValidator(Path.expanduser)]
Positive = Annotated[int, Field(ge=1, le=10**7)]
NotNegative = Annotated[int, Field(ge=0, le=10**7)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
PositiveNumber = Annotated[float, Field(gt=0, le=1e6)]
NotNegativeNumber = Annotated[float, Field(ge=0, le=1e6)]
"""All numbers have bounds, so that typing errors are found."""


class Section(pydantic.BaseModel):
    """A frozen group of settings. Unknown keys and non-finite numbers are errors."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def is_section(kind: Any) -> TypeGuard[type[Section]]:
    """Whether a type is a section."""
    return isinstance(kind, type) and issubclass(kind, Section)


def walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted keys of a section, each inner section before its own keys."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if is_section(field.annotation):
            yield from walk(field.annotation, f"{prefix}{name}.")


def describe(section: type[Section], base: type) -> None:
    """Set the descriptions of keys that a section inherits from a dataclass."""
    (kind,) = ast.parse(inspect.getsource(base)).body
    assert isinstance(kind, ast.ClassDef)
    for field, text in itertools.pairwise(kind.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            info = section.model_fields[ast.unparse(field.target)]
            info.description = info.description or inspect.cleandoc(ast.literal_eval(text.value))


Need = tuple[str, str, Callable[[Any], object]]
"""(keys separated by spaces, their requirement in words, whether a config meets it)."""


def forbid_unused(config: Any, needs: Iterable[Need], section: str = "") -> None:
    """Raise ValueError for a key that is set although its requirement is not met.

    `section`: prefix of the keys in the message, ending with a dot.
    """
    for keys, need, holds in needs:
        for key in keys.split():
            if is_set(config, key) and not holds(config):
                value = attrgetter(key)(config)
                raise ValueError(f"{section}{key}: {value!r} does nothing without {need}")


Rule = tuple[str, str, Callable[[Any], object]]
"""(key, what is expected, a format string of the config `c`; whether a config meets it)."""


def require_rules(config: Any, rules: Iterable[Rule]) -> None:
    """Raise ValueError for the first rule that a config breaks."""
    for key, expected, holds in rules:
        if not holds(config):
            value: Any = config
            for name in key.split("."):
                value = value[name] if isinstance(value, dict) else getattr(value, name)
            value = str(value) if isinstance(value, str) else value  # not the repr of a StrEnum
            raise ValueError(f"{key}: expected {expected.format(c=config)}, got {value!r}")


def is_set(config: Any, key: str) -> bool:
    """Whether the value of a dotted key differs from its default."""
    path, _, name = key.rpartition(".")
    section = attrgetter(path)(config) if path else config
    return bool(getattr(section, name) != type(section).model_fields[name].default)
