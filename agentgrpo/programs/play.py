"""Play tasks with a user's program. Each rollout is one run of the program.

The programs run concurrently. Their requests to the endpoint become turns of the engine's one loop.
A rollout's status follows from its program's exit and the endpoint's last response.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from agentgrpo.actions import InfrastructureError
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import AnyEpisode, Environment
from agentgrpo.envs.runner import NOTHING, EpisodeRunner
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.programs.endpoint import Endpoint
from agentgrpo.programs.launch import AsyncFunction, Hosted, Launcher, Outcome, Running
from agentgrpo.programs.session import UNENFORCED, SampleRequest, Session
from agentgrpo.rollout.engine_protocol import Decoder, Ended, SamplerStats
from agentgrpo.rollout.groups import Groups
from agentgrpo.rollout.limits import treatment_of
from agentgrpo.rollout.sampler import AnySampler
from agentgrpo.support.user_calls import UserCodeError, print_stderr
from agentgrpo.types import COUNTS, Completion, Group, Rollout, Segment, Status, Task, Treatment


class ProgramSampler(AnySampler):
    """A sampler whose rollouts are runs of a program (see AnySampler)."""

    def __init__(
        self, engine: Decoder, agent: ProgramAgent, launcher: Launcher | None, env: Environment,
        chat: ChatTemplate, config: RolloutConfig, *, max_live: int,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self.engine, self.agent, self.launcher, self.max_live = engine, agent, launcher, max_live
        self._env, self._chat = env, chat
        self.probes: set[str] = set()
        """See Session.rows()."""
        self._endpoint: Endpoint | None = None
        self._reported: set[str] = set()

    def _tell_once(self, kind: str, line: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            print_stderr(line)

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _play(
        self, tasks: Sequence[Task], group_size: int, config: RolloutConfig, seed: int,
        filters: Mapping[str, float], ended: Ended,
    ) -> tuple[list[Group], SamplerStats]:  # fmt: skip
        if self._endpoint is None:
            self._endpoint = Endpoint()
        groups = Groups(tasks, seed, self._env, config, group_size, ended)
        runner = EpisodeRunner(self.max_live, config.call_timeout_s)
        player = _Player(self, self._endpoint, groups, runner, config, filters)
        player.queue.extend((index, 0) for index in range(len(tasks) * group_size))
        finished_groups = player.run()
        self._report_ignored_options(finished_groups)
        return finished_groups, player.stats

    def make_session(
        self, config: RolloutConfig, task: Task, on_request: Callable[[SampleRequest], None]
    ) -> Session:
        """Make the endpoint's session of a rollout."""
        # episodes that run themselves also make their prompts: all of them are trained on
        plays = getattr(self._env, "plays", False)
        texts = [m["content"] for m in task.messages if m["role"] == "user" and not plays]
        return Session(
            self._chat, config, self.engine.max_model_len, self.agent.read_calls, on_request,
            self.agent.act_in_thoughts, self._tell_once, texts or ("",),
        )  # fmt: skip

    def _report_ignored_options(self, groups: Sequence[Group]) -> None:
        stats = {name for group in groups for rollout in group.rollouts for name in rollout.stats}
        ignored = {name.removeprefix(UNENFORCED) for name in stats if name.startswith(UNENFORCED)}
        if new := sorted(ignored - self._reported):
            self._reported |= ignored
            print_stderr(
                f"programs set {', '.join(new)}, which is ignored: the run's config decides how "
                "trained turns are sampled and rendered (docs/agent-programs.md)"
            )


@dataclass(slots=True, eq=False)
class _Live:
    task: Task
    attempt: int
    session: Session
    episode: AnyEpisode
    running: Running
    deadline: float
    """Time limit, on the clock of time.monotonic()."""
    overdue: bool = False
    broken: str | None = None
    """The infrastructure error, if there was one."""
    failed: Outcome | None = None
    """The program's failure, if nothing else caused it."""
    started_at: float = field(default_factory=time.perf_counter)
    first_request_at: float | None = None
    """Time of the program's first request."""


