"""Loads the agent, environment, reward or sampler that a config names.

A shipped agent or environment is a line in a table of this module; a user's own is `module:Class`.
Both are classes whose keyword arguments are `agent.options` and `env.options`, documented in the
class's docstring. A constructor parameter with a name in PROVIDED receives that part of the run.
Errors are ValueErrors that name the config key.
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
"""By config section."""
PROVIDED = {
    "agent": ("env", "tools_script", "host_tools", "call_reader", "pool"),
    "env": (
        *("pool", "timeout_s", "stateless", "host_tools", "seed"),
        *("models", "retrievers", "load_encoder"),
    ),
}
"""Constructor parameters that the run fills in, if the class has them. They are no options.

env: the environment. tools_script: source of sandbox.tools, or None. host_tools: for an agent, the
signatures and docstrings of sandbox.host_tools; for an environment, their HostTools; or None.
call_reader: from a parser's name to the engine's tool call parser. pool: the SandboxPool.
timeout_s, stateless: of [sandbox]. seed: of the run. models: actions.Model by name, for a second
role. retrievers: by endpoint name. load_encoder: loads a text encoder.
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
    """Any if the class has none."""
    default: Any
    """`inspect.Parameter.empty` if the option is required."""
    text: str
    """The option's description in the docstring's `Args:`."""


def parameters_of(factory: Factory) -> dict[str, inspect.Parameter]:
    """The named parameters of a class or function; the key `**` is present if it takes any others.

    If a class passes on `**options`, its parents' parameters are included. A parent's parameter is
    not required, since the class may pass it itself.
    """
    mro = [c for c in getattr(factory, "__mro__", ()) if not getattr(c, "_is_protocol", False)]
    owners = [c for c in mro if c is not object and {"__init__", "__new__"} & vars(c).keys()]
    named: dict[str, inspect.Parameter] = {}
    for owner in owners or [factory]:
        parameters = list(inspect.signature(owner).parameters.values())
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                as_is = owner in (factory, *owners[:1]) or p.default is not p.empty
                named.setdefault(p.name, p if as_is else p.replace(default=None))
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            return named
    return {**named, "**": parameters[-1]}


def options_of(section: str, factory: Factory) -> list[Option]:
    """The options that `agent.options` or `env.options` may set for a class."""
    hints: dict[str, Any] = {}
    descriptions: dict[str, str] = {}
    for owner in reversed(getattr(factory, "__mro__", [factory])):
        # a dataclass has its annotations on the class, others on __init__
        for annotated in (owner, vars(owner).get("__init__", owner)):
            module = getattr(annotated, "__module__", None)
            names = vars(sys.modules[module]) if module else {}
            for name, hint in inspect.get_annotations(annotated).items():
                # NameError: imported under TYPE_CHECKING only; such an option is not checked
                with contextlib.suppress(NameError):
                    hints[name] = eval(hint, names) if isinstance(hint, str) else hint
        descriptions |= describe(inspect.cleandoc(owner.__doc__ or ""))[1]
    return [
        Option(name, hints.get(name, Any), p.default, descriptions.get(name, ""))
        for name, p in parameters_of(factory).items()
        if name not in (*PROVIDED[section], "**")
    ]


def class_of(section: str, kind: str) -> Factory:
    """The class that `agent.kind` or `env.kind` names."""
    key, also = f"{section}.kind", ("auto",) if section == "env" else ()
    name = resolve_name(kind, KINDS[section], key=key, own="module:Class", also=also)
    return load_callable(name, key=key) if isinstance(name, str) else name


def checked_option(key: str, annotation: Any, value: Any) -> Any:
    """Validate a value against an annotation, without converting types.

    The string "none" means None where the annotation allows that.
    """
    if value == "none" and type(None) in get_args(annotation):
        return None
    settings = pydantic.ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        reader: Any = pydantic.TypeAdapter(dict[str, annotation], config=settings)
        text = json.dumps({"": value}, default=str)
    except (pydantic.PydanticUserError, TypeError):  # pydantic cannot check this annotation
        return value
    try:
        return reader.validate_json(text, strict=True)[""]
    except pydantic.ValidationError as error:
        raise ValueError(
            "\n".join(
                format_error(f"{key}{path}", *details) for path, details in by_key(error).items()
            )
        ) from None


