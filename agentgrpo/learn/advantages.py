"""Rewards -> advantages: how much better each rollout, or each turn of it, did than its siblings.

A rollout that is not Rollout.in_baseline, as one that the machine broke, is not a sibling: it
leaves the baseline and keeps advantage 0. A group without contrast teaches nothing and gets
exact zeros.

Rewards of spans (config span_credit = "return_to_go"). Let G[i, k] be what rollout i earned from
its k-th sampled segment on: its rewards as a whole, and those of spans that end after the segment
begins; for k beyond its last segment, G of the last. The k-th segment of rollout i gets

    A[i, k] = (G[i, k] - b[k]) * scale,   b[k] = mean over the group of G[., k]

* What was earned before a segment began is left out, which changes no expectation: given the past,
  the mean of grad log p is 0.
* With leave_one_out, b comes from the other rollouts alone, which are independent of this one, also
  in how many turns they have. So without scaling the estimate of the policy gradient is unbiased.
* With the mean over all, every A is (n - 1) / n times that: the same direction.
* The scale is one number per group (or step), of its returns at all turns: dividing turn by turn,
  as is common, weighs a turn by how much the others happened to differ there, and is biased.

With "turn" G[i, k] has of the spans only those that end before the next sampled segment begins, and
for k beyond the last none: a line with a syntax error pays for it alone, not the lines before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from agentgrpo.config import LossConfig
from agentgrpo.types import Group, Rollout, Segment

EQUAL_WITHIN = 1e-6
"""Rewards closer than this are equal: a deviation of rounding errors must not become a gradient."""
EPS = 1e-4
"""Added to a deviation, in reward units, as in TRL."""


def centred(rewards: Sequence[float], *, baseline: str = "mean") -> list[float]:
    """Each reward of a group less its baseline: the mean, or with leave_one_out that of the others
    (RLOO, arXiv:2402.14740). Exactly 0.0 where all are equal (within EQUAL_WITHIN).

    ValueError: a reward is not finite, or the baseline is unknown.

    >>> centred([1.0, 0.0, 0.0, 1.0])
    [0.5, -0.5, -0.5, 0.5]
    >>> centred([1.0, 0.0, 0.0], baseline="leave_one_out")
    [1.0, -0.5, -0.5]
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline: expected mean or leave_one_out, got {baseline!r}")
    if not has_contrast(rewards):
        return [0.0] * len(rewards)
    # r - mean of the others = (r - mean of all) * n / (n - 1)
    factor = len(rewards) / (len(rewards) - 1) if baseline == "leave_one_out" else 1.0
    mean = fmean(rewards)
    return [(reward - mean) * factor for reward in rewards]


