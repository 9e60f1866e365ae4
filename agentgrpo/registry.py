"""From the names in a config to agents, environments, rewards and tasks: shipped or the user's own.

A shipped kind is a line in a table here; a user's is `module:Class`. An environment is called with
`env.options` and with whatever it asks for by name of what the run has: `pool` (the sandbox),
`timeout_s` (of one step), `stateless`, `seed`. An agent of the user's own is called with
`agent.options`, and with `env` if it asks for it.
"""

from __future__ import annotations

import difflib
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from agentgrpo.actions import ReadCalls
from agentgrpo.agents.base import Agent
from agentgrpo.config import RewardConfig, RolloutConfig, TrainConfig
from agentgrpo.config.read import load_callable
from agentgrpo.envs.base import Environment
from agentgrpo.machine.packages import require_library
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rewards.rewards import (
    EnvironmentReward,
    MathReward,
    NumericReward,
    Reward,
    RewardError,
    TextReward,
    with_tool_cost,
)
from agentgrpo.rollout.custom import RolloutSampler
from agentgrpo.sandbox import SandboxException
from agentgrpo.sandbox.contexts import command_of
from agentgrpo.types import Rollout

ENVIRONMENTS = {
    "python": "agentgrpo.envs.python:PythonEnv",
    "console": "agentgrpo.envs.console:ConsoleEnv",
    "tools": "agentgrpo.envs.tools:ToolEnv",
    "factory": "agentgrpo.envs.factory:FactoryEnv",
    "mcp": "agentgrpo.envs.mcp:McpEnv",
    "unit_tests": "agentgrpo.envs.graded:UnitTestEnv",
    "search": "agentgrpo.envs.search:SearchEnv",
    "gymnasium": "agentgrpo.envs.gymnasium:GymnasiumEnv",
    "reasoning_gym": "agentgrpo.envs.reasoning_gym:ReasoningGymEnv",
    "tau2": "agentgrpo.envs.tau2:Tau2Env",
    "tau_bench": "agentgrpo.envs.tau_bench:TauBenchEnv",
    "verifiers": "agentgrpo.envs.verifiers:VerifiersEnv",
}
RUN_CODE = {"code": ("python", "unit_tests", "reasoning_gym"), "repl": ("console",)}
"""Which of them answer the code of which agent; the others answer calls of tools."""
REWARDS: dict[str, Callable[..., Reward]] = {
    "numeric": NumericReward,
    "math": MathReward,
    "text": TextReward,
    "none": EnvironmentReward,
}


def make_env(config: TrainConfig, pool: Any) -> Environment:
    """The environment of a run.

    Args:
        config: of the run.
        pool: the sandbox, for environments that run code.

    Raises:
        ValueError: there is no such kind or class, or its options are wrong; names the key.
    """
    kind = config.env.kind
    if kind == "auto":
        kind = "console" if config.agent.kind == "repl" else "python"
    if ":" not in kind and kind not in ENVIRONMENTS:
        near = difflib.get_close_matches(kind, ENVIRONMENTS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"env.kind: expected auto, {', '.join(ENVIRONMENTS)} or 'module:Class', "
            f"got {kind!r}{hint}"
        )
    given = {
        "pool": pool,
        "timeout_s": config.sandbox.timeout_s,
        "stateless": config.sandbox.stateless,
        "seed": config.seed,
    }
    made = _construct(
        load_callable(ENVIRONMENTS.get(kind, kind), key="env.kind"),
        config.env.options,
        given,
        key="env.options",
    )
    _require(made, ("reset",), key="env.kind", name=kind)
    return cast(Environment, made)


def make_agent(config: TrainConfig, env: Environment, read_calls: ReadCalls | None = None) -> Agent:
    """The agent of a run.

    Args:
        config: of the run.
        env: what it will act in; its tools are the agent's.
        read_calls: the engine's reader of tool calls, for kind "tools".

    Raises:
        ValueError: there is no such class, its options are wrong, or the environment has no tools
            although the agent calls tools; names the key.
    """
    c = config.agent
    _require_fit(c.kind, config.env.kind)
    if c.kind == "code":
        return _code_agent(config, env)
    if c.kind == "repl":
        from agentgrpo.agents.repl import ReplAgent

        return ReplAgent(c)
    if c.kind in ("inline", "tools"):
        return _tool_agent(config, env, read_calls)
    made = _construct(
        load_callable(c.kind, key="agent.kind"), c.options, {"env": env}, key="agent.options"
    )
    names = ("stop", "messages", "prefill", "tools", "parse", "observe")
    _require(made, names, key="agent.kind", name=c.kind)
    return cast(Agent, made)


def _require_fit(agent: str, env: str) -> None:
    """That an environment of this kind answers what an agent of that kind does, as far as known."""
    fits = RUN_CODE.get(agent)
    if fits is not None and env in ENVIRONMENTS and env not in fits:
        callers = "; agent.kind inline and tools call tools" if env != "console" else ""
        raise ValueError(
            f"agent.kind {agent!r} acts in env.kind {', '.join(fits)}, and not in {env!r}{callers}"
        )


