"""Advantages against TRL's formula in torch, and the groups that teach nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentgrpo.advantages import Estimator, assign_advantages, group_advantages, has_gradient
from agentgrpo.types import Group, Rollout, Segment, Status, Task

TASK = Task(id="t", messages=(), spec={})
ESTIMATORS: list[Estimator] = ["grpo", "dr_grpo", "leave_one_out"]


def make_group(rewards: list[float], *, broken: tuple[int, ...] = (), sampled: int = 2) -> Group:
    """One rollout per reward, of `sampled` sampled tokens; those in `broken` are infra errors."""
    prompt = Segment(np.arange(3, dtype=np.int32))
    turn = Segment(np.zeros(sampled, np.int32), np.zeros(sampled, np.float32))
    rollouts = [
        Rollout(
            task=TASK,
            segments=[prompt, turn],
            status=Status.INFRA_ERROR if i in broken else Status.COMPLETED,
            rewards={"answer": reward},
            advantage=9.0,
        )
        for i, reward in enumerate(rewards)
    ]
    return Group(task=TASK, rollouts=rollouts)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_grpo_is_the_z_score_with_sample_deviation_as_in_trl(rewards: list[float]) -> None:
    r = torch.tensor(rewards, dtype=torch.float64)
    want = (r - r.mean()) / (r.std() + 1e-4)
    if max(rewards) - min(rewards) > 1e-6:
        np.testing.assert_allclose(group_advantages(rewards), want.numpy(), rtol=1e-6, atol=1e-7)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_leave_one_out_compares_each_with_the_mean_of_the_others(rewards: list[float]) -> None:
    if max(rewards) - min(rewards) <= 1e-6:
        return
    for i, got in enumerate(group_advantages(rewards, estimator="leave_one_out")):
        others = rewards[:i] + rewards[i + 1 :]
        assert got == pytest.approx(rewards[i] - sum(others) / len(others), abs=1e-9)


def test_dr_grpo_is_the_plain_difference_to_the_mean() -> None:
    assert group_advantages([3.0, 0.0, 0.0], estimator="dr_grpo") == [2.0, -1.0, -1.0]


def test_eps_is_added_to_the_deviation() -> None:
    assert group_advantages([1.0, -1.0], eps=math.sqrt(2)) == pytest.approx(
        [1 / 8**0.5, -(8**-0.5)]
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[], [0.7], [1.1] * 5, [0.1 + 0.2, 0.3], [1.0, 1.0 + 9e-7]])
def test_without_contrast_all_advantages_are_exactly_zero(
    rewards: list[float], estimator: Estimator
) -> None:
    assert group_advantages(rewards, estimator=estimator) == [0.0] * len(rewards)


def test_a_difference_just_above_the_tolerance_counts() -> None:
    assert group_advantages([1.0, 1.0 + 2e-6])[1] > 0


def test_broken_rollouts_leave_the_baseline_and_get_zero() -> None:
    group = make_group([1.0, 100.0, 0.0, 0.0], broken=(1,))
    assign_advantages(group, estimator="dr_grpo")
    got = [rollout.advantage for rollout in group.rollouts]
    assert got == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])


def test_the_reward_is_the_sum_of_its_parts() -> None:
    group = make_group([1.0, 1.0])
    group.rollouts[0].rewards["format"] = 0.5
    assign_advantages(group, estimator="dr_grpo")
    assert [rollout.advantage for rollout in group.rollouts] == [0.25, -0.25]


@pytest.mark.parametrize(
    ("rewards", "broken", "expected"),
    [
        ([1.0, 0.0, 0.0], (), True),
        ([1.0, 1.0, 1.0], (), False),
        ([1.0, 0.0, 0.0], (0,), False),  # contrast only with a broken one
        ([1.0, 0.0, 0.0], (1, 2), False),  # a single one is left
        ([1.0, 0.0, 0.0], (2,), True),
    ],
)
def test_has_gradient_needs_two_sound_rollouts_that_differ(
    rewards: list[float], broken: tuple[int, ...], expected: bool
) -> None:
    group = make_group(rewards, broken=broken)
    assign_advantages(group)
    assert has_gradient(group) is expected


def test_rollouts_without_sampled_tokens_give_no_gradient() -> None:
    group = make_group([1.0, 0.0], sampled=0)
    assign_advantages(group)
    assert not has_gradient(group)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_names_the_task(bad: float) -> None:
    with pytest.raises(ValueError, match=r"task t: rewards must be finite, got \[1.0, (nan|inf)\]"):
        assign_advantages(make_group([1.0, bad]))


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"estimator: .* got 'gae'"):
        group_advantages([1.0, 0.0], estimator="gae")  # type: ignore[arg-type]
