"""Rows that grow, and prompts that were rendered again."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.token_weights import token_weights
from agentgrpo.rollout import transcript as transcripts
from agentgrpo.rollout.transcript import Drift, Transcript, classify
from agentgrpo.types import Float32, Group, Int32, Rollout, Status
from tests.given import TASK


def ids(*values: int) -> Int32:
    return np.array(values, np.int32)


def logp(count: int) -> Float32:
    return -np.arange(1, count + 1, dtype=np.float32)


HELD = ids(*range(1, 11))


@pytest.mark.parametrize(
    ("prompt", "threshold", "expected"),
    [
        (ids(*range(1, 12)), 1024, (Drift.CLEAN, 10)),
        (HELD, 1024, (Drift.CLEAN, 10)),
        (ids(*range(1, 8), 99, 100), 1024, (Drift.REALIGN, 7)),
        (ids(1, 2, 50, 4, 5), 1024, (Drift.FORK, 2)),
        (ids(*range(1, 6)), 1024, (Drift.REALIGN, 5)),  # the whole turn is gone
        (ids(*range(1, 5)), 1024, (Drift.FORK, 4)),
        (ids(*range(1, 8), 99), 3, (Drift.FORK, 7)),  # 3 differing tokens are too many
        (ids(*range(1, 8), 99), 4, (Drift.REALIGN, 7)),
        (ids(9), 1024, (Drift.FORK, 0)),
        (ids(), 1024, (Drift.FORK, 0)),
    ],
)
def test_prompts_are_classified(prompt: Int32, threshold: int, expected: tuple[Drift, int]) -> None:
    assert classify(HELD, prompt, 5, threshold) == expected


def mask(transcript: Transcript) -> list[int]:
    """1 where the policy sampled the token."""
    return [int(s.sampled) for s in transcript.segments for _ in s.token_ids]


def logprobs(transcript: Transcript) -> list[float]:
    return [
        x
        for s in transcript.segments
        for x in ([0] * len(s.token_ids) if s.logprobs is None else s.logprobs.tolist())
    ]


def held() -> Transcript:
    transcript = Transcript(ids(1, 2, 3))
    transcript.give(ids(4, 5))
    transcript.sample(ids(6, 7, 8, 9, 10), logp(5))
    return transcript


def test_a_realigned_turn_keeps_its_beginning_in_the_loss() -> None:
    transcript = held()
    assert transcript.rerender(ids(*range(1, 8), 99, 100)) is Drift.REALIGN
    assert transcript.ids.tolist() == [*range(1, 8), 99, 100]
    assert mask(transcript) == [0] * 5 + [1, 1, 0, 0]
    assert logprobs(transcript) == [0] * 5 + [-1, -2, 0, 0]
    assert [s.sampled for s in transcript.segments] == [False, False, True, False]


def test_a_fork_closes_the_row_and_begins_with_the_whole_prompt() -> None:
    transcript = held()
    assert transcript.rerender(ids(1, 2, 50)) is Drift.FORK
    assert transcript.ids.tolist() == [1, 2, 50]
    assert mask(transcript) == [0, 0, 0]
    (closed,) = transcript.closed_rows
    assert [s.token_ids.tolist() for s in closed] == [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    transcript.sample(ids(60), logp(1))
    assert transcript.rerender(ids(1, 2, 50, 60, 70)) is Drift.CLEAN


@given(st.integers(0, 2**32))
def test_a_row_is_always_what_the_engine_was_sent(seed: int) -> None:
    """Against plain lists: ids equal the prompt, and every sampled id is kept in one row."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transcripts, "FORK_FROM", rng.choice([1, 3, 1024]))
        _is_what_the_engine_was_sent(rng)


def _is_what_the_engine_was_sent(rng: random.Random) -> None:
    transcript = Transcript(ids(0))
    plain, sampled_at = [0], [0]
    for turn in range(rng.randint(1, 6)):
        sampled = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
        start = len(plain)
        transcript.sample(ids(*sampled), logp(len(sampled)))
        plain, sampled_at = plain + sampled, sampled_at + [1] * len(sampled)
        prompt = plain[: rng.randint(0, len(plain))] if rng.random() < 0.5 else list(plain)
        prompt = [*prompt, *(rng.randint(1, 3) for _ in range(rng.randint(0, 3)))] or [9]
        shared = next(
            (i for i, (a, b) in enumerate(zip(plain, prompt, strict=False)) if a != b),
            min(len(plain), len(prompt)),
        )
        drift = transcript.rerender(ids(*prompt))
        if drift is Drift.FORK:
            assert shared < len(plain)
            sampled_at = [0] * len(prompt)
        else:
            assert drift is Drift.CLEAN or shared >= start
            assert transcript.replaced == [
                token for token, own in zip(plain[shared:], sampled_at[shared:], strict=True) if own
            ]
            sampled_at = [*sampled_at[:shared], *([0] * (len(prompt) - shared))]
        plain = prompt
        assert transcript.ids.tolist() == plain
        assert mask(transcript) == sampled_at
        joined = [i for s in transcript.segments for i in s.token_ids.tolist()]
        assert joined == plain, turn


def test_a_forked_rollout_counts_once() -> None:
    """Both rows are trained on, as terms of one sample, and the normaliser counts one rollout."""
    transcript = held()
    transcript.rerender(ids(1, 2, 50))
    transcript.sample(ids(60, 61), logp(2))
    forked = Rollout(
        task=TASK, segments=transcript.segments, closed_rows=transcript.closed_rows,
        status=Status.COMPLETED, advantage=2.0,
    )  # fmt: skip
    plain = Transcript(ids(1, 2, 3))
    plain.sample(ids(6), logp(1))
    other = Rollout(task=TASK, segments=plain.segments, status=Status.COMPLETED, advantage=-1.0)
    groups = [Group(task=TASK, rollouts=[other, forked])]
    assert forked.num_sampled == 7
    weights = token_weights(groups, "grpo", 100)
    assert weights == [1 / 2, 1 / 14]
    (batch,) = pack_tree(groups, max_tokens=100, weights=weights)
    terms = sorted(
        zip(batch.sample_N.tolist(), batch.target_N.tolist(), batch.turn_N.tolist(), strict=True)
    )
    assert terms == [(0, 6, 0), *[(1, i, 0) for i in (6, 7, 8, 9, 10)], (1, 60, 1), (1, 61, 1)]
    assert batch.weight_N.sum() == pytest.approx(1.0)
    assert batch.advantage_N[batch.sample_N == 1].tolist() == [2.0] * 7
