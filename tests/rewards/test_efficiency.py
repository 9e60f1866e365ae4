"""The efficiency reward: the paper's numbers, and rollouts that must not enter the means."""

from __future__ import annotations

import pytest

from agentgrpo.rewards.efficiency import add_efficiency, decay, well_formed
from agentgrpo.rewards.shipped import score
from agentgrpo.types import Group, Rollout, Status, Task, Treatment
from tests.given import a_rollout

TASK = Task(id="t", messages=(), spec={})


def right(rollout: Rollout) -> dict[str, float]:
    return {"answer": float(rollout.answer == "right"), "format": 0.1}


def five() -> Group:
    """Tool calls, sampled tokens, answer and malformed turns of the worked example."""
    rows = [
        (1, 100, "right", 0),
        (2, 150, "right", 0),
        (3, 200, "wrong", 0),
        (6, 400, "right", 0),
        (1, 120, "right", 1),
    ]
    rollouts = [
        a_rollout(
            [[-1.0] * n], answer=answer, stats={"tool_calls": float(c), "malformed": float(m)}
        )
        for c, n, answer, m in rows
    ]
    return Group(task=TASK, rollouts=rollouts)


@pytest.mark.parametrize(
    ("sigma_tool", "sigma_length", "earned"),
    [
        (0.2, 0.5, [1.406036, 1.167147, 0.0, 0.374991, 1.354544]),  # the worked example
        (0.2, 0.0, [1.15865, 1.05993, 0.0, 0.67252, 1.15865]),  # each factor alone
        (0.0, 0.5, [1.21351, 1.10116, 0.0, 0.55759, 1.16907]),
        (0.0, 0.0, [1, 1, 0, 1, 1]),
    ],
)
def test_S3_9_efficiency_equals_the_papers_formula(
    sigma_tool: float, sigma_length: float, earned: list[float]
) -> None:
    group = five()
    score(group, right)
    add_efficiency(group, sigma_tool=sigma_tool, sigma_length=sigma_length)
    parts = [r.rewards for r in group.rollouts]
    assert [p["answer"] + p["answer_efficiency"] for p in parts] == pytest.approx(earned, abs=6e-6)
    assert [p["answer"] for p in parts] == [1, 1, 0, 1, 1]
    assert [p["format"] for p in parts] == [0, 0, 0, 0, -1], "the last is malformed"


@pytest.mark.parametrize(
    ("status", "treatment"),
    [
        (Status.TIMED_OUT, Treatment.DROP),
        (Status.TIMED_OUT, Treatment.RETRY),
        (Status.INFRA_ERROR, Treatment.TRAIN),
    ],
)
def test_rollouts_outside_the_baseline_do_not_enter_the_means(
    status: Status, treatment: Treatment
) -> None:
    """For example a timed-out rollout with more calls than all others together."""
    alone, beside = five(), five()
    late = a_rollout([[-1.0] * 900], status=status, stats={"tool_calls": 50.0})
    late.treatment = treatment
    beside.rollouts.insert(2, late)
    for group in (alone, beside):
        score(group, right)
        add_efficiency(group)
    assert "answer_efficiency" not in late.rewards
    beside.rollouts.remove(late)
    assert [r.rewards for r in beside.rollouts] == [r.rewards for r in alone.rollouts]


def test_S3_9_sigmas_decay_from_one_to_zero() -> None:
    assert [decay(step, 5) for step in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert decay(0, 1) == 1
    assert decay(9, 5) == 0


def test_efficiency_keeps_other_parts_and_reports_invalid_input() -> None:
    group = five()
    score(group, lambda r: {"answer": 1.0, "style": 0.25})
    with pytest.raises(ValueError, match="sigma_length: expected 0 or more, got -1"):
        add_efficiency(group, sigma_length=-1)
    add_efficiency(group)
    assert all(r.rewards["style"] == 0.25 for r in group.rollouts)
    unjudged = five()
    score(unjudged, lambda r: {"style": 1.0})
    with pytest.raises(ValueError, match=r"task t: .* part 'answer', got \['style'\]"):
        add_efficiency(unjudged)
    add_efficiency(Group(task=TASK, rollouts=[a_rollout(status=Status.INFRA_ERROR)]))


def test_well_formed_needs_an_answer_and_no_malformed_turn() -> None:
    assert well_formed(a_rollout(answer="1"))
    assert not well_formed(a_rollout(answer=None))
    assert not well_formed(a_rollout(answer="1", stats={"malformed": 1.0}))
    assert not well_formed(a_rollout(answer="1", status=Status.TRUNCATED_TURNS))