@dataclass(frozen=True, slots=True)
class Kind:
    """The class that `agent.kind` or `env.kind` names, and its options."""

    section: str
    name: str
    factory: Factory
    options: Mapping[str, Any]
    """Validated against the class's annotations."""

    def make(self, protocol: type, provided: Mapping[str, Any]) -> Any:
        """Make an instance from the options and those of `provided` that the class takes.

        ValueError: the instance lacks a method of the protocol, or the class refuses an option.
        """
        factory, key = self.factory, f"{self.section}.kind"
        parameters, options = parameters_of(factory), f"{self.section}.options"
        arguments = {name: value for name, value in provided.items() if name in parameters}
        try:
            with user_call(factory, f"{key}: {factory.__name__}"):
                instance = factory(**arguments, **self.options)
        except UserCodeError as error:
            cause, (name, colon, _) = error.__cause__, str(error.__cause__).partition(":")
            if isinstance(cause, ValueError) and colon and name.partition(".")[0] in parameters:
                raise ValueError(f"{options}.{cause} (at {error.line})") from error
            raise
        except (ValueError, TypeError) as error:  # from a shipped class
            name, colon, _ = str(error).partition(":")
            if name.startswith(f"{self.section}.") and colon:  # the message names its key already
                raise
            known = name.partition(".")[0] in parameters
            prefix = f"{options}." if known else f"{options}: {factory.__name__}: "
            raise ValueError(f"{prefix}{error}") from error
        members = [name for name in vars(protocol) if not name.startswith("_")]
        with user_call(type(instance), f"{key}: {type(instance).__name__}"):  # maybe properties
            missing = ", ".join(name for name in members if not hasattr(instance, name))
        if missing:
            raise ValueError(f"{key}: {self.name!r} lacks {missing}; see agents/base.py, envs/")
        return instance


def kind_of(section: str, kind: str, options: Mapping[str, Any]) -> Kind:
    """Load the class that `agent.kind` or `env.kind` names and check its options."""
    factory, key = class_of(section, kind), f"{section}.options"
    known = {option.name: option for option in options_of(section, factory)}
    takes_all = "**" in parameters_of(factory)
    for name in (name for name in options if name not in known):
        if not takes_all or name in PROVIDED[section]:
            raise ValueError(
                f"{key}.{name}: {factory.__name__} has no such option{did_you_mean(name, known)}; "
                f"its options: {', '.join(known) or 'none'}"
            )
    checked = {
        name: checked_option(f"{key}.{name}", known[name].annotation, value)
        if name in known
        else value
        for name, value in options.items()
    }
    for name, option in known.items():
        if option.default is inspect.Parameter.empty and name not in options:
            raise ValueError(f"{key}.{name}: {factory.__name__} requires it")
    return Kind(section, kind, factory, checked)


def decide_reward(reward: RewardConfig, *, judges: bool) -> RewardConfig:
    """Replace reward.kind "auto" by a kind.

    "none" if the environment judges, or if a function has TRL's signature: such functions are the
    whole reward, as in TRL. Otherwise "numeric".
    """
    if reward.kind != "auto":
        return reward
    is_trl = any(is_trl_form(reward_function(name)) for name in reward.functions)
    update: dict[str, Any] = {"kind": "none" if judges or is_trl else "numeric"}
    if is_trl and not is_set(reward, "format"):
        update["format"] = 0.0
    return reward.model_copy(update=update)


def needs_answers(reward: RewardConfig) -> bool:
    """Whether rows must have an expected answer. A user's own reward does not require it."""
    return reward.kind in REWARDS.keys() - {"none"}


def make_reward(reward: RewardConfig, *, judges: bool = False) -> Reward:
    """Make the reward that reward.kind names, with its length and call costs."""
    reward = decide_reward(reward, judges=judges)
    if reward.strict and reward.kind != "numeric":
        raise ValueError(f"reward.strict: expected reward.kind 'numeric', got {reward.kind!r}")
    if ":" in reward.kind:
        return with_costs(load_reward(reward.kind), reward)
    shipped = resolve_name(reward.kind, REWARDS, key="reward.kind", also=("auto",))
    if reward.kind == "math":
        optional_deps.require_installed("math_verify", "reward.kind = 'math'")
    strict = {"strict": True} if reward.strict else {}
    return with_costs(shipped(answer=reward.answer, format=reward.format, **strict), reward)


def load_reward(name: str) -> Reward:
    """Load a user's own reward, `module:function`."""
    function = load_callable(name, key="reward.kind")
    if is_trl_form(function):
        raise ValueError(
            f"reward.kind: {name!r} has TRL's signature; name it in reward.functions = [{name!r}]"
        )
    return cast(Reward, function)


def load_sampler(config: RolloutConfig) -> Callable[[ChatTemplate], RolloutSampler]:
    """Load the class that `rollout.sampler` names. Returns a function that makes an instance."""
    factory = load_callable(config.sampler, key="rollout.sampler")

    def make(chat: ChatTemplate) -> RolloutSampler:
        with user_call(factory, "rollout.sampler"):
            sampler = factory(chat, config)
        if not callable(getattr(sampler, "rollout", None)):
            raise ValueError(f"rollout.sampler: {config.sampler!r} has no method rollout()")
        return cast(RolloutSampler, sampler)

    return make


def host_tools_of(config: SandboxConfig) -> HostTools | None:
    """Load the functions of sandbox.host_tools; None if there are none."""
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
    """The source of sandbox.tools, checked for syntax errors; "" for None."""
    if path is None:
        return ""
    try:
        source = read_text(path)
        compile(source, str(path), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"sandbox.tools: {error}") from None
    return source
