"""Attempts that can be taken up in the middle: kept turns, an edited one, then the model goes on.

A Trajectory is a rollout by turns. A turn's tokens are those that the engine sampled, or the
encoding of what somebody else wrote, put together exactly as rollouts are (agents, ChatTemplate).
Where an attempt goes on from kept turns, their actions are carried out again in a fresh episode,
so that the world is as it was, and what the new turn does is answered anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentgrpo.actions import Action, CallTools, Finish, Malformed, Observation
from agentgrpo.agents.base import Agent
from agentgrpo.engine.endpoints import EngineLoop
from agentgrpo.envs.base import AnyEpisode, Environment
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rewards.rewards import Reward
from agentgrpo.rewards.scoring import Scoring, score_all
from agentgrpo.run.records import rollout_record
from agentgrpo.types import Group, Int32, Rollout, Segment, Status, Task


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedTurn:
    """What was done in one turn, by whom, and what the world said to it."""

    text: str
    """Without the token that closes it."""
    pieces: tuple[tuple[Segment, str], ...]
    """Its tokens, run by run, each with its author: "generator" (sampled), or whoever wrote it."""
    told: Segment | None = None
    """The tokens of the world's answer; None after the last turn, and before it has answered."""
    told_text: str = ""
    calls: int = 0
    failed: bool = False
    """What it did failed, by status."""
    malformed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One attempt at a task."""

    turns: tuple[PlayedTurn, ...]
    rollout: Rollout
    """Of the same tokens, scored. Written turns are not `sampled` there."""
    operator: str
    """What made it: "fresh", "redundant", ..."""
    parent: int | None = None
    """Which of the question's trajectories it was made from."""

    @property
    def calls(self) -> int:
        """Tool calls carried out."""
        return sum(turn.calls for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy is to learn: of all turns, not of the world's answers."""
        return sum(len(segment.token_ids) for turn in self.turns for segment, _ in turn.pieces)

    @property
    def said(self) -> tuple[str, ...]:
        """The turns' texts."""
        return tuple(turn.text for turn in self.turns)

    def record(self) -> dict[str, Any]:
        """JSON values that records.read_rollout() reads; `flywheel` says how it was made.

        Its `authors` has who wrote each segment; None: the prompt, or the world.
        """
        authors: list[str | None] = [None]  # the prompt
        for turn in self.turns:
            authors += [author for _, author in turn.pieces]
            authors += [None] * (turn.told is not None)
        made = {"operator": self.operator, "parent": self.parent, "authors": authors}
        return {**rollout_record(self.rollout), "flywheel": made}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one attempt may use."""

    max_turns: int
    max_turn_tokens: int
    max_observation_tokens: int
    temperature: float


class TrajectoryPlayer:
    """Plays attempts, from the start or from kept turns. May be used by many threads at once.

    Args:
        loop: the engine that samples.
        agent: what turns mean.
        env: who answers; reset() and episodes are used from the calling thread's attempt only.
        chat: how messages become tokens.
        reward: what an attempt is worth.
        worlds: where episodes run.
    """

    def __init__(
        self,
        loop: EngineLoop,
        agent: Agent,
        env: Environment,
        chat: ChatTemplate,
        reward: Reward | Scoring,
        worlds: EpisodeRunner,
    ) -> None:
        self.loop, self.agent, self.env, self.chat = loop, agent, env, chat
        self._reward, self._worlds = reward, worlds

    def written(self, text: str, author: str) -> PlayedTurn:
        """A turn that somebody wrote: cut behind the first stop string, else closed.

        Raises:
            ValueError: it is empty, or acts in a malformed way.
        """
        for stop in self.agent.stop:
            head, found, _ = text.partition(stop)
            text = head + found
        if not text.strip():
            raise ValueError("an empty step")
        action = self.agent.parse(text)
        if isinstance(action, Malformed):
            raise ValueError(f"a malformed step: {action.message}")
        ids = self.chat.text_ids(text)
        if not any(text.endswith(stop) for stop in self.agent.stop):
            ids = np.append(ids, np.int32(self.chat.end_of_turn_id))
        return PlayedTurn(text=text, pieces=((Segment(ids), author),))

    def play(
        self,
        task: Task,
        limits: Budget,
        *,
        operator: str,
        parent: int | None = None,
        kept: Sequence[PlayedTurn] = (),
        begin: str = "",
        author: str = "",
    ) -> Trajectory:
        """An attempt.

        Args:
            task: what to solve.
            limits: what it may use, kept turns included.
            operator: see Trajectory.
            parent: see Trajectory.
            kept: its first turns. What they do is done again; one without an answer gets one.
            begin: text that the first new turn begins with.
            author: of `begin`.

        Raises:
            InfrastructureError: the machine failed.
        """
        attempt = _Attempt(self, task, limits)
        try:
            for turn in kept:
                attempt.redo(turn)
            status = attempt.go_on(begin, author)
            rewards = self._worlds.finish(attempt.episode, attempt.answer).result()
        except BaseException:
            self._worlds.close(attempt.episode).result()
            raise
        rollout = attempt.rollout(status, rewards)
        score_all([Group(task=task, rollouts=[rollout])], self._reward)
        return Trajectory(
            turns=tuple(attempt.turns), rollout=rollout, operator=operator, parent=parent
        )

    def step(self, episode: AnyEpisode, action: Action) -> Observation:
        """What the world answers."""
        if isinstance(action, Malformed):
            return Observation(action.message, failed=True)
        return self._worlds.step(episode, action).result()

    def prompt(self, task: Task) -> Int32:
        """The tokens before the policy's first."""
        prompt = self.chat.prompt_ids(self.agent.messages(task), self.agent.tools(task))
        prefill = self.agent.prefill(task)
        return np.concatenate([prompt, self.chat.text_ids(prefill)]) if prefill else prompt


class _Attempt:
    """One call of TrajectoryPlayer.play."""

    def __init__(self, player: TrajectoryPlayer, task: Task, limits: Budget) -> None:
        self._player, self._task, self._limits = player, task, limits
        self.prompt = player.prompt(task)
        self.episode: AnyEpisode = player.env.reset(task)
        self.turns: list[PlayedTurn] = []
        self.answer: str | None = None
        self._over = False

    def redo(self, turn: PlayedTurn) -> None:
        """Keep a turn and bring the world to where it was after it."""
        action = self._player.agent.parse(turn.text)
        if isinstance(action, Finish):
            self.answer, self._over = action.answer, True
            self.turns.append(turn)
            return
        observation = self._player.step(self.episode, action)
        self.turns.append(turn if turn.told else self._answered(turn, action, observation))
        self._over = observation.done

    def go_on(self, begin: str, author: str) -> Status:
        """Sample turn after turn until the attempt ends."""
        limits, chat, agent = self._limits, self._player.chat, self._player.agent
        while not self._over:
            given = chat.text_ids(begin) if begin else np.zeros(0, np.int32)
            ids = np.concatenate([self._ids(), given])
            room = self._player.loop.max_model_len - len(ids)
            if len(self.turns) >= limits.max_turns:
                return Status.TRUNCATED_TURNS
            if room < 1:
                return Status.TRUNCATED_LENGTH
            done = self._player.loop.ask(
                ids,
                max_tokens=min(limits.max_turn_tokens, room),
                temperature=limits.temperature,
                stop=tuple(agent.stop),
                stop_token_ids=chat.stop_token_ids,
            ).result()
            text = begin + chat.decode(done.token_ids)
            sampled = (Segment(done.token_ids, done.logprobs), "generator")
            turn = PlayedTurn(
                text=text, pieces=((Segment(given), author), sampled) if begin else (sampled,)
            )
            if done.finish_reason == "length":  # a turn that was cut is never acted on
                self.turns.append(turn)
                return Status.TRUNCATED_LENGTH
            self._act(turn)
            begin = ""
        return Status.COMPLETED

    def _act(self, turn: PlayedTurn) -> None:
        action = self._player.agent.parse(turn.text)
        if isinstance(action, Finish):
            self.turns.append(turn)
            self.answer, self._over = action.answer, True
            return
        observation = self._player.step(self.episode, action)
        if observation.done:
            self.turns.append(replace(turn, calls=_calls(action), failed=observation.failed))
            self.answer, self._over = observation.answer, True
        else:
            self.turns.append(self._answered(turn, action, observation))

    def _answered(self, turn: PlayedTurn, action: Action, observation: Observation) -> PlayedTurn:
        chat, limit = self._player.chat, self._limits.max_observation_tokens
        shown = replace(
            observation,
            text=chat.clip(observation.text, limit),
            outputs=tuple(chat.clip(output, limit) for output in observation.outputs),
        )
        said = self._player.agent.observe(action, shown)
        closed = int(turn.pieces[-1][0].token_ids[-1]) in chat.stop_token_ids
        if isinstance(said, str):
            ids = chat.text_ids(said)
        else:
            ids = chat.observation_ids(said, turn_closed=closed)
        return replace(
            turn,
            told=Segment(ids),
            told_text="\n".join(shown.outputs) or shown.text,
            calls=_calls(action),
            failed=observation.failed,
            malformed=isinstance(action, Malformed),
        )

    def _segments(self) -> list[Segment]:
        segments = [Segment(self.prompt)]
        for turn in self.turns:
            segments += [segment for segment, _ in turn.pieces]
            segments += [turn.told] if turn.told else []
        return segments

    def _ids(self) -> Int32:
        return np.concatenate([segment.token_ids for segment in self._segments()])

    def rollout(self, status: Status, rewards: Mapping[str, float]) -> Rollout:
        """The attempt as a rollout, unscored but for what the world gave."""
        count = sum(turn.calls for turn in self.turns)
        return Rollout(
            task=self._task,
            segments=self._segments(),
            status=status,
            answer=self.answer,
            rewards=dict(rewards),
            stats={
                "turns": float(len(self.turns)),
                "tool_calls": float(count),
                "tool_errors": float(sum(t.failed for t in self.turns if not t.malformed)),
                "malformed": float(sum(turn.malformed for turn in self.turns)),
            },
        )


def _calls(action: Action) -> int:
    if isinstance(action, CallTools):
        return len(action.calls)
    return 0 if isinstance(action, Malformed) else 1
