"""Play: the state machine of one Sampler.play() call.

Each rollout goes through these states: the engine samples its turn; its action is parsed, and
refused, reported as malformed, or carried out by the environment; the observation is appended; the
next turn is sampled. When it ends, a queued rollout may start. Everything in this module runs on
one thread. Environments work on other threads and answer through futures.
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
from agentgrpo.rollout.limits import called_tools, treatment_of
from agentgrpo.rollout.observe import (
    add_counts,
    add_feedback,
    append_observation,
    parse_turn,
    prompt_of,
)
from agentgrpo.rollout.state import QueuedRollout, RunningRollout
from agentgrpo.types import Completion, Group, Rollout, Status, Task, Treatment

Then = Callable[[int, Any], None]
"""then(index, result): continues a rollout with its environment's result."""


class Waiting:
    """The pending futures of environments, by rollout. Used by one thread.

    `together`: results are taken only when all of them are there (rollout.deterministic).
    """

    def __init__(self, *, together: bool) -> None:
        self._together = together
        self._futures: dict[int, tuple[Future[Any], Then]] = {}
        self._done: SimpleQueue[int] = SimpleQueue()
        self._running: dict[int, Then] = {}
        self.idle_s = 0.0

    def add(self, index: int, future: Future[Any], then: Then) -> None:
        """Wait for a rollout's environment; each rollout has at most one future."""
        self._futures[index] = (future, then)
        future.add_done_callback(lambda _: self._done.put(index))

    def take(self, *, block: bool) -> Iterator[tuple[int, Future[Any], Then]]:
        """Remove and yield futures that have a result or an InfrastructureError.

        Any other error is raised; its future stays, so that cancel() and wait() still see it.
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
            # sorted: the order of the next requests must not depend on which environment was faster
            ready = sorted(self._done.get() for _ in range(len(self._futures)))
        else:
            ready = [self._done.get()] if block else []
            while not self._done.empty():
                ready.append(self._done.get())
        self.idle_s += time.perf_counter() - started
        return ready

    def cancel(self) -> dict[int, Then]:
        """Cancel futures that have not started. Returns the continuations of the others."""
        for index, (future, then) in self._futures.items():
            if not future.cancel():
                self._running[index] = then
        return self._running

    @property
    def abandoned(self) -> set[int]:
        """After wait(): rollouts whose environment did not return within its time limit."""
        done = {i: f for i, (f, _) in self._futures.items() if f.done() and not f.cancelled()}
        return {i for i, future in done.items() if isinstance(future.exception(), Abandoned)}

    def wait(self) -> None:
        """Wait for all futures that cancel() could not cancel."""
        wait([self._futures[index][0] for index in self._running])


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
        """Branches that are queued as soon as their parent's episode (the key) is copied."""
        self._queue: deque[QueuedRollout] = deque()
        self._live: dict[int, RunningRollout] = {}
        self._decoding: dict[str, int] = {}
        self._waiting = Waiting(together=bool(config.deterministic))
        for task in range(len(tasks)):
            plan = GroupPlan(group_size, config.branching)
            self._plans.append(plan)
            indices = self._groups.indices(task, plan.begin())
            self._queue.extend(QueuedRollout(index=index) for index in indices)

    def run(self, *, max_live: int) -> list[Group]:
        """Play until every rollout has ended. Closes every episode, also after an error."""
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
        return self._groups.complete()

    def _stop(self) -> None:
        self.stats.idle_s = self._waiting.idle_s
        running = self._waiting.cancel()
        try:
            self._engine.abort(list(self._decoding))  # waits for a step that is under way
        finally:
            self._close_episodes(running)

    def _close_episodes(self, running: Mapping[int, Then]) -> None:
        """Wait for environments that are working, then close the open episodes.

        Episodes are open here only if an error ended the play. That error stays the one that is
        raised; errors of closing become notes of it.
        """
        self._waiting.wait()
        # runner.finish() closes an episode itself, and abandoned ones are still in a call
        finishing = {i for i, then in running.items() if then == self._finished}
        closing = [
            self._runner.close(self._live[index].episode, self._groups.name(index))
            for index in self._live.keys() - finishing - self._waiting.abandoned
        ]
        wait(closing)
        # after the episodes, which may still use the copies
        for task in range(len(self._plans)):
            self._copies.end(task)
        closing += self._copies.closing
        wait(closing)
        first_error = sys.exception()
        for error in filter(None, (future.exception() for future in closing)):
            if first_error is None:
                raise error
            first_error.add_note(f"and while it was ended: {error}")

    def _queue_roots(self, task: int, members: Sequence[int]) -> None:
        """Queue rollouts of a group that is under way, before those of other groups."""
        indices = reversed(self._groups.indices(task, members))
        self._queue.extendleft(QueuedRollout(index=index) for index in indices)

    # --- start

    @contextlib.contextmanager
    def _breaking(self, index: int) -> Iterator[None]:
        """Let an InfrastructureError, also one of an agent's method, break this rollout only."""
        try:
            yield
        except InfrastructureError as error:
            self._broken(index, error)

    def _start(self, pending: QueuedRollout) -> None:
        with self._breaking(pending.index):
            if pending.fork is None:
                self._start_root(pending)
            else:
                self._start_fork(pending, pending.fork)

    def _start_root(self, pending: QueuedRollout) -> None:
        task, limit = self._groups.task(pending.index), self._engine.max_model_len
        users = partial(self._groups.users, pending.index)
        make = partial(
            RunningRollout.from_prompt, pending=pending, task=task, config=self._config, limit=limit
        )
        # registered before the agent is called: _broken() needs a rollout if that fails
        self._live[pending.index] = make(np.empty(0, np.int32))
        prompt, start, messages, _ = prompt_of(self._agent, self._chat, task, users)
        if len(prompt) >= limit:
            raise ValueError(
                f"engine.max_model_len: expected more than the {len(prompt)} tokens of the prompt "
                f"of task {task.id!r}, got {limit}"
            )
        live = self._live[pending.index] = make(prompt, messages, start)
        live.episode = self._groups.reset(pending.index)
        live.add_time("queue_s")
        self._request_turn(pending.index)

    def _start_fork(self, pending: QueuedRollout, live: RunningRollout) -> None:
        """Bring a new episode to the parent's state, by a snapshot or by replaying its actions."""
        # not the parent's episode, which would be closed with this rollout if reset() fails
        live.episode = NOTHING
        self._live[pending.index] = live
        live.episode = self._groups.reset(pending.index)
        live.budget.started = time.monotonic()
        live.add_time("queue_s")
        actions = [(step.action, step.memory) for step in live.history]
        name = self._groups.name(pending.index)
        future = self._runner.replay(live.episode, actions, name, pending.copy)
        self._waiting.add(pending.index, future, self._replayed)

    def _replayed(self, index: int, observations: Sequence[Observation] | None) -> None:
        """Continue a branch; `observations` is None if its episode resumed from a snapshot."""
        live = self._live[index]
        live.add_time("tools_s")
        live.rollout.stats["branched_by_snapshot"] = float(observations is None)
        live.rollout.stats["branched_by_replay"] = float(observations is not None)
        if observations is None or live.history == [
            Step.of(step.action, observation)
            for step, observation in zip(live.history, observations, strict=True)
        ]:
            self._request_turn(index)
            return
        # the environment is not a function of its actions: the branch's tokens would be wrong, so
        # the rollout starts from the prompt instead
        self.stats.diverged_forks += 1
        self._drop(index, again=True)

    # --- turns

    def _request_turn(self, index: int) -> None:
        """Send the next turn to the engine, or end the rollout if its budgets allow none."""
        live = self._live[index]
        status = live.budget.end(len(live.transcript))
        if status is not None:
            self._end(index, status)
            return
        request_id = f"{index}.{live.attempt}.{live.budget.turns}"
        with self._groups.users(index, type(self._agent)):
            stop = self._agent.stop  # may be a property
        live.add_time("own_s")
        if self._skips_thoughts:
            prompt_end = self._chat.decode(live.transcript.ids[-16:])
            live.thought = open_thought(prompt_end) or live.thought
        self._engine.add_request(
            request_id,
            live.transcript.ids,
            max_tokens=live.budget.turn_tokens(len(live.transcript)),
            temperature=self._config.temperature,
            seed=self._seed(index, "turn") if self._config.temperature else None,
            stop=stop,
            stop_token_ids=self._chat.stop_token_ids,
            top_logprobs=self._config.branching.top_logprobs if self._branches else 0,
            filters=self._filters,
        )
        self._decoding[request_id] = index

    def _seed(self, index: int, purpose: str) -> int:
        live = self._live[index]
        return self._groups.seed(index, live.attempt, live.budget.turns, purpose)

    def _end_overdue(self) -> None:
        overdue = [(r, i) for r, i in self._decoding.items() if self._live[i].budget.overdue()]
        self._engine.abort([request_id for request_id, _ in overdue])
        for request_id, index in overdue:
            del self._decoding[request_id]
            self._live[index].add_time("generate_s")
            self._end(index, Status.TIMED_OUT)

    def _decode(self) -> None:
        completions = self._groups.decode(self._engine)
        # all are removed from _decoding first: if one turn raises, _stop() aborts only requests
        # that the engine still has
        turns = {self._decoding.pop(turn.request_id): turn for turn in completions}
        for index in sorted(turns):
            with self._breaking(index):
                self._turn_ended(index, turns[index])

    def _turn_ended(self, index: int, turn: Completion) -> None:
        live = self._live[index]
        live.add_time("generate_s")
        if turn.finish_reason not in ("stop", "length"):
            message = f"the engine gave up a request: finish_reason {turn.finish_reason!r}"
            self._broken(index, InfrastructureError(message))
            return
        if live.asked_for is not None:
            self._engine_replied(live, index, turn)
            return
        if self._branches:
            self._branching[index] = self._consider_branching(index, turn)
            if self._branching[index] and hasattr(type(live.episode), "snapshot"):
                # before the turn is acted on: the branches start from the state before it
                keep = partial(self._copies.keep, index // self._group_size)
                future = self._runner.snapshot(live.episode, keep, self._groups.name(index))
                self._waiting.add(index, future, partial(self._copied, turn))
                return
            self._queue_branches(index)
        self._use_turn(index, turn)

    def _use_turn(self, index: int, turn: Completion) -> None:
        live = self._live[index]
        live.transcript.sample(turn.token_ids, turn.logprobs)
        live.rollout.turns.append(replace(turn.account, row=len(live.rollout.closed_rows)))
        live.budget.turns += 1
        live.rollout.stats["turns"] += 1
        self.stats.total_sampled_tokens += len(turn.token_ids)
        self.stats.cached_tokens += turn.num_cached_tokens
        self.stats.prompt_tokens += live.transcript.turn_start
        if turn.finish_reason == "length":  # the actions of a cut turn are never carried out
            self._end(index, Status.TRUNCATED_LENGTH)
        else:
            with self._groups.users(index, self._agent.parse):
                text = live.thought + self._chat.decode(turn.token_ids)
                action = parse_turn(self._agent, text, live.rollout.task)
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
            num_calls = len(called_tools(action))
            stats["refused_calls"] += num_calls
            outputs = (refusal,) * num_calls
            self._observe(index, action, Observation(refusal, failed=True, outputs=outputs))
        else:
            stats["tool_calls"] += len(called_tools(action))
            if isinstance(action, Say):
                stats["said"] = stats.get("said", 0.0) + 1.0
            live.budget.malformed = 0
            self._step(index, action, action)

    def _step(self, index: int, step_action: Action, action: Action) -> None:
        """Pass `step_action` to the episode: the policy's `action`, or a ModelReply for it."""
        live = self._live[index]
        live.add_time("own_s")
        self._waiting.add(
            index,
            self._runner.step(live.episode, step_action, self._groups.name(index)),
            lambda index, observation: self._step_done(index, step_action, action, observation),
        )

    # --- the second role

    def _request_reply(self, index: int, action: Action, ask: ModelRequest) -> None:
        """Get a model's reply that the episode needs to answer the policy's action."""
        live, limit = self._live[index], self._engine.max_model_len
        num_asked = int(live.rollout.stats.get("asked", 0.0))
        if not isinstance(ask.model, str):
            future = self._runner.ask(live.episode, ask.model, ask, self._groups.name(index))
            self._waiting.add(index, future, partial(self._model_replied, action))
            live.rollout.stats["asked"] = num_asked + 1.0
            live.add_time("own_s")
            return
        too_long = any(self._chat.exceeds(str(m.get("content")), limit) for m in ask.messages)
        room = 0 if too_long else limit - len(prompt := self._chat.prompt_ids(ask.messages))
        if room < 1:
            self._end(index, Status.TRUNCATED_LENGTH)
            return
        live.rollout.stats["asked"] = num_asked + 1.0
        live.asked_for = action
        live.add_time("own_s")
        request_id = f"{index}.{live.attempt}.{live.budget.turns}.{num_asked}"
        self._engine.add_request(
            request_id,
            prompt,
            max_tokens=min(ask.max_tokens, room),
            temperature=ask.temperature,
            seed=self._seed(index, f"asked {num_asked}") if ask.temperature else None,
            stop=(),
            stop_token_ids=self._chat.stop_token_ids,
            top_logprobs=0,
            filters={},
            **dict[str, Any](reference=True) if ask.model == "reference" else {},
        )
        self._decoding[request_id] = index

    def _model_replied(self, action: Action, index: int, reply: str) -> None:
        self._live[index].add_time("tools_s")
        self._step(index, ModelReply(reply), action)

    def _engine_replied(self, live: RunningRollout, index: int, turn: Completion) -> None:
        """Pass the engine's reply to the episode; its tokens are not part of the rollout."""
        action, live.asked_for = live.asked_for, None
        assert action is not None
        stats = live.rollout.stats
        stats["asked_tokens"] = stats.get("asked_tokens", 0.0) + len(turn.token_ids)
        self._step(index, ModelReply(self._chat.decode(turn.token_ids)), action)

    # --- branches

    def _copied(self, turn: Completion, index: int, copy: Any) -> None:
        self._live[index].add_time("tools_s")
        self._queue_branches(index, copy)
        self._use_turn(index, turn)

    def _queue_branches(self, index: int, copy: Any = None) -> None:
        """Queue a rollout's branches, with a copy of its episode if there is one."""
        for branch in self._branching.pop(index, []):
            branch.copy = copy
            self._queue.appendleft(branch)

    def _consider_branching(self, index: int, turn: Completion) -> list[QueuedRollout]:
        """Measure the turn's entropy. Returns the branches that start where the turn started.

        The turn is not in the transcript yet, so that live.fork() copies the state before it.
        """
        live, config = self._live[index], self._config.branching
        task, member = divmod(index, self._group_size)
        plan = self._plans[task]
        entropy = turn_entropy(turn.entropies, config, self._vocab_size)
        if entropy is None:
            return []
        if live.first_entropy is None:
            live.first_entropy = entropy
        self._queue_roots(task, plan.measured(member, entropy, after_tool=live.after_tool))
        if not live.after_tool or not plan.may_branch(member):
            return []
        delta = entropy - live.first_entropy
        probability = branch_probability(delta, config, live.consecutive)
        draws = [self._seed(index, f"branch {copy}") for copy in range(config.beam_size - 1)]
        copies = sum(draw < probability * 2**63 for draw in draws)  # seeds have 63 random bits
        live.consecutive = live.consecutive + 1 if copies else 0
        branches = self._groups.indices(task, plan.fork(member, copies))
        self.stats.branches += len(branches)
        return [QueuedRollout(index=i, fork=live.fork(member)) for i in reversed(branches)]

    # --- results of the environment

    def _take_answers(self, *, block: bool) -> None:
        """Continue the rollouts whose environments returned; with `block` wait for one."""
        for index, future, then in self._waiting.take(block=block):
            try:
                result = future.result()
            except InfrastructureError as error:
                closed = then == self._finished or isinstance(error, Abandoned)
                self._broken(index, error, closed=closed)
            else:
                with self._breaking(index):
                    then(index, result)

    def _step_done(
        self, index: int, step_action: Action, action: Action, observation: Observation
    ) -> None:
        live = self._live[index]
        live.add_time("tools_s")
        if self._branches:
            live.history.append(Step.of(step_action, observation))
        if observation.ask is not None:
            self._request_reply(index, action, observation.ask)
            return
        live.after_tool = True
        add_counts(live, observation)
        if observation.done:
            live.rollout.answer = observation.answer
            add_feedback(live.rollout, observation.text if observation.failed else "")
            self._end(index, Status.COMPLETED)
        else:
            self._observe(index, action, observation)

    def _observe(self, index: int, action: Action, observation: Observation) -> None:
        started = time.perf_counter()
        with self._groups.users(index, self._agent.observe):
            status = append_observation(
                self._live[index], action, observation,
                agent=self._agent, chat=self._chat, config=self._config,
            )  # fmt: skip
        self.stats.observe_s += time.perf_counter() - started
        if status is None:
            self._request_turn(index)
        else:
            self._end(index, status)

    # --- end

    def _end(self, index: int, status: Status) -> None:
        live = self._live[index]
        live.rollout.status = status
        live.rollout.treatment = treatment_of(status, self._config)
        if self._is_retried(live):
            self._drop(index, again=True)
            return
        live.add_time("own_s")
        future = self._runner.finish(live.episode, live.rollout.answer, self._groups.name(index))
        self._waiting.add(index, future, self._finished)

    def _finished(self, index: int, rewards: Mapping[str, float]) -> None:
        live = self._live.pop(index)
        live.add_time("finish_s")
        rollout = live.rollout
        rollout.environment = getattr(live.episode, "environment", None)
        if isinstance(feedback := getattr(live.episode, "feedback", ""), str):
            add_feedback(rollout, feedback)
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
        again = self._is_retried(live)
        self._drop(index, again=again, closed=closed)
        if not again:
            self._record(index, rollout)

    def _is_retried(self, live: RunningRollout) -> bool:
        is_retry = live.rollout.treatment is Treatment.RETRY
        return is_retry and live.attempt < self._config.max_retries

    def _drop(self, index: int, *, again: bool, closed: bool = False) -> None:
        """Discard a live rollout and close its episode; with `again` queue its next attempt."""
        live = self._live.pop(index)
        if not closed:
            self._runner.close(live.episode, self._groups.name(index)).result()
        if again:
            self.stats.retries += 1
            self._queue.append(QueuedRollout(index=index, attempt=live.attempt + 1))
            self._orphan(index)

    def _orphan(self, index: int) -> None:
        """Remove the parent of branches whose parent is played again: it shares no tokens now."""
        task, member = divmod(index, self._group_size)
        queued = {pending.index: pending.fork for pending in self._queue if pending.fork}
        unfinished = {index: live.rollout for index, live in (self._live | queued).items()}
        for child in self._groups.indices(task):
            rollout = unfinished.get(child) or self._groups.played.get(child)
            if rollout is not None and rollout.parent == member:
                rollout.parent = rollout.forked_at = None

    def _record(self, index: int, rollout: Rollout) -> None:
        task, member = divmod(index, self._group_size)
        self._queue_roots(task, self._plans[task].ended(member))
        if self._groups.is_last(index):
            self._copies.end(task)
        self._groups.record(index, rollout)
