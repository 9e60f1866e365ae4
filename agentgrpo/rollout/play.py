"""One call of Sampler.play: the states of all rollouts, from the prompt to the end.

Of each rollout, a request is sent; its turn ends; its action is refused, reported as malformed or
carried out; the result is appended; the next request is sent. At some point it ends, and another
may start instead. Everything here runs on one thread; environments answer on others, by futures.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from agentgrpo.actions import (
    Action,
    Finish,
    InfrastructureError,
    Malformed,
    ModelReply,
    ModelRequest,
    Observation,
    Say,
    open_thought,
    split_thoughts,
)
from agentgrpo.agents.base import Agent
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import Environment
from agentgrpo.envs.runner import NOTHING, Abandoned, EpisodeRunner
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.branch import Copies, GroupPlan, Step, branch_probability, turn_entropy
from agentgrpo.rollout.engine_protocol import Decoder, Ended, ignore
from agentgrpo.rollout.groups import Groups
from agentgrpo.rollout.limits import called, treatment_of
from agentgrpo.rollout.observe import append_observation, count, note, parsed, prompt_of
from agentgrpo.rollout.state import QueuedRollout, RunningRollout
from agentgrpo.rollout.transcript import Transcript
from agentgrpo.types import Completion, Group, Rollout, Status, Task, Treatment

Then = Callable[[int, Any], None]
"""What is to be done with an environment's answer, and to which rollout."""


class Waiting:
    """The futures of environments that work, by rollout. Used on one thread; they answer on others.

    `together`: all answers are taken at once, when the last one is there.
    """

    def __init__(self, *, together: bool) -> None:
        self._together = together
        self._futures: dict[int, tuple[Future[Any], Then]] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._begun: dict[int, Then] = {}
        self.idle_s = 0.0
        """Seconds spent waiting."""

    def add(self, index: int, future: Future[Any], then: Then) -> None:
        """Wait for a rollout's environment, for one thing at a time."""
        self._futures[index] = (future, then)
        future.add_done_callback(lambda _: self._answered.put(index))

    def take(self, *, block: bool) -> Iterator[tuple[int, Future[Any], Then]]:
        """Stop waiting for those that were answered, by a result or by an InfrastructureError.

        Any other error of an environment is raised, and it is waited for on: see cancel().
        """
        if not self._futures:
            return
        for index in self._ready(block):
            future, then = self._futures[index]
            error = future.exception()
            if error is not None and not isinstance(error, InfrastructureError):
                raise error
            del self._futures[index]
            yield index, future, then

    def _ready(self, block: bool) -> list[int]:
        started = time.perf_counter()
        if self._together:
            ready = sorted(self._answered.get() for _ in range(len(self._futures)))
        else:
            ready = [self._answered.get()] if block else []
        if self._together or block:
            self.idle_s += time.perf_counter() - started
        while not self._together and not self._answered.empty():
            ready.append(self._answered.get())
        return ready

    def cancel(self) -> dict[int, Then]:
        """Take back what has not begun; returns what was to follow the rest, done or not."""
        for index, (future, then) in self._futures.items():
            if not future.cancel():
                self._begun[index] = then
        return self._begun

    @property
    def abandoned(self) -> set[int]:
        """Of all that was waited for: those whose environments have not come back, after wait()."""
        done = {i: f for i, (f, _) in self._futures.items() if f.done() and not f.cancelled()}
        return {i for i, future in done.items() if isinstance(future.exception(), Abandoned)}

    def wait(self) -> None:
        """For all that cancel() could not take back."""
        wait([self._futures[index][0] for index in self._begun])


