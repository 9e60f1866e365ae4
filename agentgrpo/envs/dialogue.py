"""A simulated user beside any environment: what the policy says is answered, what it does is done.

`env.user` puts one there. The environment has a user then: agents say to them what is neither an
action nor an answer (Say), and their reply is a chat message of the role user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from agentgrpo.actions import Action, ModelReply, Observation, Say
from agentgrpo.envs.base import AnyEpisode, Environment
from agentgrpo.envs.customers import ScriptedUser, User, UserDialogue, UserSimulators
from agentgrpo.envs.runner import LOOP, checked_episode
from agentgrpo.support.user_calls import run_sync
from agentgrpo.types import Task

PERSON = (
    "You are a person who talks with an assistant about a request of yours. Say one line at a "
    "time, and only what the assistant asks for. Do not make up what is not said below. When the "
    "request is done, say ###STOP### and nothing else.\n\nWhat you know and want: {}"
)


class DialogueEnv:
    """An environment whose tasks come from a user who can be talked with; all else is its own."""

    has_user = True

    def __init__(
        self, inner: Environment, users: UserSimulators, mode: str, reads: bool, max_replies: int
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
        user = self.user_of(task)
        episode = checked_episode(self.inner.reset(task))
        return cast(AnyEpisode, DialogueEpisode(episode, user, self.max_replies))


class DialogueEpisode:
    """An episode and its user; what is not here is the environment's episode's."""

    def __init__(self, episode: AnyEpisode, user: User, max_replies: int) -> None:
        self._episode: Any = episode
        self._talk, self._left = UserDialogue(user), max_replies
        self._said: Say | None = None
        """What the user is yet to answer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    def _is_users(self, action: Action) -> bool:
        return isinstance(action, Say) or (
            isinstance(action, ModelReply) and self._said is not None
        )

    def _answered(self, action: Action) -> Observation:
        """What the user answers; a rollout that they end has what was said last as its answer."""
        if isinstance(action, Say):
            if self._left == 0:
                return Observation("", done=True, answer=action.answer)
            self._said = action
            told = self._talk.say(action.text, satisfied=False)
        else:
            assert isinstance(action, ModelReply)
            told = self._talk.on_reply(action.text)
        if told.ask is not None:
            return told
        said, self._said = self._said, None
        assert said is not None
        if told.done:
            return replace(told, answer=said.answer)
        self._left -= 1
        return told

    def step(self, action: Action) -> Observation:
        if self._is_users(action):
            return self._answered(action)
        return cast(Observation, run_sync(self._episode.step(action), LOOP))
