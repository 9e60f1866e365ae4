"""The environment `answer`: no actions; a reward scores the answer."""

from __future__ import annotations

from typing import ClassVar

from agentgrpo.envs.base import Episode
from agentgrpo.envs.runner import NOTHING
from agentgrpo.types import Task


class AnswerEnv:
    """Episodes without actions, for agent programs that bring their own tools."""

    answers: ClassVar[tuple[str, ...]] = ()

    def reset(self, task: Task) -> Episode:
        return NOTHING
