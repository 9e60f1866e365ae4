"""Objectives and metrics that read a rollout's tokens together are independent of the batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from agentgrpo.config import LossConfig, TrainConfig
from agentgrpo.kernels.objective import LOSSES
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.types import Group, Segment
from tests.learn.given import run_config

WHOLE: dict[str, dict[str, Any]] = {
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 0.005},
    "gspo-token": {"importance_sampling_level": "sequence_token", "epsilon": 0.005},
    **{
        name: {"loss_type": name, **({"epsilon": 0.005} if "epsilon" in loss.reads else {})}
        for name, loss in LOSSES.items()
        if loss.whole_sequence
    },
    "geometric correction": {"vllm_importance_sampling_mode": "geometric_truncate"},
    "sequence correction": {"vllm_importance_sampling_mode": "sequence_mask"},
    "off-policy mask": {"off_policy_mask_threshold": 0.02},
}
"""Objectives that read the terms of a rollout together."""


def with_budget(loss: LossConfig, max_tokens: int) -> TrainConfig:
    """A budget below engine.max_model_len, which the config does not allow."""
    config = run_config(loss)
    learner = config.learner.model_copy(update={"max_tokens": max_tokens})
    return config.model_copy(update={"learner": learner})


def forked(groups: Sequence[Group]) -> None:
    """Every rollout's second turn begins a new row; the first turn of some gets no reward."""
    for number, rollout in enumerate(r for g in groups for r in g.rollouts):
        rollout.closed_rows = [rollout.segments[:2]]
        rollout.segments = [Segment(rollout.token_ids[2:15]), *rollout.segments[3:]]
        first = 0.0 if number % 2 else rollout.advantage
        rollout.segment_advantages = [0.0, first, 0.0, rollout.advantage, 0.0]


@pytest.mark.parametrize("case", WHOLE)
def test_whole_rollout_terms_are_independent_of_batches(
    make_learner: Callable[..., Learner], groups: list[Group], case: str
) -> None:
    """Rollouts whose rows would be in two batches: equal to one undivided batch, in float64.

    Except for norms, which transformers computes in float32; steps move parameters by 1e-2.
    """
    forked(groups)
    loss = LossConfig(**{"num_iterations": 2, **WHOLE[case]})
    recorded = {}
    for budget in (1000, 34):
        config = with_budget(loss, budget)
        learner = make_learner(loss)
        updates = plan_updates(groups, config, step=0)
        metrics = learner.step(updates)
        recorded[budget] = len(updates[0].batches), metrics, list(learner.model.parameters())
    (one, expected, undivided), (many, got, divided) = recorded.values()
    assert one < many
    for name in ("loss", "grad_norm", "mismatch_ratio_max", "mismatch_modified"):
        assert got[name] == pytest.approx(expected[name], rel=1e-6), name
    for a, b in zip(divided, undivided, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
