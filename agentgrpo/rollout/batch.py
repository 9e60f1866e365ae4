"""Sampling groups of rollouts without a trainer: to evaluate, to make data, to try an agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentgrpo.agents.base import Agent
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import Environment
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.decoder import Decoder
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.types import Group, Task


def as_task(task: Task | str, id: str) -> Task:
    """A task; of a text, that of one user message."""
    if isinstance(task, Task):
        return task
    message = {"role": "user", "content": task}
    return Task(id=id, messages=(message,), spec={}, is_text=True)


def generate(
    tasks: Sequence[Task | str],
    engine: Decoder,
    agent: Agent,
    n: int = 1,
    *,
    env: Environment,
    tokenizer: Any,
    config: RolloutConfig | None = None,
    seed: int = 0,
    max_live: int = 256,
) -> list[Group]:
    """Play every task n times.

    Args:
        tasks: what to play; a text becomes a task of one user message.
        engine: an Engine that is awake.
        agent: what a turn means.
        n: rollouts per task.
        env: what answers.
        tokenizer: the model's, with its chat template.
        config: budgets and temperature.
        seed: of everything sampled.
        max_live: rollouts at once; at most as many as there are sandbox sessions.

    Returns:
        One group per task, in order, each with its n rollouts in index order, unscored but for
        what the environment gives.
    """
    made = [as_task(task, str(i)) for i, task in enumerate(tasks)]
    config = config or RolloutConfig()
    chat = ChatTemplate(tokenizer, config.template_options)
    sampler = Sampler(engine, agent, env, chat, config, max_live=max_live)
    return sampler.play(made, n, seed=seed)[0]
