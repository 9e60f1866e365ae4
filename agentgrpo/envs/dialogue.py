"""A simulated user in front of any environment (config key `env.user`).

A turn of the agent that is neither an action nor an answer is a message to the user (Say). The
user's reply is a chat message with the role user. Actions go to the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from agentgrpo.actions import Action, ModelReply, Observation, Say
from agentgrpo.envs.base import AnyEpisode, Environment
from agentgrpo.envs.customers import User, UserDialogue, UserSimulators
from agentgrpo.envs.runner import LOOP, checked_episode
from agentgrpo.support.user_calls import run_sync
from agentgrpo.types import Task

PERSON = (
    "You are a person who talks with an assistant about a request of yours. Say one line at a "
    "time, and only what the assistant asks for. Do not make up what is not said below. When the "
    "request is done, say ###STOP### and nothing else.\n\nWhat you know and want: {}"
)


class DialogueEnv:
    """Adds a simulated user to an environment and forwards everything else."""

    has_user = True

    def __init__(
        self, inner: Environment, users: UserSimulators, reads: bool, max_replies: int
    ) -> None:
        self.inner, self._users, self._reads, self._max_replies = inner, users, reads, max_replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def texts_of(self, task: Task) -> Sequence[str]:
        """The texts in the task's column `user`. Raises ValueError if it has none."""
        if not self._reads:
            return ()
        value = task.spec.get("user")
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise ValueError(
                f"column 'user': expected the messages of the user of task {task.id!r}, a text or "
                f"a list of texts, got {value!r:.80}"
            )
        return texts

    def reset(self, task: Task) -> AnyEpisode:
        texts = self.texts_of(task)
        user = cast(User, self._users.of(task, texts, PERSON.format("\n".join(texts))))
        episode = checked_episode(self.inner.reset(task))
        return cast(AnyEpisode, DialogueEpisode(episode, user, self._max_replies))


class DialogueEpisode:
    """An episode and its user. Other attributes are forwarded to the environment's episode."""

    def __init__(self, episode: AnyEpisode, user: User, max_replies: int) -> None:
        self._episode: Any = episode
        self._talk, self._num_replies_left = UserDialogue(user), max_replies
        self._pending: Say | None = None
        """The message to which a model, as the user, must still reply."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    def _is_for_user(self, action: Action) -> bool:
        return isinstance(action, Say) or (
            isinstance(action, ModelReply) and self._pending is not None
        )

    def _user_reply(self, action: Action) -> Observation:
        """Get the user's reply. If the user ends the dialogue, the last message is the answer."""
        if isinstance(action, Say):
            if self._num_replies_left == 0:
                return Observation("", done=True, answer=action.answer)
            self._pending = action
            observation = self._talk.say(action.text, satisfied=False)
        else:
            assert isinstance(action, ModelReply)
            observation = self._talk.on_reply(action.text)
        if observation.ask is not None:
            return observation
        message, self._pending = self._pending, None
        assert message is not None
        if observation.done:
            return replace(observation, answer=message.answer)
        self._num_replies_left -= 1
        return observation

    def step(self, action: Action) -> Observation:
        if self._is_for_user(action):
            return self._user_reply(action)
        return cast(Observation, run_sync(self._episode.step(action), LOOP))
