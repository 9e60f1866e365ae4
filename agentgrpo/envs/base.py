"""Protocols of environments. A rollout has one episode, which one thread uses at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentgrpo.actions import Action, Observation
from agentgrpo.types import Task


class Episode(Protocol):
    """The environment of one rollout. The defaults: no rewards, nothing to close."""

    def step(self, action: Action) -> Observation:
        """Execute the action. May block. A failure that the policy caused is an Observation.

        Raises:
            InfrastructureError: the machine failed, not the policy.
        """

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """Return the environment's rewards by name. May block.

        May also set the attributes `feedback`, a text for a teacher (config.teacher) without hidden
        information, and `measures`, numbers by name that are added to Rollout.stats.

        Called once, when the rollout has ended other than by an InfrastructureError.

        Args:
            answer: the policy's final answer, or None.

        Raises:
            InfrastructureError: the machine failed, not the policy.
        """
        return {}

    def close(self) -> None:
        """Release all resources. Called once, also after an error."""
        return


class CopiedEpisode(Episode, Protocol):
    """An Episode from which branches (rollout.branching) can start without repeating its actions.

    Both methods must be defined on the class: a wrapper's __getattr__ must not forward them.
    """

    def snapshot(self) -> Any:
        """Copy the state for several episodes to start from.

        The copy's close() is called when the group has ended. None: no copy is possible, and the
        actions are repeated.
        """

    def resume(self, copy: Any) -> bool:
        """Set a fresh episode of the task to the state of a copy, before its first step().

        False: exactly that state was not reached. The episode is fresh again, and the actions are
        repeated.
        """


class AsyncEpisode(Protocol):
    """An Episode whose methods are coroutines. One event loop runs all episodes of a run."""

    async def step(self, action: Action) -> Observation:
        """As Episode.step()."""

    async def finish(self, answer: str | None) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        return


AnyEpisode = Episode | AsyncEpisode


class Environment(Protocol):
    """Makes episodes.

    Optional attributes, looked up by name: `tools(task)`, `tasks(split)`, `begin(task)`, `judges`
    (it scores answers itself), `has_user`, `needs_actions` (shipped agents that do not act are
    rejected), `hosts_programs` (its episodes' `begin()` returns the session in which programs run),
    `close()`, and `answers`, the kinds of actions that its episodes take: "code", "lines" of a
    console, "tools", "search". `answers` is compared with the agent's `acts` if both are set.
    """

    def reset(self, task: Task) -> Any:
        """Make a fresh Episode or AsyncEpisode of a task.

        It must be cheap: expensive work belongs in the first step().
        """
