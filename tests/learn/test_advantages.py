"""Advantages against TRL's formulas, exact expectations, and groups without contrast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgrpo.config import LossConfig, TrainConfig
from agentgrpo.config.read import config_of, load_config
from agentgrpo.envs.validate import RESERVED_NAMES
from agentgrpo.inspect.verify.advantages import advantage_faults
from agentgrpo.learn.advantages import (
    assign_advantages,
    centred,
    has_gradient,
    turn_returns,
    why_dead,
)
from agentgrpo.types import Group, Rollout, Segment, SpanReward, Status, Treatment
from tests.learn.given import group_of, observed, rollout_of

NORMALIZE_THEN_SUM: dict[str, Any] = {"multi_objective_aggregation": "normalize_then_sum"}
PROMPT = Segment(np.arange(3, dtype=np.int32))


def turn(length: int = 2) -> Segment:
    return Segment(np.zeros(length, np.int32), np.zeros(length, np.float32))


def make_group(rewards: list[float], *, broken: tuple[int, ...] = (), sampled: int = 2) -> Group:
    """One rollout per reward, of `sampled` sampled tokens; those in `broken` are infra errors."""
    fields: dict[str, Any] = {"advantage": 9.0, "segment_advantages": [7.0, 7.0]}
    rollouts = [rollout_of(PROMPT, turn(sampled), rewards={"answer": r}, **fields) for r in rewards]
    for i in broken:
        rollouts[i].status = Status.INFRA_ERROR
    return group_of(*rollouts)


def assigned(*groups: Group, **config: Any) -> list[float]:
    assign_advantages(groups, LossConfig(**config))
    return [rollout.advantage for group in groups for rollout in group.rollouts]


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_group_scaling_equals_trl_z_score(rewards: list[float]) -> None:
    r = torch.tensor(rewards, dtype=torch.float64)
    expected = (r - r.mean()) / (r.std() + 1e-4)
    if max(rewards) - min(rewards) > 1e-6:
        np.testing.assert_allclose(assigned(make_group(rewards)), expected, rtol=1e-6, atol=1e-7)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=5))
def test_batch_scaling_divides_by_step_deviation_as_in_trl(
    rewards: list[list[float]],
) -> None:
    r = torch.tensor(rewards, dtype=torch.float64)
    expected = (r - r.mean(1, keepdim=True)) / (r.std() + 1e-4)
    expected[r.amax(1) - r.amin(1) <= 1e-6] = 0
    got = assigned(*map(make_group, rewards), scale_rewards="batch")
    np.testing.assert_allclose(got, expected.flatten(), rtol=1e-6, atol=1e-7)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_leave_one_out_subtracts_the_mean_of_the_others(rewards: list[float]) -> None:
    if max(rewards) - min(rewards) <= 1e-6:
        return
    for i, got in enumerate(centred(rewards, baseline="leave_one_out")):
        others = rewards[:i] + rewards[i + 1 :]
        assert got == pytest.approx(rewards[i] - sum(others) / len(others), abs=1e-9)


def test_without_scaling_advantage_is_difference_to_mean() -> None:
    assert assigned(make_group([3.0, 0.0, 0.0]), scale_rewards="none") == [2.0, -1.0, -1.0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[], [0.7], [1.1] * 5, [0.1 + 0.2, 0.3], [1.0, 1.0 + 9e-7]])
def test_S2_13_equal_rewards_give_exactly_zero_advantages(
    rewards: list[float], baseline: str, scale: str
) -> None:
    group = make_group(rewards)
    got = assigned(group, make_group([0.0, 3.0]), baseline=baseline, scale_rewards=scale)
    assert got[: len(rewards)] == [0.0] * len(rewards)
    assert got[-1] > 0
    assert all(rollout.segment_advantages is None for rollout in group.rollouts)


def test_difference_above_the_tolerance_counts() -> None:
    assert centred([1.0, 1.0 + 2e-6])[1] > 0


def test_broken_rollouts_leave_the_baseline_and_get_zero() -> None:
    group = make_group([1.0, 100.0, 0.0, 0.0], broken=(1,))
    got = assigned(group, scale_rewards="none")
    assert got == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])


@pytest.mark.parametrize("credit", ["rollout", "return_to_go"])
def test_masked_rollouts_enter_the_baseline_and_get_zero(credit: str) -> None:
    group = make_group([1.0, 3.0, 0.0, 0.0])
    group.rollouts[1].treatment = Treatment.MASK
    group.rollouts[1].span_rewards = [SpanReward(3, 5, "line", 0.0)]
    got = assigned(group, scale_rewards="none", span_credit=credit)
    assert got == [0.0, 0.0, -1.0, -1.0]
    assert group.rollouts[1].segment_advantages is None


def test_reward_is_the_sum_of_its_parts() -> None:
    group = make_group([1.0, 1.0])
    group.rollouts[0].rewards["format"] = 0.25
    group.rollouts[0].span_rewards = [SpanReward(3, 5, "line", 0.25)]
    assert assigned(group, scale_rewards="none") == [0.25, -0.25]


def test_gdpo_keeps_parts_that_cancel_in_the_sum() -> None:
    group = make_group([0.0, 0.0, 0.0, 0.0])
    for rollout, (a, b) in zip(group.rollouts, [(1, 0), (0, 1), (0, 0), (1, 1)], strict=True):
        rollout.rewards = {"a": float(a), "b": 10.0 * b}
    rare = assigned(group, multi_objective_aggregation="normalize_then_sum")
    assert rare[0] == pytest.approx(rare[1], abs=1e-3), "each part counts the same"
    assert abs(assigned(group)[0] - assigned(group)[1]) > 1


# A world of two turns: at each the policy does 0 or 1; after 1 at the first the rollout may end.
# Rewards: by span after each turn, and one for the whole.

ENDS = {(1,): 0.3, (0, 0): 1.0, (0, 1): -0.5}
"""Rollouts by their actions, and what they are worth as a whole."""
SPANS = {(1,): [0.8], (0, 0): [0.2, -1.0], (0, 1): [0.2, 0.9]}


def rewarded(values: Sequence[float], **rewards: float) -> Rollout:
    """A turn is one token and has one of these rewards; one observation token separates turns."""
    segments, spans = [PROMPT], []
    for k, value in enumerate(values):
        segments += [turn(1), observed(0)]
        spans.append(SpanReward(3 + 2 * k, 4 + 2 * k, "turn", value))
    return rollout_of(*segments, rewards=rewards, span_rewards=spans)


def play(actions: tuple[int, ...]) -> Rollout:
    return rewarded(SPANS[actions], end=ENDS[actions])


def log_probs(theta: torch.Tensor, actions: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.log_softmax(theta[k], 0)[a] for k, a in enumerate(actions)]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("group_size", [2, 3])
def test_span_estimator_is_unbiased(baseline: str, group_size: int) -> None:
    """Its exact expectation over all groups is the gradient of the expected reward."""
    theta = torch.tensor([[0.3, -0.2], [0.9, 0.1]], dtype=torch.float64, requires_grad=True)
    outcomes = list(ENDS)
    value = torch.zeros((), dtype=torch.float64)
    for actions in outcomes:
        probability = torch.stack(log_probs(theta, actions)).sum().exp()
        value = value + probability * (ENDS[actions] + sum(SPANS[actions]))
    (expected,) = torch.autograd.grad(value, theta)
    got = torch.zeros_like(theta)
    config = LossConfig(scale_rewards="none", baseline=baseline, span_credit="return_to_go")  # type: ignore[arg-type]
    for chosen in itertools.product(outcomes, repeat=group_size):
        group = group_of(*(play(actions) for actions in chosen))
        assign_advantages([group], config)
        surrogate = torch.zeros((), dtype=torch.float64)
        weight = 1.0
        for actions, rollout in zip(chosen, group.rollouts, strict=True):
            logs = log_probs(theta, actions)
            weight *= math.exp(sum(x.item() for x in logs))
            each = rollout.segment_advantages or [rollout.advantage] * len(rollout.segments)
            sampled = [a for s, a in zip(rollout.segments, each, strict=True) if s.sampled]
            assert len(sampled) == len(actions)
            surrogate = surrogate + sum(a * x for a, x in zip(sampled, logs, strict=True))
        (gradient,) = torch.autograd.grad(surrogate / group_size, theta)
        got += weight * gradient
    factor = (group_size - 1) / group_size if baseline == "mean" else 1.0
    torch.testing.assert_close(got, factor * expected, rtol=1e-12, atol=1e-12)


def test_turn_gets_no_credit_for_earlier_rewards() -> None:
    group = group_of(play((0, 0)), play((0, 1)))
    assigned(group, scale_rewards="none", span_credit="return_to_go")
    first, second = (r.segment_advantages for r in group.rollouts)
    assert first == pytest.approx([0, (0.2 - 0.6) / 2, 0, (0.0 - 0.4) / 2, 0])
    assert second == pytest.approx([0, (0.6 - 0.2) / 2, 0, (0.4 - 0.0) / 2, 0])


def test_line_reward_credits_that_line_only() -> None:
    """A penalty of 0.3 for a line changes the advantages of that line only."""
    lines = [[0.0, 0.0, 0.0], [0.0, -0.3, 0.0], [-0.3]]
    rollouts = [rewarded(values, answer=float(n == 0)) for n, values in enumerate(lines)]
    group = group_of(*rollouts)
    assigned(group, scale_rewards="none", span_credit="turn")
    right, wrong, short = (r.segment_advantages for r in group.rollouts)
    assert right == pytest.approx([0, 2 / 3 + 0.1, 0, 2 / 3 + 0.1, 0, 2 / 3, 0])
    assert wrong == pytest.approx([0, -1 / 3 + 0.1, 0, -1 / 3 - 0.2, 0, -1 / 3, 0])
    assert short == pytest.approx([0, -1 / 3 - 0.2, 0])
    rollouts[1].span_rewards[1] = SpanReward(5, 7, "line", -0.3)  # to the end of what it was told
    assert turn_returns(rollouts[1], "turn") == [0.0, -0.3, 0.0]
    again = [r.segment_advantages for r in group.rollouts]
    assigned(group, scale_rewards="none", span_credit="turn")
    assert [r.segment_advantages for r in group.rollouts] == again, "no reward is lost in between"


@pytest.mark.parametrize(
    ("config", "credit"),
    [
        ({}, "rollout"),
        ({"agent": {"kind": "repl"}}, "turn"),
        ({"env": {"kind": "console"}}, "turn"),
        ({"agent": {"kind": "repl"}, "loss": {"span_credit": "return_to_go"}}, "return_to_go"),
        ({"agent": {"kind": "repl"}, "loss": NORMALIZE_THEN_SUM}, "rollout"),
    ],
)
def test_default_span_credit_depends_on_the_agent(config: dict[str, Any], credit: str) -> None:
    resolved = TrainConfig.model_validate({"model": "m", "out_dir": "o", **config})
    assert resolved.credited.span_credit == credit
    before = load_config("quickstart", ["loss.beta=0.1"])
    assert config_of(before, config).credited.span_credit == credit, "or who plays in its place"


def test_early_end_compares_the_final_return() -> None:
    group = group_of(play((1,)), play((0, 0)))
    assigned(group, scale_rewards="none", span_credit="return_to_go")
    late = group.rollouts[1].segment_advantages
    # from its second turn on (0, 0) earns 1.0 - 1.0; (1,) ended with 0.3 + 0.8
    assert late is not None
    assert late[3] == pytest.approx((0.0 - 1.1) / 2)


def test_rows_get_credit_in_order() -> None:
    """Turns in separate rows, as when a template rewrites history, count like other turns."""
    whole, rows = play((0, 1)), play((0, 1))
    rows.closed_rows, rows.segments = [rows.segments[:2]], [PROMPT, turn(1)]
    rows.span_rewards = [SpanReward(3, 4, "turn", 0.2), SpanReward(7, 8, "turn", 0.9)]
    assert turn_returns(rows) == turn_returns(whole)
    group = group_of(rows, play((0, 0)))
    assigned(group, scale_rewards="none", span_credit="return_to_go")
    assert group.rollouts[0].segment_advantages == pytest.approx([0, 0.2, 0, 0.2])
    assert has_gradient(group)


def test_cancelling_spans_are_scaled_by_their_deviation() -> None:
    """Equal totals but unequal turns: the scale must not come from rounding errors."""
    group = group_of(play((0, 0)), play((0, 0)))
    for rollout, values in zip(group.rollouts, [(1.0, 0.0), (0.0, 1.0)], strict=True):
        rollout.span_rewards = [
            SpanReward(3 + 2 * k, 4 + 2 * k, "turn", v) for k, v in enumerate(values)
        ]
    assigned(group, span_credit="return_to_go")
    assert group.rollouts[0].advantage == 0.0
    late = group.rollouts[1].segment_advantages
    assert late is not None
    assert 0.1 < late[3] < 10
    assert has_gradient(group)


@pytest.mark.parametrize("credit", ["soft", "hard"])
def test_branches_average_shared_segments(credit: str) -> None:
    common, mid = turn(), turn()
    paths = [[common, mid, turn()], [common, mid, turn()], [common, turn()], [turn()]]
    group = make_group([1.0, 0.0, 0.5, 0.1])
    for rollout, path in zip(group.rollouts, paths, strict=True):
        rollout.segments = [PROMPT, *path]
    a = assigned(group, scale_rewards="none", branch_credit=credit)
    each = [rollout.segment_advantages for rollout in group.rollouts]
    if credit == "soft":
        assert each == [None] * 4
        return
    of_three, of_two = sum(a[:3]) / 3, sum(a[:2]) / 2
    assert each[0] == pytest.approx([0, of_three, of_two, a[0]])
    assert each[1] == pytest.approx([0, of_three, of_two, a[1]])
    assert each[2] == pytest.approx([0, of_three, a[2]])
    assert each[3] == pytest.approx([0, a[3]])


@pytest.mark.parametrize(
    ("rewards", "broken", "reason"),
    [
        ([1.0, 0.0, 0.0], (), None),
        ([1.0, 1.0, 1.0], (), "all_solved"),
        ([0.0, 0.0, 0.0], (), "all_equal"),
        ([1.0, 0.0, 0.0], (0,), "all_equal"),  # contrast only with a broken one
        ([1.0, 0.0, 0.0], (1, 2), "broken"),  # a single one is left
        ([1.0, 0.0, 0.0], (2,), None),
        ([], (), "broken"),
    ],
)
def test_S2_14_gradient_needs_two_valid_different_rollouts(
    rewards: list[float], broken: tuple[int, ...], reason: str | None
) -> None:
    group = make_group(rewards, broken=broken)
    assigned(group)
    assert why_dead(group) == reason
    assert reason is None or f"dead_{reason}" in RESERVED_NAMES
    assert has_gradient(group) is (reason is None)


def test_S2_14_environment_decides_what_is_solved() -> None:
    group = make_group([0.0, 0.0])
    for rollout in group.rollouts:
        rollout.rewards = {"solved": 1.0}
    assigned(group)
    assert why_dead(group) == "all_solved"


def test_S2_14_equal_rewards_with_unsolved_rollouts_are_all_equal() -> None:
    group = make_group([1.0, 1.0])
    group.rollouts[0].rewards = {"environment": 1.0}
    assigned(group)
    assert why_dead(group) == "all_equal"


def test_rollouts_without_sampled_tokens_have_no_gradient() -> None:
    group = make_group([1.0, 0.0], sampled=0)
    assigned(group)
    assert why_dead(group) == "silent"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_reward_error_names_the_task(bad: float) -> None:
    with pytest.raises(ValueError, match=r"task t: rewards must be finite, got \[1.0, (nan|inf)\]"):
        assigned(make_group([1.0, bad]))


@pytest.mark.parametrize(
    "config", [{}, {"span_credit": "return_to_go"}, {"branch_credit": "hard"}, NORMALIZE_THEN_SUM]
)
def test_assigning_twice_resets_the_advantages(config: dict[str, Any]) -> None:
    group, other = make_group([1.0, 0.0, 0.5]), make_group([0.0, 2.0, 1.0])
    group.rollouts[0].span_rewards = [SpanReward(3, 5, "line", 0.25)]
    assigned(group, **config)
    again = assigned(group, other, **config)
    fresh, third = make_group([1.0, 0.0, 0.5]), make_group([0.0, 2.0, 1.0])
    fresh.rollouts[0].span_rewards = [SpanReward(3, 5, "line", 0.25)]
    assert again == assigned(fresh, third, **config)


def test_gdpo_keeps_dead_groups_and_treats_missing_parts_as_zero() -> None:
    dead, live = make_group([1.0, 1.0]), make_group([0.0, 0.0, 0.0])
    live.rollouts[0].rewards = {"a": 2.0}
    live.rollouts[1].rewards = {"a": 1.0}
    live.rollouts[2].rewards = {"b": 0.0}  # neither lacks what the others have: it earned 0
    got = assigned(dead, live, **NORMALIZE_THEN_SUM)
    assert got[:2] == [0.0, 0.0]
    summed = torch.tensor([0.0, 0.0, 1.0, 0.0, -1.0], dtype=torch.float64) / (1 + 1e-4)
    expected = (summed - summed.mean()) / (summed.std() + 1e-4)
    assert got[2:] == pytest.approx(expected[2:].tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("whole", "share"),
    [("answer", "partial"), ("solved", "partial"), ("answer", "answer_efficiency")],
)
def test_gdpo_merges_partial_into_the_answer(whole: str, share: str) -> None:
    shares = make_group([0.0, 0.0, 0.0])
    for rollout, worth in zip(shares.rollouts, (1.0, 0.5, 0.0), strict=True):
        part = {whole: 1.0, share: 0.0} if worth == 1 else {whole: 0.0, share: worth}
        rollout.rewards = part
    whole_group = make_group([1.0, 0.5, 0.0])
    assert assigned(shares, **NORMALIZE_THEN_SUM) == assigned(whole_group, **NORMALIZE_THEN_SUM)
    assert not list(advantage_faults([shares], LossConfig(**NORMALIZE_THEN_SUM)))


def test_spans_credit_the_whole_rollout_by_default() -> None:
    group = group_of(play((0, 1)), play((0, 0)))
    assigned(group)
    assert [rollout.segment_advantages for rollout in group.rollouts] == [None, None]
    assigned(group, scale_rewards="none", span_credit="return_to_go")
    first = group.rollouts[0]
    assert first.segment_advantages is not None
    assert first.advantage == first.segment_advantages[1], "that of the first turn is all it earned"
