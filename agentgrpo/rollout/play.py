"""One call of Sampler.play: which rollout is decoding, which waits for its world, which is over.

A rollout is a line of states: its prompt is asked for, its turn ends, its action is refused, said
to be malformed or carried out, what came of it is appended, the next turn is asked for; at some
point it ends, and another may begin in its place. Everything here runs on one thread; worlds answer
on others, through futures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from agentgrpo.agents.base import Action, Agent, Finish, Heard, Malformed, Message
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import AnyEpisode, Ask, Environment, InfrastructureError, Observation
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.rollout.branch import GroupPlan, Step, branch_probability, turn_entropy
from agentgrpo.rollout.delta import ChatTemplate
from agentgrpo.rollout.limits import Spent, called, treatment_of
from agentgrpo.rollout.transcript import Transcript
from agentgrpo.types import (
    COUNTS,
    Group,
    Int32,
    Metrics,
    Rollout,
    Segment,
    SpanReward,
    Status,
    Task,
    Treatment,
    Turn,
)

if TYPE_CHECKING:
    from agentgrpo.engine import Completion


class Decoder(Protocol):
    """The part of engine.Engine that rollouts need."""

    max_model_len: int

    def add_request(
        self, request_id: str, prompt_ids: Int32, *, max_tokens: int, temperature: float,
        seed: int | None, stop: Sequence[str], stop_token_ids: Sequence[int], top_logprobs: int,
        filters: Mapping[str, float],
    ) -> None: ...  # fmt: skip
    def step(self) -> list[Completion]: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...


@dataclass(slots=True)
class SamplerStats:
    """Where the time of sampling went, in seconds, and how much was sampled."""

    total_s: float = 0.0
    decode_s: float = 0.0
    """In the engine."""
    idle_s: float = 0.0
    """Waiting for tools with nothing to decode."""
    engine_steps: int = 0
    total_sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    infra_failures: int = 0
    """Rollouts that the machine broke, those that were then played again included."""
    retries: int = 0
    branches: int = 0
    diverged_forks: int = 0
    """Branches whose replayed tools answered otherwise than before: begun anew, alone."""

    def metrics(self) -> Metrics:
        """The numbers, by name."""
        return {name: float(value) for name, value in dataclasses.asdict(self).items()}


def request_seed(seed: int, *place: int | str) -> int:
    """The seed of one thing that is drawn: another at each place, the same in every repetition.

    Args:
        seed: of the call, itself a function of run and step (TrainConfig.seed_of).
        place: task, rollout, try, turn, and what is drawn.

    Returns:
        63 bits.
    """
    named = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(named, "little") >> 1


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """A rollout being played."""

    rollout: Rollout
    episode: AnyEpisode
    transcript: Transcript
    """Its tokens; `rollout` has the same lists of segments."""
    spent: Spent
    attempt: int
    since: float
    """When it began to wait for what it waits for: on the clock of time.perf_counter()."""
    history: list[Step] = field(default_factory=list)
    """What its episode was asked and answered, where a branch might need it."""
    after_tool: bool = False
    """The turn that is being sampled follows a tool's answer."""
    first_entropy: float | None = None
    consecutive: int = 0
    """Branchings in a row that led here."""
    messages: list[Message] = field(default_factory=list)
    """The conversation so far, where it is rendered anew for each turn."""
    asked_for: Action | None = None
    """The policy's action for which the engine is speaking in a second role."""

    def took(self, name: str) -> None:
        """Count the time since it was last asked where its time went."""
        now, timings = time.perf_counter(), self.rollout.timings
        timings[name] = timings.get(name, 0.0) + now - self.since
        self.since = now


@dataclass(slots=True, kw_only=True, eq=False)
class _Fork:
    """Where a rollout branches off: what it has in common with its parent."""

    parent: int | None
    segments: list[Segment]
    spent: Spent
    stats: dict[str, float]
    span_rewards: list[SpanReward]
    turns: list[Turn]
    history: list[Step]
    first_entropy: float | None
    consecutive: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """A rollout that waits for its place."""

    index: int
    attempt: int = 0
    fork: _Fork | None = None
    since: float = field(default_factory=lambda: time.perf_counter())
    """When it was queued."""


