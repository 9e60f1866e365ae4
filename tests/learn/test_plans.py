"""Which tokens each update trains on, with which advantages and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentgrpo.config import LossConfig
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.types import Group, Status
from tests.learn.given import DAPO, TASK, branched, run_config


def test_span_advantages_reach_the_right_tokens(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    for i, rollout in enumerate(r for g in groups for r in g.rollouts):
        rollout.segment_advantages = [9.0, 0.5 + i, 9.0, -1.0 - i, 9.0]
    (update,) = plan_updates(groups, run_config(DAPO), step=0)
    for batch in update.batches:
        expected = np.where(batch.turn_N == 0, 0.5 + batch.sample_N, -1.0 - batch.sample_N)
        np.testing.assert_array_equal(batch.advantage_N, expected.astype(np.float32))
        sizes = np.bincount(batch.turn_N)
        assert sizes.tolist() == [24, 24]


def test_dead_rollouts_are_packed_if_a_kl_trains_them(groups: list[Group]) -> None:
    for rollout in groups[0].rollouts:
        rollout.advantage = 0.0

    def terms(loss: LossConfig) -> int:
        updates = plan_updates(groups, run_config(loss), step=0)
        return sum(len(b.row_N) for u in updates for b in u.batches)

    alive = sum(r.num_sampled for r in groups[1].rollouts)
    every = sum(r.num_sampled for g in groups for r in g.rollouts)
    assert terms(LossConfig()) == alive
    assert terms(LossConfig(beta=0.1)) == every
    assert terms(LossConfig(entropy_coef=0.1)) == every
    groups[0].rollouts[0].status = Status.INFRA_ERROR
    assert terms(LossConfig(beta=0.1)) == every - groups[0].rollouts[0].num_sampled


def test_mini_batches_are_a_function_of_seed_and_step(groups: list[Group]) -> None:
    loss = LossConfig(num_mini_batches=2)
    many = [
        Group(task=TASK, rollouts=[replace(r, advantage=k + 1.0) for r in groups[0].rollouts])
        for k in range(7)
    ]

    def plan(step: int) -> list[set[float]]:
        updates = plan_updates(many, run_config(loss), step=step)
        assert [u.num_samples for u in updates] == [12, 9]
        shares = [set(np.concatenate([b.advantage_N for b in u.batches]).tolist()) for u in updates]
        assert sorted(x for share in shares for x in share) == [1, 2, 3, 4, 5, 6, 7]
        return shares

    assert plan(3) == plan(3)
    assert len({str(plan(step)) for step in range(8)}) > 1
    other = run_config(loss).model_copy(update={"seed": 1})
    orders = [
        [
            [b.advantage_N.tolist() for b in update.batches]
            for config in (run_config(loss), other)
            for update in plan_updates(many, config, step=step)
        ]
        for step in range(4)
    ]
    assert any(order[:2] != order[2:] for order in orders), "another seed, another order"


def test_plan_follows_its_settings(groups: list[Group]) -> None:
    every = [r for group in groups for r in group.rollouts]
    # of each row nothing is computed from its last sampled token on: here that and two told tokens
    lengths = sum(len(r.token_ids) - 3 for r in every)
    loss = LossConfig(loss_type="dr_grpo")
    (update,) = plan_updates(groups, run_config(loss), step=0)
    budget = run_config(loss).rollout.max_sampled_tokens
    assert budget != run_config(loss).rollout.max_turn_tokens
    for batch in update.batches:
        np.testing.assert_allclose(batch.weight_N, 1 / (len(every) * budget), rtol=1e-6)
    assert len(update.batches) == 1
    assert len(update.batches[0].input_ids_T) < lengths
    (alone,) = plan_updates(groups, run_config(loss), step=0, share_prefixes=False)
    assert sum(len(b.input_ids_T) for b in alone.batches) == lengths
    (many,) = plan_updates(groups, run_config(loss, max_tokens=40), step=0)
    assert all(len(b.input_ids_T) <= 40 for b in many.batches)
    assert len(many.batches) > 1


def test_hard_credit_records_a_shared_turn_in_the_first_branch() -> None:
    """The learner's per-token results reach the recorded rollouts."""
    config = run_config(LossConfig(branch_credit="hard"))
    groups = branched()
    for number, rollout in enumerate(r for g in groups for r in g.rollouts):
        rollout.advantage = 1.0 + number
    (update,) = plan_updates(groups, config, step=0)
    for batch in update.batches:
        update.store_fields(*batch.labels, learner_logprobs=-batch.target_N.astype(np.float32))
    messages = [
        [None if logp is None else (-logp).tolist() for logp in r.learner_logprobs or ()]
        for g in groups
        for r in g.rollouts
    ]
    assert messages == [
        [None, [10, 11, 12], None, [30, 31]],
        [None, None, None, [40]],
        [None, [50, 51]],
        [None, [60]],
        [None, [70, 71]],
    ]


@pytest.mark.parametrize("credit", ["soft", "hard"])
def test_S3_7_shared_branch_tokens_enter_the_loss_once(credit: str) -> None:
    """With the mean of its branches' advantages; weights then count the unique sampled tokens."""
    loss: Any = {"branch_credit": credit, "scale_rewards": "none"}
    config = run_config(LossConfig(**loss))
    groups = branched()
    assign_advantages(groups, config.loss)
    (update,) = plan_updates(groups, config, step=0)
    (batch,) = update.batches
    terms = list(zip(batch.target_N.tolist(), batch.advantage_N.tolist(), strict=True))
    shared = [advantage for token, advantage in terms if token in (10, 11, 12)]
    unique = 3 + 2 + 1 + 2 + 1 + 2
    assert sorted(batch.input_ids_T.tolist()).count(11) == 1  # laid out once in either case
    if credit == "soft":
        assert sorted(shared) == [-0.5] * 3 + [0.5] * 3
        assert batch.weight_N.tolist() == pytest.approx([1 / (unique + 3)] * len(terms))
        return
    assert shared == [0.0] * 3  # mean of 0.5 and -0.5
    assert {token: a for token, a in terms if token in (30, 31, 40)} == {30: 0.5, 31: 0.5, 40: -0.5}
    counted = batch.weight_N * unique
    assert counted.tolist() == pytest.approx([1.0] * len(terms))
    # the third rollout's terms have no advantage: it is left out of the batch, not of the count
    assert len(terms) == unique - 2
    assert [r.segments[1].sampled for r in groups[0].rollouts] == [True] * 3  # records stay whole
