"""Rollouts that resume in the middle: kept turns, an edited turn, then new turns of the model.

A Trajectory is a rollout split into turns. A turn's tokens were sampled by the engine, or encode a
text that another model wrote. A trajectory is played like any rollout (rollout/play.py), with an
engine that first repeats the kept turns. So their actions run again in a fresh episode, which
restores the environment's state for the new turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentgrpo.actions import InfrastructureError, Malformed
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

AuthoredSegments = tuple[tuple[Segment, str], ...]
"""Segments of a turn, each with its author: "generator" (sampled) or the writer's role."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedTurn:
    """One turn with its authors, and the environment's observation."""

    text: str
    """Text without the closing token."""
    pieces: AuthoredSegments
    result: Segment | None = None
    """The observation's tokens. None: the last turn, or the observation does not exist yet."""
    result_text: str = ""

    @property
    def segments(self) -> list[Segment]:
        return [segment for segment, _ in self.pieces] + ([self.result] if self.result else [])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One rollout of a task by turns."""

    turns: tuple[PlayedTurn, ...]
    rollout: Rollout
    """The scored rollout with the same tokens. Written turns are not `sampled` in it."""
    operator: str
    """The operator that made it: "fresh", "redundant", ..."""
    parent: int | None = None
    """Index of the question's trajectory from which it was made."""
    quality: float = math.nan
    """Quality of its answer, in [0, 1], once it is scored."""

    @property
    def right(self) -> bool:
        return self.quality >= SOLVED_AT

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, smallest for the best: by correctness, then by tool calls."""
        return (-min(self.quality, SOLVED_AT), self.rollout.stats["tool_calls"])

    def record(self) -> dict[str, Any]:
        """A rollout record (records.read_rollout()) with a key `flywheel`.

        Its `authors` has the author of each segment; None: the prompt or the environment.
        """
        authors: list[str | None] = [None]  # the prompt
        for turn in self.turns:
            authors += [author for _, author in turn.pieces]
            authors += [None] * (turn.result is not None)
        info = {
            "operator": self.operator,
            "parent": self.parent,
            "authors": authors,
            "quality": self.quality,
            "right": self.right,
            "valid": well_formed(self.rollout),
        }
        return {**rollout_record(self.rollout), "flywheel": info}


class TrajectoryPlayer:
    """Plays trajectories, from the start or after kept turns. Thread-safe.

    `env`: each episode is used by one call only. `runner`: runs the episodes. `config`: limits of a
    rollout, including kept turns; history must be "append".
    """

    def __init__(
        self, loop: EngineLoop, agent: Agent, env: Environment, chat: ChatTemplate,
        reward: Scoring, runner: EpisodeRunner, config: RolloutConfig,
    ) -> None:  # fmt: skip
        self.agent, self.chat = agent, chat
        self._loop, self._env, self._reward = loop, env, reward
        self._runner, self._config = runner, config

    def make_written_turn(self, text: str, author: str, task: Task) -> PlayedTurn:
        """Make a turn from a written text: cut after the first stop string, or closed."""
        for stop in self.agent.stop:
            head, stop_string, _ = text.partition(stop)
            text = head + stop_string
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
        kept_turns: Sequence[PlayedTurn] = (),
        begin: str = "",
        author: str = "",
    ) -> Trajectory:
        """Play a trajectory. The actions of its kept turns are executed again.

        `begin`: prefix of the first new turn. `author`: its author.
        """
        prefix_ids = self.chat.text_ids(begin, own=True) if begin else np.zeros(0, np.int32)
        play = Play(
            _ResumingEngine(self._loop, kept_turns, prefix_ids), self.agent, self._env,
            self.chat, self._runner, self._config, tasks=[task], group_size=1, seed=0, filters={},
        )  # fmt: skip
        (group,) = play.run(max_live=1)
        (rollout,) = group.rollouts
        if rollout.status is Status.INFRA_ERROR:
            raise InfrastructureError(rollout.error or "")
        turns: list[PlayedTurn] = []
        for segment in rollout.segments[1:]:
            if not segment.sampled:
                last = len(turns) - 1
                _, reply = rollout.tool_messages[last]
                text = reply if isinstance(reply, str) else "\n".join(m["content"] for m in reply)
                turns[last] = replace(turns[last], result=segment, result_text=text)
            elif len(turns) < len(kept_turns):
                turns.append(replace(kept_turns[len(turns)], result=None, result_text=""))
            else:
                first = len(prefix_ids) if len(turns) == len(kept_turns) else 0
                turns.append(
                    PlayedTurn(
                        text=self.chat.decode(segment.token_ids),
                        pieces=_authored_segments(segment, first, author),
                    )
                )
        rollout.segments = [rollout.segments[0], *(s for turn in turns for s in turn.segments)]
        rollout.turns = []  # the engine's accounts do not fit: it did not sample all turns
        self._reward.begin(group).result()
        return Trajectory(turns=tuple(turns), rollout=rollout, operator=operator, parent=parent)


def _authored_segments(segment: Segment, prefix_length: int, author: str) -> AuthoredSegments:
    """Split a turn that Play recorded into its prefix, which was not sampled, and the rest."""
    if not prefix_length:
        return ((segment, "generator"),)
    assert segment.logprobs is not None
    sampled = Segment(segment.token_ids[prefix_length:], segment.logprobs[prefix_length:])
    return ((Segment(segment.token_ids[:prefix_length]), author), (sampled, "generator"))


class _ResumingEngine:
    """A Decoder for one rollout that repeats the kept turns, then lets the engine continue.

    Since the history is append-only, a request of the policy starts with its previous prompt. Any
    other request is of a second role, which the engine samples.
    """

    def __init__(
        self, loop: EngineLoop, kept_turns: Sequence[PlayedTurn], prefix_ids: Int32
    ) -> None:
        self.max_model_len = loop.max_model_len
        self._loop, self._kept_turns, self._prefix_ids = loop, kept_turns, prefix_ids
        self._turn, self._last_prompt = -1, prefix_ids[:0]
        self._request_prefix = prefix_ids
        self._future: Future[Completion] = Future()
        self._request_id = ""

    def add_request(
        self, request_id: str, prompt_ids: Int32, *, max_tokens: int, seed: int | None,
        **options: Any,
    ) -> None:  # fmt: skip
        self._request_id = request_id
        is_policy = np.array_equal(prompt_ids[: len(self._last_prompt)], self._last_prompt)
        if is_policy:
            self._turn, self._last_prompt = self._turn + 1, prompt_ids.copy()
        num_new_turns = self._turn - len(self._kept_turns)
        self._request_prefix = (
            self._prefix_ids if is_policy and num_new_turns == 0 else self._prefix_ids[:0]
        )
        if is_policy and num_new_turns < 0:
            ids = np.concatenate([s.token_ids for s, _ in self._kept_turns[self._turn].pieces])
            self._future = Future()
            self._future.set_result(_completion(prompt_ids, ids, "stop"))
            return
        prompt = np.concatenate([prompt_ids, self._request_prefix])
        max_new_tokens = min(max_tokens, self.max_model_len - len(prompt))
        if max_new_tokens > 0:
            self._future = self._loop.submit(prompt, max_tokens=max_new_tokens, **options)
        else:
            self._future = Future()
            self._future.set_result(_completion(prompt_ids, self._prefix_ids[:0], "length"))

    def step(self) -> list[Completion]:
        completion = self._future.result()
        ids = np.concatenate([self._request_prefix, completion.token_ids])
        logprobs = np.concatenate(
            [np.zeros(len(self._request_prefix), np.float32), completion.logprobs]
        )
        fields = {"request_id": self._request_id, "token_ids": ids, "logprobs": logprobs}
        return [replace(completion, **fields)]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ignore the request's result, since the engine cannot abort it here."""


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
