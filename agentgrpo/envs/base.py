"""What an environment answers to an action. One episode a rollout, used by a thread at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentgrpo.actions import Action, Observation
from agentgrpo.types import Task


class Episode(Protocol):
    """The environment of one rollout. Who inherits from it gives no rewards and holds nothing."""

    def step(self, action: Action) -> Observation:
        """Carry the action out. May block; never raises for what the policy caused.

        Raises:
            InfrastructureError: see there.
        """

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """Rewards that the environment itself gives, by name; may block.

        It may also set `feedback`, text for a teacher (config.teacher): of nothing that is hidden;
        and `measures`, numbers by name that become Rollout.stats.

        Called once, when the rollout has ended in whatever way but a failure of the machine.

        Args:
            answer: what the policy answered in the end, if it did.

        Raises:
            InfrastructureError: see there.
        """
        return {}

    def close(self) -> None:
        """Give everything back. Called once, also after an error."""
        return


class CopiedEpisode(Episode, Protocol):
    """An Episode that branches (rollout.branching) can start from without repeating its actions.

    Both methods must be the class's own, so that a wrapper does not pass them on by accident.
    """

    def snapshot(self) -> Any:
        """A copy of its state, which several episodes can start from: an object whose close() is
        called when the group has ended. None: none can be made, the actions are repeated.
        """

    def resume(self, copy: Any) -> bool:
        """Bring a fresh episode of the task to the state of a copy, before its first step().
        False: it is not exactly that state. The episode is fresh again, the actions are repeated.
        """


class AsyncEpisode(Protocol):
    """An Episode whose methods are coroutines: all of a run wait on one thread's event loop."""

    async def step(self, action: Action) -> Observation:
        """As Episode's."""

    async def finish(self, answer: str | None) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        return


AnyEpisode = Episode | AsyncEpisode


class Environment(Protocol):
    """Makes episodes.

    What else one may have is looked up by name: `tools(task)`, `tasks(split)`, `begin(task)`,
    `judges`, `has_user`, `needs_actions` (shipped agents that do not act are refused),
    `hosts_programs` (its episodes' `begin()` gives the session that programs run in), `close()`;
    and `answers`, what its episodes take: "code", "lines" of a console, "tools", "search" (an
    agent's `acts` are compared with it, where both say).
    """

    def reset(self, task: Task) -> Any:
        """A fresh Episode or AsyncEpisode of a task.

        Cheap: what is expensive waits for the first step().
        """
