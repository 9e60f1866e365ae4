"""Attempts that can be taken up in the middle: kept turns, an edited one, then the model goes on.

A Trajectory is a rollout by turns. A turn's tokens are those that the engine sampled, or the
encoding of what somebody else wrote. It is played as any rollout (rollout/play.py), by an engine
that says the kept turns again before it goes on: so their actions are carried out in a fresh
episode, the environment is as it was, and what the new turn does is answered again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from agentgrpo.actions import Action, InfrastructureError, Malformed, Message, Observation
from agentgrpo.agents.base import Agent
from agentgrpo.config import RolloutConfig
from agentgrpo.engine.in_process import EngineLoop
from agentgrpo.envs.base import Environment
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.recipe.measures import SOLVED_AT
from agentgrpo.records.rollouts import rollout_record
from agentgrpo.rewards.efficiency import well_formed
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rollout.play import Play
from agentgrpo.types import Completion, Int32, Rollout, Segment, Status, Task, Turn

Pieces = tuple[tuple[Segment, str], ...]
"""Tokens of a turn, run by run, each with its author: "generator" (sampled), or who wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedTurn:
    """What was done in one turn, by whom, and what the environment said to it."""

    text: str
    """Without the token that closes it."""
    pieces: Pieces
    result: Segment | None = None
    """The tokens of the environment's answer; None after the last turn, and before the answer."""
    result_text: str = ""

    @property
    def segments(self) -> list[Segment]:
        """Of the turn and of the environment's answer."""
        return [segment for segment, _ in self.pieces] + ([self.result] if self.result else [])


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
    quality: float = math.nan
    """Of its answer, in [0, 1], once it is judged."""

    @property
    def right(self) -> bool:
        return self.quality >= SOLVED_AT

    @property
    def rank(self) -> tuple[float, float]:
        """Better ones are smaller: by correctness, then by tool calls."""
        return (-min(self.quality, SOLVED_AT), self.rollout.stats["tool_calls"])

    def record(self) -> dict[str, Any]:
        """JSON values that records.read_rollout() reads; `flywheel` says how it was made.

        Its `authors` has who wrote each segment; None: the prompt, or the environment.
        """
        authors: list[str | None] = [None]  # the prompt
        for turn in self.turns:
            authors += [author for _, author in turn.pieces]
            authors += [None] * (turn.result is not None)
        made = {
            "operator": self.operator,
            "parent": self.parent,
            "authors": authors,
            "quality": self.quality,
            "right": self.right,
            "valid": well_formed(self.rollout),
        }
        return {**rollout_record(self.rollout), "flywheel": made}


class TrajectoryPlayer:
    """Plays attempts, from the start or from kept turns. May be used by many threads at once.

    `env`: reset() and episodes are used from the calling thread's attempt only. `runner`: where
    episodes run. `config`: what one attempt may use, kept turns included; history must be "append".
    """

    def __init__(
        self, loop: EngineLoop, agent: Agent, env: Environment, chat: ChatTemplate,
        reward: Scoring, runner: EpisodeRunner, config: RolloutConfig,
    ) -> None:  # fmt: skip
        self.agent, self.chat = agent, chat
        self._loop, self._env, self._reward = loop, env, reward
        self._runner, self._config = runner, config

    def written(self, text: str, author: str, task: Task) -> PlayedTurn:
        """A turn that somebody wrote: cut behind the first stop string, else closed."""
        for stop in self.agent.stop:
            head, found, _ = text.partition(stop)
            text = head + found
        if not text.strip():
            raise ValueError("an empty step")
        action = self.agent.parse(text, task)
        if isinstance(action, Malformed):
            raise ValueError(f"a malformed step: {action.message}")
        ids = self.chat.text_ids(text, own=True)
        if not any(text.endswith(stop) for stop in self.agent.stop):
            ids = np.append(ids, np.int32(self.chat.end_of_turn_id))
        return PlayedTurn(text=text, pieces=((Segment(ids), author),))

    def play(
        self,
        task: Task,
        *,
        operator: str,
        parent: int | None = None,
        kept: Sequence[PlayedTurn] = (),
        begin: str = "",
        author: str = "",
    ) -> Trajectory:
        """An attempt. What its kept turns do is done again; `author` wrote what the next one begins
        with.
        """
        given = self.chat.text_ids(begin, own=True) if begin else np.zeros(0, np.int32)
        agent = _Listening(self.agent)
        played = Play(
            _Continued(self._loop, kept, given), cast(Agent, agent), self._env, self.chat,
            self._runner, self._config, tasks=[task], group_size=1, seed=0, filters={},
        )  # fmt: skip
        (group,) = played.run(max_live=1)
        (rollout,) = group.rollouts
        if rollout.status is Status.INFRA_ERROR:
            raise InfrastructureError(rollout.error or "")
        turns: list[PlayedTurn] = []
        for segment in rollout.segments[1:]:
            if not segment.sampled:
                at = len(turns) - 1
                turns[at] = replace(turns[at], result=segment, result_text=agent.results[at])
            elif len(turns) < len(kept):
                turns.append(replace(kept[len(turns)], result=None, result_text=""))
            else:
                first = len(given) if len(turns) == len(kept) else 0
                turns.append(
                    PlayedTurn(
                        text=self.chat.decode(segment.token_ids),
                        pieces=_pieces(segment, first, author),
                    )
                )
        rollout.segments = [rollout.segments[0], *(s for turn in turns for s in turn.segments)]
        rollout.turns = []  # the engine's accounts are of turns that are not all its own
        self._reward.begin(group).result()
        return Trajectory(turns=tuple(turns), rollout=rollout, operator=operator, parent=parent)


