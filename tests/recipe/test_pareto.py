"""Selection by fronts against the textbook's quadratic loops, and what may be selected at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgrpo.recipe.pareto import contrast, crowding, fronts, select_groups, select_points
from agentgrpo.types import Group, Rollout, Status, Task
from tests.given import a_rollout

Point = tuple[float, float]
COORDINATE = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.5]) | st.floats(0, 4)
POINTS = st.lists(st.tuples(COORDINATE, COORDINATE), max_size=40)


def dominates(p: Point, q: Point) -> bool:
    return p[0] >= q[0] and p[1] >= q[1] and p != q


def naive_fronts(points: list[Point]) -> list[int]:
    front, left, number = [0] * len(points), set(range(len(points))), 0
    while left:
        best = {i for i in left if not any(dominates(points[j], points[i]) for j in left)}
        for i in best:
            front[i] = number
        left -= best
        number += 1
    return front


def naive_crowding(points: list[Point]) -> list[float]:
    total = [0.0] * len(points)
    for axis in (0, 1):
        order = sorted(range(len(points)), key=lambda i: points[i][axis])
        low, high = points[order[0]][axis], points[order[-1]][axis]
        if low == high:
            continue
        total[order[0]] = total[order[-1]] = float("inf")
        for before, here, after in zip(order, order[1:], order[2:], strict=False):
            total[here] += (points[after][axis] - points[before][axis]) / (high - low)
    return total


def array(points: list[Point]) -> np.ndarray[Any, Any]:
    return np.array(points, np.float64).reshape(-1, 2)


@given(POINTS)
def test_S3_11_fronts_equal_the_textbook_algorithm(points: list[Point]) -> None:
    assert fronts(array(points)).tolist() == naive_fronts(points)


@given(POINTS.filter(bool))
def test_S3_11_crowding_equals_the_textbook_algorithm(points: list[Point]) -> None:
    assert crowding(array(points)).tolist() == pytest.approx(naive_crowding(points))


@given(POINTS, st.integers(0, 45))
def test_S3_11_no_unselected_point_dominates_a_selected_one(
    points: list[Point], count: int
) -> None:
    chosen = select_points(array(points), count).tolist()
    assert len(chosen) == len(set(chosen)) == min(count, len(points))
    assert chosen == sorted(chosen)
    front = naive_fronts(points)
    left = set(range(len(points))) - set(chosen)
    assert max((front[i] for i in chosen), default=0) <= min((front[i] for i in left), default=99)
    cut = {front[i] for i in chosen} & {front[i] for i in left}
    for number in cut:  # at most one
        members = [i for i in range(len(points)) if front[i] == number]
        apart = dict(zip(members, naive_crowding([points[i] for i in members]), strict=True))
        taken = [apart[i] for i in members if i in chosen]
        assert min(taken) >= max(apart[i] for i in members if i in left) - 1e-12


def question(name: str, rows: list[tuple[int, float]], kind: str = "math") -> Group:
    task = Task(id=name, messages=(), spec={"kind": kind})
    return Group(
        task=task,
        rollouts=[
            a_rollout(task=task, stats={"tool_calls": float(c)}, rewards={"answer": a})
            for c, a in rows
        ],
    )


def correctness(rollout: Rollout) -> float:
    return rollout.rewards["answer"]


def test_contrast_is_the_variances_of_the_rollouts() -> None:
    group = question("q", [(1, 1.0), (3, 0.5), (2, 0.0)])
    group.rollouts.append(a_rollout(status=Status.INFRA_ERROR, stats={"tool_calls": 99.0}))
    seen = contrast(group, correctness)
    assert (seen.tools, seen.correctness) == pytest.approx((2 / 3, 1 / 6))
    assert seen.mixed
    graded = question("q", [(1, 0.74), (1, 0.0)])
    assert not contrast(graded, correctness).mixed
    assert contrast(question("q", [(1, 0.75), (1, 0.0)]), correctness).mixed  # right at
    assert not contrast(question("q", [(1, 0.75), (1, 1.0)]), correctness).mixed
    nothing = Group(task=group.task, rollouts=[a_rollout(status=Status.INFRA_ERROR)])
    assert not contrast(nothing, correctness).mixed


def test_S3_12_only_mixed_questions_are_selected() -> None:
    """Unmixed ones vary most in tool calls: filtered afterwards, they would leave gaps."""
    groups = [question(f"u{i}", [(0, 1.0), (50 + i, 1.0)]) for i in range(10)]
    groups += [question(f"m{i}", [(0, 1.0), (i, 0.0)]) for i in range(5)]
    assert select_groups(groups, 4, correctness) == [11, 12, 13, 14]
    assert select_groups(groups, 99, correctness) == [10, 11, 12, 13, 14]
    assert select_groups(groups[:10], 3, correctness) == []


def test_graded_questions_do_not_lose_to_binary_ones() -> None:
    math = [question(f"m{i}", [(0, 1.0), (i, 0.0)]) for i in range(6)]
    graded = [question(f"g{i}", [(0, 0.8), (i, 0.6)], "qa") for i in range(3)]
    groups = [*math, *graded]
    assert select_groups(groups, 3, correctness) == [3, 4, 5]
    apart = select_groups(groups, 3, correctness, kind=lambda group: group.task.spec["kind"])
    assert apart == [4, 5, 8]
    assert select_groups(groups, 8, correctness, kind=lambda g: g.task.spec["kind"]) == [
        *range(1, 6),
        *range(6, 9),
    ]


def test_kinds_share_the_count_by_their_mixed_questions() -> None:
    """By largest remainder; indices come ascending although kinds are selected apart."""
    kinds = ["a", "b", "c", "c", "b", "a", "c", "a", "b", "c"]  # 3, 3 and 4
    groups = [question(str(i), [(0, 1.0), (i + 1, 0.0)], kind) for i, kind in enumerate(kinds)]
    chosen = select_groups(groups, 5, correctness, kind=lambda g: g.task.spec["kind"])
    assert chosen == sorted(chosen)
    assert [kinds[i] for i in chosen].count("a") == 2  # 1.5, the first of two equal remainders
    assert [kinds[i] for i in chosen].count("b") == 1
    assert [kinds[i] for i in chosen].count("c") == 2
    assert select_groups(groups, 99, correctness, kind=lambda g: g.task.spec["kind"]) == [
        *range(10)
    ]
