"""Plays groups of rollouts without a barrier: each goes to its tool when its own turn ends.

The engine decodes all rollouts in flight, one token at a time. A finished turn is parsed; its code
goes to a thread that waits for the sandbox; the result comes back as appended tokens and a new
request, while the others are decoded (play.py). With `deterministic`, the tools of one engine step
are awaited before the next, so that the batches, and with them every sampled bit, repeat.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentgrpo.agents.base import Agent
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import BranchConfig, RolloutConfig
from agentgrpo.envs.base import Environment
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.engine_protocol import Decoder, Ended, SamplerStats, ignore
from agentgrpo.rollout.play import Play
from agentgrpo.types import Group, Task


class AnySampler(ABC):
    """What the training loop and the evaluation play tasks with: Sampler, or a user's own."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config

    def play(
        self,
        tasks: Sequence[Task],
        group_size: int,
        *,
        seed: int,
        temperature: float | None = None,
        filters: Mapping[str, float] = MappingProxyType({}),
        ended: Ended = ignore,
    ) -> tuple[list[Group], SamplerStats]:
        """Play each task group_size times; one group per task, in order, unscored.

        `seed`: of everything sampled in this call, see decoder.request_seed(). `temperature`:
        instead of config.temperature, and without branching; 0 is greedy. `filters`: as in
        Engine.add_request(); what is played so must not be trained on. `ended` is told of each
        group that has ended, where this process plays by itself.
        """
        started = time.perf_counter()
        config = self._config
        if temperature is not None:
            changed = {"temperature": temperature, "branching": BranchConfig()}
            config = config.model_copy(update=changed)
        groups, stats = self._play(tasks, group_size, config, seed, filters, ended)
        stats.total_s = time.perf_counter() - started
        return groups, stats

    def close(self) -> None:
        """Let go of what it holds, at the end of a run."""
        return

    @abstractmethod
    def _play(
        self, tasks: Sequence[Task], group_size: int, config: RolloutConfig, seed: int,
        filters: Mapping[str, float], ended: Ended,
    ) -> tuple[list[Group], SamplerStats]: ...  # fmt: skip


class Sampler(AnySampler):
    """Plays every task group_size times with one agent in one environment.

    The engine is awake while playing. Of rollouts `max_live` are played at once, at most as many as
    there are sandbox sessions: a rollout keeps its session until it ends. `max_tool_threads`
    blocking environments may work at once; asynchronous ones have no limit.
    """

    def __init__(
        self,
        engine: Decoder,
        agent: Agent,
        env: Environment,
        chat: ChatTemplate,
        config: RolloutConfig,
        *,
        max_live: int = 256,
        max_tool_threads: int = 64,
    ) -> None:
        super().__init__(config)
        if max_live < 1:
            raise ValueError(f"max_live must be at least 1, got {max_live}")
        if isinstance(agent, ProgramAgent):
            raise ValueError(
                "agent: a program plays its own turns: play it with agentgrpo.programs.play"
            )
        self._engine, self._agent, self._env, self._chat = engine, agent, env, chat
        self._max_live = max_live
        self._max_tool_threads = max_tool_threads

    def _play(
        self, tasks: Sequence[Task], group_size: int, config: RolloutConfig, seed: int,
        filters: Mapping[str, float], ended: Ended,
    ) -> tuple[list[Group], SamplerStats]:  # fmt: skip
        runner = EpisodeRunner(self._max_tool_threads, config.call_timeout_s)
        play = Play(
            self._engine, self._agent, self._env, self._chat, runner, config,
            tasks=tasks, group_size=group_size, seed=seed, filters=filters, ended=ended,
        )  # fmt: skip
        return play.run(max_live=self._max_live), play.stats


def as_task(task: Task | str, id: str) -> Task:
    """A task; of a text, that of one user message."""
    if isinstance(task, Task):
        return task
    message = {"role": "user", "content": task}
    return Task(id=id, messages=(message,), spec={}, is_text=True)
