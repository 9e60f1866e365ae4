"""Loads a config from TOML and command-line overrides, and validates it. Errors name the key.

A config file contains what differs from the defaults, or from the file that it `extends`. An
override is `section.key=value`; the value is parsed as TOML, or taken as a string if it is none.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import pydantic

from agentgrpo.config import FILTERS, Section, TrainConfig
from agentgrpo.config.command_settings import RECIPE_SECTIONS, require_used
from agentgrpo.config.section import is_section, walk
from agentgrpo.support.files import expanded, read_toml
from agentgrpo.support.user_calls import user_call

HERE = "{here}/"
MOVED = {
    "agentgrpo.recipe.errands:ErrandsEnv": "agentgrpo.examples.recipe.tasks:ComputeAndSearchEnv",
    "agentgrpo.recipe.errands:": "agentgrpo.examples.recipe.tasks:",
    "agentgrpo.examples.lessons:LettersEnv": "agentgrpo.examples.letters.env:LettersEnv",
    "agentgrpo.examples.lessons:FunctionsEnv": "agentgrpo.examples.functions.env:FunctionsEnv",
    "agentgrpo.examples.worlds:Walk": "agentgrpo.examples.walk.env:Walk",
    "agentgrpo.examples.worlds:Guess": "agentgrpo.examples.guess.env:Guess",
}
"""Module names in run.json of older runs, and their current names."""
Config = TypeVar("Config", bound=TrainConfig)
T = TypeVar("T")


def load_config(name_or_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load the config of a training run: load_config_of(TrainConfig, ...)."""
    return load_config_of(TrainConfig, name_or_path, overrides)


def load_config_of(
    kind: type[Config], name_or_path: str | Path, overrides: Sequence[str] = (), command: str = ""
) -> Config:
    """Read a TOML file, or a shipped config by its name, and apply `section.key=value` overrides.

    ValueError: a key is unknown (the message suggests the nearest), a value is invalid, or an
    override sets a key that `command` does not use ("": not checked).
    """
    path = _find(name_or_path, Path())
    table, keys = _read(path), list[str]()
    # kinds first: options on the command line belong to the kind on the command line
    for override in sorted(overrides, key=lambda o: not o.partition("=")[0].endswith(".kind")):
        dotted, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r}: expected section.key=value")
        *parents, leaf = names = dotted.strip().split(".")
        if not all(names):
            raise ValueError(
                f"override {override!r}: expected section.key=value, got an empty name"
            )
        section, name = table, ""
        for name in parents:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ValueError(f"override {override!r}: {name} is not a section")
        value = _value(text)
        if leaf == "kind" and _is_another_kind(name, section, value):
            section.pop("options", None)
        section[leaf] = value
        keys += _leaves(dotted.strip(), value)
    config = validate(kind, table, str(path))
    if command:
        require_used(command, keys)
    return config


def validate(kind: type[Config], table: Mapping[str, Any], source: str) -> Config:
    """Make a config from a table, without converting types: 1 is not true.

    `source` names the file in messages. ValueError has a line for each wrong key.
    """
    # by way of JSON: pydantic's strict mode accepts lists for tuples and strings for paths there
    text = json.dumps(unset(table, kind), default=str)
    for old, new in MOVED.items():
        text = text.replace(f'"{old}', f'"{new}')
    try:
        return kind.model_validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise ValueError("\n".join(_error_lines(error, kind, source))) from None


def unset(table: Any, kind: Any) -> Any:
    """Replace the string "none" by None where the type allows None, which TOML lacks."""
    if not (isinstance(table, Mapping) and is_section(kind)):
        return table
    result = dict(table)
    for key, field in kind.model_fields.items():
        if result.get(key) == "none" and type(None) in get_args(field.annotation):
            result[key] = None
        elif key in result:
            result[key] = unset(result[key], field.annotation)
    return result


