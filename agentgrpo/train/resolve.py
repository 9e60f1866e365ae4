"""What the names in a config mean, decided once: resolve(), the first step of preparing a run.

Agent, environment, reward, host functions and sampler are found, their options checked, and whether
they fit together. Whatever checks, makes or describes a run reads the result.
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
    """A config's names, resolved."""

    config: TrainConfig
    agent: Kind
    env: Kind
    judges: bool | None
    """Whether the environment judges by itself; None: its class does not tell, an instance does."""
    reward: RewardConfig
    """`reward` of the config, what `auto` comes to decided."""
    score: Reward
    """What a rollout is worth besides what the environment and `reward.functions` give it."""
    runs_code: bool
    """Whether the environment or the agent is given the sandbox."""
    host_tools: HostTools | None
    make_sampler: Callable[[ChatTemplate], RolloutSampler] | None
    """Of rollout.sampler."""

    def with_env(self, env: Environment) -> Resolved:
        """The same, now that the environment is made: whether it judges is known."""
        judges = bool(getattr(env, "judges", False))
        return self if judges is self.judges else replace(self, **_judged(self.config, judges))


def resolve(config: TrainConfig) -> Resolved:
    """What the config's names mean; ValueError: one is wrong, or they do not fit together."""
    agent = kind_of("agent", config.agent.kind, config.agent.options)
    env = kind_of("env", env_name(config), config.env.options)
    require_fit(agent, env)
    _require_user(config)
    _require_read(config, agent, env)
    judged = _judged(config, _class_judges(env.name, env.factory))
    for name in config.reward.functions:
        reward_function(name)
    host_tools = host_tools_of(config.sandbox)
    if host_tools and "host_tools" not in parameters_of(env.factory):
        raise ValueError(
            f"sandbox.host_tools: env.kind {env.name!r} runs no code that could call them"
        )
    code = runs_code(agent, env)
    forbid_unused(config, [("sandbox.tools", "an env.kind that runs code", lambda _: code)])
    return Resolved(
        config=config,
        agent=agent,
        env=env,
        runs_code=code,
        host_tools=host_tools,
        make_sampler=load_sampler(config.rollout) if config.rollout.sampler else None,
        **judged,
    )


def env_name(config: TrainConfig) -> str:
    """`env.kind`, or where it is auto, the environment that the agent is made for."""
    if config.env.kind != "auto":
        return config.env.kind
    return str(getattr(class_of("agent", config.agent.kind), "home", "python"))


def judges_by_class(config: TrainConfig) -> bool | None:
    """Whether the environment judges by itself; None: its class does not define it, or is absent.

    For the records of a run, whose own modules need not be here.
    """
    own = ":" in (config.agent.kind if config.env.kind == "auto" else config.env.kind)
    try:
        name = env_name(config)
        return _class_judges(name, class_of("env", name))
    except ValueError:
        if own:
            return None
        raise


def _class_judges(name: str, factory: Callable[..., Any]) -> bool | None:
    judges: bool | None = getattr(factory, "judges", None if ":" in name else False)
    return judges


def _judged(config: TrainConfig, judges: bool | None) -> dict[str, Any]:
    """What of a Resolved hangs on whether the environment judges."""
    reward = decide_reward(config.reward, judges=bool(judges))
    return {"judges": judges, "reward": reward, "score": make_reward(reward)}


def runs_code(agent: Kind, env: Kind) -> bool:
    """Whether an environment, or an agent with its options, is given the sandbox."""
    asked = getattr(agent.factory, "asks_for_pool", lambda options: False)(agent.options)
    return asked or "pool" in parameters_of(env.factory)


def require_fit(agent: Kind, env: Kind, made: Environment | None = None) -> None:
    """That the environment, or where it is not made yet its class, answers what the agent does."""
    acts = getattr(agent.factory, "acts", ())
    answers = getattr(env.factory if made is None else made, "answers", None)
    hosted = agent.name == "program" and getattr(env.factory, "hosts_programs", False)
    idle = not acts and ":" not in agent.name and not hosted
    if idle and getattr(env.factory, "needs_actions", False):
        raise ValueError(
            f"agent.kind: expected one that acts in env.kind {env.name!r}, such as 'code' or "
            f"'tools', got {agent.name!r}, which can change nothing there"
        )
    if answers is None:  # one that does not say
        has_tools = made is None or callable(getattr(made, "tools", None))
        answers = [what for what in acts if what != "tools" or has_tools]
    missing = [what for what in acts if what not in answers]
    if missing:
        fits = [e for e in ENVIRONMENTS if {*acts} <= {*class_of("env", e).answers}]  # type: ignore[attr-defined]
        raise ValueError(
            f"agent.kind {agent.name!r} acts by {' and '.join(acts)}, and env.kind {env.name!r} "
            f"does not answer {' and '.join(missing)}; env.kind {', '.join(fits)} would"
        )


def _require_read(config: TrainConfig, agent: Kind, env: Kind) -> None:
    """That no setting is set that this agent or environment does not read."""
    reasons = {"agent": "which plays its own turns", "env": "whose tasks describe their sessions"}
    for kind in (agent, env):
        need = f"another {kind.section}.kind than {kind.name!r}, {reasons[kind.section]}"
        unread = " ".join(getattr(kind.factory, "unread", ()))
        forbid_unused(config, [(unread, need, lambda _: False)])


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
