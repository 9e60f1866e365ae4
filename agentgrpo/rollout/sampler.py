"""Plays groups of rollouts without a barrier: each goes to its tool when its own turn ends.

The engine decodes whatever is in flight, one token at a time. A finished turn is parsed; code goes
to a thread that waits for the sandbox; the observation comes back as appended tokens and a new
request, while the others decode on. With `deterministic` the tools of one engine step are awaited
before the next, so that the batches (and with them every sampled bit) repeat from run to run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from agentgrpo.agents.base import Action, Agent, Finish, Malformed, RunCode
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import Environment, Episode, InfrastructureError, Observation
from agentgrpo.rollout.delta import ChatTemplate
from agentgrpo.types import Float32, Group, Int32, Metrics, Rollout, Segment, Status, Task

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
    episode: Episode
    ids: list[Int32]
    length: int
    turns: int = 0


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
        with ThreadPoolExecutor(self._max_tool_threads, "tool") as threads:
            queue = [task for task in tasks for _ in range(group_size)]
            rollouts = play.run(queue, threads, max_live=self._max_live)
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
        self._tools: dict[int, Future[Observation]] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self.stats = SamplerStats()

    def run(
        self, tasks: Sequence[Task], threads: ThreadPoolExecutor, *, max_live: int
    ) -> list[Rollout]:
        rollouts: list[Rollout] = []
        try:
            while self._live or len(rollouts) < len(tasks):
                while len(rollouts) < len(tasks) and len(self._live) < max_live:
                    rollouts.append(self._start(len(rollouts), tasks[len(rollouts)]))
                self._take_answers(block=not self._decoding)
                if self._decoding:
                    self._decode(threads)
        finally:
            running = [tool for tool in self._tools.values() if not tool.cancel()]
            self._engine.abort(list(self._decoding))
            wait(running)
            for live in self._live.values():
                live.episode.close()
        return rollouts

    def _start(self, index: int, task: Task) -> Rollout:
        prompt = self._chat.prompt_ids(self._agent.messages(task))
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

    def _decode(self, threads: ThreadPoolExecutor) -> None:
        started = time.perf_counter()
        done = self._engine.step()
        self.stats.decode_s += time.perf_counter() - started
        self.stats.engine_steps += 1
        for completion in sorted(done, key=lambda c: self._decoding[c.request_id]):
            self._turn_ended(self._decoding.pop(completion.request_id), completion, threads)

    def _turn_ended(self, index: int, turn: Completion, threads: ThreadPoolExecutor) -> None:
        live = self._live[index]
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
            self._observe(index, action.message)
        else:
            stats["tool_calls"] += 1
            self._call(index, action, threads)

    def _call(self, index: int, action: RunCode, threads: ThreadPoolExecutor) -> None:
        future = threads.submit(self._live[index].episode.step, action)
        self._tools[index] = future
        future.add_done_callback(lambda _: self._answered.put(index))

    def _take_answers(self, *, block: bool) -> None:
        """Continue the rollouts whose tools answered; wait for one if nothing decodes."""
        if not self._tools:
            return
        started = time.perf_counter()
        if self._config.deterministic:
            ready = sorted(self._answered.get() for _ in range(len(self._tools)))
        else:
            ready = [self._answered.get()] if block else []
            while not self._answered.empty():
                ready.append(self._answered.get())
        if block or self._config.deterministic:
            self.stats.idle_s += time.perf_counter() - started
        for index in ready:
            self._tool_answered(index, self._tools.pop(index))

    def _tool_answered(self, index: int, future: Future[Observation]) -> None:
        try:
            observation = future.result()
        except InfrastructureError as error:
            self.stats.infra_failures += 1
            self._live[index].rollout.error = str(error)
            self._end(index, Status.INFRA_ERROR)
            return
        self._live[index].rollout.stats["tool_errors"] += observation.failed
        self._observe(index, observation.text)

    def _observe(self, index: int, text: str) -> None:
        live = self._live[index]
        message = self._agent.observe(self._chat.clip(text, self._config.max_observation_tokens))
        closed = int(live.ids[-1][-1]) in self._chat.stop_token_ids
        self._append(live, self._chat.observation_ids([message], turn_closed=closed), None)
        self._ask(index)

    def _append(self, live: _Live, ids: Int32, logprobs: Float32 | None) -> None:
        live.rollout.segments.append(Segment(ids, logprobs))
        live.ids.append(ids)
        live.length += len(ids)

    def _end(self, index: int, status: Status) -> None:
        live = self._live.pop(index)
        live.rollout.status = status
        live.episode.close()
