"""Plays tasks with a program of the user's: each rollout is one run of it.

The programs work at their own pace. What they ask the endpoint becomes turns of the engine's one
loop; how they end, and what the endpoint last said to them, is how their rollouts end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
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
from agentgrpo.programs.launch import Awaited, Hosted, Launcher, Outcome, Running
from agentgrpo.programs.session import UNENFORCED, SampleRequest, Session
from agentgrpo.rollout.engine_protocol import Decoder, Ended, SamplerStats
from agentgrpo.rollout.groups import Groups
from agentgrpo.rollout.limits import treatment_of
from agentgrpo.rollout.sampler import AnySampler
from agentgrpo.support.user_calls import UserCodeError, print_stderr
from agentgrpo.types import COUNTS, Completion, Group, Rollout, Segment, Status, Task, Treatment


class ProgramSampler(AnySampler):
    """See AnySampler."""

    def __init__(
        self, engine: Decoder, agent: ProgramAgent, launcher: Launcher | None, env: Environment,
        chat: ChatTemplate, config: RolloutConfig, *, max_live: int,
    ) -> None:  # fmt: skip
        super().__init__(config)
        self._engine, self._launcher, self._env = engine, launcher, env
        self._chat, self._read_calls = chat, agent.read_calls
        self._max_live, self._timeout_s = max_live, agent.timeout_s
        self._act_in_thoughts = agent.act_in_thoughts
        self._endpoint: Endpoint | None = None
        self._said: set[str] = set()
        self._probes: set[str] = set()

    def _tell_once(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
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
        endpoint = self._endpoint

        plays = getattr(self._env, "plays", False)  # its prompts are its own affair
        given = self._chat, config, self._engine.max_model_len, self._read_calls
        own = self._act_in_thoughts, self._tell_once

        def session(ask: Any, task: Task) -> Session:
            texts = [m["content"] for m in task.messages if m["role"] == "user" and not plays]
            return endpoint.open(lambda key: Session(key, *given, ask, *own, texts or ("",)))

        runner = EpisodeRunner(self._max_live, config.call_timeout_s)
        played = Groups(tasks, seed, self._env, config, group_size, ended)
        play = _Play(
            self._engine, self._launcher, played, runner, endpoint, session, config,
            self._timeout_s, filters, self._max_live, self._probes,
        )  # fmt: skip
        play.queue.extend((index, 0) for index in range(len(tasks) * group_size))
        groups = play.run()
        self._say_what_is_ignored(groups)
        return groups, play.stats

    def _say_what_is_ignored(self, groups: Sequence[Group]) -> None:
        """Once, of what programs ask for."""
        stats = {name for group in groups for rollout in group.rollouts for name in rollout.stats}
        ignored = {name.removeprefix(UNENFORCED) for name in stats if name.startswith(UNENFORCED)}
        if new := sorted(ignored - self._said):
            self._said |= ignored
            print_stderr(
                f"programs ask for {', '.join(new)}, which is not obeyed: what is trained on is "
                "sampled and rendered as the run says (docs/agent-programs.md)"
            )


@dataclass(slots=True, eq=False)
class _Live:
    """A rollout whose program runs."""

    task: Task
    attempt: int
    session: Session
    episode: AnyEpisode
    running: Running
    until: float
    """On the clock of time.monotonic()."""
    overdue: bool = False
    broken: str | None = None
    """What the machine said, if it failed the program."""
    failed: Outcome | None = None
    """How its program failed, if that is nobody else's doing."""
    began: float = field(default_factory=time.perf_counter)
    asked: float | None = None
    """When it did for the first time."""


