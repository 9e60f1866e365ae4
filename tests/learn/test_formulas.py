"""Updates of a step against plain loops in float64: ratios, clipping, KL, epochs, entropy.

Objectives and metrics that read a rollout's tokens together are independent of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.config import LossConfig
from agentgrpo.kernels.objective import LOSSES
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.types import Group, Segment
from tests.learn.given import (
    assert_same_model,
    clipped,
    oracle_step,
    run_config,
)
from tests.tiny import make_model_dir

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one update": ({}, {}),
    "three passes": ({"num_iterations": 3}, {"iterations": 3}),
    "clip higher": (
        {"num_iterations": 3, "epsilon": 0.01, "epsilon_high": 0.05},
        {"iterations": 3, "low": 0.01, "high": 0.05},
    ),
    "old from the sampler": (
        {"num_iterations": 2, "old_logps": "sampler"},
        {"iterations": 2, "old_is_sampler": True, "cap": None},
    ),
    "mini-batches": ({"num_mini_batches": 2, "num_iterations": 2}, {"iterations": 2, "split": 2}),
    "kl": ({"beta": 0.3, "num_iterations": 2}, {"iterations": 2, "beta": 0.3}),
}


@pytest.mark.parametrize("case", CASES)
def test_step_matches_the_formula(
    make_learner: Callable[..., Learner], tiny_model: Path, groups: list[Group], case: str
) -> None:
    options, oracle = CASES[case]
    options = {"loss_type": "dapo", **options}
    loss = LossConfig(**options)
    oracle = {"iterations": 1, **oracle}
    low, high = oracle.pop("low", 0.2), oracle.pop("high", 0.2)
    split = oracle.pop("split", 1)
    learner = make_learner(loss)
    updates = plan_updates(groups, run_config(loss), step=0)
    assert len(updates) == split
    metrics = learner.step(updates)
    order: list[list[int]] = [[0, 1]]
    if split == 2:  # which group comes first is the planner's business
        prompts = [group.rollouts[0].token_ids[0] for group in groups]
        first = updates[0].batches[0].input_ids_T[0]
        order = [[0], [1]] if first == prompts[0] else [[1], [0]]
    model, losses = oracle_step(
        tiny_model, groups, order,
        term=lambda logp, old, _, a: clipped((logp - old).exp(), a, low, high), **oracle,
    )  # fmt: skip
    assert metrics["updates"] == len(losses)
    assert metrics["loss"] == pytest.approx(float(np.mean(losses)), abs=1e-6)
    assert_same_model(learner.model, model, tiny_model)


def test_kl_is_to_the_reference_not_to_the_resumed_weights(
    make_learner: Callable[..., Learner], groups: list[Group], tmp_path: Path
) -> None:
    loss = LossConfig(beta=0.1)
    updates = plan_updates(groups, run_config(loss), step=0)
    assert make_learner(loss).step(updates)["ref_kl"] == pytest.approx(0.0, abs=1e-9)
    other = make_model_dir(tmp_path / "other", seed=3)
    assert make_learner(loss, reference=other).step(updates)["ref_kl"] > 1e-3


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize("normaliser", [None, "sequence_mean"])
def test_custom_loss_trains_like_the_shipped_one(
    groups: list[Group], make_learner: Callable[..., Learner], normaliser: Any
) -> None:
    """A custom grpo formula gives the same losses and weights after two updates."""
    learners, metrics = [], []
    shipped = "dapo" if normaliser is None else "grpo"
    for loss_type in (shipped, "own_losses:grpo"):
        loss = LossConfig(
            loss_type=loss_type, num_iterations=2, epsilon=0.01, epsilon_high=0.02, beta=0.1,
            normaliser=None if loss_type == shipped else normaliser,
        )  # fmt: skip
        learner = make_learner(loss)
        metrics.append(learner.step(plan_updates(groups, run_config(loss), step=0)))
        learners.append(learner)
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-12)
    assert metrics[0]["ratio_max"] > 1.02
    for ours, theirs in zip(learners[0].policy.trained, learners[1].policy.trained, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


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
        learner = make_learner(loss)
        updates = plan_updates(groups, run_config(loss, max_tokens=budget), step=0)
        metrics = learner.step(updates)
        recorded[budget] = len(updates[0].batches), metrics, list(learner.model.parameters())
    (one, expected, undivided), (many, got, divided) = recorded.values()
    assert one < many
    for name in ("loss", "grad_norm", "mismatch_ratio_max", "mismatch_modified"):
        assert got[name] == pytest.approx(expected[name], rel=1e-6), name
    for a, b in zip(divided, undivided, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
