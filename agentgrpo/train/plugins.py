"""From a name in a config to an agent, environment, reward or sampler: shipped or the user's own.

A shipped kind of agent or environment is a line in a table here; a user's is `module:Class`. Either
is a class whose keyword arguments are `agent.options` and `env.options`, documented in its own
docstring. What a run has, it is given if it asks for it by name (`GIVEN`). What is wrong is a
ValueError that names its key.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import pydantic

from agentgrpo.actions import InfrastructureError
from agentgrpo.config import RewardConfig, RolloutConfig, SandboxConfig
from agentgrpo.config.read import by_key, did_you_mean, format_error, load_callable, resolve_name
from agentgrpo.config.section import is_set
from agentgrpo.envs.tools import describe
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rewards.scoring import reward_function
from agentgrpo.rewards.shipped import (
    ChoiceReward,
    EnvironmentReward,
    MathReward,
    NumericReward,
    Reward,
    TextReward,
    with_costs,
)
from agentgrpo.rewards.trl_functions import is_trl_form
from agentgrpo.rollout.custom import RolloutSampler
from agentgrpo.sandbox import HostBudget, HostTools, SandboxInfraError
from agentgrpo.support import optional_deps
from agentgrpo.support.files import read_text
from agentgrpo.support.user_calls import UserCodeError, user_call

AGENTS = {
    "code": "agentgrpo.agents.code:CodeAgent",
    "repl": "agentgrpo.agents.repl:ReplAgent",
    "inline": "agentgrpo.agents.inline:InlineAgent",
    "tools": "agentgrpo.agents.tools:ToolAgent",
    "tags": "agentgrpo.agents.tags:TagAgent",
    "program": "agentgrpo.agents.program:ProgramAgent",
}
ENVIRONMENTS = {
    "python": "agentgrpo.envs.python:PythonEnv",
    "console": "agentgrpo.envs.console:ConsoleEnv",
    "tools": "agentgrpo.envs.tools:ToolEnv",
    "factory": "agentgrpo.envs.factory:FactoryEnv",
    "mcp": "agentgrpo.envs.adapters.mcp:McpEnv",
    "answer": "agentgrpo.envs.answer:AnswerEnv",
    "unit_tests": "agentgrpo.envs.graded:UnitTestEnv",
    "repair": "agentgrpo.envs.repair:RepairEnv",
    "harbor": "agentgrpo.envs.harbor:HarborEnv",
    "search": "agentgrpo.envs.search:SearchEnv",
    "tagged": "agentgrpo.envs.python_and_search:TaggedEnv",
    "gymnasium": "agentgrpo.envs.adapters.gymnasium:GymnasiumEnv",
    "reasoning_gym": "agentgrpo.envs.adapters.reasoning_gym:ReasoningGymEnv",
    "tau2": "agentgrpo.envs.adapters.tau2:Tau2Env",
    "tau_bench": "agentgrpo.envs.adapters.tau_bench:TauBenchEnv",
    "verifiers": "agentgrpo.envs.adapters.verifiers:VerifiersEnv",
}
KINDS: Mapping[str, Mapping[str, str]] = {"agent": AGENTS, "env": ENVIRONMENTS}
"""By section of a config."""
GIVEN = {
    "agent": ("env", "tools_script", "host_tools", "call_reader", "pool"),
    "env": (
        *("pool", "timeout_s", "stateless", "host_tools", "seed"),
        *("models", "retrievers", "load_encoder"),
    ),
}
"""What a class is given that asks for it by name; no options.

An agent: what it acts in; the source of sandbox.tools or None; the def lines and docstrings of
sandbox.host_tools or None; the engine's readers of tool calls by the parser's name; the sandbox's
pool. An environment: the pool, sandbox.timeout_s and stateless, the HostTools of sandbox.host_tools
or None, seed, who may be asked to speak in a second role (actions.Model) by the name of the
endpoint, the endpoints that find documents by theirs, what loads an encoder.
"""
REWARDS: dict[str, Callable[..., Reward]] = {
    "numeric": NumericReward,
    "math": MathReward,
    "choice": ChoiceReward,
    "text": TextReward,
    "none": EnvironmentReward,
}

Factory = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a kind: a keyword argument of its class."""

    name: str
    annotation: Any
    """What it takes; Any where the class does not say."""
    default: Any
    """`inspect.Parameter.empty` where it has to be given."""
    text: str
    """What the class's docstring says of it under `Args:`."""


