"""A user's own sampler: what it gets, and what it returns is checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from agentgrpo.config import RolloutConfig
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.custom import CustomSampler, RolloutParams, rollout_from_tokens
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.train.plugins import load_sampler
from agentgrpo.types import COUNTS, Rollout, Segment, SpanReward, Status, Task, Treatment
from tests.playing import EOT, TOKENIZER, tasks
from tests.rollout.stubs import StubEngine, Turn

CHAT = ChatTemplate(TOKENIZER)


class Engine(StubEngine):
    """The stub, with what only the real engine has."""

    @property
    def num_in_flight(self) -> int:
        return len(self.running)

    def abort_all(self) -> None:
        self.abort(list(self.running))

    def add_request(self, request_id: str, prompt_ids: Any, **options: Any) -> None:
        super().add_request(request_id, prompt_ids, **{"top_logprobs": 0, **options})


def engine(text: str = f"said{EOT}") -> Engine:
    return Engine(TOKENIZER, lambda number, _: Turn(text, steps=1 + number % 3))


def rollout(task: Task, **fields: Any) -> Rollout:
    return rollout_from_tokens(task, [1, 5, 6], [7, 8, 9], [-0.1, -0.2, -0.3], **fields)


class Mine:
    """Returns what it is told to; keeps what it got."""

    def __init__(self, change: Callable[[Rollout], Any] = lambda r: None) -> None:
        self.change = change
        self.got: list[Any] = []

    def rollout(
        self, engine: Any, tasks: Sequence[Task], n: int, params: RolloutParams
    ) -> list[list[Rollout]]:
        self.got.append((engine, list(tasks), n, params))
        played = [[rollout(task) for _ in range(n)] for task in tasks]
        self.change(played[-1][-1])
        return played


def sampler(user: Any, served: Any = None, **config: Any) -> CustomSampler:
    return CustomSampler(user, cast(Any, served or engine()), RolloutConfig(**config), (2,))


def test_user_sampler_plays_the_groups() -> None:
    user, served = Mine(), engine()
    custom = sampler(user, served, temperature=0.5, max_turns=4, max_response_tokens=99)
    questions = tasks(2)
    groups, stats = custom.play(questions, 3, seed=11)
    assert [group.task for group in groups] == questions
    assert [len(group.rollouts) for group in groups] == [3, 3]
    assert stats.total_sampled_tokens == 2 * 3 * 3
    ((seen_engine, seen_tasks, n, params),) = user.got
    assert (seen_engine, seen_tasks, n) == (served, questions, 3)
    assert params == RolloutParams(
        temperature=0.5,
        max_turns=4,
        max_turn_tokens=64,
        max_response_tokens=99,
        stop_token_ids=(2,),
        seed=11,
        filters={},
    )


def test_evaluation_passes_its_params() -> None:
    user = Mine()
    sampler(user).play(tasks(1), 1, seed=0, temperature=0.0, filters={"top_p": 0.9})
    params = user.got[0][3]
    assert (params.temperature, params.filters) == (0.0, {"top_p": 0.9})
    assert params.max_response_tokens == 10_000  # the engine's context


def test_statuses_get_the_default_treatments() -> None:
    def cut(last: Rollout) -> None:
        last.status = Status.TRUNCATED_LENGTH

    config = {"treatment": {"truncated_length": "mask"}}
    groups, _ = sampler(Mine(cut), **config).play(tasks(1), 2, seed=0)
    assert [r.treatment for r in groups[0].rollouts] == [Treatment.TRAIN, Treatment.MASK]


def test_missing_stats_are_filled_in() -> None:
    """Reports, efficiency and rewards read these counts of every rollout."""

    def counts(last: Rollout) -> None:
        last.stats = {"tool_calls": 4.0, "searches": 2.0}
        last.segments += [Segment(np.array([4], np.int32)), last.segments[1]]

    groups, _ = sampler(Mine(counts)).play(tasks(1), 2, seed=0)
    first, last = (rollout.stats for rollout in groups[0].rollouts)
    assert first == {**dict.fromkeys(COUNTS, 0.0), "turns": 1.0}
    assert last == {**dict.fromkeys(COUNTS, 0.0), "turns": 2.0, "tool_calls": 4.0, "searches": 2.0}


def span(start: int, end: int, value: float = 1.0) -> Callable[[Rollout], None]:
    return lambda r: r.span_rewards.append(SpanReward(start, end, "x", value))


def nan(r: Rollout) -> None:
    r.segments.append(Segment(np.array([3], np.int32), np.array([np.nan], np.float32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: setattr(r, "task", tasks(9)[8]), "its task is 't8'"),
        (lambda r: r.segments.pop(0), "must begin with a prompt"),
        (nan, "log-probability is nan or infinite"),
        (lambda r: r.closed_rows.append([]), "must begin with a prompt"),
        (lambda r: r.rewards.update(taste=np.nan), "expected {name: finite number}, got {'taste'"),
        (
            lambda r: r.stats.update(seen=None),
            r"expected {name: finite number}, got {'seen': None}",
        ),
        (lambda r: r.stats.update(solved=1.0), "'solved' is a name of the run's metrics"),
        (lambda r: setattr(r, "answer", 42), "answer: expected a text or None, got 42"),
        (
            lambda r: r.segments.append(Segment(np.zeros(10_000, np.int32))),
            "10006 tokens exceed engine.max_model_len 10000",
        ),
        (span(-1, 2), "is not within its 6 tokens"),
        (span(3, 7), "is not within its 6 tokens"),
        (span(4, 4), "is not within its 6 tokens"),
        (span(3, 6, float("inf")), "is not finite"),
    ],
)
def test_untrainable_rollout_is_an_error(change: Callable[[Rollout], Any], message: str) -> None:
    with pytest.raises(UserCodeError, match=rf"wrong result: task 't1', rollout 1: .*{message}"):
        sampler(Mine(change)).play(tasks(2), 2, seed=0)


def test_spans_may_lie_in_any_row() -> None:
    def two_rows(r: Rollout) -> None:
        r.closed_rows.append(list(r.segments))
        r.span_rewards.append(SpanReward(9, 12, "x", 1.0))

    groups, _ = sampler(Mine(two_rows)).play(tasks(1), 1, seed=0)
    assert groups[0].rollouts[0].reward == 1.0


def ask(engine: Any) -> None:
    engine.add_request("a", np.array([1], np.int32), max_tokens=9, temperature=1.0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _, played: played[0].pop(), r"expected 2 lists of 2 rollouts, got lists of \[1, 2"),
        (lambda engine, _: ask(engine), "1 requests are still in flight"),
        (
            lambda _, played: played[0].__setitem__(1, played[0][0]),
            "task 't0', rollout 1: the same object is returned twice",
        ),
    ],
)
def test_incomplete_groups_are_errors(spoil: Callable[[Any, Any], None], message: str) -> None:
    class Spoilt(Mine):
        def rollout(self, engine: Any, *args: Any) -> list[list[Rollout]]:
            played = super().rollout(engine, *args)
            spoil(engine, played)
            return played

    with pytest.raises(UserCodeError, match=message):
        sampler(Spoilt()).play(tasks(2), 2, seed=0)


def test_error_aborts_requests_in_flight() -> None:
    class Buggy(Mine):
        def rollout(self, engine: Any, *args: Any) -> list[list[Rollout]]:
            ask(engine)
            raise ZeroDivisionError

    served = engine()
    with pytest.raises(UserCodeError, match=r"Buggy\.rollout raised ZeroDivisionError"):
        sampler(Buggy(), served).play(tasks(1), 1, seed=0)
    assert served.num_in_flight == 0


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        (None, [(5, True)]),
        ([1, 1, 1, 1, 1], [(5, True)]),
        ([0, 0, 0, 0, 0], [(5, False)]),
        ([1, 0, 0, 1, 1], [(1, True), (2, False), (2, True)]),
        ([0, 1, 0, 1, 0], [(1, False), (1, True), (1, False), (1, True), (1, False)]),
    ],
)
def test_a_mask_becomes_segments(mask: list[int] | None, runs: list[tuple[int, bool]]) -> None:
    task = tasks(1)[0]
    made = rollout_from_tokens(task, [1, 2], range(10, 15), [-1, -2, -3, -4, -5], mask)
    assert made.token_ids.tolist() == [1, 2, 10, 11, 12, 13, 14]
    assert [(len(s.token_ids), s.sampled) for s in made.segments[1:]] == runs
    at = 0
    for segment in made.segments[1:]:
        if segment.logprobs is not None:
            assert segment.logprobs.tolist() == [
                -1.0 - at - i for i in range(len(segment.token_ids))
            ]
        at += len(segment.token_ids)


@pytest.mark.parametrize(("logprobs", "mask"), [([0.0], None), ([0.0] * 2, [1])])
def test_flat_lists_of_other_lengths_are_refused(logprobs: Any, mask: Any) -> None:
    with pytest.raises(ValueError, match="2 completion tokens need as many logprobs and mask"):
        rollout_from_tokens(tasks(1)[0], [1], [3, 4], logprobs, mask)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a user's module."""
    made = ModuleType("users_own")
    vars(made).update(Mine=lambda chat, config: Mine(), Wrong=lambda chat, config: object())
    monkeypatch.setitem(sys.modules, "users_own", made)
    return "users_own"


def test_config_names_the_sampler(module: str) -> None:
    made = load_sampler(RolloutConfig(sampler=f"{module}:Mine"))(CHAT)
    assert isinstance(made, Mine)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_own:Wrong", r"'users_own:Wrong' has no method rollout\(\)"),
        ("users_own:Missing", "Missing"),
        ("no_such_module:X", "no_such_module"),
    ],
)
def test_unknown_sampler_is_an_error(module: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.sampler.*{message}"):
        load_sampler(RolloutConfig(sampler=name))(CHAT)
