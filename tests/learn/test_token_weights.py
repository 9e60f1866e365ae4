"""Token weights against the papers' formulas in fractions; the mismatch against plain loops."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.config import LossConfig, TrainConfig
from agentgrpo.kernels.grpo_loss import grpo_loss
from agentgrpo.kernels.objective import (
    CORRECTIONS,
    LEVELS,
    LOSSES,
    NORMALISERS,
    LossType,
    Objective,
)
from agentgrpo.kernels.reduce import term_weights
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.learn.token_weights import mismatch_metrics, token_weights
from agentgrpo.train.build import build, prepare
from agentgrpo.types import Group, Status, Treatment
from tests.given import a_group
from tests.kernels.oracles import ORACLES

LENGTHS = ((3, 1, 4), (1, 5, 9))
BUDGET = 12


@pytest.fixture
def groups() -> list[Group]:
    return [a_group(lengths) for lengths in LENGTHS]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_weights_match_the_papers(groups: list[Group], loss_type: str) -> None:
    expected = [ORACLES[loss_type].weight(n, 6, 23, BUDGET) for row in LENGTHS for n in row]
    assert token_weights(groups, loss_type, BUDGET) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_learner_and_kernels_count_the_same_samples(groups: list[Group], normaliser: Any) -> None:
    """As in TRL: including masked and empty rollouts, excluding infrastructure failures."""
    silent, broken = a_group([0]), a_group([7], status=Status.INFRA_ERROR)
    masked = a_group([5], treatment=Treatment.MASK)
    loss = LossType(term="clipped", normaliser=normaliser)
    ours = token_weights([groups[0], broken, silent, masked, groups[1]], loss, BUDGET)
    lengths = torch.tensor([*LENGTHS[0], 0, 5, *LENGTHS[1]])
    sequence = torch.repeat_interleave(torch.arange(8), lengths)
    theirs = term_weights(loss, sequence, 8, mask_N=sequence != 4, max_completion_length=BUDGET)
    assert [ours[i] for i in (3, 4, 5)] == [0, 0, 0]
    kept = torch.tensor([*ours[:3], *ours[4:]])[sequence]
    torch.testing.assert_close(kept, theirs)
    if not normaliser.endswith("token_mean"):
        assert ours[0] < token_weights(groups, loss, BUDGET)[0], "B counts the two"


def test_update_counts_but_does_not_pack_masked_rollouts(groups: list[Group]) -> None:
    config = TrainConfig(model="m", out_dir=Path("o"), loss=LossConfig(loss_type="luspo", beta=0.1))
    groups[0].rollouts[0].treatment = Treatment.MASK
    groups[0].rollouts[1].treatment = Treatment.DROP
    (update,) = plan_updates(groups, config, step=0)
    assert update.num_samples == 4
    weights = np.concatenate([batch.weight_N for batch in update.batches])
    np.testing.assert_allclose(weights, 1 / 5, rtol=1e-6)
    assert len(weights) == sum(r.num_sampled for g in groups for r in g.rollouts) - 4


@pytest.mark.parametrize("loss_type", LOSSES)
def test_empty_rollouts_are_no_error(loss_type: str) -> None:
    assert token_weights([a_group([0, 0])], loss_type, BUDGET) == [0.0, 0.0]
    assert token_weights([], loss_type, BUDGET) == []


# What a config says arrives in the kernels.


def test_config_defaults_equal_kernel_defaults() -> None:
    config = LossConfig()
    for field in fields(Objective):
        assert getattr(config, field.name) == field.default, field.name
        assert LossConfig.model_fields[field.name].description, field.name


def with_loss(options: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate({"model": "m", "out_dir": "o", "loss": options})


def test_config_options_reach_the_kernels() -> None:
    common: dict[str, Any] = {
        "normaliser": "sequence_sum", "beta": 0.1, "kl_estimator": "k2",
        "use_bias_correction_kl": False, "entropy_coef": 0.01,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 4.0,
        "vllm_importance_sampling_clip_min": 0.5, "off_policy_mask_threshold": 0.2,
    }  # fmt: skip
    special: dict[str, Any] = {
        "epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0, "clip_ratio_c": 3.0,
        "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 1.6, "vespo_k_pos": 1.1,
        "vespo_lambda_pos": 1.2, "vespo_k_neg": 1.3, "vespo_lambda_neg": 1.4,
    }  # fmt: skip
    for loss_type, loss in LOSSES.items():
        own = {key: special[key] for key in loss.reads}
        options = {"loss_type": loss_type, **common, **own}
        if not loss.whole_sequence:
            options["importance_sampling_level"] = "sequence"
        result = LossConfig(**options)
        assert {name: getattr(result, name) for name in options} == options
        for key in special.keys() - own.keys():
            needed = {need: special[need] for need in loss.needs}
            with pytest.raises(ValueError, match=rf"loss\.{key}: "):
                with_loss({"loss_type": loss_type, **needed, key: special[key]})
    names = {*special, *common, "loss_type", "importance_sampling_level"}
    assert {field.name for field in fields(Objective)} == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, r"loss\.epsilon_high: cispo needs it"),
        (
            {"loss_type": "gpro"},
            r"loss\.loss_type: expected one of grpo, .* 'module:function', got 'gpro'",
        ),
        (
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            r"loss\.importance_sampling_level: vespo weighs .* does nothing without beta",
        ),
        ({"loss_type": "sapo", "epsilon": 0.1}, r"loss\.epsilon: 0.1 does nothing without .* grpo"),
    ],
)
def test_incompatible_options_name_the_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_loss(options)


# A loss of one's own.


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_losses:nothing", "nothing"),
        ("no_such_module:grpo", "no_such_module"),
        ("own_losses:number", "number"),
        ("own_losses:constant", "its result has no gradient"),
        ("own_losses:flat", "its gradient is 0 for every token"),
        ("own_losses:steep", r"its gradient is \[.*nan.*\]; expected finite numbers"),
        ("own_losses:nowhere", r"its losses are \[nan, nan, nan\]; expected finite numbers"),
        ("own_losses:total", "expected a loss per term, .torch.float32, .3,"),
        ("own_losses:broken", "AttributeError"),
        ("own_losses:two", "TypeError"),
    ],
)
def test_invalid_custom_loss_fails_before_the_model_loads(
    tmp_path: Path, name: str, message: str
) -> None:
    config = TrainConfig(
        model="no such model", out_dir=tmp_path / "out", loss=LossConfig(loss_type=name, beta=0.1)
    )
    for start in (build, prepare):
        with pytest.raises(ValueError, match=rf"loss\.loss_type.*{message}"):
            start(config)


# The mismatch.

GAP = np.array([0.1, -0.2, 1.5, np.nan, 0.0, -1.0], np.float32)
SAMPLE = np.array([0, 0, 0, 1, 1, 1], np.int32)


@pytest.mark.parametrize(
    ("level", "ratios"),
    [
        ("token", [math.exp(g) for g in (0.1, -0.2, 1.5, 0.0, 0.0, -1.0)]),
        ("sequence", [math.exp(1.4)] * 3 + [math.exp(-1.0)] * 3),
        ("geometric", [math.exp(1.4 / 3)] * 3 + [math.exp(-1.0 / 3)] * 3),
    ],
)
def test_ratios_are_reported_before_clipping(level: str, ratios: list[float]) -> None:
    mode: Any = f"{level}_truncate"
    objective = Objective(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.2,
        vllm_importance_sampling_clip_min=0.5,
    )
    got = mismatch_metrics(GAP, SAMPLE, objective)
    assert got["mismatch_ratio_min"] == pytest.approx(min(ratios), rel=1e-6)
    assert got["mismatch_ratio_max"] == pytest.approx(max(ratios), rel=1e-6)
    assert got["mismatch_ratio_mean"] == pytest.approx(sum(ratios) / 6, rel=1e-6)
    assert got["mismatch_modified"] == sum(not 0.5 <= r <= 1.2 for r in ratios) / 6


def test_mismatch_kl_is_the_k3_estimate() -> None:
    k3 = [math.exp(g) - 1 - g for g in (0.1, -0.2, 1.5, 0.0, 0.0, -1.0)]
    got = mismatch_metrics(GAP, SAMPLE, Objective())
    assert got["mismatch_kl"] == pytest.approx(sum(k3) / 6, rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_valid_config_can_be_computed(loss_type: str) -> None:
    """Otherwise a run would fail at its first update, after loading and sampling."""
    x, refused = torch.tensor([-1.0, -2.0, -0.5]), set()
    needs: Any = dict.fromkeys(LOSSES[loss_type].needs, 5.0)
    for level, mode, corrects in product(LEVELS, CORRECTIONS, (True, False)):
        try:
            result = LossConfig(
                loss_type=loss_type, importance_sampling_level=level,
                vllm_importance_sampling_mode=mode, vllm_importance_sampling_correction=corrects,
                beta=0.1, entropy_coef=0.1, **needs,
            )  # fmt: skip
        except ValueError as error:
            refused.add((str(error).partition("loss.")[2].partition(":")[0], corrects))
            continue
        loss, _ = grpo_loss(
            x, x - 0.1, x, -x, result, ref_logp_N=x, sampler_logp_N=x, entropy_N=-x,
            entropy_threshold=0.7, sequence_N=torch.tensor([0, 0, 1]), num_sequences=2,
        )  # fmt: skip
        assert loss.isfinite()
    gmpo = {("importance_sampling_level", True), ("importance_sampling_level", False)}
    assert refused == (gmpo if loss_type == "gmpo" else set())
