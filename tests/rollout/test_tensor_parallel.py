"""Ranks of one engine, as threads over a team in memory: all engines are asked for the same."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentgrpo.config import RolloutConfig
from agentgrpo.engine.agreement import Disagreement
from agentgrpo.rollout.engine_protocol import SamplerStats
from agentgrpo.rollout.tensor_parallel import Leader, TeamSampler, follow
from agentgrpo.types import Group, Task

SIZE = 3
Log = list[tuple[Any, ...]]


class Board:
    """Where members in memory meet."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=20)
        self.values: list[Any] = [None] * SIZE


class Member:
    """parallel.Team over a board."""

    size = SIZE

    def __init__(self, board: Board, place: int) -> None:
        self._board, self.place = board, place

    def gather(self, value: Any) -> list[Any]:
        self._board.values[self.place] = pickle.dumps(value)  # as between processes
        self._board.barrier.wait()
        values = [pickle.loads(value) for value in self._board.values]
        self._board.barrier.wait()
        return values

    def tell(self, value: Any = None) -> Any:
        return self.gather(value)[0]


class Recorder:
    """An engine that finishes its oldest request in every step."""

    max_model_len = 8

    def __init__(self, *, odd: str = "") -> None:
        self.log: Log = []
        self.waiting: list[str] = []
        self._odd = odd

    def add_request(self, request_id: str, prompt_ids: Any, **options: Any) -> None:
        if len(prompt_ids) > self.max_model_len:
            raise ValueError("too long")
        self.log.append(("add", request_id, prompt_ids.tolist(), options))
        self.waiting.append(request_id)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.log.append(("abort", list(request_ids)))
        self.waiting = [r for r in self.waiting if r not in request_ids]

    def abort_all(self) -> None:
        self.abort(list(self.waiting))

    @property
    def num_in_flight(self) -> int:
        return len(self.waiting)

    def step(self) -> list[Any]:
        self.log.append(("step",))
        if not self.waiting:
            return []
        name = self.waiting.pop(0)
        ids = [len(self.log), 99 if name == self._odd else 1]
        return [SimpleNamespace(request_id=name, token_ids=np.array(ids, np.int32))]


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What each member returned or raised."""
    results: list[Any] = [None] * SIZE

    def run(place: int) -> None:
        try:
            results[place] = work(place)
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a rank waits for ever"
    return results


def prompt(*ids: int) -> Any:
    return np.array(ids, np.int32)


def ask(leader: Any) -> list[Any]:
    """All that a sampler can ask of an engine; returns what it was answered."""
    leader.add_request("a", prompt(1, 2), max_tokens=3, temperature=0.5)
    with pytest.raises(ValueError, match="too long"):
        leader.add_request("bad", prompt(*range(9)), max_tokens=1)
    leader.add_request("b", prompt(3), max_tokens=1)
    leader.add_request("c", prompt(4), max_tokens=1)
    answers = leader.step()
    leader.abort(["b"])
    assert leader.num_in_flight == 1
    answers += leader.step()
    leader.add_request("d", prompt(5), max_tokens=1)
    leader.abort_all()
    assert leader.num_in_flight == 0
    return list(answers)


def play_through(engines: Sequence[Recorder]) -> list[Any]:
    board = Board()

    def work(place: int) -> Any:
        team: Any = Member(board, place)
        engine: Any = engines[place]
        if place:
            try:
                return follow(engine, team)
            except Disagreement:
                board.barrier.abort()  # this process has ended
                raise
        leader = Leader(engine, team)
        answers = ask(leader)
        leader.finish()
        return answers

    return in_threads(work)


def test_all_engines_are_asked_for_the_same_in_the_same_order() -> None:
    engines = [Recorder() for _ in range(SIZE)]
    answers, *others = play_through(engines)
    assert [a.request_id for a in answers] == ["a", "c"]
    assert others == [None, None]
    alone = Recorder()
    ask(alone)
    assert engines[0].log == engines[1].log == engines[2].log == alone.log
    assert ("add", "a", [1, 2], {"max_tokens": 3, "temperature": 0.5}) in alone.log
    assert not any("bad" in call for call in alone.log)


@pytest.mark.parametrize("odd", ["a", "c"])
def test_a_rank_that_sampled_something_else_stops(odd: str) -> None:
    _, fine, apart = play_through([Recorder(), Recorder(), Recorder(odd=odd)])
    assert fine is None or isinstance(fine, threading.BrokenBarrierError)
    assert isinstance(apart, Disagreement)
    assert "rank 2 of its engine sampled different tokens than the first" in str(apart)


def test_llm_is_an_error() -> None:
    engine: Any = Recorder()
    team: Any = Member(Board(), 0)
    with pytest.raises(RuntimeError, match=r"engine.llm cannot be used with engine.tensor_par"):
        _ = Leader(engine, team).llm


def test_on_token_is_an_error() -> None:
    """The others would not stop where the first does: refused before anybody is told of it."""
    engine: Any = Recorder()
    team: Any = Member(Board(), 0)
    leader = Leader(engine, team)
    with pytest.raises(ValueError, match=r"on_token: requires engine\.tensor_parallel_size = 1"):
        leader.add_request("a", prompt(1), max_tokens=1, on_token=lambda token: True)
    assert leader._calls == []


class Sampler:
    """Plays a task by one request, and notes what it was given."""

    def __init__(self, leader: Any) -> None:
        self._leader = leader

    def _play(
        self, tasks: Sequence[Task], group_size: int, config: RolloutConfig, seed: int,
        filters: Mapping[str, float], ended: Any,
    ) -> Any:  # fmt: skip
        self.given = [task.id for task in tasks], group_size, config.temperature, seed, filters
        for task in tasks:
            self._leader.add_request(task.id, prompt(1), max_tokens=1)
            if task.id == "broken":
                raise OSError("no sandbox")
            while self._leader.num_in_flight:
                self._leader.step()
        stats = SamplerStats(engine_steps=len(tasks))
        return [Group(task=task, rollouts=[]) for task in tasks], stats


def play_tasks(shares: Sequence[Sequence[str]]) -> tuple[list[Any], list[Any]]:
    board, samplers = Board(), []

    def work(place: int) -> Any:
        team: Any = Member(board, place)
        engine: Any = Recorder()
        leader = Leader(engine, team)
        sampler: Any = Sampler(leader)
        samplers.append((place, sampler))
        tasks = [Task(id=name, messages=(), spec={}) for name in shares[place]]
        try:
            groups, stats = TeamSampler(RolloutConfig(), sampler, leader, engine, team).play(
                tasks, 4, seed=place, temperature=0.0, filters={"top_p": 0.5}
            )
        finally:
            if place == 0 and "broken" in shares[0]:
                board.barrier.abort()  # this process has ended
        return [group.task.id for group in groups], stats.engine_steps, engine.log

    results = in_threads(work)
    return results, [sampler for _, sampler in sorted(samplers, key=lambda pair: pair[0])]


@pytest.mark.parametrize("shares", [("ab", "cd", "e"), ("a", "", ""), ("", "", "")])
def test_leader_plays_all_tasks_and_ranks_get_their_groups(shares: tuple[str, ...]) -> None:
    results, samplers = play_tasks([list(share) for share in shares])
    assert [names for names, _, _ in results] == [list(share) for share in shares]
    every = list("".join(shares))
    assert samplers[0].given == (every, 4, 0.0, 0, {"top_p": 0.5})
    assert not any(hasattr(sampler, "given") for sampler in samplers[1:])
    assert [steps for _, steps, _ in results] == [len(every), 0, 0]
    assert results[0][2] == results[1][2] == results[2][2]


def test_error_in_the_leader_ends_the_followers() -> None:
    (leader, *others), _ = play_tasks([["a", "broken"], ["b"], []])
    assert isinstance(leader, OSError)
    assert all(isinstance(other, threading.BrokenBarrierError) for other in others)
