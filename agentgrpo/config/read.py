"""TOML and command-line overrides -> a checked config; every error names its key.

A config file holds only what differs from the defaults, or from another file that it `extends`.
Values on the command line are `section.key=value`; a value is read as TOML where it is TOML and as
a plain string otherwise.
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
from agentgrpo.support.files import expanded, read_toml
from agentgrpo.support.user_calls import user_call

HERE = "{here}/"
MOVED = {
    "agentgrpo.recipe.errands:": "agentgrpo.examples.recipe.tasks:",
    "agentgrpo.examples.lessons:LettersEnv": "agentgrpo.examples.letters.env:LettersEnv",
    "agentgrpo.examples.lessons:FunctionsEnv": "agentgrpo.examples.functions.env:FunctionsEnv",
    "agentgrpo.examples.worlds:Walk": "agentgrpo.examples.walk.env:Walk",
    "agentgrpo.examples.worlds:Guess": "agentgrpo.examples.guess.env:Guess",
}
"""Names that run.json of older runs has, and the names of today."""
Config = TypeVar("Config", bound=TrainConfig)
T = TypeVar("T")


def load_config(name_or_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The settings of a run: load_config_of(TrainConfig, ...)."""
    return load_config_of(TrainConfig, name_or_path, overrides)


def load_config_of(
    kind: type[Config], name_or_path: str | Path, overrides: Sequence[str] = (), command: str = ""
) -> Config:
    """Read a TOML file (or a shipped config by its name), then apply `section.key=value` overrides.

    There may be the sections of `kind`, and of overrides what `command` reads ("": anything). Else
    a ValueError names the key and the nearest that there is.
    """
    path = _find(name_or_path, Path())
    table, keys = _read(path), list[str]()
    # kinds first: what an override says of options is of the kind that an override names
    for override in sorted(overrides, key=lambda o: not o.partition("=")[0].endswith(".kind")):
        dotted, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r}: expected section.key=value")
        *parents, leaf = names = dotted.strip().split(".")
        if not all(names):
            raise ValueError(f"override {override!r}: a name is empty; expected section.key=value")
        section, name = table, ""
        for name in parents:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ValueError(f"override {override!r}: {name} is not a section")
        value = _value(text)
        if leaf == "kind" and _is_another(name, section, value):
            section.pop("options", None)
        section[leaf] = value
        keys += _leaves(dotted.strip(), value)
    config = validate(kind, table, str(path))
    if command:
        require_used(command, keys)
    return config


def validate(kind: type[Config], table: Mapping[str, Any], of: str) -> Config:
    """The settings that a table of the file `of` holds, each of the type that it is written in: 1
    is not true. ValueError has a line for each wrong key.
    """
    text = json.dumps(unset(table, kind), default=str)  # lists are tuples in JSON, texts paths
    for old, new in MOVED.items():
        text = text.replace(f'"{old}', f'"{new}')
    try:
        return kind.model_validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        raise ValueError("\n".join(_explained(error, kind, of))) from None


def unset(table: Any, kind: Any) -> Any:
    """TOML has no None: where None may be, the text "none" means it."""
    if not (isinstance(table, Mapping) and isinstance(kind, type) and issubclass(kind, Section)):
        return table
    made = dict(table)
    for key, field in kind.model_fields.items():
        if made.get(key) == "none" and type(None) in get_args(field.annotation):
            made[key] = None
        elif key in made:
            made[key] = unset(made[key], field.annotation)
    return made


def config_of(given: str | Path | TrainConfig | None, settings: Mapping[str, Any]) -> TrainConfig:
    """The settings of a run, from Python: a file, a shipped config's name or a whole config (None:
    nothing), with settings by section in its place: {"steps": 8, "rollout": {"group_size": 4}}.
    """
    table, of = {}, "the call"
    if isinstance(given, TrainConfig):
        if not settings:
            return given
        table = given.model_dump(exclude_unset=True)
    elif given is not None:
        path = _find(given, Path())
        table, of = _read(path), str(path)
    return validate(TrainConfig, _merged(table, settings), of)