def has_contrast(rewards: Sequence[float]) -> bool:
    """Whether two of them differ by more than rounding."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > EQUAL_WITHIN


def assign_advantages(groups: Sequence[Group], config: LossConfig) -> None:
    """Set the advantages of all rollouts of a step.

    Each is relative to the rollouts of its group that are sound. scale_rewards: `group` divides by
    the sample deviation of the group's rewards plus EPS (arXiv:2402.03300, sec. 4.1.2, as TRL
    does), `batch` by that of all rewards of the step, `none` by nothing (arXiv:2503.20783).
    """
    sound = [[r for r in group.rollouts if r.in_baseline] for group in groups]
    for group in groups:
        for rollout in group.rollouts:
            rollout.advantage, rollout.segment_advantages = 0.0, None
    if config.multi_objective_aggregation == "normalize_then_sum":
        _gdpo(groups, sound, config.baseline)
    else:
        returns = [_returns(rollouts, config.span_credit) for rollouts in sound]
        every = [value for rows in returns for row in rows for value in row]
        for group, rollouts, rows in zip(groups, sound, returns, strict=True):
            own = [value for row in rows for value in row]
            scale = {"group": own, "batch": every, "none": []}[config.scale_rewards]
            columns = list(zip(*rows, strict=True))
            values = [_checked(group, column, config.baseline) for column in columns]
            _set(rollouts, values, _one_over_deviation(scale))
    if config.branch_credit == "hard":
        for rollouts in sound:
            _average_shared(rollouts)
    for rollout in (r for rollouts in sound for r in rollouts if not r.trained):
        rollout.advantage, rollout.segment_advantages = 0.0, None


def has_gradient(group: Group) -> bool:
    """Whether training on the group moves anything: some sampled token has an advantage.

    Reads the advantages that `assign_advantages` set.
    """
    pairs = [pair for rollout in group.rollouts for pair in _with_advantages(rollout)]
    return any(value and len(segment.token_ids) for segment, value in pairs)


def why_dead(group: Group) -> str | None:
    """Why a group has no gradient, for the count of reasons; None if it has one.

    `broken`: fewer than two sound rollouts; `silent`: nothing was sampled; else no contrast:
    `all_solved` if every rollout is (Rollout.solved), `all_equal` if not.
    """
    if has_gradient(group):
        return None
    sound = [rollout for rollout in group.rollouts if rollout.in_baseline]
    if len(sound) < 2:
        return "broken"
    if not any(rollout.num_sampled for rollout in sound):
        return "silent"
    return "all_solved" if all(rollout.solved for rollout in sound) else "all_equal"


def _checked(group: Group, rewards: Sequence[float], baseline: str) -> list[float]:
    try:
        return centred(rewards, baseline=baseline)
    except ValueError as error:
        raise ValueError(f"task {group.task.id}: {error}") from None


def _one_over_deviation(rewards: Sequence[float]) -> float:
    return 1.0 / (stdev(rewards) + EPS) if len(rewards) > 1 else 1.0


def _gdpo(groups: Sequence[Group], sound: Sequence[list[Rollout]], baseline: str) -> None:
    """GDPO (arXiv:2601.05242) as TRL computes it: z-scores of each part by group, weighted and
    summed, then whitened over the step. A part without contrast adds nothing, and one that does not
    apply to a rollout is normalised without it. Parts come weighted, and a z-score keeps of a
    weight the sign alone: so it is of the part without its weight.
    """
    for group, rollouts in zip(groups, sound, strict=True):
        parts = [reward_parts(rollout) for rollout in rollouts]
        weights = {name: w for rollout in rollouts for name, w in rollout.weights.items()}
        for name in sorted({name for part in parts for name in part}):
            pairs = zip(rollouts, parts, strict=True)
            applies = [
                (r, part.get(name, 0.0)) for r, part in pairs if name not in r.not_applicable
            ]
            weight = weights.get(name, 1.0)
            values = [value / (weight or 1.0) for _, value in applies]
            factor = weight * _one_over_deviation(values)
            for (rollout, _), value in zip(applies, _checked(group, values, baseline), strict=True):
                rollout.advantage += value * factor
    summed = [rollout.advantage for rollouts in sound for rollout in rollouts]
    if not has_contrast(summed):
        return
    mean, factor = fmean(summed), _one_over_deviation(summed)
    for rollouts in sound:
        if any(rollout.advantage for rollout in rollouts):  # else a dead group, which stays dead
            for rollout in rollouts:
                rollout.advantage = (rollout.advantage - mean) * factor


def reward_parts(rollout: Rollout) -> dict[str, float]:
    """All that the rollout earned, by name; its reward is the sum.

    `partial` is within what it is a share of, and what efficiency makes of an answer within the
    answer: normalised apart, the one would cancel the other.
    """
    parts = dict(rollout.rewards)
    for span in rollout.span_rewards:
        parts[span.name] = parts.get(span.name, 0.0) + span.value
    judged = "solved" if "solved" in parts else "answer"
    for name, whole in (("partial", judged), ("answer_efficiency", "answer")):
        if share := parts.pop(name, 0.0):
            parts[whole] = parts.get(whole, 0.0) + share
    return parts


def turn_returns(rollout: Rollout, span_credit: str = "return_to_go") -> list[float]:
    """What counts for each of its sampled segments: LossConfig.span_credit, but for "rollout"."""
    total = sum(rollout.rewards.values())
    starts, length = [], 0
    for segment in rollout.all_segments:
        if segment.sampled:
            starts.append(length)
        length += len(segment.token_ids)
    nexts = [*starts[1:], length] if span_credit == "turn" else [length] * len(starts)
    return [
        total + sum(span.value for span in rollout.span_rewards if start < span.end <= end)
        for start, end in zip(starts, nexts, strict=True)
    ]


def _returns(rollouts: Sequence[Rollout], span_credit: str) -> list[list[float]]:
    """A row per rollout: what counts for each of its turns, held to the longest; or its reward."""
    by_turn = span_credit in ("return_to_go", "turn")
    if not by_turn or not any(rollout.span_rewards for rollout in rollouts):
        return [[rollout.reward] for rollout in rollouts]
    rows = [turn_returns(rollout, span_credit) or [rollout.reward] for rollout in rollouts]
    longest = max(map(len, rows))
    for rollout, row in zip(rollouts, rows, strict=True):
        alone = span_credit == "turn"
        row += [sum(rollout.rewards.values()) if alone else row[-1]] * (longest - len(row))
    return rows


def _set(rollouts: Sequence[Rollout], by_turn: Sequence[Sequence[float]], factor: float) -> None:
    """Give every rollout its number, or its number of each turn."""
    for i, rollout in enumerate(rollouts):
        rollout.advantage = by_turn[0][i] * factor
        if len(by_turn) > 1:
            turn = iter(by_turn)
            rollout.segment_advantages = [
                next(turn)[i] * factor if segment.sampled else 0.0
                for segment in rollout.all_segments
            ]


def _average_shared(rollouts: Sequence[Rollout]) -> None:
    """ARPO's hard credit (arXiv:2507.19849): segments that branches share get the branches' mean.

    minibatches.py then trains on each of their tokens once. With `soft` a shared token has one loss
    term per branch, each with its own advantage.
    """
    owners: dict[int, list[float]] = {}
    for rollout in rollouts:
        for segment, value in _with_advantages(rollout):
            owners.setdefault(id(segment), []).append(value)
    if all(len(values) == 1 for values in owners.values()):
        return
    for rollout in rollouts:
        sampled = {id(segment) for segment, _ in _with_advantages(rollout)}
        rollout.segment_advantages = [
            fmean(owners[id(segment)]) if id(segment) in sampled else 0.0
            for segment in rollout.all_segments
        ]


def _with_advantages(rollout: Rollout) -> list[tuple[Segment, float]]:
    each = rollout.segment_advantages or [rollout.advantage] * len(rollout.all_segments)
    pairs = zip(rollout.all_segments, each, strict=True)
    return [(segment, value) for segment, value in pairs if segment.sampled]
