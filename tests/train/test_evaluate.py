"""The shares that are reported: over the rollouts that the machine did not break."""

from __future__ import annotations

import pytest

from agentgrpo.actions import InfrastructureError
from agentgrpo.train.evaluate import summarize
from agentgrpo.types import Group, Status, Task
from tests.given import a_rollout

TASK = Task(id="t", messages=(), spec={})


def test_summary_means_exclude_broken_rollouts() -> None:
    groups = [
        Group(
            task=TASK,
            rollouts=[
                a_rollout([[-1.0] * 4], answer="1", rewards={"answer": 1.0, "format": 0.5}),
                a_rollout([[-1.0] * 2], answer="2", rewards={"answer": 0.0, "format": 0.5}),
            ],
        ),
        Group(
            task=TASK,
            rollouts=[
                a_rollout(status=Status.INFRA_ERROR, answer="never counted"),
                a_rollout([[-1.0] * 3], status=Status.TRUNCATED_LENGTH, rewards={"answer": 0.0}),
            ],
        ),
    ]
    groups[0].rollouts[0].stats = {"turns": 3.0}
    for played in (groups[0].rollouts[1], *groups[1].rollouts):
        played.stats = {"turns": 0.0}
    assert summarize(groups) == pytest.approx(
        {
            "rollouts": 4,
            "infra_errors": 1,
            "reward": 2.0 / 3,
            "solved": 1 / 3,
            "answered": 2 / 3,
            "sampled_tokens": 3,
            "turns": 1.0,
            "status_completed": 2 / 3,
            "status_truncated_length": 1 / 3,
            "status_truncated_turns": 0,
            "status_truncated_calls": 0,
            "status_malformed": 0,
            "status_timed_out": 0,
            "status_infra_error": 0,
        }
    )


def test_solved_is_absent_without_a_definition() -> None:
    """reward.solved_at, else the environment, else the reward; a reward alone says nothing."""
    said = {
        (): None,
        (("environment", 1.0), ("format", 0.1)): None,
        (("answer", 1.0),): True,
        (("answer", 0.0), ("format", 0.1)): False,
        (("solved", 0.0), ("answer", 1.0), ("partial", 0.5)): False,
        (("solved", 1.0), ("answer", 0.0)): True,
    }
    assert [a_rollout(rewards=dict(parts)).solved for parts in said] == list(said.values())
    counted = a_rollout(rewards={"solved": 1.0}, stats={"solved": 0.0})
    assert counted.solved is False
    nobody = Group(task=TASK, rollouts=[a_rollout(rewards={"environment": 1.0})])
    assert "solved" not in summarize([nobody])
    one = Group(task=TASK, rollouts=[a_rollout(rewards={"answer": 1.0}), a_rollout(rewards={})])
    assert summarize([one])["solved"] == 0.5


def test_summary_of_broken_rollouts_has_only_counts() -> None:
    broken = Group(task=TASK, rollouts=[a_rollout(status=Status.INFRA_ERROR)])
    with pytest.raises(InfrastructureError, match="broke 1 of 1 rollouts"):
        summarize([broken])
    half = Group(task=TASK, rollouts=[a_rollout(), a_rollout(status=Status.INFRA_ERROR)])
    assert summarize([half])["infra_errors"] == 1
    assert summarize([]) == {"rollouts": 0, "infra_errors": 0}