def config_of(base: str | Path | TrainConfig | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Make a config in Python: a base with changed settings.

    `base`: a file, the name of a shipped config, a config, or None for the defaults. `settings`: by
    section, {"steps": 8, "rollout": {"group_size": 4}}.
    """
    table, source = {}, "the call"
    if isinstance(base, TrainConfig):
        if not settings:
            return base
        table = base.model_dump(exclude_unset=True)
    elif base is not None:
        path = _find(base, Path())
        table, source = _read(path), str(path)
    return validate(TrainConfig, _merged(table, settings), source)


def shipped_configs() -> dict[str, Path]:
    """The configs of the package's examples, by name."""
    folder = Path(str(resources.files("agentgrpo"))) / "examples"
    return {path.parent.name: path for path in sorted(folder.glob("*/config.toml"))}


def _read(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file's table and merge it into that of the file that it `extends`."""
    table: dict[str, Any] = _replace_here(read_toml(path), path)
    base = table.pop("extends", None)
    if base is None:
        return table
    extending = (*extending, path.resolve())
    try:
        if not isinstance(base, str):
            raise ValueError(f"expected the name of a shipped config or a path, got {base!r}")
        base_path = _find(base, path.parent)
        if base_path.resolve() in extending:
            cycle = " -> ".join(map(str, (*extending, base_path)))
            raise ValueError(f"{base!r} is a circle: {cycle}")
    except ValueError as error:
        raise ValueError(f"{path}: extends: {error}") from None
    return _merged(_read(base_path, extending), table)


def _replace_here(value: Any, path: Path) -> Any:
    """Replace "{here}/" at the start of strings by the folder of the config file."""
    if isinstance(value, dict):
        return {key: _replace_here(item, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_here(item, path) for item in value]
    if isinstance(value, str) and value.startswith(HERE):
        return str(path.absolute().parent / value.removeprefix(HERE))
    return value


def _merged(base: Mapping[str, Any], table: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Merge `table` into `base`, table by table; another kind discards the base's options."""
    drops_options = "kind" in table and _is_another_kind(name, base, table["kind"])
    merged = {key: value for key, value in base.items() if not (drops_options and key == "options")}
    for key, value in table.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value, key)
        merged[key] = value
    return merged


def _is_another_kind(section: str, table: Mapping[str, Any], kind: Any) -> bool:
    """Whether a section's table has another kind. Not for "auto", since its options may fit."""
    field = TrainConfig.model_fields.get(section)
    default = getattr(field.default, "kind", kind) if field else kind
    return table.get("kind", default) not in ("auto", kind)


def _leaves(key: str, value: Any) -> list[str]:
    """The dotted keys that a key and its value set; the value may be a table."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]


def _find(name_or_path: str | Path, folder: Path) -> Path:
    """The file with that path relative to the folder, else the shipped config of that name."""
    path = folder / expanded(str(name_or_path))
    shipped = shipped_configs()
    if path.exists():
        return path
    if str(name_or_path) not in shipped:
        raise ValueError(
            f"config {str(name_or_path)!r} is neither a file nor the name of a shipped config"
            f"{did_you_mean(path.stem, shipped) or '; see `agentgrpo train --help`'}"
        )
    return shipped[str(name_or_path)]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except ValueError:  # not TOML, or a number with thousands of digits
        return text.strip()


_ALTERNATIVE = re.compile(r"bool|int|float|str|(literal|list|tuple|dict)\[.*")
"""Parts of pydantic's error locations that name a member of a union, not a key."""


def by_key(error: pydantic.ValidationError) -> dict[str, list[Any]]:
    """The errors by dotted key."""
    errors: dict[str, list[Any]] = {}
    for details in error.errors():
        parts = [str(p) for p in details["loc"] if not _ALTERNATIVE.fullmatch(str(p))]
        errors.setdefault(".".join(parts), []).append(details)
    return errors


TRL_KEYS = {
    "num_generations": "rollout.group_size", "max_completion_length": "rollout.max_response_tokens",
    "temperature": "rollout.temperature", "max_tool_calling_iterations": "rollout.max_turns",
    "per_device_train_batch_size": "learner.max_tokens", "max_steps": "steps",
    "gradient_accumulation_steps": "learner.max_tokens", "output_dir": "out_dir",
    "generation_batch_size": "rollout.tasks_per_step", "save_steps": "save_every",
    "vllm_gpu_memory_utilization": "engine.kv_cache_gib", "eval_steps": "eval_every",
    "reward_funcs": "reward.functions", "report_to": "trackers", "lr": "learner.learning_rate",
}  # fmt: skip
"""Keys of TRL's GRPOConfig and their names here; docs/coming-from.md has all of them."""


def _error_lines(
    error: pydantic.ValidationError, kind: type[Section], source: str
) -> Iterable[str]:
    """One line for each key."""
    for key, errors in by_key(error).items():
        types = {details["type"] for details in errors}
        section, _, leaf = key.rpartition(".")
        if section == "rollout" and leaf in FILTERS:
            yield (
                f"rollout.{leaf} does not exist: the sampler would renormalise over the remaining "
                "tokens, the learner would not, and every importance ratio would be biased. Only "
                "temperature is exact (evaluation.top_p and top_k are allowed)"
            )
        elif "extra_forbidden" in types and key in RECIPE_SECTIONS:
            yield f"[{key}] is a section of a recipe; run it with `agentgrpo recipe`"
        elif "extra_forbidden" in types:
            for leaf_key in _leaves(key, errors[0]["input"]):
                yield f"unknown config key {leaf_key}{_suggest_key(leaf_key, [*dict(walk(kind))])}"
        elif "missing" in types:
            yield f"config key {key} is required, and {source} does not set it"
        elif "value_error" in types:  # raised by a validator of config/, which names its keys
            yield str(errors[0]["msg"]).removeprefix("Value error, ")
        else:
            yield format_error(f"config key {key}", *errors)


def _suggest_key(unknown: str, keys: Sequence[str]) -> str:
    """Suggest a key: the translation of TRL's, one with this name elsewhere, or a similar one."""
    section, _, leaf = unknown.rpartition(".")
    same_name = [key for key in keys if key.rpartition(".")[2] == leaf]
    candidates = [*same_name, *difflib.get_close_matches(unknown, keys, 1, 0.75)]
    if f"{section}.options" in keys:  # perhaps an option of the kind
        candidates.append(f"{section}.options.{leaf}")
    if suggestion := TRL_KEYS.get(leaf) or next(iter(candidates), ""):
        return f"; did you mean {suggestion}?"
    return "; docs/coming-from.md translates the settings of TRL and verl"


def format_error(key: str, *errors: Mapping[str, Any]) -> str:
    """A message for errors of ValidationError.errors() that concern the same value."""
    first, *more = dict.fromkeys(str(error["msg"]) for error in reversed(errors))
    expected = " or ".join([first, *(text.removeprefix("Input should be ") for text in more)])
    got = repr(errors[0]["input"])
    got = got if len(got) < 1000 else f"{got[:100]}... ({len(got)} characters)"
    hint = did_you_mean(str(errors[0]["input"]), re.findall(r"'([^']*)'", expected))
    return f"{key}: {expected}, got {got}{hint}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message that suggests the nearest known name, or ""."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def resolve_name(
    name: str,
    shipped: Mapping[str, T],
    *,
    key: str,
    own: str = "module:function",
    also: tuple[str, ...] = (),
) -> T | Callable[..., Any]:
    """Look up a name among the shipped ones, or load the user's own `module:function`.

    `key`, `own` (the form of a user's own name) and `also` (other valid names) are for the message
    of the ValueError.
    """
    if name in shipped:
        return shipped[name]
    if ":" in name:
        return load_callable(name, key=key)
    known = (*also, *shipped)
    raise ValueError(
        f"{key}: expected {', '.join(known)} or {own!r}, got {name!r}{did_you_mean(name, known)}"
    )


def name_of(function: Callable[..., Any], *, key: str) -> str:
    """The `module:name` by which load_callable() finds a function.

    ValueError: it is not a global of its module, the notebook or the script, such as a lambda.
    """
    for module in (getattr(function, "__module__", None), "__main__"):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        for name, value in names.items():
            if value is function:
                return f"{module}:{name}"
    raise ValueError(
        f"{key}: expected a function with a global name in its module, the notebook or the script, "
        f"for run.json, got {function!r}. Assign it to a name"
    )


def load_callable(name: str, *, key: str) -> Callable[..., Any]:
    """Import `module:attribute`. `key` is the setting that names it, for error messages.

    ValueError: it does not exist or is not callable. UserCodeError: the import fails.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute.isidentifier()) or module_name.endswith(".py"):
        raise ValueError(
            f"{key}: expected 'module:function' (a module is its file's name without .py), "
            f"got {name!r}"
        )
    with user_call(None, f"{key}: the module {module_name!r}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but something that it imports does not
            raise ValueError(f"{key}: no module {error.name!r} (from {name!r})") from None
        value = getattr(module, attribute, None)
    if not callable(value):
        what = "no" if value is None else "no callable"
        callables = (name for name, value in vars(module).items() if callable(value))
        hint = did_you_mean(attribute, callables)
        raise ValueError(f"{key}: module {module_name!r} has {what} {attribute!r}{hint}")
    return cast(Callable[..., Any], value)