@dataclass(slots=True, eq=False)
class _Player:
    """One call of play(); see Groups for indices."""

    sampler: ProgramSampler
    endpoint: Endpoint
    groups: Groups
    runner: EpisodeRunner
    config: RolloutConfig
    filters: Mapping[str, float]
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    """Index and attempt of rollouts that have not started."""
    live: dict[int, _Live] = field(default_factory=dict)
    inbox: SimpleQueue[tuple[int, Any]] = field(default_factory=SimpleQueue)
    """From other threads: a rollout's index, and a SampleRequest or a finished Future."""
    decoding: dict[str, tuple[int, SampleRequest]] = field(default_factory=dict)
    finishing: dict[int, tuple[Rollout, AnyEpisode]] = field(default_factory=dict)
    failures: list[Outcome] = field(default_factory=list)
    num_requests: int = 0

    @property
    def stats(self) -> SamplerStats:
        return self.groups.stats

    def run(self) -> list[Group]:
        """Play until every program has ended. No program is left running, even after an error."""
        try:
            while self.queue or self.live or self.finishing:
                while self.queue and len(self.live) + len(self.finishing) < self.sampler.max_live:
                    self._start(*self.queue.popleft())
                self._end_overdue()
                self._process_inbox()
                if self.decoding:
                    self._decode()
        finally:
            self._stop()
        self._require_some_ran()
        return self.groups.complete()

    # --- programs

    def _start(self, index: int, attempt: int) -> None:
        task = self.groups.task(index)
        session = self.sampler.make_session(
            self.config, task, lambda request: self.inbox.put((index, request))
        )
        self.endpoint.open(session)
        episode: Any = NOTHING
        try:
            episode = self.groups.reset(index)
            # without a launcher, the environment's episodes run themselves
            launcher = self.sampler.launcher or AsyncFunction(episode.play)
            limits = [self.sampler.agent.timeout_s]
            if self.config.max_seconds:
                limits.append(self.config.max_seconds)
            if isinstance(launcher, Hosted):
                limits.append(episode.timeout_s)
            running = launcher.start(task, session, self.endpoint, episode)
        except BaseException as error:
            self.endpoint.end(session)
            if episode is not NOTHING:
                self.runner.close(episode, self.groups.name(index)).result()
            if not isinstance(error, InfrastructureError):
                raise
            rollout = _rollout_without_turns(session, task, str(error))
            rollout.treatment = treatment_of(rollout.status, self.config)
            self._retry_or_record(index, attempt, rollout)
            return
        deadline = time.monotonic() + min(limits)
        self.live[index] = _Live(task, attempt, session, episode, running, deadline)
        running.outcome.add_done_callback(lambda future: self.inbox.put((index, future)))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for live in self.live.values():
            if not live.overdue and now >= live.deadline:
                live.overdue = True
                live.session.ended_by = Status.TIMED_OUT
                live.running.stop()

    def _process_inbox(self) -> None:
        """Process messages of other threads. Waits for one if the engine has nothing to decode."""
        block = not self.decoding and bool(self.live or self.finishing)
        while True:
            wait_start = time.perf_counter()
            try:
                index, item = self.inbox.get(block, self._seconds_left() if block else None)
            except Empty:
                break
            finally:
                self.stats.idle_s += (time.perf_counter() - wait_start) * block
            block = False
            if isinstance(item, SampleRequest):
                self._submit(index, item)
            elif index in self.finishing:
                self._on_rewards(index, item)
            else:
                self._on_program_end(index, item)

    def _seconds_left(self) -> float | None:
        """Seconds until the next program's time limit. None: no program has one left."""
        deadlines = [live.deadline for live in self.live.values() if not live.overdue]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    # --- turns

    def _submit(self, index: int, request: SampleRequest) -> None:
        live = self.live.get(index)
        if live is None or live.overdue:
            request.on_result(InfrastructureError("the rollout is over"))
            return
        live.first_request_at = live.first_request_at or time.perf_counter()
        seed = self.groups.seed(index, live.attempt, *request.seed_key)
        self.num_requests += 1
        request_id = f"{index}.{self.num_requests}"
        temperature = request.temperature
        if temperature is None:
            temperature = self.config.temperature
        self.sampler.engine.add_request(
            request_id,
            request.token_ids,
            max_tokens=request.max_tokens,
            temperature=temperature,
            seed=seed if temperature else None,
            stop=request.stop,
            stop_token_ids=live.session.chat.stop_token_ids,
            top_logprobs=0,
            filters=self.filters,
        )
        self.decoding[request_id] = index, request

    def _decode(self) -> None:
        for turn in self.groups.decode(self.sampler.engine):
            self._deliver(*self.decoding.pop(turn.request_id), turn)

    def _deliver(self, index: int, request: SampleRequest, turn: Completion) -> None:
        self.stats.total_sampled_tokens += len(turn.token_ids)
        self.stats.cached_tokens += turn.num_cached_tokens
        self.stats.prompt_tokens += len(request.token_ids)
        if turn.finish_reason in ("stop", "length"):
            request.on_result(turn)
        else:
            message = f"the engine aborted a request: finish_reason {turn.finish_reason!r}"
            self.live[index].broken = message
            request.on_result(InfrastructureError(message))

    # --- ends

    def _on_program_end(self, index: int, future: Future[Outcome]) -> None:
        live = self.live.pop(index)
        pending = [(name, request) for name, (of, request) in self.decoding.items() if of == index]
        self.sampler.engine.abort([name for name, _ in pending])
        for name, _ in pending:
            del self.decoding[name]
        self.endpoint.end(live.session)
        rollout = self._make_rollout(live, future)
        rollout.treatment = treatment_of(rollout.status, self.config)
        rollout.timings["program_s"] = time.perf_counter() - live.started_at
        if live.first_request_at is not None:
            rollout.timings["start_s"] = live.first_request_at - live.started_at
        will_retry = rollout.treatment is Treatment.RETRY and live.attempt < self.config.max_retries
        if live.failed is not None and not will_retry:
            self.failures.append(live.failed)
        if will_retry or rollout.status is Status.INFRA_ERROR:
            self.runner.close(live.episode, self.groups.name(index)).result()
            self._retry_or_record(index, live.attempt, rollout)
            return
        rollout.environment = getattr(live.episode, "environment", None)
        self.finishing[index] = rollout, live.episode
        finish = self.runner.finish(live.episode, rollout.answer, self.groups.name(index))
        finish.add_done_callback(lambda future: self.inbox.put((index, future)))

    def _retry_or_record(self, index: int, attempt: int, rollout: Rollout) -> None:
        self.stats.infra_failures += rollout.status is Status.INFRA_ERROR
        if rollout.treatment is Treatment.RETRY and attempt < self.config.max_retries:
            self.stats.retries += 1
            self.queue.append((index, attempt + 1))
        else:
            self.groups.record(index, rollout)

    def _make_rollout(self, live: _Live, future: Future[Outcome]) -> Rollout:
        """Make a rollout from the endpoint's rows. Its status follows from the endpoint's last
        response first, then from the program's outcome.
        """
        session, error = live.session, live.broken
        outcome, is_infra_error = Outcome(None), error is not None
        if not future.cancelled():
            try:
                outcome = future.result()
            except InfrastructureError as raised:
                error, is_infra_error = str(raised), True
        rows, aside = session.rows(self.sampler.probes)
        # a refused request matters only if the program failed after it
        refused_status = session.refused if outcome.failed else None
        end_status = Status.TRUNCATED_LENGTH if rows and rows[-1].cut else Status.COMPLETED
        status = session.ended_by or refused_status or end_status
        if live.overdue:
            status = Status.TIMED_OUT
        elif error is None and not rows:
            reason = "the program ended without a request that is trained on"
            note = session.last_refusal and f"its last request was refused: {session.last_refusal}"
            error = ". ".join(part for part in (reason, note, outcome.failed) if part)
        if outcome.failed and not is_infra_error and status is Status.COMPLETED:
            live.failed = outcome
            session.stats["program_failed"] += 1
        if error is not None:
            status = Status.INFRA_ERROR
        turns = {
            number: replace(turn, row=place)
            for place, row in enumerate(rows)
            for number, turn in row.turns
        }
        session.stats["turns"] = len(turns)
        probes = [str(session.chat.tokenizer.decode(row.transcript.ids)) for row in aside]
        if probes:
            tokens = [turn.sampled_tokens for row in aside for _, turn in row.turns]
            session.stats |= {"probe_turns": len(tokens), "probe_tokens": sum(tokens)}
            note = f"conversations without the task's text are not trained on: {probes[0]!r:.300}"
            session.tell_once("probe", note)
        segments = [row.transcript.segments for row in rows] or [
            [_prompt_segment(session, live.task)]
        ]
        return Rollout(
            task=live.task,
            segments=segments[-1],
            closed_rows=segments[:-1],
            status=status,
            turns=[turns[number] for number in sorted(turns)],
            answer=None if status is Status.INFRA_ERROR else session.answer(outcome.answer),
            error=error,
            extra={"probes": probes} if probes else {},
            stats={**dict.fromkeys(COUNTS, 0.0), **{k: float(v) for k, v in session.stats.items()}},
        )

    def _on_rewards(self, index: int, future: Future[Mapping[str, float]]) -> None:
        rollout, episode = self.finishing.pop(index)
        try:
            rewards = future.result()
        except InfrastructureError as error:
            self.stats.infra_failures += 1
            rollout.status, rollout.error, rollout.answer = Status.INFRA_ERROR, str(error), None
            rollout.treatment = Treatment.DROP
        else:
            rollout.rewards |= rewards
            rollout.stats |= getattr(episode, "measures", {})
        self.groups.record(index, rollout)

    def _require_some_ran(self) -> None:
        """Raise UserCodeError if the program itself failed in every rollout.

        Failures that the policy's code may have caused (no program_fault) are only reported.
        """
        if not self.failures:
            return
        first = self.failures[0]
        if sum(outcome.program_fault for outcome in self.failures) >= len(self.groups.played) > 1:
            raise UserCodeError("agent.kind 'program'", first.failed) from first.error
        failed = f"{len(self.failures)} of {len(self.groups.played)} programs failed"
        print_stderr(f"{failed}; the first {first.failed}")

    def _stop(self) -> None:
        try:
            self.sampler.engine.abort(list(self.decoding))
        finally:
            for live in self.live.values():
                live.running.stop()
            wait([live.running.outcome for live in self.live.values()], timeout=10)
            closing = []
            for index, live in self.live.items():
                self.endpoint.end(live.session)
                closing.append(self.runner.close(live.episode, self.groups.name(index)))
            wait(closing)


def _rollout_without_turns(session: Session, task: Task, error: str) -> Rollout:
    """The rollout of a program that could not start because of an infrastructure error."""
    return Rollout(
        task=task,
        segments=[_prompt_segment(session, task)],
        status=Status.INFRA_ERROR,
        error=error,
        stats=dict.fromkeys(COUNTS, 0.0),
    )


def _prompt_segment(session: Session, task: Task) -> Segment:
    ids = session.chat.prompt_ids([dict(message) for message in task.messages])
    return Segment(np.asarray(ids, np.int32))