def parameters_of(factory: Factory) -> dict[str, inspect.Parameter]:
    """What a class or function takes by name; `**` with whatever else it takes.

    Where a class passes on what it does not know (`**options`), its parent's parameters are taken
    too. None of these is required: the class may give it itself.
    """
    above = [c for c in getattr(factory, "__mro__", ()) if not getattr(c, "_is_protocol", False)]
    owners = [c for c in above if c is not object and {"__init__", "__new__"} & vars(c).keys()]
    taken: dict[str, inspect.Parameter] = {}
    for owner in owners or [factory]:
        parameters = list(inspect.signature(owner).parameters.values())
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                needed = owner in (factory, *owners[:1]) or p.default is not p.empty
                taken.setdefault(p.name, p if needed else p.replace(default=None))
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            return taken
    return {**taken, "**": parameters[-1]}


def options_of(section: str, factory: Factory) -> list[Option]:
    """What `agent.options` or `env.options` may hold for a class."""
    hints: dict[str, Any] = {}
    said: dict[str, str] = {}
    for owner in reversed(getattr(factory, "__mro__", [factory])):
        for part in (owner, vars(owner).get("__init__", owner)):  # of a dataclass, of another
            names = vars(sys.modules[part.__module__]) if hasattr(part, "__module__") else {}
            for name, hint in inspect.get_annotations(part).items():
                with contextlib.suppress(NameError):  # that only type checkers know: unchecked
                    hints[name] = eval(hint, names) if isinstance(hint, str) else hint
        said |= describe(inspect.cleandoc(owner.__doc__ or ""))[1]
    return [
        Option(name, hints.get(name, Any), p.default, said.get(name, ""))
        for name, p in parameters_of(factory).items()
        if name not in (*GIVEN[section], "**")
    ]


def class_of(section: str, kind: str) -> Factory:
    """The class that `agent.kind` or `env.kind` names."""
    key, also = f"{section}.kind", ("auto",) if section == "env" else ()
    name = resolve_name(kind, KINDS[section], key=key, own="module:Class", also=also)
    return load_callable(name, key=key) if isinstance(name, str) else name


def checked_option(key: str, annotation: Any, value: Any) -> Any:
    """A value as an annotation reads it, which converts no types; "none" where None may be."""
    if value == "none" and type(None) in get_args(annotation):
        return None
    settings = pydantic.ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        reader: Any = pydantic.TypeAdapter(dict[str, annotation], config=settings)
        text = json.dumps({"": value}, default=str)
    except (pydantic.PydanticUserError, TypeError):  # an annotation that says nothing to pydantic
        return value
    try:
        return reader.validate_json(text, strict=True)[""]
    except pydantic.ValidationError as error:
        found = by_key(error).items()
        raise ValueError(
            "\n".join(format_error(f"{key}{where}", *some) for where, some in found)
        ) from None


@dataclass(frozen=True, slots=True)
class Kind:
    """The class that `agent.kind` or `env.kind` names, and its options."""

    section: str
    name: str
    factory: Factory
    options: Mapping[str, Any]
    """Each as the class's annotation reads it."""

    def make(self, protocol: type, given: Mapping[str, Any]) -> Any:
        """An instance, from the options and what the class asks for by name of what is given."""
        factory, key = self.factory, f"{self.section}.kind"
        asked, options = parameters_of(factory), f"{self.section}.options"
        taken = {name: given[name] for name in given if name in asked}
        try:
            with user_call(factory, f"{key}: {factory.__name__}"):
                made = factory(**taken, **self.options)
        except UserCodeError as error:
            cause, (name, colon, _) = error.__cause__, str(error.__cause__).partition(":")
            if isinstance(cause, ValueError) and colon and name.partition(".")[0] in asked:
                raise ValueError(f"{options}.{cause} (at {error.where})") from error
            raise
        except (ValueError, TypeError) as error:  # of a shipped one
            name, colon, _ = str(error).partition(":")
            if name.startswith(f"{self.section}.") and colon:  # it names its key itself
                raise
            known = name.partition(".")[0] in asked
            where = f"{options}." if known else f"{options}: {factory.__name__}: "
            raise ValueError(f"{where}{error}") from error
        needed = [name for name in vars(protocol) if not name.startswith("_")]
        with user_call(type(made), f"{key}: {type(made).__name__}"):  # some may be properties
            missing = ", ".join(name for name in needed if not hasattr(made, name))
        if missing:
            raise ValueError(f"{key}: {self.name!r} lacks {missing}; see agents/base.py, envs/")
        return made


