"""A learner without an engine, and groups for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.config import LearnerConfig, LossConfig
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.learner import Learner
from agentgrpo.types import Group, Segment
from tests.learn.given import (
    EPS,
    LR,
    TEMPERATURE,
    Holder,
    group_of,
    learner_on,
    logp_of,
    oracle_model,
    rollout_of,
)
from tests.tiny import VOCAB


@pytest.fixture
def make_learner(tiny_model: Path) -> Callable[..., Learner]:
    def make(loss: LossConfig | None = None, **config: Any) -> Learner:
        names = ("adapter", "reference", "teacher")
        arguments: dict[str, Any] = {name: config.pop(name, None) for name in names}
        options: dict[str, Any] = {"learning_rate": LR, "max_grad_norm": 1e9, **config}
        learner = learner_on(
            Holder(), tiny_model, LearnerConfig(**options), loss, temperature=TEMPERATURE,
            weights="copy", dlogp_limit=9.0, **arguments,
        )  # fmt: skip
        learner._optimizer._adamw.param_groups[0]["eps"] = EPS
        return learner

    return make


@pytest.fixture
def groups(tiny_model: Path) -> list[Group]:
    """Two groups of three two-turn rollouts, sampled by a policy a little off the learner's."""
    rng = np.random.default_rng(3)
    model, result = oracle_model(tiny_model), []
    for g in range(2):
        prompt = Segment(rng.integers(3, VOCAB, size=9, dtype=np.int32))
        rollouts = []
        for i in range(3):
            segments = [prompt]
            for length in (4, 3 + i):
                ids = rng.integers(3, VOCAB, size=length, dtype=np.int32)
                segments.append(Segment(ids, np.zeros(length, np.float32)))
                segments.append(Segment(rng.integers(3, VOCAB, size=2, dtype=np.int32)))
            played = rollout_of(*segments)
            with torch.no_grad():
                logp = logp_of(model, played).numpy()
            noisy = (logp + rng.normal(0, 0.4, len(logp))).astype(np.float32)
            played.segments[1] = Segment(segments[1].token_ids, noisy[:4])
            played.segments[3] = Segment(segments[3].token_ids, noisy[4:])
            played.rewards = {"r": float(i * i + g)}  # no rollout at the mean
            rollouts.append(played)
        result.append(group_of(*rollouts))
    assign_advantages(result, LossConfig())
    return result


OWN = """
import torch

def grpo(batch, objective, ratio):
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return -torch.min(ratio * batch.advantage, bounded * batch.advantage)

def constant(batch, objective, ratio):
    return batch.advantage

def total(batch, objective, ratio):
    return ratio.sum()

def broken(batch, objective, ratio):
    return batch.reward

def flat(batch, objective, ratio):
    return 0 * ratio

def steep(batch, objective, ratio):
    return (ratio - ratio.detach()).abs().sqrt() * batch.advantage

def nowhere(batch, objective, ratio):
    return ratio * float("nan")

def two(batch, objective):
    return batch.logp

number = 3
"""


@pytest.fixture
def own_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that loss.loss_type may name."""
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)
