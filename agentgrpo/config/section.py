"""What all sections of a config have in common."""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError, core_schema

from agentgrpo.files import expanded


def _not_empty(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise PydanticCustomError("empty_path", "expected a path")  # "" would be where one is
    return value


NotEmpty = pydantic.BeforeValidator(_not_empty)
Place = Annotated[str, NotEmpty, pydantic.AfterValidator(expanded)]
"""A path, or a name of something else."""
PathOf = Annotated[Path, NotEmpty, pydantic.AfterValidator(Path.expanduser)]
"""A path."""
Positive = Annotated[int, Field(ge=1, le=10**7)]
NotNegative = Annotated[int, Field(ge=0, le=10**7)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
PositiveNumber = Annotated[float, Field(gt=0, le=1e6)]
NotNegativeNumber = Annotated[float, Field(ge=0, le=1e6)]
"""Every number has bounds, beyond which only a slip of the hand lies."""


class AsWritten:
    """Marks a type in which true is no number, "1" neither, 1 not true, and "none" may be None."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return _as_written(handler(source))


def _as_written(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(map(_as_written, schema))
    if not isinstance(schema, dict):
        return schema
    inner = {key: x if key == "default" else _as_written(x) for key, x in schema.items()}
    if schema.get("type") in ("bool", "int", "float"):
        return inner | {"strict": True}
    if schema.get("type") == "nullable" and "none" not in schema["schema"].get("expected", ()):
        return core_schema.no_info_before_validator_function(_unset, inner)
    return inner


def _unset(value: Any) -> Any:
    """TOML has no None: where None may be, the text "none" means it."""
    return None if value == "none" else value


class Section(AsWritten, pydantic.BaseModel):
    """A frozen group of settings that knows no other keys and converts none; numbers are finite."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def describe(section: type[Section], base: type) -> None:
    """Give the keys that a section inherits from a dataclass the texts below its fields."""
    (kind,) = ast.parse(inspect.getsource(base)).body
    assert isinstance(kind, ast.ClassDef)
    for field, text in itertools.pairwise(kind.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            info = section.model_fields[ast.unparse(field.target)]
            info.description = info.description or inspect.cleandoc(ast.literal_eval(text.value))


def is_set(section: Section, key: str) -> bool:
    """Whether a key has another value than its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def refuse_unread(section: Section, path: str, *keys: str, unless: bool, need: str) -> None:
    """Refuse keys that are set and would do nothing.

    Args:
        section: whose keys they are.
        path: its name in a config, for the message.
        keys: that are read in some settings only.
        unless: these are such settings.
        need: what would make them be.

    Raises:
        ValueError: one has another value than its default, and is not read.
    """
    wrong = [key for key in keys if is_set(section, key)]
    if wrong and not unless:
        value = getattr(section, wrong[0])
        raise ValueError(f"{path}.{wrong[0]}: {value!r} does nothing without {need}")
