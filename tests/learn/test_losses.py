"""Token weights against the papers' formulas in fractions, and the mismatch in plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.config import LossConfig
from agentgrpo.kernels.grpo_loss import grpo_loss
from agentgrpo.kernels.objective import CORRECTIONS, LEVELS, LOSS_TYPES, Objective
from agentgrpo.kernels.reduce import term_weights
from agentgrpo.learn.losses import mismatch_metrics, objective_of, token_weights
from agentgrpo.types import Group, Status

LENGTHS = ((3, 1, 4), (1, 5, 9))
BUDGET = 12


@pytest.fixture
def groups(group: Callable[..., Group]) -> list[Group]:
    return [group(lengths) for lengths in LENGTHS]


def objective(groups: list[Group], loss_type: str, budget: int = BUDGET) -> float:
    """What the loss of a step is when every token's loss is 1: the weights' total."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    weights = token_weights(groups, loss_type, budget)
    return sum(w * r.num_sampled for w, r in zip(weights, rollouts, strict=True))


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "cispo", "vespo"])
def test_every_token_has_the_same_weight(groups: list[Group], loss_type: str) -> None:
    assert token_weights(groups, loss_type, BUDGET) == [float(Fraction(1, 23))] * 6


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "gmpo"])
def test_every_rollout_has_the_same_weight(groups: list[Group], loss_type: str) -> None:
    expected = [float(Fraction(1, 6 * n)) for lengths in LENGTHS for n in lengths]
    assert token_weights(groups, loss_type, BUDGET) == pytest.approx(expected, rel=1e-15)


def test_dr_grpo_divides_by_the_budget_whatever_the_length(groups: list[Group]) -> None:
    assert token_weights(groups, "dr_grpo", BUDGET) == [1 / (6 * BUDGET)] * 6


def test_luspo_counts_rollouts_only(groups: list[Group]) -> None:
    assert token_weights(groups, "luspo", BUDGET) == [1 / 6] * 6


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_kernels_weigh_alike(groups: list[Group], loss_type: str) -> None:
    lengths = torch.tensor([n for row in LENGTHS for n in row])
    sequence = torch.repeat_interleave(torch.arange(6), lengths)
    theirs = term_weights(loss_type, sequence, 6, max_completion_length=BUDGET)
    ours = torch.tensor(token_weights(groups, loss_type, BUDGET))[sequence]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("loss_type", "total"), [("dapo", 1.0), ("grpo", 1.0), ("dr_grpo", 23 / 72), ("luspo", 23 / 6)]
)
def test_a_loss_of_one_per_token_sums_to(groups: list[Group], loss_type: str, total: float) -> None:
    assert objective(groups, loss_type) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_the_machine_broke_weighs_nothing_and_counts_for_nothing(
    groups: list[Group], group: Callable[..., Group], loss_type: str
) -> None:
    alone = token_weights(groups, loss_type, BUDGET)
    broken = group([7], status=Status.INFRA_ERROR)
    silent = group([0])
    together = token_weights([groups[0], broken, silent, groups[1]], loss_type, BUDGET)
    assert together == [*alone[:3], 0.0, 0.0, *alone[3:]]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_sampled_is_no_error(group: Callable[..., Group], loss_type: str) -> None:
    assert token_weights([group([0, 0])], loss_type, BUDGET) == [0.0, 0.0]
    assert token_weights([], loss_type, BUDGET) == []


def test_an_unknown_loss_type_is_refused(groups: list[Group]) -> None:
    with pytest.raises(ValueError, match="loss_type: 'ppo' has no weights"):
        token_weights(groups, "ppo", BUDGET)


# What a config says arrives in the kernels.


def test_every_option_of_the_kernels_is_a_key_of_the_same_name() -> None:
    changed: dict[str, Any] = {
        "loss_type": "sapo", "importance_sampling_level": "sequence", "epsilon": 0.1,
        "epsilon_high": 0.3, "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 1.6,
        "vespo_k_pos": 1.1, "vespo_lambda_pos": 1.2, "vespo_k_neg": 1.3, "vespo_lambda_neg": 1.4,
        "beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False, "entropy_coef": 0.01,
        "vllm_importance_sampling_correction": False,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 4.0,
        "vllm_importance_sampling_clip_min": 0.5, "off_policy_mask_threshold": 0.2,
    }  # fmt: skip
    clipped: dict[str, Any] = {"delta": 4.0, "clip_ratio_c": 3.0}
    for options in (changed, clipped):
        made = objective_of(LossConfig(**options))
        for name, value in options.items():
            assert getattr(made, name) == value, name
    assert {field.name for field in fields(Objective)} == {*changed, *clipped}


def test_options_that_do_not_go_together_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"loss\.epsilon_high: cispo needs it"):
        objective_of(LossConfig(loss_type="cispo"))


# The mismatch.

GAP = np.array([0.1, -0.2, 1.5, np.nan, 0.0, -1.0], np.float32)
SAMPLE = np.array([0, 0, 0, 1, 1, 1], np.int32)
TURN = np.array([0, 1, 1, 0, 0, 1], np.int32)


