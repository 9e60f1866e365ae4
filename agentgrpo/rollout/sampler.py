"""Sampler: plays groups of rollouts without a barrier between turns.

The engine decodes all requests in flight, one token per step. When a turn ends, its action runs on
another thread; its observation is appended and the next turn requested while the other rollouts
continue to decode (play.py). With rollout.deterministic, the tools of one engine step finish before
the next step, so that batches, and with them all sampled bits, repeat from run to run.
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
    """Base class of what the training loop and the evaluation play tasks with."""

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
        """Play each task group_size times. Returns one unscored group per task, in order.

        Args:
            tasks: to play.
            group_size: rollouts per task.
            seed: from which the seeds of all requests are derived (request_seed).
            temperature: replaces config.temperature and disables branching; 0 is greedy.
            filters: as in Engine.add_request(). Rollouts sampled with filters must not be trained
                on.
            ended: called with each group when it is complete, unless another rank plays it.
        """
        started = time.perf_counter()
        config = self._config
        if temperature is not None:
            update = {"temperature": temperature, "branching": BranchConfig()}
            config = config.model_copy(update=update)
        groups, stats = self._play(tasks, group_size, config, seed, filters, ended)
        stats.total_s = time.perf_counter() - started
        return groups, stats

    def close(self) -> None:
        """Release resources at the end of a run."""
        return

    @abstractmethod
    def _play(
        self, tasks: Sequence[Task], group_size: int, config: RolloutConfig, seed: int,
        filters: Mapping[str, float], ended: Ended,
    ) -> tuple[list[Group], SamplerStats]: ...  # fmt: skip


class Sampler(AnySampler):
    """Plays tasks with one agent in one environment.

    The engine must be awake. At most `max_live` rollouts are played at once; it must not exceed the
    number of sandbox sessions, since a rollout keeps its session until it ends. At most
    `max_tool_threads` blocking environments work at once; asynchronous ones have no limit.
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
            raise ValueError(f"max_live: expected at least 1, got {max_live}")
        if isinstance(agent, ProgramAgent):
            raise ValueError(
                "agent: a program plays its own turns. Use agentgrpo.programs.play.ProgramSampler"
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
    """Return a task; a string becomes a task with one user message."""
    if isinstance(task, Task):
        return task
    message = {"role": "user", "content": task}
    return Task(id=id, messages=(message,), spec={}, is_text=True)
