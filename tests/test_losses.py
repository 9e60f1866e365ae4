"""Token weights against the three papers' formulas, written out with exact fractions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from agentgrpo.losses import LossType, token_weights
from agentgrpo.types import Group, Status

LENGTHS = ((3, 1, 4), (1, 5, 9))
BUDGET = 12


@pytest.fixture
def groups(group: Callable[..., Group]) -> list[Group]:
    return [group(lengths) for lengths in LENGTHS]


def objective(groups: list[Group], loss_type: LossType, budget: int = BUDGET) -> float:
    """What the loss of a step is when every token's loss is 1: the weights' total."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    weights = token_weights(groups, loss_type, budget)
    return sum(w * r.num_sampled for w, r in zip(weights, rollouts, strict=True))


def test_dapo_gives_every_token_the_same_weight(groups: list[Group]) -> None:
    assert token_weights(groups, "dapo", BUDGET) == [float(Fraction(1, 23))] * 6


def test_grpo_gives_every_rollout_the_same_weight(groups: list[Group]) -> None:
    expected = [float(Fraction(1, 6 * n)) for lengths in LENGTHS for n in lengths]
    assert token_weights(groups, "grpo", BUDGET) == pytest.approx(expected, rel=1e-15)


def test_dr_grpo_divides_by_the_budget_whatever_the_length(groups: list[Group]) -> None:
    assert token_weights(groups, "dr_grpo", BUDGET) == [1 / (6 * BUDGET)] * 6


@pytest.mark.parametrize(
    ("loss_type", "total"), [("dapo", 1.0), ("grpo", 1.0), ("dr_grpo", 23 / 72)]
)
def test_a_loss_of_one_per_token_sums_to(
    groups: list[Group], loss_type: LossType, total: float
) -> None:
    assert objective(groups, loss_type) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_what_the_machine_broke_weighs_nothing_and_counts_for_nothing(
    groups: list[Group], group: Callable[..., Group], loss_type: LossType
) -> None:
    alone = token_weights(groups, loss_type, BUDGET)
    broken = group([7], status=Status.INFRA_ERROR)
    silent = group([0])
    together = token_weights([groups[0], broken, silent, groups[1]], loss_type, BUDGET)
    assert together == [*alone[:3], 0.0, 0.0, *alone[3:]]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_nothing_sampled_is_no_error(group: Callable[..., Group], loss_type: LossType) -> None:
    assert token_weights([group([0, 0])], loss_type, BUDGET) == [0.0, 0.0]
    assert token_weights([], loss_type, BUDGET) == []
