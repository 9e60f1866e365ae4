"""Objectives and measures that read a rollout's tokens together, whatever the batches."""

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
    """A budget below engine.max_model_len, which a user could not set."""
    config = run_config(loss)
    learner = config.learner.model_copy(update={"max_tokens": max_tokens})
    return config.model_copy(update={"learner": learner})


def forked(groups: Sequence[Group]) -> None:
    """Every rollout's second turn begins a row of its own; the first turn of some earns nothing."""
    for number, rollout in enumerate(r for g in groups for r in g.rollouts):
        rollout.closed_rows = [rollout.segments[:2]]
        rollout.segments = [Segment(rollout.token_ids[2:15]), *rollout.segments[3:]]
        first = 0.0 if number % 2 else rollout.advantage
        rollout.segment_advantages = [0.0, first, 0.0, rollout.advantage, 0.0]


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_read_of_a_whole_rollout_does_not_depend_on_the_batches(
    make_learner: Callable[..., Learner], groups: list[Group], case: str
) -> None:
    """A rollout whose rows would lie in two batches: as in one undivided batch, in float64.

    But for norms, which transformers computes in float32; steps move parameters by 1e-2.
    """
    forked(groups)
    loss = LossConfig(**{"num_iterations": 2, **WHOLE[case]})
    seen = {}
    for budget in (1000, 34):
        config = with_budget(loss, budget)
        learner = make_learner(loss)
        updates = plan_updates(groups, config, step=0)
        metrics = learner.step(updates)
        seen[budget] = len(updates[0].batches), metrics, list(learner.model.parameters())
    (one, want, undivided), (many, got, divided) = seen.values()
    assert one < many
    for name in ("loss", "grad_norm", "mismatch_ratio_max", "mismatch_modified"):
        assert got[name] == pytest.approx(want[name], rel=1e-6), name
    for a, b in zip(divided, undivided, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
