"""Which questions are worth training on: those whose rollouts differ, in tool use and in outcome.

Group-wise Pareto sampling (ET-Agent): a question is a point, (variance of the
number of tool calls, variance of correctness) over its rollouts, both to be large. Questions are
taken front by front, as NSGA-II does (Deb et al., 2002); the front that does not fit is cut by
crowding distance. Differences to the released code, both on purpose: questions without contrast in
correctness leave before the selection and not after, so that `count` are returned where there are
as many; and kinds of questions may be selected apart, since the variance of 0/1 outcomes is larger
than that of graded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import pvariance

import numpy as np
from numpy.typing import NDArray

from agentgrpo.recipe.measures import SOLVED_AT
from agentgrpo.types import Group, Int32, Rollout, Status

Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Contrast:
    """How much the rollouts of one question differ."""

    tools: float
    """Population variance of the number of tool calls."""
    correctness: float
    """Population variance of the correctness, which is in [0, 1]."""
    mixed: bool
    """Some rollouts are right and some are wrong."""


def contrast(group: Group, correctness: Callable[[Rollout], float]) -> Contrast:
    """The question's point; rollouts that the machine broke are left out."""
    valid = [rollout for rollout in group.rollouts if rollout.status is not Status.INFRA_ERROR]
    if not valid:
        return Contrast(0.0, 0.0, mixed=False)
    outcomes = [correctness(rollout) for rollout in valid]
    return Contrast(
        tools=pvariance([rollout.stats["tool_calls"] for rollout in valid]),
        correctness=pvariance(outcomes),
        mixed=min(outcomes) < SOLVED_AT <= max(outcomes),
    )


def select_groups(
    groups: Sequence[Group],
    count: int,
    correctness: Callable[[Rollout], float],
    *,
    kind: Callable[[Group], str] = lambda group: "",
) -> list[int]:
    """The indices, ascending, of the `count` questions that teach most; all mixed ones if there are
    fewer.

    `correctness` is of a rollout, in [0, 1]. Questions of one `kind` are compared with each other
    only, and each kind gets its share of `count` by its number of mixed questions.
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1, got {count}")
    seen = [contrast(group, correctness) for group in groups]
    kinds: dict[str, list[int]] = {}
    for index, point in enumerate(seen):
        if point.mixed:
            kinds.setdefault(kind(groups[index]), []).append(index)
    shares = _shares([len(members) for members in kinds.values()], count)
    chosen: list[int] = []
    for members, share in zip(kinds.values(), shares, strict=True):
        points = np.array([[seen[i].tools, seen[i].correctness] for i in members])
        chosen += [members[position] for position in select(points, share)]
    return sorted(chosen)


def select(points_N2: Points, count: int) -> Int32:
    """The best `count` of N points [N, 2], ascending, by front, the last front by crowding
    distance.

    Both objectives are to be large. Of equally crowded points of the cut front, the first.
    """
    front_N = fronts(points_N2)
    by_front = np.argsort(front_N, kind="stable")
    if count >= len(by_front):
        return np.arange(len(by_front), dtype=np.int32)
    cut = front_N[by_front[count]]
    whole = np.flatnonzero(front_N < cut)
    last = np.flatnonzero(front_N == cut)
    least_crowded = np.argsort(-crowding(points_N2[last]), kind="stable")
    chosen = np.concatenate([whole, last[least_crowded[: count - len(whole)]]])
    return np.sort(chosen).astype(np.int32)


def fronts(points_N2: Points) -> Int32:
    """The non-dominated front that each point [N, 2] is in, 0 being the best.

    p dominates q if it is at least as good in both objectives and better in one; equal points are
    in one front. ValueError: a coordinate is not finite, or there are not two.
    """
    if points_N2.ndim != 2 or points_N2.shape[1] != 2 or not np.isfinite(points_N2).all():
        raise ValueError(f"points: expected finite [N, 2], got shape {points_N2.shape}")
    p, q = points_N2[:, None], points_N2[None]
    dominates_NN = np.all(p >= q, axis=-1) & np.any(p > q, axis=-1)
    front_N = np.full(len(points_N2), -1, np.int32)
    number = 0
    while (left := front_N < 0).any():
        front_N[left & ~dominates_NN[left].any(0)] = number
        number += 1
    return front_N


def crowding(points_F2: Points) -> NDArray[np.float64]:
    """How far the neighbours of each point of a front lie apart; infinite for a front's ends.

    Summed over the objectives, each divided by its range; an objective without a range is skipped.
    """
    total_F = np.zeros(len(points_F2))
    for values_F in points_F2.T:
        order = np.argsort(values_F, kind="stable")
        ordered = values_F[order]
        if not len(ordered) or ordered[0] == ordered[-1]:
            continue
        total_F[order[[0, -1]]] = np.inf
        total_F[order[1:-1]] += (ordered[2:] - ordered[:-2]) / (ordered[-1] - ordered[0])
    return total_F


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """`count` divided in proportion to the sizes, by largest remainder."""
    total = sum(sizes)
    shares = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(count * sizes[i] % total))
    for index in by_remainder[: count - sum(shares)]:
        shares[index] += 1
    return shares