def kind_of(section: str, kind: str, options: Mapping[str, Any]) -> Kind:
    """What `agent.kind` or `env.kind` names, its options checked."""
    factory, key = class_of(section, kind), f"{section}.options"
    known = {option.name: option for option in options_of(section, factory)}
    takes_all = "**" in parameters_of(factory)
    for name in (name for name in options if name not in known):
        if not takes_all or name in GIVEN[section]:
            raise ValueError(
                f"{key}.{name}: {factory.__name__} does not take it{did_you_mean(name, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )
    checked = {
        name: checked_option(f"{key}.{name}", known[name].annotation, value)
        if name in known
        else value
        for name, value in options.items()
    }
    for name, option in known.items():
        if option.default is inspect.Parameter.empty and name not in options:
            raise ValueError(f"{key}.{name}: {factory.__name__} needs it")
    return Kind(section, kind, factory, checked)


def decide_reward(reward: RewardConfig, *, judges: bool) -> RewardConfig:
    """What `auto` comes to: functions in TRL's form are the whole reward, as in TRL."""
    if reward.kind != "auto":
        return reward
    alone = any(is_trl_form(reward_function(name)) for name in reward.functions)
    chosen: dict[str, Any] = {"kind": "none" if judges or alone else "numeric"}
    if alone and not is_set(reward, "format"):
        chosen["format"] = 0.0
    return reward.model_copy(update=chosen)


def needs_answers(reward: RewardConfig) -> bool:
    """Whether rows must have an expected answer; a reward of the user's own reads what it likes."""
    return reward.kind in REWARDS.keys() - {"none"}


def make_reward(reward: RewardConfig, *, judges: bool = False) -> Reward:
    """What a rollout is worth besides what an environment that judges gives it."""
    reward = decide_reward(reward, judges=judges)
    if reward.strict and reward.kind != "numeric":
        raise ValueError(f"reward.strict: only kind 'numeric' reads it, and it is {reward.kind!r}")
    if ":" in reward.kind:
        return with_costs(load_reward(reward.kind), reward)
    shipped = resolve_name(reward.kind, REWARDS, key="reward.kind", also=("auto",))
    if reward.kind == "math":
        optional_deps.require_installed("math_verify", "reward.kind = 'math'")
    strict = {"strict": True} if reward.strict else {}
    return with_costs(shipped(answer=reward.answer, format=reward.format, **strict), reward)


def load_reward(name: str) -> Reward:
    """The user's own reward, from `module:function`."""
    function = load_callable(name, key="reward.kind")
    if is_trl_form(function):
        raise ValueError(
            f"reward.kind: {name!r} is in TRL's form; name it in reward.functions = [{name!r}]"
        )
    return cast(Reward, function)


def load_sampler(config: RolloutConfig) -> Callable[[ChatTemplate], RolloutSampler]:
    """What makes the sampler that `rollout.sampler` names."""
    factory = load_callable(config.sampler, key="rollout.sampler")

    def make(chat: ChatTemplate) -> RolloutSampler:
        with user_call(factory, "rollout.sampler"):
            sampler = factory(chat, config)
        if not callable(getattr(sampler, "rollout", None)):
            raise ValueError(f"rollout.sampler: {config.sampler!r} has no method rollout()")
        return cast(RolloutSampler, sampler)

    return make


def host_tools_of(config: SandboxConfig) -> HostTools | None:
    """What sandbox.host_tools names; None if there is nothing."""
    if not config.host_tools:
        return None
    functions = [load_callable(name, key="sandbox.host_tools") for name in config.host_tools]
    try:
        return HostTools(
            functions,
            budget=HostBudget(**dict(config.host_budget)),
            cached=config.host_cache,
            machine_errors=(InfrastructureError, SandboxInfraError),
        )
    except ValueError as error:
        raise ValueError(f"sandbox.{error}") from None


def script_of(path: Path | None) -> str:
    """The source of sandbox.tools."""
    if path is None:
        return ""
    try:
        source = read_text(path)
        compile(source, str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"sandbox.tools: {error}") from None
    return source