class Play:
    """Plays `tasks`, each group_size times; see Sampler for the arguments, Groups for indices."""

    def __init__(
        self, engine: Decoder, agent: Agent, env: Environment, chat: ChatTemplate,
        runner: EpisodeRunner, config: RolloutConfig, *,
        tasks: Sequence[Task], group_size: int, seed: int, filters: Mapping[str, float],
        ended: Ended = ignore,
    ) -> None:  # fmt: skip
        self._engine, self._agent, self._chat = engine, agent, chat
        self._runner, self._config = runner, config
        self._groups = Groups(tasks, seed, env, config, group_size, ended)
        self._group_size, self._filters, self.stats = group_size, filters, self._groups.stats
        self._branches = 0 < config.branching.initial < group_size
        self._skips_thoughts = not getattr(agent, "act_in_thoughts", True)
        self._vocab_size = len(chat.tokenizer)
        self._plans: list[GroupPlan] = []
        self._copies = Copies(lambda task, copy: runner.close(copy, (tasks[task].id, None)))
        self._branching: dict[int, list[QueuedRollout]] = {}
        """By rollout whose episode is being copied: what branches off it, to be queued then."""
        self._queue: deque[QueuedRollout] = deque()
        self._live: dict[int, RunningRollout] = {}
        self._decoding: dict[str, int] = {}
        self._waiting = Waiting(together=bool(config.deterministic))
        for task in range(len(tasks)):
            plan = GroupPlan(group_size, config.branching)
            self._plans.append(plan)
            begin = self._groups.indices(task, plan.begin())
            self._queue.extend(QueuedRollout(index=index) for index in begin)

    def run(self, *, max_live: int) -> list[Group]:
        """Play until every rollout has ended; whatever happens, every episode is closed."""
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
        return self._groups.whole()

    def _stop(self) -> None:
        """Drop what is decoding, and leave no environment open."""
        self.stats.idle_s = self._waiting.idle_s
        begun = self._waiting.cancel()
        try:
            self._engine.abort(list(self._decoding))  # waits for a step that is under way
        finally:
            self._close(begun)

    def _close(self, begun: Mapping[int, Then]) -> None:
        """Wait for the environments that work, close those that are open: there are some where an
        error has ended the play. It stays the error that is told, whatever closing raises.
        """
        self._waiting.wait()
        ending = {i for i, then in begun.items() if then == self._finished}
        left = self._waiting.abandoned
        closing = [  # those that end close themselves
            self._runner.close(self._live[index].episode, self._groups.of(index))
            for index in self._live.keys() - ending - left
        ]
        wait(closing)
        for task in range(len(self._plans)):
            self._copies.end(task)
        closing += self._copies.closing
        wait(closing)
        why = sys.exception()
        for error in filter(None, (closed.exception() for closed in closing)):
            if why is None:
                raise error
            why.add_note(f"and while it was ended: {error}")

    def _begin_alone(self, task: int, members: Sequence[int]) -> None:
        """Queue members of a group that is under way, before groups that are not."""
        alone = reversed(self._groups.indices(task, members))
        self._queue.extendleft(QueuedRollout(index=index) for index in alone)

    # --- beginnings

    @contextlib.contextmanager
    def _breaking(self, index: int) -> Iterator[None]:
        """What the machine fails in here, in agents' methods too, breaks this rollout alone."""
        try:
            yield
        except InfrastructureError as error:
            self._broken(index, error)

    def _start(self, pending: QueuedRollout) -> None:
        with self._breaking(pending.index):
            if pending.fork is None:
                self._start_alone(pending)
            else:
                self._start_fork(pending, pending.fork)

    def _start_alone(self, pending: QueuedRollout) -> None:
        task, limit = self._groups.task(pending.index), self._engine.max_model_len
        users = partial(self._groups.users, pending.index)
        made = partial(
            RunningRollout.behind, pending=pending, task=task, config=self._config, limit=limit
        )
        self._live[pending.index] = made(np.empty(0, np.int32))  # until the agent has said more
        prompt, start, messages, _ = prompt_of(self._agent, self._chat, task, users)
        if len(prompt) >= limit:
            raise ValueError(
                f"task {task.id!r}: its prompt has {len(prompt)} tokens, engine.max_model_len is "
                f"{limit}"
            )
        live = self._live[pending.index] = made(prompt, messages, start)
        live.episode = self._groups.reset(pending.index)
        live.took("queue_s")
        self._ask(pending.index)

    def _start_fork(self, pending: QueuedRollout, live: RunningRollout) -> None:
        """Bring a fresh episode to where the parent's was, then go on from there."""
        live.episode = NOTHING  # and not its parent's
        self._live[pending.index] = live
        live.episode = self._groups.reset(pending.index)
        live.budget.started = time.monotonic()
        live.took("queue_s")
        actions = [(step.action, step.memory) for step in live.history]
        of = self._groups.of(pending.index)
        future = self._runner.replay(live.episode, actions, of, pending.copy)
        self._waiting.add(pending.index, future, self._replayed)

    def _replayed(self, index: int, observations: Sequence[Observation] | None) -> None:
        """Go on from where the parent was; None: the episode resumed from a copy."""
        live = self._live[index]
        live.took("tools_s")
        live.rollout.stats["branched_by_snapshot"] = float(observations is None)
        live.rollout.stats["branched_by_replay"] = float(observations is not None)
        told = observations or []
        if observations is None or live.history == [
            Step.of(s.action, o) for s, o in zip(live.history, told, strict=True)
        ]:
            self._ask(index)
            return
        self.stats.diverged_forks += 1  # an environment that is not a function of its actions
        self._drop(index, QueuedRollout(index=index, attempt=live.attempt + 1))

    # --- turns

    def _ask(self, index: int) -> None:
        """Queue the next turn, or end the rollout if its budgets allow none."""
        live = self._live[index]
        end = live.budget.end(len(live.transcript))
        if end is not None:
            self._end(index, end)
            return
        request_id = f"{index}.{live.attempt}.{live.budget.turns}"
        with self._groups.users(index, type(self._agent)):
            stop = self._agent.stop  # may be a property
        live.took("own_s")
        if self._skips_thoughts:
            last = self._chat.decode(live.transcript.ids[-16:])
            live.thought = open_thought(last) or live.thought
        self._engine.add_request(
            request_id,
            live.transcript.ids,
            max_tokens=live.budget.turn_tokens(len(live.transcript)),
            temperature=self._config.temperature,
            seed=self._draw(index, "turn") if self._config.temperature else None,
            stop=stop,
            stop_token_ids=self._chat.stop_token_ids,
            top_logprobs=self._config.branching.top_logprobs if self._branches else 0,
            filters=self._filters,
        )
        self._decoding[request_id] = index

    def _draw(self, index: int, what: str) -> int:
        live = self._live[index]
        return self._groups.seed(index, live.attempt, live.budget.turns, what)

    def _end_overdue(self) -> None:
        if self._config.max_seconds is None:
            return
        late = [(r, i) for r, i in self._decoding.items() if self._live[i].budget.overdue()]
        self._engine.abort([request_id for request_id, _ in late])
        for request_id, index in late:
            del self._decoding[request_id]
            self._live[index].took("generate_s")
            self._end(index, Status.TIMED_OUT)

    def _decode(self) -> None:
        done = self._groups.decode(self._engine)
        turns = {self._decoding.pop(completion.request_id): completion for completion in done}
        for index in sorted(turns):  # none of them is the engine's any more, whatever one does
            with self._breaking(index):
                self._turn_ended(index, turns[index])

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
            self._branching[index] = self._consider_branching(index, turn)
            if self._branching[index] and hasattr(type(live.episode), "snapshot"):
                keep = partial(self._copies.keep, index // self._group_size)
                future = self._runner.snapshot(live.episode, keep, self._groups.of(index))
                self._waiting.add(index, future, partial(self._copied, turn))
                return
            self._queue_branches(index)
        self._use_turn(index, turn)

    def _use_turn(self, index: int, turn: Completion) -> None:
        """Append a turn, and do what it says."""
        live = self._live[index]
        live.transcript.sample(turn.token_ids, turn.logprobs)
        live.rollout.turns.append(replace(turn.account, row=len(live.rollout.closed_rows)))
        live.budget.turns += 1
        live.rollout.stats["turns"] += 1
        self.stats.total_sampled_tokens += len(turn.token_ids)
        self.stats.cached_tokens += turn.num_cached_tokens
        self.stats.prompt_tokens += live.transcript.turn_start
        if turn.finish_reason == "length":  # a turn that was cut is never acted on
            self._end(index, Status.TRUNCATED_LENGTH)
        else:
            with self._groups.users(index, self._agent.parse):
                text = live.thought + self._chat.decode(turn.token_ids)
                action = parsed(self._agent, text, live.rollout.task)
            if self._skips_thoughts:
                live.thought = split_thoughts(text, getattr(self._agent, "marks", r"\S"))[2]
            self._act(index, action)

    def _act(self, index: int, action: Action) -> None:
        live = self._live[index]
        stats = live.rollout.stats
        live.after_tool = False
        if isinstance(action, Finish):
            live.rollout.answer = action.answer
            self._end(index, Status.COMPLETED)
        elif isinstance(action, Malformed):
            stats["malformed"] += 1
            live.budget.malformed += 1
            self._observe(index, action, Observation(action.message, failed=True))
        elif (refusal := live.budget.refuse(action)) is not None:
            stats["refused_calls"] += len(called(action))
            told = (refusal,) * len(called(action))
            self._observe(index, action, Observation(refusal, failed=True, outputs=told))
        else:
            stats["tool_calls"] += len(called(action))
            if isinstance(action, Say):
                stats["said"] = stats.get("said", 0.0) + 1.0
            live.budget.malformed = 0
            self._step(index, action, action)

    def _step(self, index: int, does: Action, action: Action) -> None:
        """Carry out what an action of the policy's comes to: itself, or what was heard for it."""
        live = self._live[index]
        live.took("own_s")
        self._waiting.add(
            index,
            self._runner.step(live.episode, does, self._groups.of(index)),
            lambda index, observation: self._answered_to(index, does, action, observation),
        )

    # --- the second role

    def _ask_role(self, index: int, action: Action, ask: ModelRequest) -> None:
        """Have a model say what an episode asks for before it answers the policy's action."""
        live, limit = self._live[index], self._engine.max_model_len
        asked = int(live.rollout.stats.get("asked", 0.0))
        if not isinstance(ask.model, str):
            future = self._runner.ask(live.episode, ask.model, ask, self._groups.of(index))
            self._waiting.add(index, future, partial(self._speaker_spoke, action))
            live.rollout.stats["asked"] = asked + 1.0
            live.took("own_s")
            return
        long = any(self._chat.exceeds(str(m.get("content")), limit) for m in ask.messages)
        left = 0 if long else limit - len(prompt := self._chat.prompt_ids(ask.messages))
        if left < 1:
            self._end(index, Status.TRUNCATED_LENGTH)
            return
        live.rollout.stats["asked"] = asked + 1.0
        live.asked_for = action
        live.took("own_s")
        request_id = f"{index}.{live.attempt}.{live.budget.turns}.{asked}"
        self._engine.add_request(
            request_id,
            prompt,
            max_tokens=min(ask.max_tokens, left),
            temperature=ask.temperature,
            seed=self._draw(index, f"asked {asked}") if ask.temperature else None,
            stop=(),
            stop_token_ids=self._chat.stop_token_ids,
            top_logprobs=0,
            filters={},
            **dict[str, Any](reference=True) if ask.model == "reference" else {},
        )
        self._decoding[request_id] = index

    def _speaker_spoke(self, action: Action, index: int, said: str) -> None:
        self._live[index].took("tools_s")
        self._step(index, ModelReply(said), action)

    def _role_spoke(self, live: RunningRollout, index: int, turn: Completion) -> None:
        """Tell the episode, in whose conversation and in no rollout's this is."""
        action, live.asked_for = live.asked_for, None
        assert action is not None
        stats = live.rollout.stats
        stats["asked_tokens"] = stats.get("asked_tokens", 0.0) + len(turn.token_ids)
        self._step(index, ModelReply(self._chat.decode(turn.token_ids)), action)

    # --- branches

    def _copied(self, turn: Completion, index: int, copy: Any) -> None:
        self._live[index].took("tools_s")
        self._queue_branches(index, copy)
        self._use_turn(index, turn)

    def _queue_branches(self, index: int, copy: Any = None) -> None:
        """Queue what branches off a rollout, with a copy of its episode if there is one."""
        for branch in self._branching.pop(index, []):
            branch.copy = copy
            self._queue.appendleft(branch)

    def _consider_branching(self, index: int, turn: Completion) -> list[QueuedRollout]:
        """Measure the turn that has just ended; returns those that are to begin where it did."""
        live, config = self._live[index], self._config.branching
        task, member = divmod(index, self._group_size)
        plan = self._plans[task]
        entropy = turn_entropy(turn.entropies, config, self._vocab_size)
        if entropy is None:
            return []
        if live.first_entropy is None:
            live.first_entropy = entropy
        self._begin_alone(task, plan.measured(member, entropy, after_tool=live.after_tool))
        if not live.after_tool or not plan.may_branch(member):
            return []
        delta = entropy - live.first_entropy
        probability = branch_probability(delta, config, live.consecutive)
        chances = [self._draw(index, f"branch {copy}") for copy in range(config.beam_size - 1)]
        copies = sum(chance < probability * 2**63 for chance in chances)
        live.consecutive = live.consecutive + 1 if copies else 0
        new = self._groups.indices(task, plan.fork(member, copies))
        self.stats.branches += len(new)
        return [
            QueuedRollout(index=one, fork=live.fork(member, Transcript.of(live.rollout.segments)))
            for one in reversed(new)
        ]

    # --- the environment's answers

    def _take_answers(self, *, block: bool) -> None:
        """Continue the rollouts whose environments answered; wait for one if nothing decodes."""
        for index, future, then in self._waiting.take(block=block):
            try:
                answer = future.result()
            except InfrastructureError as error:
                closed = then == self._finished or isinstance(error, Abandoned)
                self._broken(index, error, closed=closed)
            else:
                with self._breaking(index):
                    then(index, answer)

    def _answered_to(
        self, index: int, done: Action, action: Action, observation: Observation
    ) -> None:
        live = self._live[index]
        live.took("tools_s")
        if self._branches:
            live.history.append(Step.of(done, observation))
        if observation.ask is not None:
            self._ask_role(index, action, observation.ask)
            return
        live.after_tool = True
        count(live, observation)
        if observation.done:
            live.rollout.answer = observation.answer
            note(live.rollout, observation.text if observation.failed else "")
            self._end(index, Status.COMPLETED)
        else:
            self._observe(index, action, observation)

    def _observe(self, index: int, action: Action, observation: Observation) -> None:
        """Tell the policy, and ask for its next turn."""
        started = time.perf_counter()
        with self._groups.users(index, self._agent.observe):
            end = append_observation(
                self._live[index], action, observation,
                agent=self._agent, chat=self._chat, config=self._config,
            )  # fmt: skip
        self.stats.observe_s += time.perf_counter() - started
        if end is None:
            self._ask(index)
        else:
            self._end(index, end)

    # --- ends

    def _end(self, index: int, status: Status) -> None:
        live = self._live[index]
        live.rollout.status = status
        live.rollout.treatment = treatment_of(status, self._config)
        if self._play_again(live):
            self._drop(index, QueuedRollout(index=index, attempt=live.attempt + 1))
            return
        live.took("own_s")
        future = self._runner.finish(live.episode, live.rollout.answer, self._groups.of(index))
        self._waiting.add(index, future, self._finished)

    def _finished(self, index: int, rewards: Mapping[str, float]) -> None:
        live = self._live.pop(index)
        live.took("finish_s")
        rollout = live.rollout
        rollout.environment = getattr(live.episode, "environment", None)
        if isinstance(said := getattr(live.episode, "feedback", ""), str):
            note(rollout, said)
        rollout.stats |= getattr(live.episode, "measures", {})
        for name, value in rewards.items():
            rollout.rewards[name] = rollout.rewards.get(name, 0.0) + value
        self._record(index, rollout)

    def _broken(self, index: int, error: InfrastructureError, *, closed: bool = False) -> None:
        live = self._live[index]
        rollout = live.rollout
        self._queue_branches(index)
        self.stats.infra_failures += 1
        rollout.error = str(error)
        rollout.status = Status.INFRA_ERROR
        rollout.treatment = treatment_of(Status.INFRA_ERROR, self._config)
        rollout.rewards, rollout.span_rewards = {}, []
        again = (
            QueuedRollout(index=index, attempt=live.attempt + 1) if self._play_again(live) else None
        )
        self._drop(index, again, closed=closed)
        if again is None:
            self._record(index, rollout)

    def _play_again(self, live: RunningRollout) -> bool:
        again = live.rollout.treatment is Treatment.RETRY
        return again and live.attempt < self._config.max_retries

    def _drop(self, index: int, again: QueuedRollout | None, *, closed: bool = False) -> None:
        """Forget a rollout that is under way and its episode; perhaps play another instead."""
        live = self._live.pop(index)
        if not closed:
            self._runner.close(live.episode, self._groups.of(index)).result()
        if again is not None:
            self.stats.retries += 1
            self._queue.append(again)
            self._orphan(index)

    def _orphan(self, index: int) -> None:
        """What branched off a rollout that is played again has no parent any more."""
        task, member = divmod(index, self._group_size)
        waiting = {pending.index: pending.fork for pending in self._queue if pending.fork}
        begun = {index: live.rollout for index, live in (self._live | waiting).items()}
        for child in self._groups.indices(task):
            rollout = begun.get(child) or self._groups.played.get(child)
            if rollout is not None and rollout.parent == member:
                rollout.parent = rollout.forked_at = None

    def _record(self, index: int, rollout: Rollout) -> None:
        task, member = divmod(index, self._group_size)
        self._begin_alone(task, self._plans[task].ended(member))
        if self._groups.is_last(index):
            self._copies.end(task)
        self._groups.record(index, rollout)
