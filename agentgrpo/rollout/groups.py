"""The tasks of one call of play(), and the rollouts of each that have been played."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import AnyEpisode, Environment
from agentgrpo.envs.runner import checked_episode, networks_fault
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
        self._played: dict[int, Rollout] = {}
        self._whole: dict[int, Group] = {}
        self.stats = SamplerStats()

    @property
    def played(self) -> Mapping[int, Rollout]:
        """The rollouts that have ended, by index."""
        return self._played

    def whole(self) -> list[Group]:
        """All groups, in the order of their tasks; KeyError if one is not whole."""
        return [self._whole[task] for task in range(len(self._tasks))]

    def indices(self, task: int, members: Sequence[int] | None = None) -> list[int]:
        """Of rollouts by their places in a group; None: all of it."""
        every = range(self._size) if members is None else members
        return [task * self._size + member for member in every]

    def task(self, index: int) -> Task:
        """What a rollout plays."""
        return self._tasks[index // self._size]

    def of(self, index: int) -> tuple[str, int]:
        """Task and place in its group of a rollout."""
        return self.task(index).id, index % self._size

    def seed(self, index: int, attempt: int, *what: int | str) -> int:
        """Of one thing that is drawn in a rollout's attempt: another for each."""
        task, member = divmod(index, self._size)
        return request_seed(self._seed, task, member, attempt, *what)

    def users(self, index: int, function: Any) -> AbstractContextManager[Any]:
        """Within this a function of the agent's or the environment's is called."""
        task, rollout = self.of(index)
        limit = self._config.call_timeout_s
        return user_call(function, task=task, rollout=rollout, limit_s=limit)

    def reset(self, index: int) -> AnyEpisode:
        with networks_fault(self._env.reset), self.users(index, self._env.reset):
            return checked_episode(self._env.reset(self.task(index)))

    def decode(self, engine: Decoder) -> list[Completion]:
        """One step of the engine; the turns that it ended."""
        started = time.perf_counter()
        done = engine.step()
        self.stats.decode_s += time.perf_counter() - started
        self.stats.engine_steps += 1
        return done

    def is_last(self, index: int) -> bool:
        """Whether all others of a rollout's group have ended."""
        others = {*self.indices(index // self._size)} - {index}
        return self._played.keys() >= others

    def record(self, index: int, rollout: Rollout) -> None:
        """A rollout has ended; the last one of its group makes that whole."""
        self._played[index] = rollout
        task = index // self._size
        members = self.indices(task)
        if all(member in self._played for member in members):
            rollouts = [self._played[member] for member in members]
            self._whole[task] = Group(task=self._tasks[task], rollouts=rollouts)
            self._ended(self._whole[task])
