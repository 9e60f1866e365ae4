"""A simulated user beside any environment: what the policy says is answered, what it does is done.

`env.user` puts one there. The environment then `talks`: agents say to the user what is neither an
action nor an answer (Say), and the user's reply is a chat message of the role user.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from agentgrpo.actions import Action, Heard, Observation, Say
from agentgrpo.envs.base import AnyEpisode, Environment
from agentgrpo.envs.customers import Customers, ScriptedUser, Talk, User
from agentgrpo.envs.runner import checked_episode
from agentgrpo.types import Task

PERSON = (
    "You are a person who talks with an assistant about a request of yours. Say one line at a "
    "time, and only what the assistant asks for. Do not make up what is not said below. When the "
    "request is done, say ###STOP### and nothing else.\n\nWhat you know and want: {}"
)


class DialogueEnv:
    """An environment whose tasks come from a user who can be talked with; all else is its own.

    Args:
        inner: the environment.
        users: who they are.
        mode: what `users` was made of: "scripted" leaves when everything is said.
        reads: the column `user` of a task's spec; a user of one's own reads the spec.
        max_replies: of a rollout. What is said after that ends it.
    """

    talks = True

    def __init__(
        self, inner: Environment, users: Customers, mode: str, reads: bool, max_replies: int
    ) -> None:
        self.inner, self.max_replies = inner, max_replies
        self._users, self._mode, self._reads = users, mode, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def user_of(self, task: Task) -> User:
        """The user who brings a task."""
        texts = self.texts_of(task)
        if self._mode == "scripted":
            return ScriptedUser(texts, patience=0)
        return cast(User, self._users.of(task, texts, PERSON.format("\n".join(texts))))

    def texts_of(self, task: Task) -> Sequence[str]:
        """What the task's column says of the user; errors as of user_of()."""
        if not self._reads:
            return ()
        given = task.spec.get("user")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise ValueError(
                f"column 'user': expected what the user of task {task.id!r} says, a text or a list "
                f"of texts, got {given!r:.80}"
            )
        return texts

    def reset(self, task: Task) -> AnyEpisode:
        """An episode of the environment's, with a user of its own."""
        user = self.user_of(task)
        episode = checked_episode(self.inner.reset(task))
        waits = inspect.iscoroutinefunction(episode.step)
        kind = AsyncDialogueEpisode if waits else DialogueEpisode
        return cast(AnyEpisode, kind(episode, user, self.max_replies))


class _Dialogue:
    """What both kinds of episode share; what is not here is the environment's episode's."""

    def __init__(self, episode: AnyEpisode, user: User, max_replies: int) -> None:
        self._episode: Any = episode
        self._talk, self._left = Talk(user), max_replies
        self._said: Say | None = None
        """What the user is yet to answer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    def _is_users(self, action: Action) -> bool:
        return isinstance(action, Say) or (isinstance(action, Heard) and self._said is not None)

    def _answered(self, action: Action) -> Observation:
        """What the user answers; a rollout that they end has what was said last as its answer."""
        if isinstance(action, Say):
            if self._left == 0:
                return Observation("", done=True, answer=action.answer)
            self._said = action
            told = self._talk.say(action.text, satisfied=False)
        else:
            assert isinstance(action, Heard)
            told = self._talk.heard(action.text)
        if told.ask is not None:
            return told
        said, self._said = self._said, None
        assert said is not None
        if told.done:
            return replace(told, answer=said.answer)
        self._left -= 1
        return told


class DialogueEpisode(_Dialogue):
    """Beside an episode that blocks."""

    def step(self, action: Action) -> Observation:
        """Say it to the user, or carry it out."""
        if self._is_users(action):
            return self._answered(action)
        return cast(Observation, self._episode.step(action))


class AsyncDialogueEpisode(_Dialogue):
    """Beside an asynchronous episode; a user may block."""

    async def step(self, action: Action) -> Observation:
        """Say it to the user, or carry it out."""
        if self._is_users(action):
            return await asyncio.to_thread(self._answered, action)
        return cast(Observation, await self._episode.step(action))
