"""Plays groups of rollouts without a barrier: each goes to its tool when its own turn ends.

The engine decodes whatever is in flight, one token at a time. A finished turn is parsed; what it
wants done goes to the environment; the observation comes back as appended tokens and a new
request, while the others decode on. With `deterministic` the tools of one engine step are awaited
before the next, so that the batches (and with them every sampled bit) repeat from run to run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from agentgrpo.agents.base import Action, Agent, CallTools, Finish, Malformed
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import AnyEpisode, Environment, InfrastructureError, Observation
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.rollout.delta import ChatTemplate
from agentgrpo.types import (
    Float32,
    Group,
    Int32,
    Metrics,
    Rollout,
    Segment,
    SpanReward,
    Status,
    Task,
)

if TYPE_CHECKING:
    from agentgrpo.engine import Completion


class Decoder(Protocol):
    """The part of engine.Engine that rollouts need."""

    max_model_len: int

    def seed(self, seed: int) -> None: ...
    def add_request(
        self, request_id: str, prompt_ids: Int32, *, max_tokens: int, temperature: float,
        stop: Sequence[str], stop_token_ids: Sequence[int],
    ) -> None: ...  # fmt: skip
    def step(self) -> list[Completion]: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """A rollout being played."""

    rollout: Rollout
    episode: AnyEpisode
    ids: list[Int32]
    length: int
    turns: int = 0
    turn_start: int = 0
    """Where the tokens of the last turn begin."""


@dataclass(slots=True)
class SamplerStats:
    """Where the time of sampling went, in seconds, and how much was sampled."""

    decode_s: float = 0.0
    idle_s: float = 0.0
    """Waiting for tools with nothing to decode."""
    engine_steps: int = 0
    total_sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    infra_failures: int = 0

    def metrics(self) -> Metrics:
        """The numbers, by name."""
        return {name: float(value) for name, value in dataclasses.asdict(self).items()}


class Sampler:
    """Plays every task group_size times with one agent in one environment.

    Args:
        engine: awake while playing.
        agent, env, chat: what turns mean, who answers, how messages become tokens.
        config: budgets and temperature.
        max_live: rollouts played at once; the others wait for one to end. At most as many as there
            are sandbox sessions: a rollout keeps its session until it ends.
        max_tool_threads: tool calls that may wait for the sandbox at once.
    """

    def __init__(
        self,
        engine: Decoder,
        agent: Agent,
        env: Environment,
        chat: ChatTemplate,
        config: RolloutConfig,
        *,
        max_live: int = 256,
        max_tool_threads: int = 32,
    ) -> None:
        self._engine, self._agent, self._env, self._chat = engine, agent, env, chat
        self._config = config
        self._max_live = max_live
        self._max_tool_threads = max_tool_threads

    def play(
        self,
        tasks: Sequence[Task],
        group_size: int,
        *,
        seed: int,
        temperature: float | None = None,
    ) -> tuple[list[Group], SamplerStats]:
        """Play each task group_size times.

        Args:
            tasks: what to play; ids need not differ.
            group_size: rollouts per task.
            seed: of everything sampled in this call.
            temperature: in place of config.temperature; 0 is greedy.

        Returns:
            One group per task, in order, its rollouts in index order; unscored.
        """
        self._engine.seed(seed)
        heat = self._config.temperature if temperature is None else temperature
        play = _Play(self._engine, self._agent, self._env, self._chat, self._config, heat)
        with EpisodeRunner(self._max_tool_threads) as worlds:
            queue = [task for task in tasks for _ in range(group_size)]
            rollouts = play.run(queue, worlds, max_live=self._max_live)
        groups = [
            Group(task=task, rollouts=rollouts[i * group_size : (i + 1) * group_size])
            for i, task in enumerate(tasks)
        ]
        return groups, play.stats


class _Play:
    """One call of Sampler.play."""

    def __init__(
        self, engine: Decoder, agent: Agent, env: Environment, chat: ChatTemplate,
        config: RolloutConfig, temperature: float,
    ) -> None:  # fmt: skip
        self._engine, self._agent, self._env, self._chat = engine, agent, env, chat
        self._config, self._temperature = config, temperature
        self._live: dict[int, _Live] = {}
        self._decoding: dict[str, int] = {}
        self._waiting: dict[int, tuple[Future[Any], Callable[[int, Any], None]]] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self.stats = SamplerStats()

    def run(self, tasks: Sequence[Task], worlds: EpisodeRunner, *, max_live: int) -> list[Rollout]:
        self._worlds = worlds
        rollouts: list[Rollout] = []
        try:
            while self._live or len(rollouts) < len(tasks):
                while len(rollouts) < len(tasks) and len(self._live) < max_live:
                    rollouts.append(self._start(len(rollouts), tasks[len(rollouts)]))
                self._take_answers(block=not self._decoding)
                if self._decoding:
                    self._decode()
        finally:
            running = {i: future for i, (future, _) in self._waiting.items() if not future.cancel()}
            self._engine.abort(list(self._decoding))
            wait(running.values())
            ending = {i for i in running if self._waiting[i][1] == self._finished}
            for index in self._live.keys() - ending:  # those that end close themselves
                worlds.close(self._live[index].episode).result()
        return rollouts

    def _start(self, index: int, task: Task) -> Rollout:
        prompt = self._chat.prompt_ids(self._agent.messages(task), self._agent.tools(task))
        prefill = self._agent.prefill(task)
        if prefill:
            prompt = np.concatenate([prompt, self._chat.text_ids(prefill)])
        if len(prompt) >= self._engine.max_model_len:
            raise ValueError(
                f"task {task.id!r}: its prompt has {len(prompt)} tokens, engine.max_model_len is "
                f"{self._engine.max_model_len}"
            )
        rollout = Rollout(task=task, segments=[Segment(prompt)], status=Status.COMPLETED)
        rollout.stats = {"turns": 0.0, "tool_calls": 0.0, "tool_errors": 0.0, "malformed": 0.0}
        self._live[index] = _Live(
            rollout=rollout, episode=self._env.reset(task), ids=[prompt], length=len(prompt)
        )
        self._ask(index)
        return rollout

    def _ask(self, index: int) -> None:
        """Queue the next turn, or end the rollout if its budgets allow none."""
        live = self._live[index]
        room = self._engine.max_model_len - live.length
        if live.turns >= self._config.max_turns:
            self._end(index, Status.TRUNCATED_TURNS)
            return
        if room < 1:
            self._end(index, Status.TRUNCATED_LENGTH)
            return
        request_id = f"{index}.{live.turns}"
        self._engine.add_request(
            request_id,
            np.concatenate(live.ids),
            max_tokens=min(self._config.max_turn_tokens, room),
            temperature=self._temperature,
            stop=self._agent.stop,
            stop_token_ids=self._chat.stop_token_ids,
        )
        self._decoding[request_id] = index

    def _decode(self) -> None:
        started = time.perf_counter()
        done = self._engine.step()
        self.stats.decode_s += time.perf_counter() - started
        self.stats.engine_steps += 1
        for completion in sorted(done, key=lambda c: self._decoding[c.request_id]):
            self._turn_ended(self._decoding.pop(completion.request_id), completion)

    def _turn_ended(self, index: int, turn: Completion) -> None:
        live = self._live[index]
        live.turn_start = live.length
        self._append(live, turn.token_ids, turn.logprobs)
        live.turns += 1
        stats = live.rollout.stats
        stats["turns"] += 1
        self.stats.total_sampled_tokens += len(turn.token_ids)
        self.stats.cached_tokens += turn.num_cached_tokens
        self.stats.prompt_tokens += live.length - len(turn.token_ids)
        if turn.finish_reason == "length":  # a turn that was cut is never acted on
            self._end(index, Status.TRUNCATED_LENGTH)
            return
        action: Action = self._agent.parse(self._chat.decode(turn.token_ids))
        if isinstance(action, Finish):
            live.rollout.answer = action.answer
            self._end(index, Status.COMPLETED)
        elif isinstance(action, Malformed):
            stats["malformed"] += 1
            self._observe(index, action, Observation(action.message, failed=True))
        else:
            stats["tool_calls"] += len(action.calls) if isinstance(action, CallTools) else 1
            self._wait_for(
                index,
                self._worlds.step(live.episode, action),
                lambda index, observation: self._answered_to(index, action, observation),
            )

    def _wait_for(self, index: int, future: Future[Any], then: Callable[[int, Any], None]) -> None:
        self._waiting[index] = (future, then)
        future.add_done_callback(lambda _: self._answered.put(index))

    def _take_answers(self, *, block: bool) -> None:
        """Continue the rollouts whose tools answered; wait for one if nothing decodes."""
        if not self._waiting:
            return
        started = time.perf_counter()
        if self._config.deterministic:
            ready = sorted(self._answered.get() for _ in range(len(self._waiting)))
        else:
            ready = [self._answered.get()] if block else []
            while not self._answered.empty():
                ready.append(self._answered.get())
        if block or self._config.deterministic:
            self.stats.idle_s += time.perf_counter() - started
        for index in ready:
            future, then = self._waiting.pop(index)
            try:
                answer = future.result()
            except InfrastructureError as error:
                self._broken(index, error, closed=then == self._finished)
            else:
                then(index, answer)

    def _answered_to(self, index: int, action: Action, observation: Observation) -> None:
        rollout = self._live[index].rollout
        rollout.stats["tool_errors"] += observation.failed
        for name, count in observation.counts.items():
            rollout.stats[name] = rollout.stats.get(name, 0.0) + count
        for name, value in observation.rewards.items():
            live = self._live[index]
            end = live.turn_start + len(live.ids[-1])
            rollout.span_rewards.append(SpanReward(live.turn_start, end, name, value))
        if observation.done:
            rollout.answer = observation.answer
            self._end(index, Status.COMPLETED)
        else:
            self._observe(index, action, observation)

    def _observe(self, index: int, action: Action, observation: Observation) -> None:
        live = self._live[index]
        limit = self._config.max_observation_tokens
        shown = replace(
            observation,
            text=self._chat.clip(observation.text, limit),
            outputs=tuple(self._chat.clip(output, limit) for output in observation.outputs),
        )
        said = self._agent.observe(action, shown)
        closed = int(live.ids[-1][-1]) in self._chat.stop_token_ids
        if not isinstance(said, str):
            ids = self._chat.observation_ids(said, turn_closed=closed)
        elif closed:  # the policy closed the message that the text would have gone into
            self._end(index, Status.COMPLETED)
            return
        else:
            ids = self._chat.text_ids(said)
        self._append(live, ids, None)
        self._ask(index)

    def _append(self, live: _Live, ids: Int32, logprobs: Float32 | None) -> None:
        live.rollout.segments.append(Segment(ids, logprobs))
        live.ids.append(ids)
        live.length += len(ids)

    def _end(self, index: int, status: Status) -> None:
        live = self._live[index]
        live.rollout.status = status
        future = self._worlds.finish(live.episode, live.rollout.answer)
        self._wait_for(index, future, self._finished)

    def _finished(self, index: int, rewards: Mapping[str, float]) -> None:
        rollout = self._live.pop(index).rollout
        for name, value in rewards.items():
            rollout.rewards[name] = rollout.rewards.get(name, 0.0) + value

    def _broken(self, index: int, error: InfrastructureError, *, closed: bool) -> None:
        live = self._live.pop(index)
        self.stats.infra_failures += 1
        live.rollout.error = str(error)
        live.rollout.status = Status.INFRA_ERROR
        live.rollout.rewards, live.rollout.span_rewards = {}, []
        if not closed:
            self._worlds.close(live.episode).result()