def _pieces(segment: Segment, given: int, author: str) -> Pieces:
    """A turn as Play recorded it, its first tokens given and not sampled."""
    if not given:
        return ((segment, "generator"),)
    assert segment.logprobs is not None
    sampled = Segment(segment.token_ids[given:], segment.logprobs[given:])
    return ((Segment(segment.token_ids[:given]), author), (sampled, "generator"))


class _Listening:
    """An agent, and what it was told, turn by turn."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.results: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def observe(self, action: Action, shown: Observation) -> Sequence[Message] | str:
        self.results.append("\n".join(shown.outputs) or shown.text)
        return self._agent.observe(action, shown)


class _Continued:
    """A Decoder for one rollout that says kept turns again, then has the engine go on.

    Since histories are appended to, a request of the policy's goes on from its last one; what does
    not is of a second role, which the engine answers.
    """

    def __init__(self, loop: EngineLoop, kept: Sequence[PlayedTurn], given: Int32) -> None:
        self.max_model_len = loop.max_model_len
        self._loop, self._kept, self._given = loop, kept, given
        self._turn, self._last = -1, given[:0]
        self._head = given
        self._asked: Future[Completion] = Future()
        self._request_id = ""

    def add_request(
        self, request_id: str, prompt_ids: Int32, *, max_tokens: int, seed: int | None,
        **options: Any,
    ) -> None:  # fmt: skip
        self._request_id = request_id
        own = np.array_equal(prompt_ids[: len(self._last)], self._last)
        if own:
            self._turn, self._last = self._turn + 1, prompt_ids.copy()
        new = self._turn - len(self._kept)
        self._head = self._given if own and new == 0 else self._given[:0]
        if own and new < 0:
            ids = np.concatenate([s.token_ids for s, _ in self._kept[self._turn].pieces])
            self._asked = Future()
            self._asked.set_result(_completion(prompt_ids, ids, "stop"))
            return
        prompt = np.concatenate([prompt_ids, self._head])
        room = min(max_tokens, self.max_model_len - len(prompt))
        if room > 0:
            self._asked = self._loop.submit(prompt, max_tokens=room, **options)
        else:
            self._asked = Future()
            self._asked.set_result(_completion(prompt_ids, self._given[:0], "length"))

    def step(self) -> list[Completion]:
        done = self._asked.result()
        ids = np.concatenate([self._head, done.token_ids])
        logprobs = np.concatenate([np.zeros(len(self._head), np.float32), done.logprobs])
        said = {"request_id": self._request_id, "token_ids": ids, "logprobs": logprobs}
        return [replace(done, **said)]

    def abort(self, request_ids: Sequence[str]) -> None:
        """What the engine still says is not listened to."""


def _completion(prompt: Int32, ids: Int32, finish_reason: str) -> Completion:
    return Completion(
        request_id="",
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason=finish_reason,
        stop_reason=None,
        num_cached_tokens=0,
        account=Turn.of(prompt, ids, finish_reason),
    )
