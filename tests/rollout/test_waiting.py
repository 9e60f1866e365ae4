"""Rollouts whose worlds have answered go on, whether or not others are waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentgrpo.rollout.observe import _shorten_spans
from agentgrpo.types import Rollout, Segment, SpanReward, Status, Task


@pytest.mark.parametrize(("kept", "end"), [(2, 12), (1, 11), (0, 11)])
def test_span_reward_ends_with_the_rest_of_its_turn(kept: int, end: int) -> None:
    """Positions count the rows before; where nothing is left, to the token in its place."""
    task = Task(id="t", messages=(), spec={})
    closed = [[Segment(np.array([0] * 6, np.int32))], [Segment(np.array([0], np.int32))]]
    row = [Segment(np.array([1] * 8, np.int32))]
    rollout = Rollout(task=task, segments=row, status=Status.COMPLETED, closed_rows=closed)
    rollout.span_rewards = [SpanReward(2, 4, "a", 1.0), SpanReward(10, 15, "b", 1.0)]
    live: Any = SimpleNamespace(rollout=rollout, transcript=SimpleNamespace(turn_start=3))
    _shorten_spans(live, kept)
    assert [(span.start, span.end) for span in rollout.span_rewards] == [(2, 4), (10, end)]