def _code_agent(config: TrainConfig, env: Environment) -> Agent:
    from agentgrpo.agents.code import CodeAgent

    c, script, pool = config.agent, config.sandbox.tools, getattr(env, "pool", None)
    if pool is not None:
        try:
            command_of(c.language, pool.template, pool.limits)
        except SandboxException as error:
            raise ValueError(f"agent.language: {error}") from error
    if script is not None and c.language != "python" and c.show_tools != "no":
        raise ValueError(
            f"sandbox.tools: its functions are Python's, and agent.language is {c.language!r}; "
            "with agent.show_tools = 'no' it is run and not shown"
        )
    return CodeAgent(c, tools=None if script is None else script.read_text())


def _tool_agent(config: TrainConfig, env: Environment, read_calls: ReadCalls | None) -> Agent:
    tools = getattr(env, "tools", None)
    if not callable(tools):
        raise ValueError(
            f"agent.kind {config.agent.kind!r} needs an environment with tools, and env.kind "
            f"{config.env.kind!r} has none; choose tools, factory, mcp, search, tau2 ..."
        )
    if config.agent.kind == "inline":
        from agentgrpo.agents.inline import InlineAgent

        return InlineAgent(config.agent, tools=tools)
    from agentgrpo.agents.tools import ToolAgent

    if read_calls is None:
        raise ValueError("agent.kind 'tools' needs the engine's reader of tool calls")
    talks = bool(getattr(env, "talks", False))
    return ToolAgent(config.agent, tools=tools, read_calls=read_calls, talks=talks)


def make_reward(config: RewardConfig, env: Environment | None = None) -> Reward:
    """What a rollout is worth besides what the environment gives it.

    Raises:
        ValueError: there is no such kind or function, or its library is missing; names the key.
    """
    kind = config.kind
    if kind == "auto":
        kind = "none" if getattr(env, "judges", False) else "numeric"
    if ":" in kind:
        if config.strict:
            raise ValueError(f"reward.strict: only kind 'numeric' reads it, and it is {kind!r}")
        reward = load_reward(kind)
    elif kind in REWARDS:
        strict = {"strict": True} if config.strict else {}
        if strict and kind != "numeric":
            raise ValueError(f"reward.strict: only kind 'numeric' reads it, and it is {kind!r}")
        if kind == "math":
            require_library("math_verify", "reward.kind = 'math'")
        reward = REWARDS[kind](answer=config.answer, format=config.format, **strict)
    else:
        raise ValueError(
            f"reward.kind: expected auto, {', '.join(REWARDS)} or 'module:function', got {kind!r}"
        )
    return with_tool_cost(reward, config.tool_cost)


def needs_answers(reward: RewardConfig, env: Environment) -> bool:
    """Whether tasks must have a number as answer, so that it can be checked before the run."""
    return reward.kind == "numeric" or (reward.kind == "auto" and not getattr(env, "judges", False))


def script_of(path: Path | None) -> str:
    """The source of sandbox.tools.

    Raises:
        ValueError: there is no such file, or it is not Python.
    """
    if path is None:
        return ""
    try:
        source = path.read_text()
        compile(source, str(path), "exec")
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"sandbox.tools: {path} cannot be used: {error}") from None
    return source


def _construct(
    factory: Callable[..., Any], options: Mapping[str, Any], given: Mapping[str, Any], *, key: str
) -> Any:
    parameters = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        takes = [name for name in parameters if name not in given]
        for name in options:
            if name not in takes:
                raise ValueError(
                    f"{key}.{name}: {factory.__name__} does not take it; "
                    f"it takes {', '.join(takes) or 'none'}"
                )
    arguments = {**{n: v for n, v in given.items() if n in parameters}, **options}
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and name not in arguments:
            raise ValueError(f"{key}.{name}: {factory.__name__} needs it")
    try:
        return factory(**arguments)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {factory.__name__}: {error}") from error


def _require(made: Any, names: tuple[str, ...], *, key: str, name: str) -> None:
    missing = [attribute for attribute in names if not hasattr(made, attribute)]
    if missing:
        raise ValueError(f"{key}: {name!r} lacks {', '.join(missing)}; see agents/base.py, envs/")


def load_reward(name: str) -> Reward:
    """The user's own reward, from `module:function`.

    Raises:
        ValueError: the name has another shape, there is no such module or function, or it is not
            callable. An error inside the module while it is imported is left as it is. What the
            function raises later is a RewardError.
    """
    function = load_callable(name, key="reward")

    def reward(rollout: Rollout) -> Mapping[str, float]:
        try:
            return cast(Mapping[str, float], function(rollout))
        except Exception as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            raise RewardError(
                f"reward {name!r} failed on task {rollout.task.id!r}, answer {rollout.answer!r}: "
                f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            ) from error

    return reward


def load_sampler(config: RolloutConfig, chat: ChatTemplate) -> RolloutSampler:
    """What `rollout.sampler` names.

    Raises:
        ValueError: no such class or function, or what the class makes has no rollout().
    """
    kind, _, function = config.sampler.partition(":")
    if kind == "rollout_func":
        from agentgrpo.rollout.trl import RolloutFuncSampler

        return RolloutFuncSampler(load_callable(function, key="rollout.sampler"), chat, config)
    user = load_callable(config.sampler, key="rollout.sampler")(chat, config)
    if not callable(getattr(user, "rollout", None)):
        raise ValueError(f"rollout.sampler: {config.sampler!r} has no method rollout()")
    return cast(RolloutSampler, user)
