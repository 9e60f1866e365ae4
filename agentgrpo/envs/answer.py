"""No environment: the answer alone counts, which rewards judge."""

from __future__ import annotations

from typing import ClassVar

from agentgrpo.envs.base import Episode
from agentgrpo.envs.runner import NOTHING
from agentgrpo.types import Task


class AnswerEnv:
    """See envs/base.py. For programs, which bring their tools with them."""

    answers: ClassVar[tuple[str, ...]] = ()

    def reset(self, task: Task) -> Episode:
        return NOTHING
