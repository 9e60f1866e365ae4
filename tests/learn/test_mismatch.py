"""The mismatch between sampler and learner: logged, recorded, and refused if too large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.config import LossConfig
from agentgrpo.engine.agreement import Disagreement, outliers_of, widest_gap
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.types import Group, Segment
from tests.learn.given import distributions, logp_of, oracle_model, run_config, sampled_logp


def test_mismatch_is_logged_before_clipping(
    make_learner: Callable[..., Learner], tiny_model: Path, groups: list[Group]
) -> None:
    loss = LossConfig(vllm_importance_sampling_clip_max=1.2)
    metrics = make_learner(loss).step(plan_updates(groups, run_config(loss), step=0))
    model = oracle_model(tiny_model)
    with torch.no_grad():
        gaps = [logp_of(model, r) - sampled_logp(r) for g in groups for r in g.rollouts]
    ratio = torch.cat(gaps).exp()
    assert metrics["mismatch_ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-5)
    assert metrics["mismatch_ratio_min"] == pytest.approx(ratio.min().item(), rel=1e-5)
    assert metrics["mismatch_ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert metrics["mismatch_modified"] == pytest.approx((ratio > 1.2).double().mean().item())


def test_mismatch_is_measured_before_the_first_update(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    """For any number of passes over the batches."""
    once, thrice = (
        make_learner(loss).step(plan_updates(groups, run_config(loss), step=0))
        for loss in (
            LossConfig(old_logps="sampler"),
            LossConfig(old_logps="sampler", num_iterations=3),
        )
    )
    names = [name for name in once if name.startswith("mismatch_")]
    assert names
    assert {name: once[name] for name in names} == {name: thrice[name] for name in names}


@pytest.mark.parametrize(
    "options",
    [{}, {"num_iterations": 2}, {"num_mini_batches": 2, "num_iterations": 2}],
    ids=["once", "twice", "mini-batches"],
)
def test_rollouts_get_the_learner_scores_of_before_the_step(
    make_learner: Callable[..., Learner],
    tiny_model: Path,
    groups: list[Group],
    options: dict[str, Any],
) -> None:
    rollout, dead = groups[0].rollouts[0], groups[1].rollouts[2]
    rollout.closed_rows = [rollout.segments[:2]]  # two rows, of one turn each
    rollout.segments = [Segment(rollout.token_ids[3:13]), *rollout.segments[3:]]
    dead.advantage = 0.0
    loss = LossConfig(**options)
    make_learner(loss).step(plan_updates(groups, run_config(loss), step=0))
    assert dead.learner_logprobs is None
    assert dead.entropies is None
    model = oracle_model(tiny_model)
    for played in (r for g in groups for r in g.rollouts if r is not dead):
        assert played.learner_logprobs is not None
        assert played.entropies is not None
        recorded = iter(zip(played.learner_logprobs, played.entropies, strict=True))
        for row in played.rows:
            ids = np.concatenate([s.token_ids for s in row])
            with torch.no_grad():
                every = distributions(model, ids)
            start = 0
            for segment in row:
                end = start + len(segment.token_ids)
                logp, entropy = next(recorded)
                if not segment.sampled:
                    assert logp is None
                    assert entropy is None
                else:
                    own = every[start - 1 : end - 1]
                    expected = own[np.arange(end - start), ids[start:end]]
                    np.testing.assert_allclose(logp, expected, atol=1e-5)  # type: ignore[arg-type]
                    np.testing.assert_allclose(entropy, -(own.exp() * own).sum(-1), atol=1e-5)  # type: ignore[arg-type]
                start = end
        assert next(recorded, None) is None


def test_agreement_is_checked_before_the_first_update(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    twice = {"num_iterations": 2}
    cases: list[dict[str, Any]] = [{}, twice, {"old_logps": "sampler"}, {"num_mini_batches": 2}]
    for options in cases:
        loss = LossConfig(**options)
        learner = make_learner(loss)
        learner._dlogp_limit = 0.5
        before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
        with pytest.raises(Disagreement, match="on the sampled tokens"):
            learner.step(plan_updates(groups, run_config(loss), step=0))
        assert all(torch.equal(p, before[n]) for n, p in learner.model.named_parameters())


@pytest.mark.parametrize("outliers", [0.0, 1e-3])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_non_finite_logprob_disagrees_in_any_position(at: int, outliers: float) -> None:
    assert widest_gap([], outliers) == 0.0
    gaps = [np.array(part, np.float32) for part in ([0.1, 0.1], [], [0.2, -0.7])]
    assert widest_gap(gaps, outliers) == pytest.approx(0.7)
    for bad in ("nan", "inf"):
        gaps[at] = np.array([float(bad), *[0.1] * 5000], np.float32)
        assert not widest_gap(gaps, outliers) <= 1e9


def test_bfloat16_allows_one_outlier_in_a_thousand_float32_none() -> None:
    gaps = [np.full(1500, 0.01, np.float32), np.full(1500, -0.02, np.float32)]
    for number in range(5):
        assert (widest_gap(gaps, outliers_of("bfloat16")) > 1) == (number > 3)
        assert (widest_gap(gaps, outliers_of("float32")) > 1) == (number > 0)
        gaps[number % 2][number] = 1.5 + number
