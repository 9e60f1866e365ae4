"""Segments refuse inconsistent mask, ids and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentgrpo.types import Segment
from tests.given import a_rollout

IDS = np.array([1, 2, 3], np.int32)


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        (IDS.astype(np.int64), None, "1-d int32, got 1-d int64"),
        (IDS[None], None, "1-d int32, got 2-d int32"),
        (IDS, np.zeros(2, np.float32), r"3 tokens need as many float32 logprobs, got \(2,\)"),
        (IDS, np.zeros(3, np.float64), "float64"),
        (IDS, np.zeros((3, 1), np.float32), r"\(3, 1\)"),
    ],
)
def test_segment_with_invalid_arrays_raises(ids: Any, logprobs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segment(ids, logprobs)


def test_sampled_means_having_logprobs() -> None:
    assert Segment(IDS, np.zeros(3, np.float32)).sampled
    assert not Segment(IDS).sampled
    assert Segment(IDS[:0], np.zeros(0, np.float32)).sampled


def test_rollout_counts_sampled_tokens_and_sums_rewards() -> None:
    played = a_rollout([[-1.0, -2.0], [-3.0]], rewards={"answer": 1.0, "format": 0.25})
    played.segments.insert(2, Segment(np.array([7, 8, 9], np.int32)))
    assert played.num_sampled == 3
    assert played.token_ids.tolist() == [1, 2, 0, 1, 7, 8, 9, 10]
    assert played.reward == 1.25