class Play:
    """Plays `tasks`, each group_size times; see Sampler for the arguments.

    Rollout i of task t has the index t * group_size + i.
    """

    def __init__(
        self, engine: Decoder, agent: Agent, env: Environment, chat: ChatTemplate,
        worlds: EpisodeRunner, config: RolloutConfig, *,
        tasks: Sequence[Task], group_size: int, seed: int, filters: Mapping[str, float],
    ) -> None:  # fmt: skip
        self._engine, self._agent, self._env, self._chat = engine, agent, env, chat
        self._worlds, self._config = worlds, config
        self._tasks, self._group_size = tasks, group_size
        self._seed, self._filters = seed, filters
        self._branches = 0 < config.branching.initial < group_size
        self._vocab_size = len(chat.tokenizer)
        self._plans = [GroupPlan(group_size, config.branching) for _ in tasks]
        self._queue: deque[_Pending] = deque()
        self._live: dict[int, _Live] = {}
        self._decoding: dict[str, int] = {}
        self._waiting: dict[int, tuple[Future[Any], Callable[[int, Any], None]]] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._played: dict[int, Rollout] = {}
        self.stats = SamplerStats()

    def run(self, *, max_live: int) -> list[Group]:
        """Play until every rollout has ended; whatever happens, every episode is closed."""
        for task, plan in enumerate(self._plans):
            self._queue.extend(_Pending(index=i) for i in self._indices(task, plan.begin()))
        try:
            while self._queue or self._live:
                while self._queue and len(self._live) < max_live:
                    self._start(self._queue.popleft())
                self._end_overdue()
                self._take_answers(block=not self._decoding)
                if self._decoding:
                    self._decode()
        finally:
            self._stop()
        size = self._group_size
        return [
            Group(task=task, rollouts=[self._played[t * size + i] for i in range(size)])
            for t, task in enumerate(self._tasks)
        ]

    def _stop(self) -> None:
        """Drop what is decoding, wait for the worlds that work, close those that are open."""
        running = {i: future for i, (future, _) in self._waiting.items() if not future.cancel()}
        self._engine.abort(list(self._decoding))
        wait(running.values())
        ending = {i for i in running if self._waiting[i][1] == self._finished}
        for index in self._live.keys() - ending:  # those that end close themselves
            self._worlds.close(self._live[index].episode).result()

    def _indices(self, task: int, members: Sequence[int]) -> list[int]:
        return [task * self._group_size + member for member in members]

    def _begin_alone(self, task: int, members: Sequence[int]) -> None:
        """Queue members of a group that is under way, before groups that are not."""
        self._queue.extendleft(
            _Pending(index=index) for index in reversed(self._indices(task, members))
        )

    # --- beginnings

    def _start(self, pending: _Pending) -> None:
        if pending.fork is None:
            self._start_alone(pending)
        else:
            self._start_fork(pending, pending.fork)

    def _start_alone(self, pending: _Pending) -> None:
        task = self._tasks[pending.index // self._group_size]
        prompt = self._chat.prompt_ids(self._agent.messages(task), self._agent.tools(task))
        prefill = self._agent.prefill(task)
        if prefill:
            prompt = np.concatenate([prompt, self._chat.text_ids(prefill)])
        if len(prompt) >= self._engine.max_model_len:
            raise ValueError(
                f"task {task.id!r}: its prompt has {len(prompt)} tokens, engine.max_model_len is "
                f"{self._engine.max_model_len}"
            )
        transcript = Transcript(prompt, fork_threshold=self._config.fork_threshold)
        rollout = Rollout(
            task=task,
            segments=transcript.segments,
            closed_rows=transcript.closed_rows,
            status=Status.COMPLETED,
            stats=dict.fromkeys(COUNTS, 0.0),
        )
        live = _Live(
            rollout=rollout,
            episode=self._env.reset(task),
            transcript=transcript,
            spent=Spent(self._config, len(prompt), self._engine.max_model_len),
            attempt=pending.attempt,
            since=pending.since,
            messages=list(self._agent.messages(task)),
        )
        self._live[pending.index] = live
        live.took("queue_s")
        self._ask(pending.index)

    def _start_fork(self, pending: _Pending, fork: _Fork) -> None:
        """Bring a fresh episode to where the parent's was, then go on from there."""
        task = self._tasks[pending.index // self._group_size]
        transcript = Transcript.of(fork.segments, fork_threshold=self._config.fork_threshold)
        rollout = Rollout(
            task=task,
            segments=transcript.segments,
            closed_rows=transcript.closed_rows,
            status=Status.COMPLETED,
            parent=None if fork.parent is None else fork.parent % self._group_size,
            forked_at=None if fork.parent is None else len(transcript),
            stats=fork.stats,
            span_rewards=fork.span_rewards,
            turns=fork.turns,
        )
        live = _Live(
            rollout=rollout,
            episode=self._env.reset(task),
            transcript=transcript,
            spent=fork.spent,
            attempt=pending.attempt,
            since=pending.since,
            history=fork.history,
            after_tool=True,
            first_entropy=fork.first_entropy,
            consecutive=fork.consecutive,
        )
        self._live[pending.index] = live
        live.took("queue_s")
        future = self._worlds.replay(live.episode, [step.action for step in live.history])
        self._wait_for(pending.index, future, self._replayed)

    def _replayed(self, index: int, observations: Sequence[Observation]) -> None:
        live = self._live[index]
        live.took("tools_s")
        again = [Step.of(s.action, o) for s, o in zip(live.history, observations, strict=True)]
        if again == live.history:
            self._ask(index)
            return
        self.stats.diverged_forks += 1  # a world that is not a function of its actions
        self._drop(index, _Pending(index=index, attempt=live.attempt + 1))

    # --- turns

    def _ask(self, index: int) -> None:
        """Queue the next turn, or end the rollout if its budgets allow none."""
        live = self._live[index]
        end = live.spent.end(len(live.transcript))
        if end is not None:
            self._end(index, end)
            return
        request_id = f"{index}.{live.attempt}.{live.spent.turns}"
        live.took("own_s")
        self._engine.add_request(
            request_id,
            live.transcript.ids,
            max_tokens=live.spent.turn_tokens(len(live.transcript)),
            temperature=self._config.temperature,
            seed=self._draw(index, "turn") if self._config.temperature else None,
            stop=self._agent.stop,
            stop_token_ids=self._chat.stop_token_ids,
            top_logprobs=self._config.branching.top_logprobs if self._branches else 0,
            filters=self._filters,
        )
        self._decoding[request_id] = index

    def _draw(self, index: int, what: str) -> int:
        live = self._live[index]
        place = divmod(index, self._group_size)
        return request_seed(self._seed, *place, live.attempt, live.spent.turns, what)

    def _end_overdue(self) -> None:
        if self._config.max_seconds is None:
            return
        late = [(r, i) for r, i in self._decoding.items() if self._live[i].spent.overdue()]
        self._engine.abort([request_id for request_id, _ in late])
        for request_id, index in late:
            del self._decoding[request_id]
            self._live[index].took("generate_s")
            self._end(index, Status.TIMED_OUT)

    def _decode(self) -> None:
        started = time.perf_counter()
        done = self._engine.step()
        self.stats.decode_s += time.perf_counter() - started
        self.stats.engine_steps += 1
        for completion in sorted(done, key=lambda c: self._decoding[c.request_id]):
            self._turn_ended(self._decoding.pop(completion.request_id), completion)

    def _turn_ended(self, index: int, turn: Completion) -> None:
        live = self._live[index]
        live.took("generate_s")
        if turn.finish_reason not in ("stop", "length"):
            said = f"the engine gave a request up: finish_reason {turn.finish_reason!r}"
            self._broken(index, InfrastructureError(said))
            return
        if live.asked_for is not None:
            self._role_spoke(live, index, turn)
            return
        if self._branches:
            self._consider_branching(index, turn)
        live.transcript.sample(turn.token_ids, turn.logprobs)
        live.rollout.turns.append(replace(turn.account, row=len(live.rollout.closed_rows)))
        live.spent.turns += 1
        live.rollout.stats["turns"] += 1
        self.stats.total_sampled_tokens += len(turn.token_ids)
        self.stats.cached_tokens += turn.num_cached_tokens
        self.stats.prompt_tokens += live.transcript.turn_start
        if turn.finish_reason == "length":  # a turn that was cut is never acted on
            self._end(index, Status.TRUNCATED_LENGTH)
        else:
            self._act(index, self._agent.parse(self._chat.decode(turn.token_ids)))

    def _act(self, index: int, action: Action) -> None:
        live = self._live[index]
        stats = live.rollout.stats
        live.after_tool = False
        if isinstance(action, Finish):
            live.rollout.answer = action.answer
            self._end(index, Status.COMPLETED)
        elif isinstance(action, Malformed):
            stats["malformed"] += 1
            live.spent.malformed += 1
            self._observe(index, action, Observation(action.message, failed=True))
        elif (refusal := live.spent.refuse(action)) is not None:
            stats["refused_calls"] += len(called(action))
            told = (refusal,) * len(called(action))
            self._observe(index, action, Observation(refusal, failed=True, outputs=told))
        else:
            stats["tool_calls"] += len(called(action))
            live.spent.malformed = 0
            self._step(index, action, action)

    def _step(self, index: int, does: Action, action: Action) -> None:
        """Carry out what an action of the policy's comes to: itself, or what was heard for it."""
        live = self._live[index]
        live.took("own_s")
        self._wait_for(
            index,
            self._worlds.step(live.episode, does),
            lambda index, observation: self._answered_to(index, does, action, observation),
        )

    # --- the second role

    def _ask_role(self, index: int, action: Action, ask: Ask) -> None:
        """Have the engine say what an episode asks for before it answers the policy's action."""
        live = self._live[index]
        prompt = self._chat.prompt_ids(ask.messages)
        room = self._engine.max_model_len - len(prompt)
        if room < 1:
            self._end(index, Status.TRUNCATED_LENGTH)
            return
        asked = int(live.rollout.stats.get("asked", 0.0))
        live.rollout.stats["asked"] = asked + 1.0
        live.asked_for = action
        live.took("own_s")
        request_id = f"{index}.{live.attempt}.{live.spent.turns}.{asked}"
        self._engine.add_request(
            request_id,
            prompt,
            max_tokens=min(ask.max_tokens, room),
            temperature=ask.temperature,
            seed=self._draw(index, f"asked {asked}") if ask.temperature else None,
            stop=(),
            stop_token_ids=self._chat.stop_token_ids,
            top_logprobs=0,
            filters={},
        )
        self._decoding[request_id] = index

    def _role_spoke(self, live: _Live, index: int, turn: Completion) -> None:
        """Tell the episode, in whose conversation and in no rollout's this is."""
        action, live.asked_for = live.asked_for, None
        assert action is not None
        stats = live.rollout.stats
        stats["asked_tokens"] = stats.get("asked_tokens", 0.0) + len(turn.token_ids)
        self._step(index, Heard(self._chat.decode(turn.token_ids)), action)

    # --- branches

    def _consider_branching(self, index: int, turn: Completion) -> None:
        """Measure the turn that has just ended; perhaps let another rollout begin where it did."""
        live, config = self._live[index], self._config.branching
        task, member = divmod(index, self._group_size)
        plan = self._plans[task]
        entropy = turn_entropy(turn.entropies, config, self._vocab_size)
        if entropy is None:
            return
        if live.first_entropy is None:
            live.first_entropy = entropy
        self._begin_alone(task, plan.measured(member, entropy, after_tool=live.after_tool))
        if not live.after_tool or not plan.may_branch(member):
            return
        delta = entropy - live.first_entropy
        probability = branch_probability(delta, config, live.consecutive)
        if self._draw(index, "branch") >= probability * 2**63:
            live.consecutive = 0
            return
        live.consecutive += 1
        self.stats.branches += 1
        (new,) = self._indices(task, [plan.fork(member)])
        self._queue.appendleft(_Pending(index=new, fork=_fork_of(live, index)))

    # --- the world's answers

    def _wait_for(self, index: int, future: Future[Any], then: Callable[[int, Any], None]) -> None:
        self._waiting[index] = (future, then)
        future.add_done_callback(lambda _: self._answered.put(index))

    def _take_answers(self, *, block: bool) -> None:
        """Continue the rollouts whose worlds answered; wait for one if nothing decodes."""
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

    def _answered_to(
        self, index: int, done: Action, action: Action, observation: Observation
    ) -> None:
        live = self._live[index]
        rollout = live.rollout
        live.took("tools_s")
        if self._branches:
            live.history.append(Step.of(done, observation))
        if observation.ask is not None:
            self._ask_role(index, action, observation.ask)
            return
        live.after_tool = True
        rollout.stats["tool_errors"] += observation.failed
        for name, count in observation.counts.items():
            rollout.stats[name] = rollout.stats.get(name, 0.0) + count
        for name, value in observation.rewards.items():
            closed = sum(len(s.token_ids) for row in rollout.closed_rows for s in row)
            start = closed + live.transcript.turn_start
            end = closed + len(live.transcript)
            rollout.span_rewards.append(SpanReward(start, end, name, value))
        if observation.done:
            rollout.answer = observation.answer
            self._end(index, Status.COMPLETED)
        else:
            self._observe(index, action, observation)

    def _observe(self, index: int, action: Action, observation: Observation) -> None:
        """Append what the policy is told, if there is room for it, and ask for the next turn."""
        live, config = self._live[index], self._config

        def cut(text: str) -> str:
            return self._chat.clip(text, config.max_observation_tokens, config.keep_observation)

        shown = replace(
            observation, text=cut(observation.text), outputs=tuple(map(cut, observation.outputs))
        )
        said = self._agent.observe(action, shown)
        closed = int(live.transcript.ids[-1]) in self._chat.stop_token_ids
        if not isinstance(said, str) and config.history == "render":
            self._rerender(index, said)
            return
        if not isinstance(said, str):
            ids = self._chat.observation_ids(said, turn_closed=closed)
        elif closed:  # the policy closed the message that the text would have gone into
            self._end(index, Status.COMPLETED)
            return
        else:
            ids = self._chat.text_ids(said)
        if not live.spent.fits(len(live.transcript) + len(ids)):
            self._end(index, Status.TRUNCATED_LENGTH)
            return
        live.transcript.give(ids)
        self._ask(index)

    def _rerender(self, index: int, said: Sequence[Message]) -> None:
        """Render the whole conversation for the next turn and make the rollout's rows follow."""
        live, rollout = self._live[index], self._live[index].rollout
        turn = {"role": "assistant", "content": self._chat.decode(live.transcript.turn)}
        live.messages += [turn, *said]
        prompt = self._chat.prompt_ids(live.messages, self._agent.tools(rollout.task))
        if not live.spent.fits(len(prompt)):
            self._end(index, Status.TRUNCATED_LENGTH)
            return
        drift = live.transcript.rerender(prompt)
        rollout.stats[f"prompts_{drift}"] = rollout.stats.get(f"prompts_{drift}", 0.0) + 1
        rollout.segments = live.transcript.segments
        if live.transcript.replaced:
            rollout.turns[-1] = replace(rollout.turns[-1], replaced=live.transcript.replaced)
        self._ask(index)

    # --- ends

    def _end(self, index: int, status: Status) -> None:
        live = self._live[index]
        live.rollout.status = status
        live.rollout.treatment = treatment_of(status, self._config)
        if self._play_again(live):
            self._drop(index, _Pending(index=index, attempt=live.attempt + 1))
            return
        live.took("own_s")
        future = self._worlds.finish(live.episode, live.rollout.answer)
        self._wait_for(index, future, self._finished)

    def _finished(self, index: int, rewards: Mapping[str, float]) -> None:
        live = self._live.pop(index)
        live.took("finish_s")
        rollout = live.rollout
        for name, value in rewards.items():
            rollout.rewards[name] = rollout.rewards.get(name, 0.0) + value
        self._record(index, rollout)

    def _broken(self, index: int, error: InfrastructureError, *, closed: bool = False) -> None:
        live = self._live[index]
        rollout = live.rollout
        self.stats.infra_failures += 1
        rollout.error = str(error)
        rollout.status = Status.INFRA_ERROR
        rollout.treatment = treatment_of(Status.INFRA_ERROR, self._config)
        rollout.rewards, rollout.span_rewards = {}, []
        again = _Pending(index=index, attempt=live.attempt + 1) if self._play_again(live) else None
        self._drop(index, again, closed=closed)
        if again is None:
            self._record(index, rollout)

    def _play_again(self, live: _Live) -> bool:
        again = live.rollout.treatment is Treatment.RETRY
        return again and live.attempt < self._config.max_retries

    def _drop(self, index: int, again: _Pending | None, *, closed: bool = False) -> None:
        """Forget a rollout that is under way and its episode; perhaps play another in its place."""
        live = self._live.pop(index)
        if not closed:
            self._worlds.close(live.episode).result()
        if again is not None:
            self.stats.retries += 1
            self._queue.append(again)
            self._orphan(index)

    def _orphan(self, index: int) -> None:
        """What branched off a rollout that is played again has no parent any more."""
        task, member = divmod(index, self._group_size)
        for child in self._indices(task, range(self._group_size)):
            rollout = self._live[child].rollout if child in self._live else self._played.get(child)
            if rollout is not None and rollout.parent == member:
                rollout.parent = rollout.forked_at = None
        for pending in self._queue:
            if pending.fork is not None and pending.fork.parent == index:
                pending.fork.parent = None

    def _record(self, index: int, rollout: Rollout) -> None:
        self._played[index] = rollout
        task, member = divmod(index, self._group_size)
        self._begin_alone(task, self._plans[task].ended(member))


def _fork_of(live: _Live, index: int) -> _Fork:
    """What a branch has in common with a rollout whose last segment is the tool's answer."""
    return _Fork(
        parent=index,
        segments=list(live.rollout.segments),
        spent=replace(live.spent, calls=live.spent.calls.copy(), started=time.monotonic()),
        stats=dict(live.rollout.stats),
        span_rewards=list(live.rollout.span_rewards),
        turns=list(live.rollout.turns),
        history=list(live.history),
        first_entropy=live.first_entropy,
        consecutive=live.consecutive,
    )
