"""Select questions for training whose rollouts differ in tool use and in outcome.

Group-wise Pareto sampling (ET-Agent): a question is a point (variance of the number of tool calls,
variance of correctness) over its rollouts; both are maximised. Questions are selected front by
front as in NSGA-II (Deb et al., 2002); the last front is cut by crowding distance. Two intended
differences to the released code: questions without contrast in correctness are removed before the
selection instead of after it, so that `count` questions are returned if there are enough; and kinds
of questions may be selected separately, since 0/1 outcomes have a larger variance than graded ones.
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
    """Whether some rollouts are right and some are wrong."""


def contrast(group: Group, correctness: Callable[[Rollout], float]) -> Contrast:
    """Compute a question's point. Rollouts with an infrastructure error are excluded."""
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
    """Ascending indices of the `count` best questions, or of all mixed ones if there are fewer.

    `correctness` of a rollout is in [0, 1]. Questions are only compared with others of their
    `kind`. Each kind gets a share of `count` in proportion to its number of mixed questions.
    """
    contrasts = [contrast(group, correctness) for group in groups]
    kinds: dict[str, list[int]] = {}
    for index, point in enumerate(contrasts):
        if point.mixed:
            kinds.setdefault(kind(groups[index]), []).append(index)
    shares = _shares([len(members) for members in kinds.values()], count)
    selected_indices: list[int] = []
    for members, share in zip(kinds.values(), shares, strict=True):
        points = np.array([[contrasts[i].tools, contrasts[i].correctness] for i in members])
        selected_indices += [members[position] for position in select_points(points, share)]
    return sorted(selected_indices)


def select_points(points_N2: Points, count: int) -> Int32:
    """Ascending indices of the best `count` of N points [N, 2].

    Both objectives are maximised. Fronts are taken in order, the last one by crowding distance;
    ties in it go to the first point.
    """
    front_N = fronts(points_N2)
    by_front = np.argsort(front_N, kind="stable")
    if count >= len(by_front):
        return np.arange(len(by_front), dtype=np.int32)
    cut_front = front_N[by_front[count]]
    complete = np.flatnonzero(front_N < cut_front)
    last_front = np.flatnonzero(front_N == cut_front)
    least_crowded = np.argsort(-crowding(points_N2[last_front]), kind="stable")
    indices = np.concatenate([complete, last_front[least_crowded[: count - len(complete)]]])
    return np.sort(indices).astype(np.int32)


def fronts(points_N2: Points) -> Int32:
    """The index of the non-dominated front of each point [N, 2]; 0 is the best.

    p dominates q if it is at least as good in both objectives and better in one. Equal points are
    in the same front.
    """
    p, q = points_N2[:, None], points_N2[None]
    dominates_NN = np.all(p >= q, axis=-1) & np.any(p > q, axis=-1)
    front_N = np.full(len(points_N2), -1, np.int32)
    number = 0
    while (unassigned := front_N < 0).any():
        front_N[unassigned & ~dominates_NN[unassigned].any(0)] = number
        number += 1
    return front_N


def crowding(points_F2: Points) -> NDArray[np.float64]:
    """Crowding distance of each point: how far apart its neighbours in the front are.

    The distances per objective are divided by its range and summed; an objective with range 0 is
    skipped. The ends of a front have infinite distance.
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
    """Divide `count` in proportion to the sizes, by the largest remainder method."""
    total = sum(sizes)
    shares = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(count * sizes[i] % total))
    for index in by_remainder[: count - sum(shares)]:
        shares[index] += 1
    return shares
