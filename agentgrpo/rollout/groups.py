"""Groups: the tasks of one play() call and their finished rollouts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import AnyEpisode, Environment
from agentgrpo.envs.runner import checked_episode, network_errors_as_infra
from agentgrpo.rollout.engine_protocol import Decoder, Ended, SamplerStats, request_seed
from agentgrpo.support.user_calls import user_call
from agentgrpo.types import Completion, Group, Rollout, Task


class Groups:
    """Each task's group_size rollouts. Rollout i of task t has the index t * group_size + i."""

    def __init__(
        self, tasks: Sequence[Task], seed: int, env: Environment, config: RolloutConfig,
        group_size: int, ended: Ended,
    ) -> None:  # fmt: skip
        self._env, self._config, self._size, self._ended = env, config, group_size, ended
        self._tasks, self._seed = tasks, seed
        self.played: dict[int, Rollout] = {}
        """The finished rollouts, by index."""
        self._complete: dict[int, Group] = {}
        self.stats = SamplerStats()

    def complete(self) -> list[Group]:
        """All groups in the order of their tasks; KeyError if one is incomplete."""
        return [self._complete[task] for task in range(len(self._tasks))]

    def indices(self, task: int, members: Sequence[int] | None = None) -> list[int]:
        """Indices of the given members of a task's group; None: of all."""
        members = range(self._size) if members is None else members
        return [task * self._size + member for member in members]

    def task(self, index: int) -> Task:
        return self._tasks[index // self._size]

    def name(self, index: int) -> tuple[str, int]:
        """Task id and group member of a rollout, for messages."""
        return self.task(index).id, index % self._size

    def seed(self, index: int, attempt: int, *purpose: int | str) -> int:
        """The seed of one random draw in a rollout's attempt."""
        task, member = divmod(index, self._size)
        return request_seed(self._seed, task, member, attempt, *purpose)

    def users(self, index: int, function: Any) -> AbstractContextManager[Any]:
        """The context in which a method of the agent or the environment is called."""
        task, rollout = self.name(index)
        limit = self._config.call_timeout_s
        return user_call(function, task=task, rollout=rollout, limit_s=limit)

    def reset(self, index: int) -> AnyEpisode:
        with network_errors_as_infra(self._env.reset), self.users(index, self._env.reset):
            return checked_episode(self._env.reset(self.task(index)))

    def decode(self, engine: Decoder) -> list[Completion]:
        started = time.perf_counter()
        completions = engine.step()
        self.stats.decode_s += time.perf_counter() - started
        self.stats.engine_steps += 1
        return completions

    def is_last(self, index: int) -> bool:
        others = {*self.indices(index // self._size)} - {index}
        return self.played.keys() >= others

    def record(self, index: int, rollout: Rollout) -> None:
        """Add a finished rollout; report its group if that is complete now."""
        self.played[index] = rollout
        task = index // self._size
        members = self.indices(task)
        if all(member in self.played for member in members):
            rollouts = [self.played[member] for member in members]
            self._complete[task] = Group(task=self._tasks[task], rollouts=rollouts)
            self._ended(self._complete[task])
