"""From the names in a config to agents, environments, rewards and tasks: shipped or the user's own.

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

from agentgrpo.actions import MODELS, InfrastructureError, Model, ReadCalls
from agentgrpo.agents.base import Agent
from agentgrpo.config import (
    OWN_MODELS,
    AgentConfig,
    EnvConfig,
    RewardConfig,
    RolloutConfig,
    SandboxConfig,
    TrainConfig,
    UserConfig,
)
from agentgrpo.config.read import by_key, did_you_mean, format_error, load_callable, resolve_name
from agentgrpo.config.section import forbid_unused, is_set
from agentgrpo.envs.base import Environment
from agentgrpo.envs.customers import UserSimulators
from agentgrpo.envs.dialogue import DialogueEnv
from agentgrpo.envs.tools import describe
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.endpoints import make_retriever
from agentgrpo.models.text_encoder import Encoder
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


def env_kind(config: TrainConfig) -> str:
    """`env.kind`, or where it is auto, the environment that the agent is made for."""
    if config.env.kind != "auto":
        return config.env.kind
    return str(getattr(class_of("agent", config.agent.kind), "home", "python"))


def checked_options(section: str, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a kind, each as its class's annotation reads it."""
    factory, key = class_of(section, kind), f"{section}.options"
    known = {option.name: option for option in options_of(section, factory)}
    takes_all = "**" in parameters_of(factory)
    for name in options.keys() - known.keys():
        if not takes_all or name in GIVEN[section]:
            raise ValueError(
                f"{key}.{name}: {factory.__name__} does not take it{did_you_mean(name, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )
    made = {
        name: checked_option(f"{key}.{name}", known[name].annotation, value)
        if name in known
        else value
        for name, value in options.items()
    }
    for name, option in known.items():
        if option.default is inspect.Parameter.empty and name not in options:
            raise ValueError(f"{key}.{name}: {factory.__name__} needs it")
    return made


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


def require_names(config: TrainConfig) -> None:
    """That everything the config names exists, takes its options, and fits the rest."""
    checked_options("agent", config.agent.kind, config.agent.options)
    checked_options("env", env_kind(config), config.env.options)
    _require_fit(config)
    _require_user(config)
    agent = config.agent.kind
    unread = " ".join(getattr(class_of("agent", agent), "unread", ()))
    need = f"another agent.kind than {agent!r}, which plays its own turns"
    forbid_unused(config, [(unread, need, lambda _: False)])
    unread = " ".join(getattr(class_of("env", env_kind(config)), "unread", ()))
    need = f"another env.kind than {env_kind(config)!r}, whose tasks describe their sessions"
    forbid_unused(config, [(unread, need, lambda _: False)])
    reward_kind(config.reward, judged=bool(judges(config)))
    for name in config.reward.functions:
        reward_function(name)
    if host_tools_of(config.sandbox) and "host_tools" not in parameters_of(
        class_of("env", env_kind(config))
    ):
        raise ValueError(
            f"sandbox.host_tools: env.kind {env_kind(config)!r} runs no code that could call them"
        )
    forbid_unused(config, [("sandbox.tools", "an env.kind that runs code", asks_for_pool)])
    if config.rollout.sampler:
        load_callable(config.rollout.sampler, key="rollout.sampler")


def judges(config: TrainConfig) -> bool | None:
    """Whether the environment judges by itself; None: its class does not tell, or is not there."""
    kind = env_kind(config)
    try:
        made = class_of("env", kind)
    except ValueError:
        if ":" in kind:
            return None
        raise
    told: bool | None = getattr(made, "judges", None if ":" in kind else False)
    return told


def judged(env: Environment | None) -> bool:
    """Whether the environment judges by itself, now that it is made."""
    return bool(getattr(env, "judges", False))


def needs_answers(reward: RewardConfig, *, judged: bool) -> bool:
    """Whether rows must have an expected answer; a reward of the user's own reads what it likes."""
    return decided(reward, judged=judged).kind in REWARDS.keys() - {"none"}


def decided(reward: RewardConfig, *, judged: bool) -> RewardConfig:
    """What `auto` comes to: functions in TRL's form are the whole reward, as in TRL."""
    if reward.kind != "auto":
        return reward
    alone = any(is_trl_form(reward_function(name)) for name in reward.functions)
    chosen: dict[str, Any] = {"kind": "none" if judged or alone else "numeric"}
    if alone and not is_set(reward, "format"):
        chosen["format"] = 0.0
    return reward.model_copy(update=chosen)


def asks_for_pool(config: TrainConfig) -> bool:
    """Whether the environment or the agent of a run is given the sandbox: others run no code."""
    agents = getattr(class_of("agent", config.agent.kind), "asks_for_pool", None)
    asked = agents is not None and agents(config.agent.options)
    return asked or "pool" in parameters_of(class_of("env", env_kind(config)))


def make_env(config: TrainConfig, pool: Any, models: Mapping[str, Model] = MODELS) -> Environment:
    """The environment of a run; the pool is None if asks_for_pool() says no."""
    given = {
        "pool": pool,
        "timeout_s": config.sandbox.timeout_s,
        "stateless": config.sandbox.stateless,
        "host_tools": host_tools_of(config.sandbox),
        "seed": config.seed,
        "models": models,
        "retrievers": {
            name: make_retriever(endpoint, name)
            for name, endpoint in config.endpoints.items()
            if endpoint.kind == "retriever"
        },
        "load_encoder": Encoder,
    }
    made = _made("env", env_kind(config), config.env, given)
    _require(made, Environment, key="env.kind", name=config.env.kind)
    return with_user(cast(Environment, made), config.env, models)


def with_user(
    env: Environment, config: EnvConfig, models: Mapping[str, Model] = MODELS
) -> Environment:
    """The environment, and whom env.user puts there."""
    users, user = users_of(config.user, models), config.user
    if users is None:
        return env
    if getattr(env, "has_user", False):
        raise ValueError(
            f"env.user.mode: env.kind {config.kind!r} has somebody to talk with already, "
            f"got {user.mode!r}; leave it at 'nobody'"
        )
    made = DialogueEnv(env, users, user.mode, user.reads_column, user.max_replies)
    return cast(Environment, made)


def _require_user(config: TrainConfig) -> None:
    user: UserConfig = config.env.user
    named: dict[str, Model] = dict.fromkeys((*OWN_MODELS, *config.endpoints), "policy")
    if users_of(user, named) and user.reads_column and config.data.train == "word_problems":
        raise ValueError(
            f"env.user.mode {user.mode!r} reads the data's column 'user', and data.train "
            "'word_problems' has no columns: name a file, or a user of your own"
        )


def users_of(config: UserConfig, models: Mapping[str, Model] = MODELS) -> UserSimulators | None:
    """What env.user names; None: nobody."""
    try:
        made = UserSimulators(config.mode, "nobody", ("scripted", "model"), models, max_tokens=64)
    except ValueError as error:
        raise ValueError(f"env.user.{str(error).removeprefix('env.options.')}") from None
    return made if made.talk else None


def no_reader(parser: str) -> ReadCalls:
    """In place of the engine's readers of tool calls, where there is no engine."""
    raise ValueError(f"parser: {parser!r} is one of the engine's, and there is no engine here")


def make_agent(
    config: TrainConfig,
    env: Environment,
    call_reader: Callable[[str], ReadCalls] = no_reader,
    pool: Any = None,
) -> Agent:
    """The agent of a run, whose tools are those of `env`.

    `call_reader`: from a parser's name to the engine's reader of tool calls.
    """
    _require_fit(config, env)
    script = config.sandbox.tools
    given = {
        "env": env,
        "tools_script": None if script is None else script_of(script),
        "host_tools": shown.shown if (shown := host_tools_of(config.sandbox)) else None,
        "call_reader": call_reader,
        "pool": pool,
    }
    made = _made("agent", config.agent.kind, config.agent, given)
    _require(made, Agent, key="agent.kind", name=config.agent.kind)
    return cast(Agent, made)


def _require_fit(config: TrainConfig, env: Any = None) -> None:
    """That the environment, or where it is not made yet its class, answers what the agent does."""
    kind = env_kind(config)
    acts = getattr(class_of("agent", config.agent.kind), "acts", ())
    answers = getattr(class_of("env", kind) if env is None else env, "answers", None)
    idle = not acts and ":" not in config.agent.kind
    if idle and getattr(class_of("env", kind), "needs_actions", False):
        raise ValueError(
            f"agent.kind: expected one that acts in env.kind {kind!r}, such as 'code' or 'tools', "
            f"got {config.agent.kind!r}, which can change nothing there"
        )
    if answers is None:  # one that does not say
        has_tools = env is None or callable(getattr(env, "tools", None))
        answers = [what for what in acts if what != "tools" or has_tools]
    missing = [what for what in acts if what not in answers]
    if missing:
        fits = [e for e in ENVIRONMENTS if {*acts} <= {*class_of("env", e).answers}]  # type: ignore[attr-defined]
        raise ValueError(
            f"agent.kind {config.agent.kind!r} acts by {' and '.join(acts)}, and env.kind {kind!r} "
            f"does not answer {' and '.join(missing)}; env.kind {', '.join(fits)} would"
        )


def _made(
    section: str, kind: str, config: AgentConfig | EnvConfig, given: Mapping[str, Any]
) -> Any:
    """What the class of a kind makes of its options and of what it is given."""
    factory, key = class_of(section, kind), f"{section}.options"
    options = checked_options(section, kind, config.options)
    asked = parameters_of(factory)
    try:
        with user_call(factory, f"{section}.kind: {factory.__name__}"):
            return factory(**{name: given[name] for name in given if name in asked}, **options)
    except UserCodeError as error:
        name, colon, _ = str(error.__cause__).partition(":")
        if isinstance(error.__cause__, ValueError) and colon and name.partition(".")[0] in asked:
            raise ValueError(f"{key}.{error.__cause__} (at {error.where})") from error
        raise
    except (ValueError, TypeError) as error:  # of a shipped one
        name, colon, _ = str(error).partition(":")
        if name.startswith(f"{section}.") and colon:  # it names its key itself
            raise
        named = f"{key}." if name.partition(".")[0] in asked else f"{key}: {factory.__name__}: "
        raise ValueError(f"{named}{error}") from error


def _require(made: Any, protocol: type, *, key: str, name: str) -> None:
    """That it has what a protocol has."""
    asked = [name for name in vars(protocol) if not name.startswith("_")]
    with user_call(type(made), f"{key}: {type(made).__name__}"):  # some may be properties
        missing = [name for name in asked if not hasattr(made, name)]
    if missing:
        raise ValueError(f"{key}: {name!r} lacks {', '.join(missing)}; see agents/base.py, envs/")


def reward_kind(config: RewardConfig, *, judged: bool) -> Callable[..., Reward] | None:
    """The class of `reward.kind`; None: a function of the user's own, see load_reward()."""
    kind = decided(config, judged=judged).kind
    if config.strict and kind != "numeric":
        raise ValueError(f"reward.strict: only kind 'numeric' reads it, and it is {kind!r}")
    resolve_name(kind, REWARDS, key="reward.kind", also=("auto",))
    if kind == "math":
        optional_deps.require_installed("math_verify", "reward.kind = 'math'")
    return REWARDS.get(kind)


def make_reward(config: RewardConfig, env: Environment | None = None) -> Reward:
    """What a rollout is worth besides what the environment gives it."""
    config = decided(config, judged=judged(env))
    shipped = reward_kind(config, judged=judged(env))
    if shipped is None:
        return with_costs(load_reward(config.kind), config)
    strict = {"strict": True} if config.strict else {}
    reward = shipped(answer=config.answer, format=config.format, **strict)
    return with_costs(reward, config)


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


def load_reward(name: str) -> Reward:
    """The user's own reward, from `module:function`."""
    function = load_callable(name, key="reward.kind")
    if is_trl_form(function):
        raise ValueError(
            f"reward.kind: {name!r} is in TRL's form; name it in reward.functions = [{name!r}]"
        )
    return cast(Reward, function)


def load_sampler(config: RolloutConfig, chat: ChatTemplate) -> RolloutSampler:
    """What `rollout.sampler` names, made."""
    made = load_callable(config.sampler, key="rollout.sampler")
    with user_call(made, "rollout.sampler"):
        user = made(chat, config)
    if not callable(getattr(user, "rollout", None)):
        raise ValueError(f"rollout.sampler: {config.sampler!r} has no method rollout()")
    return cast(RolloutSampler, user)
