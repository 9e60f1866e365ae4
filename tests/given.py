"""Default values for tests: a task, rollouts, groups and a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentgrpo.config import RewardConfig, TrainConfig
from agentgrpo.config.read import load_config
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rewards.shipped import Reward
from agentgrpo.types import Group, Rollout, Segment, Status, Task

TASK = Task(id="t", messages=({"role": "user", "content": "6*7?"},), spec={"answer": 42})
LEAST = Path(__file__).with_name("least.toml")
"""A config that sets only the keys without defaults."""


def a_rollout(
    turns: Sequence[Sequence[float]] = ((-0.5, -0.5),),
    *,
    task: Task = TASK,
    status: Status = Status.COMPLETED,
    **fields: Any,
) -> Rollout:
    """A rollout with a prompt of 2 tokens and turns given by their log-probabilities."""
    segments = [Segment(np.array([1, 2], np.int32))]
    for turn, logprobs in enumerate(turns):
        ids = np.arange(10 * turn, 10 * turn + len(logprobs), dtype=np.int32)
        segments.append(Segment(ids, np.array(logprobs, np.float32)))
    fields.setdefault("stats", dict.fromkeys(("turns", "tool_calls", "tool_errors"), 0.0))
    return Rollout(task=task, segments=segments, status=status, **fields)


def a_group(lengths: Sequence[int], *, task: Task = TASK, **fields: Any) -> Group:
    """A group of rollouts with these numbers of sampled tokens."""
    rollouts = [a_rollout([[-0.5] * length], task=task, **fields) for length in lengths]
    return Group(task=task, rollouts=rollouts)


def scored_by(reward: Reward) -> Scoring:
    """Scoring with this reward only."""
    return Scoring(reward, RewardConfig(), lambda ids: "")


def a_config(*overrides: str) -> TrainConfig:
    """The config of least.toml with overrides `section.key=value`."""
    return load_config(LEAST, overrides)