def shipped_configs() -> dict[str, Path]:
    """The configs of the examples that come with the package, by name."""
    folder = Path(str(resources.files("agentgrpo"))) / "examples"
    return {path.parent.name: path for path in sorted(folder.glob("*/config.toml"))}


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's table, merged into that of the file that it `extends`."""
    table: dict[str, Any] = _placed(read_toml(path), path)
    base = table.pop("extends", None)
    if base is None:
        return table
    seen = (*seen, path.resolve())
    try:
        if not isinstance(base, str):
            raise ValueError(f"expected the name of a shipped config or a path, got {base!r}")
        above = _find(base, path.parent)
        if above.resolve() in seen:
            raise ValueError(f"{base!r} is a circle: {' -> '.join(map(str, (*seen, above)))}")
    except ValueError as error:
        raise ValueError(f"{path}: extends: {error}") from None
    return _merged(_read(above, seen), table)


def _placed(value: Any, path: Path) -> Any:
    """A value of a config file; "{here}/" at the start of a path is replaced by its folder."""
    if isinstance(value, dict):
        return {key: _placed(item, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_placed(item, path) for item in value]
    if isinstance(value, str) and value.startswith(HERE):
        return str(path.absolute().parent / value.removeprefix(HERE))
    return value


def _merged(base: Mapping[str, Any], table: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """`table` in `base`, table by table; the options of a kind go where another kind is named."""
    other = "kind" in table and _is_another(name, base, table["kind"])
    made = {key: value for key, value in base.items() if not (other and key == "options")}
    for key, value in table.items():
        below = made.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        made[key] = _merged(cast(dict[str, Any], below), value, key) if both else value
    return made


def _is_another(section: str, table: Mapping[str, Any], kind: Any) -> bool:
    """Whether a section's table is of another kind; of auto, whose options may fit, it is not."""
    field = TrainConfig.model_fields.get(section)
    default = getattr(field.default, "kind", kind) if field else kind
    return table.get("kind", default) not in ("auto", kind)


def _leaves(key: str, value: Any) -> list[str]:
    """The settings that are made by a key and its value, which may be a table."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]


def _find(name_or_path: str | Path, folder: Path) -> Path:
    """The file of that path, from the folder, or the shipped config of that name."""
    path = folder / expanded(str(name_or_path))
    shipped = shipped_configs()
    if path.exists():
        return path
    if str(name_or_path) not in shipped:
        raise ValueError(
            f"config {str(name_or_path)!r} is neither a file nor the name of a shipped config"
            f"{did_you_mean(path.stem, shipped) or '; `agentgrpo train --help` lists these'}"
        )
    return shipped[str(name_or_path)]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except ValueError:  # no TOML, or a number of thousands of digits
        return text.strip()


_ALTERNATIVE = re.compile(r"bool|int|float|str|(literal|list|tuple|dict)\[.*")
"""How pydantic names, behind the key, which type of several a value was held against."""


def by_key(error: pydantic.ValidationError) -> dict[str, list[Any]]:
    """The errors by the dotted key that they are of."""
    found: dict[str, list[Any]] = {}
    for one in error.errors():
        parts = [str(p) for p in one["loc"] if not _ALTERNATIVE.fullmatch(str(p))]
        found.setdefault(".".join(parts), []).append(one)
    return found


TRLS = {
    "num_generations": "rollout.group_size", "max_completion_length": "rollout.max_response_tokens",
    "temperature": "rollout.temperature", "max_tool_calling_iterations": "rollout.max_turns",
    "per_device_train_batch_size": "learner.max_tokens", "max_steps": "steps",
    "gradient_accumulation_steps": "learner.max_tokens", "output_dir": "out_dir",
    "generation_batch_size": "rollout.tasks_per_step", "save_steps": "save_every",
    "vllm_gpu_memory_utilization": "engine.kv_cache_gib", "eval_steps": "eval_every",
    "reward_funcs": "reward.functions", "report_to": "trackers", "lr": "learner.learning_rate",
}  # fmt: skip
"""What settings are called here that people bring from GRPOConfig; docs/coming-from.md has all."""


def _explained(error: pydantic.ValidationError, kind: type[Section], of: str) -> Iterable[str]:
    """A line for each key."""
    for where, several in by_key(error).items():
        kinds = {one["type"] for one in several}
        section, _, leaf = where.rpartition(".")
        if section == "rollout" and leaf in FILTERS:
            yield (
                f"rollout.{leaf} is no setting: the sampler would renormalise over the tokens that "
                "are left, the learner does not, and every importance ratio would be biased; only "
                f"temperature is exact (evaluation.top_p and top_k are allowed)"
            )
        elif "extra_forbidden" in kinds and where in RECIPE_SECTIONS:
            yield f"[{where}] is a section of a recipe, which is run by `agentgrpo recipe`"
        elif "extra_forbidden" in kinds:
            for key in _leaves(where, several[0]["input"]):
                yield f"unknown config key {key}{_hint(key, all_keys(kind))}"
        elif "missing" in kinds:
            yield f"config key {where} is required, and {of} does not set it"
        elif "value_error" in kinds:  # one of ours: it names its keys
            yield str(several[0]["msg"]).removeprefix("Value error, ")
        else:
            yield format_error(f"config key {where}", *several)


def _hint(wrong: str, keys: Sequence[str]) -> str:
    """The key that was meant: TRL's, so called in another section, or nearly so."""
    section, _, leaf = wrong.rpartition(".")
    same = [key for key in keys if key.rpartition(".")[2] == leaf]
    near = [*same, *difflib.get_close_matches(wrong, keys, 1, 0.75)]
    if f"{section}.options" in keys:  # one of the kind's own
        near.append(f"{section}.options.{leaf}")
    if there := TRLS.get(leaf) or next(iter(near), ""):
        return f"; did you mean {there}?"
    return "; docs/coming-from.md has the names of TRL's and verl's settings"


def format_error(key: str, *errors: Mapping[str, Any]) -> str:
    """What is wrong with the value of a key: errors of ValidationError.errors(), of one value."""
    first, *more = dict.fromkeys(str(error["msg"]) for error in reversed(errors))
    said = " or ".join([first, *(text.removeprefix("Input should be ") for text in more)])
    got = repr(errors[0]["input"])
    got = got if len(got) < 1000 else f"{got[:100]}... ({len(got)} characters)"
    near = did_you_mean(str(errors[0]["input"]), re.findall(r"'([^']*)'", said))
    return f"{key}: {said}, got {got}{near}"


def all_keys(section: type[Section], prefix: str = "") -> list[str]:
    """The dotted keys of a section and of those in it."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            keys += all_keys(inner, f"{prefix}{name}.")
    return keys


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error's message that names the nearest of those that there are, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def resolve_name(
    name: str,
    shipped: Mapping[str, T],
    *,
    key: str,
    own: str = "module:function",
    also: tuple[str, ...] = (),
) -> T | Callable[..., Any]:
    """What the setting `key` names: one that is shipped, or the user's own, of the form `own`.

    ValueError: there is none; names what there is (`also`, too) and the nearest of it.
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
    """By what name load_callable() finds it: that of its module, or of the notebook or script.

    ValueError: it has none there, as a lambda.
    """
    for module in (getattr(function, "__module__", None), "__main__"):
        there = vars(sys.modules[module]) if module in sys.modules else {}
        for name, value in there.items():
            if value is function:
                return f"{module}:{name}"
    raise ValueError(
        f"{key}: {function!r} has no name in a module, the notebook or the script, by which "
        "run.json could name it: assign it to one"
    )


def load_callable(name: str, *, key: str) -> Callable[..., Any]:
    """What `module:attribute` names; `key` is the setting it came from, for the error message.

    ValueError: there is none, or it cannot be called. UserCodeError: the module fails.
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
                raise  # the module is there, something that it imports is not
            raise ValueError(f"{key}: no module {error.name!r} (from {name!r})") from None
        found = getattr(module, attribute, None)
    if not callable(found):
        what = "no" if found is None else "no callable"
        there = (name for name, value in vars(module).items() if callable(value))
        said = did_you_mean(attribute, there)
        raise ValueError(f"{key}: module {module_name!r} has {what} {attribute!r}{said}")
    return cast(Callable[..., Any], found)