@dataclass(slots=True, eq=False)
class _Play:
    """One call of play(); see Groups for indices."""

    engine: Decoder
    launcher: Launcher | None
    """None: its episodes play themselves."""
    groups: Groups
    runner: EpisodeRunner
    endpoint: Endpoint
    session: Any
    config: RolloutConfig
    timeout_s: float
    filters: Mapping[str, float]
    max_live: int
    probes: set[str]
    """See Session.rows()."""
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    """Index and attempt of rollouts that wait for their places."""
    live: dict[int, _Live] = field(default_factory=dict)
    inbox: SimpleQueue[tuple[int, Any]] = field(default_factory=SimpleQueue)
    """From other threads: of a rollout, a SampleRequest, or the Future of what has ended."""
    decoding: dict[str, tuple[int, SampleRequest]] = field(default_factory=dict)
    finishing: dict[int, tuple[Rollout, AnyEpisode]] = field(default_factory=dict)
    failures: list[Outcome] = field(default_factory=list)
    asked: int = 0

    @property
    def stats(self) -> SamplerStats:
        """What is counted of it."""
        return self.groups.stats

    def run(self) -> list[Group]:
        """Play until every program has ended; whatever happens, none is left running."""
        try:
            while self.queue or self.live or self.finishing:
                while self.queue and len(self.live) + len(self.finishing) < self.max_live:
                    self._start(*self.queue.popleft())
                self._end_overdue()
                self._take()
                if self.decoding:
                    self._decode()
        finally:
            self._stop()
        self._require_some_ran()
        return self.groups.complete()

    # --- programs

    def _start(self, index: int, attempt: int) -> None:
        task = self.groups.task(index)
        session = self.session(lambda wanted: self.inbox.put((index, wanted)), task)
        episode: Any = NOTHING
        try:
            episode = self.groups.reset(index)
            launcher = self.launcher or Awaited(episode.play)
            limits = [self.timeout_s, self.config.max_seconds or self.timeout_s]
            if isinstance(launcher, Hosted):
                launcher = launcher.of(episode)
                limits.append(episode.timeout_s)
            running = launcher.start(task, session, self.endpoint)
        except BaseException as error:
            self.endpoint.end(session)
            if episode is not NOTHING:
                self.runner.close(episode, self.groups.name(index)).result()
            if not isinstance(error, InfrastructureError):
                raise
            rollout = _without_a_turn(session, task, str(error))
            rollout.treatment = treatment_of(rollout.status, self.config)
            self._broken(index, attempt, rollout)
            return
        until = time.monotonic() + min(limits)
        self.live[index] = _Live(task, attempt, session, episode, running, until)
        running.outcome.add_done_callback(lambda future: self.inbox.put((index, future)))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for live in self.live.values():
            if not live.overdue and now >= live.until:
                live.overdue = True
                live.session.ended_by = Status.TIMED_OUT
                live.running.stop()

    def _take(self) -> None:
        """What has come from other threads; waits for something if nothing decodes."""
        block = not self.decoding and bool(self.live or self.finishing)
        while True:
            started = time.perf_counter()
            try:
                index, what = self.inbox.get(block, self._seconds_left() if block else None)
            except Empty:
                break
            finally:
                self.stats.idle_s += (time.perf_counter() - started) * block
            block = False
            if isinstance(what, SampleRequest):
                self._ask(index, what)
            elif index in self.finishing:
                self._finished(index, what)
            else:
                self._ended(index, what)

    def _seconds_left(self) -> float | None:
        """Until the next program has had its time; None: none has a limit left."""
        until = [live.until for live in self.live.values() if not live.overdue]
        return max(0.0, min(until) - time.monotonic()) if until else None

    # --- turns

    def _ask(self, index: int, wanted: SampleRequest) -> None:
        live = self.live.get(index)
        if live is None or live.overdue:
            wanted.on_result(InfrastructureError("the rollout is over"))
            return
        live.asked = live.asked or time.perf_counter()
        seed = self.groups.seed(index, live.attempt, *wanted.seed_key)
        self.asked += 1
        request_id = f"{index}.{self.asked}"
        asked = wanted.temperature
        temperature = self.config.temperature if asked is None else asked
        self.engine.add_request(
            request_id,
            wanted.token_ids,
            max_tokens=wanted.max_tokens,
            temperature=temperature,
            seed=seed if temperature else None,
            stop=wanted.stop,
            stop_token_ids=live.session.chat.stop_token_ids,
            top_logprobs=0,
            filters=self.filters,
        )
        self.decoding[request_id] = index, wanted

    def _decode(self) -> None:
        for turn in self.groups.decode(self.engine):
            self._print_stderr(*self.decoding.pop(turn.request_id), turn)

    def _print_stderr(self, index: int, wanted: SampleRequest, turn: Completion) -> None:
        self.stats.total_sampled_tokens += len(turn.token_ids)
        self.stats.cached_tokens += turn.num_cached_tokens
        self.stats.prompt_tokens += len(wanted.token_ids)
        if turn.finish_reason in ("stop", "length"):
            wanted.on_result(turn)
        else:
            said = f"the engine gave up a request: finish_reason {turn.finish_reason!r}"
            self.live[index].broken = said
            wanted.on_result(InfrastructureError(said))

    # --- ends

    def _ended(self, index: int, future: Future[Outcome]) -> None:
        """A program has ended: what it came to."""
        live = self.live.pop(index)
        mine = [(name, w) for name, (of, w) in self.decoding.items() if of == index]
        self.engine.abort([name for name, _ in mine])
        for name, _ in mine:
            del self.decoding[name]
        self.endpoint.end(live.session)
        rollout = self._rollout(live, future)
        rollout.treatment = treatment_of(rollout.status, self.config)
        rollout.timings["program_s"] = time.perf_counter() - live.began
        if live.asked is not None:
            rollout.timings["start_s"] = live.asked - live.began
        again = rollout.treatment is Treatment.RETRY and live.attempt < self.config.max_retries
        if live.failed is not None and not again:
            self.failures.append(live.failed)
        if again or rollout.status is Status.INFRA_ERROR:
            self.runner.close(live.episode, self.groups.name(index)).result()
            self._broken(index, live.attempt, rollout)
            return
        rollout.environment = getattr(live.episode, "environment", None)
        self.finishing[index] = rollout, live.episode
        finish = self.runner.finish(live.episode, rollout.answer, self.groups.name(index))
        finish.add_done_callback(lambda future: self.inbox.put((index, future)))

    def _broken(self, index: int, attempt: int, rollout: Rollout) -> None:
        """Play it again, if that is what is made of its end; else it ends so."""
        self.stats.infra_failures += rollout.status is Status.INFRA_ERROR
        if rollout.treatment is Treatment.RETRY and attempt < self.config.max_retries:
            self.stats.retries += 1
            self.queue.append((index, attempt + 1))
        else:
            self.groups.record(index, rollout)

    def _rollout(self, live: _Live, future: Future[Outcome]) -> Rollout:
        """What the endpoint has of it, and how it ended.

        What the endpoint said last decides, then what the program did.
        """
        session, error = live.session, live.broken
        outcome, ours = Outcome(None), error is not None
        if not future.cancelled():
            try:
                outcome = future.result()
            except InfrastructureError as raised:
                error, ours = str(raised), True
        rows, aside = session.rows(self.probes)
        refused = session.refused if outcome.failed else None  # which it did not survive
        cut = Status.TRUNCATED_LENGTH if rows and rows[-1].cut else Status.COMPLETED
        status = session.ended_by or refused or cut
        if live.overdue:
            status = Status.TIMED_OUT
        elif error is None and not rows:
            asked = "the program ended and had asked for nothing that is trained on"
            told = session.last_refusal and f"its last request was refused: {session.last_refusal}"
            error = ". ".join(part for part in (asked, told, outcome.failed) if part)
        if outcome.failed and not ours and status is Status.COMPLETED:
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
            told = f"conversations without the task's text are not trained on: {probes[0]!r:.300}"
            session.tell_once("probe", told)
        segments = [row.transcript.segments for row in rows] or [[_nothing(session, live.task)]]
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

    def _finished(self, index: int, future: Future[Mapping[str, float]]) -> None:
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
        """A program that fails of itself in every rollout is no policy's fault.

        What the policy's code may have done to it (no program_fault) is told, and ends nothing.
        """
        if not self.failures:
            return
        first = self.failures[0]
        if sum(outcome.program_fault for outcome in self.failures) >= len(self.groups.played) > 1:
            raise UserCodeError("agent.kind 'program'", first.failed) from first.error
        failed = f"{len(self.failures)} of {len(self.groups.played)} programs failed"
        print_stderr(f"{failed}; the first {first.failed}")

    def _stop(self) -> None:
        """End what still runs, and leave no environment open."""
        try:
            self.engine.abort(list(self.decoding))
        finally:
            for live in self.live.values():
                live.running.stop()
            wait([live.running.outcome for live in self.live.values()], timeout=10)
            closing = []
            for index, live in self.live.items():
                self.endpoint.end(live.session)
                closing.append(self.runner.close(live.episode, self.groups.name(index)))
            wait(closing)


def _without_a_turn(session: Session, task: Task, error: str) -> Rollout:
    """One that the machine broke before its program began."""
    return Rollout(
        task=task,
        segments=[_nothing(session, task)],
        status=Status.INFRA_ERROR,
        error=error,
        stats=dict.fromkeys(COUNTS, 0.0),
    )


def _nothing(session: Session, task: Task) -> Segment:
    """In place of a row where there is none: the task as a prompt."""
    ids = session.chat.prompt_ids([dict(message) for message in task.messages])
    return Segment(np.asarray(ids, np.int32))
