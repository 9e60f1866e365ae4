"""Resolves the names in a config: resolve(), the first step of preparing a run.

It loads the classes of agent, environment, reward, host functions and sampler, and checks their
options and whether they fit together. All other code reads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentgrpo.actions import MODELS, Model
from agentgrpo.config import OWN_MODELS, RewardConfig, TrainConfig, UserConfig
from agentgrpo.config.section import forbid_unused
from agentgrpo.envs.base import Environment
from agentgrpo.envs.customers import UserSimulators
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rewards.scoring import reward_function
from agentgrpo.rewards.shipped import Reward
from agentgrpo.rollout.custom import RolloutSampler
from agentgrpo.sandbox import HostTools
from agentgrpo.train.plugins import (
    ENVIRONMENTS,
    Kind,
    class_of,
    decide_reward,
    host_tools_of,
    kind_of,
    load_sampler,
    make_reward,
    parameters_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A config with its names resolved."""

    config: TrainConfig
    agent: Kind
    env: Kind
    judges: bool | None
    """Whether the environment judges by itself; None: only an instance can tell (with_env)."""
    reward: RewardConfig
    """config.reward with kind "auto" resolved."""
    score: Reward
    """The reward in addition to that of the environment and of `reward.functions`."""
    runs_code: bool
    """Whether the environment or the agent uses the sandbox."""
    host_tools: HostTools | None
    make_sampler: Callable[[ChatTemplate], RolloutSampler] | None
    """From rollout.sampler."""

    def with_env(self, env: Environment) -> Resolved:
        """Resolve `judges` and the reward by the environment's instance."""
        judges = bool(getattr(env, "judges", False))
        return self if judges is self.judges else replace(self, **_judged(self.config, judges))


def resolve(config: TrainConfig) -> Resolved:
    """Resolve a config. ValueError: a name is wrong, or the parts do not fit together."""
    agent = kind_of("agent", config.agent.kind, config.agent.options)
    env = kind_of("env", env_name(config), config.env.options)
    require_fit(agent, env)
    _require_user_column(config)
    _require_used(config, agent, env)
    judged = _judged(config, _class_judges(env.name, env.factory))
    for name in config.reward.functions:
        reward_function(name)
    host_tools = host_tools_of(config.sandbox)
    if host_tools and "host_tools" not in parameters_of(env.factory):
        raise ValueError(
            f"sandbox.host_tools: env.kind {env.name!r} runs no code that could call them"
        )
    needs_sandbox = runs_code(agent, env)
    need = "an env.kind that runs code"
    forbid_unused(config, [("sandbox.tools", need, lambda _: needs_sandbox)])
    return Resolved(
        config=config,
        agent=agent,
        env=env,
        runs_code=needs_sandbox,
        host_tools=host_tools,
        make_sampler=load_sampler(config.rollout) if config.rollout.sampler else None,
        **judged,
    )


def env_name(config: TrainConfig) -> str:
    """`env.kind` with auto resolved to the environment that the agent is made for."""
    if config.env.kind != "auto":
        return config.env.kind
    return str(getattr(class_of("agent", config.agent.kind), "home", "python"))


def judges_by_class(config: TrainConfig) -> bool | None:
    """Whether the environment judges by itself; None: its class does not tell, or is absent.

    For reading the records of a run on a machine that lacks the user's modules.
    """
    is_own = ":" in (config.agent.kind if config.env.kind == "auto" else config.env.kind)
    try:
        name = env_name(config)
        return _class_judges(name, class_of("env", name))
    except ValueError:
        if is_own:
            return None
        raise


def _class_judges(name: str, factory: Callable[..., Any]) -> bool | None:
    judges: bool | None = getattr(factory, "judges", None if ":" in name else False)
    return judges


def _judged(config: TrainConfig, judges: bool | None) -> dict[str, Any]:
    """The fields of Resolved that depend on whether the environment judges."""
    reward = decide_reward(config.reward, judges=bool(judges))
    return {"judges": judges, "reward": reward, "score": make_reward(reward)}


def runs_code(agent: Kind, env: Kind) -> bool:
    """Whether the environment, or the agent with its options, uses the sandbox."""
    needs_pool = getattr(agent.factory, "asks_for_pool", lambda options: False)(agent.options)
    return needs_pool or "pool" in parameters_of(env.factory)


def require_fit(agent: Kind, env: Kind, instance: Environment | None = None) -> None:
    """Check that the environment carries out the agent's actions.

    Uses the environment's class until there is an instance.
    """
    acts = getattr(agent.factory, "acts", ())
    answers = getattr(env.factory if instance is None else instance, "answers", None)
    hosted = agent.name == "program" and getattr(env.factory, "hosts_programs", False)
    idle = not acts and ":" not in agent.name and not hosted
    if idle and getattr(env.factory, "needs_actions", False):
        raise ValueError(
            f"agent.kind: expected one that acts in env.kind {env.name!r}, such as 'code' or "
            f"'tools', got {agent.name!r}, whose actions have no effect there"
        )
    if answers is None:  # a user's class that does not declare it
        has_tools = instance is None or callable(getattr(instance, "tools", None))
        answers = [act for act in acts if act != "tools" or has_tools]
    missing = [act for act in acts if act not in answers]
    if missing:
        fits = [e for e in ENVIRONMENTS if {*acts} <= {*class_of("env", e).answers}]  # type: ignore[attr-defined]
        raise ValueError(
            f"env.kind: expected {', '.join(fits)} for agent.kind {agent.name!r}, which acts by "
            f"{' and '.join(acts)}, got {env.name!r}, which lacks {' and '.join(missing)}"
        )


def _require_used(config: TrainConfig, agent: Kind, env: Kind) -> None:
    """Raise ValueError for settings that this agent or environment does not use."""
    reasons = {"agent": "which plays its own turns", "env": "whose tasks describe their sessions"}
    for kind in (agent, env):
        need = f"another {kind.section}.kind than {kind.name!r}, {reasons[kind.section]}"
        unread = " ".join(getattr(kind.factory, "unread", ()))
        forbid_unused(config, [(unread, need, lambda _: False)])


def _require_user_column(config: TrainConfig) -> None:
    user: UserConfig = config.env.user
    models: dict[str, Model] = dict.fromkeys((*OWN_MODELS, *config.endpoints), "policy")
    if users_of(user, models) and user.reads_column and config.data.train == "word_problems":
        raise ValueError(
            f"data.train: expected a file with a column 'user' for env.user.mode {user.mode!r}, "
            "got 'word_problems'. Name a file, or a user of your own"
        )


def users_of(config: UserConfig, models: Mapping[str, Model] = MODELS) -> UserSimulators | None:
    """Make the users that env.user names; None for nobody."""
    try:
        users = UserSimulators(
            config.mode, "nobody", ("scripted", "model"), models, max_tokens=64, patience=0
        )
    except ValueError as error:
        raise ValueError(f"env.user.{str(error).removeprefix('env.options.')}") from None
    return users if users.has_dialogue else None