@pytest.mark.parametrize(
    ("level", "ratios"),
    [
        ("token", [math.exp(g) for g in (0.1, -0.2, 1.5, 0.0, 0.0, -1.0)]),
        ("sequence", [math.exp(1.4)] * 3 + [math.exp(-1.0)] * 3),
        ("geometric", [math.exp(1.4 / 3)] * 3 + [math.exp(-1.0 / 3)] * 3),
    ],
)
def test_ratios_are_reported_before_any_bound(level: str, ratios: list[float]) -> None:
    objective = Objective(
        vllm_importance_sampling_mode=f"{level}_truncate",
        vllm_importance_sampling_clip_max=1.2,
        vllm_importance_sampling_clip_min=0.5,
    )
    got = mismatch_metrics(GAP, SAMPLE, TURN, objective)
    assert got["mismatch_ratio_min"] == pytest.approx(min(ratios), rel=1e-6)
    assert got["mismatch_ratio_max"] == pytest.approx(max(ratios), rel=1e-6)
    assert got["mismatch_ratio_mean"] == pytest.approx(sum(ratios) / 6, rel=1e-6)
    assert got["mismatch_modified"] == sum(not 0.5 <= r <= 1.2 for r in ratios) / 6


def test_the_mismatch_kl_is_k3() -> None:
    k3 = [math.exp(g) - 1 - g for g in (0.1, -0.2, 1.5, 0.0, 0.0, -1.0)]
    got = mismatch_metrics(GAP, SAMPLE, TURN, Objective())
    assert got["mismatch_kl"] == pytest.approx(sum(k3) / 6, rel=1e-6)
    assert got["mismatch_turn_0_kl"] == pytest.approx((k3[0] + k3[3] + k3[4]) / 3, rel=1e-5)
    assert got["mismatch_turn_1_kl"] == pytest.approx((k3[1] + k3[2] + k3[5]) / 3, rel=1e-6)


def test_all_of_the_mismatch_comes_by_turn_too() -> None:
    """A turn's numbers are those of its tokens alone."""
    objective = Objective(
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.2
    )
    got = mismatch_metrics(GAP, SAMPLE, TURN, objective)
    whole = {name for name in got if "turn" not in name}
    for turn in (0, 1):
        own = np.equal(TURN, turn)
        alone = mismatch_metrics(GAP[own], SAMPLE[own], np.zeros_like(TURN[own]), objective)
        for name in whole:
            by_turn = name.replace("mismatch_", f"mismatch_turn_{turn}_")
            assert got[by_turn] == pytest.approx(alone[name], rel=1e-12), by_turn
    assert len(got) == 3 * len(whole)
    assert got["mismatch_turn_0_ratio_max"] == pytest.approx(math.exp(0.1))
    assert got["mismatch_turn_1_ratio_min"] == pytest.approx(math.exp(-1.0))
    assert got["mismatch_turn_1_modified"] == pytest.approx(1 / 3)


def test_a_sequences_ratio_is_that_of_all_its_turns() -> None:
    objective = Objective(vllm_importance_sampling_mode="sequence_truncate")
    got = mismatch_metrics(GAP, SAMPLE, TURN, objective)
    assert got["mismatch_turn_1_ratio_max"] == pytest.approx(math.exp(1.4), rel=1e-6)


def test_late_turns_are_counted_together() -> None:
    turn = np.array([0, 7, 8, 40, 2, 9], np.int32)
    got = mismatch_metrics(GAP, SAMPLE, turn, Objective())
    names = {name for name in got if "turn" in name and name.endswith("_kl")}
    assert names == {"mismatch_turn_0_kl", "mismatch_turn_2_kl", "mismatch_turn_7_kl"}


def test_without_a_correction_nothing_is_modified() -> None:
    objective = Objective(vllm_importance_sampling_correction=False)
    assert mismatch_metrics(GAP, SAMPLE, TURN, objective)["mismatch_modified"] == 0.0


def test_no_tokens_no_metrics() -> None:
    empty = np.empty(0, np.int32)
    assert mismatch_metrics(empty.astype(np.float32), empty, empty, Objective()) == {}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_a_config_may_say_can_be_computed(loss_type: str) -> None:
    """Else the run would end at its first update, when everything has been loaded and sampled."""
    x, refused = torch.tensor([-1.0, -2.0, -0.5]), set()
    for level, mode, corrects in product(LEVELS, CORRECTIONS, (True, False)):
        config = LossConfig.model_validate({
            "loss_type": loss_type, "importance_sampling_level": level,
            "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_correction": corrects,
            "epsilon_high": 5.0 if loss_type == "cispo" else None, "beta": 0.1, "entropy_coef": 0.1,
        })  # fmt: skip
        try:
            made = objective_of(config)
        except ValueError as error:
            refused.add((str(error).partition(":")[0], corrects))
            continue
        loss, _ = grpo_loss(
            x, x - 0.1, x, -x, made, ref_logp_N=x, sampler_logp_N=x, entropy_N=-x,
            entropy_threshold=0.7, sequence_N=torch.tensor([0, 0, 1]), num_sequences=2,
        )  # fmt: skip
        assert loss.isfinite()
    level_alone = {
        ("loss.importance_sampling_level", True),
        ("loss.importance_sampling_level", False),
    }
    mode_alone = {("loss.vllm_importance_sampling_mode", True)}  # of no correction harms nothing
    alone = {"vespo": level_alone | mode_alone, "gmpo": level_alone}
    assert refused == alone.get(loss_type, set())
