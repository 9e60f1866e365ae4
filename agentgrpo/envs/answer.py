"""No world: the answer alone counts, which rewards judge."""

from __future__ import annotations

from typing import ClassVar

from agentgrpo.actions import Action, Observation
from agentgrpo.envs.base import Episode
from agentgrpo.types import Task


class _Nowhere(Episode):
    def step(self, action: Action) -> Observation:
        raise TypeError("there is no world that could do anything")


class AnswerEnv:
    """See envs/base.py. For programs, which bring their tools with them."""

    answers: ClassVar[tuple[str, ...]] = ()

    def reset(self, task: Task) -> Episode:
        """Nothing to begin."""
        return _Nowhere()
