"""Advantages from rewards: how much better each rollout, or each of its turns, is than its group.

Rollouts outside Rollout.in_baseline, for example after an infrastructure failure, do not enter the
baseline and keep advantage 0. A group whose rewards are all equal teaches nothing and gets exact
zeros.

Span rewards (config span_credit = "return_to_go"). Let G[i, k] be the return of rollout i from its
k-th sampled segment on: its whole-rollout rewards plus those of spans that end after the segment
begins; for k beyond its last segment, G of the last. The k-th segment of rollout i gets

    A[i, k] = (G[i, k] - b[k]) * scale,   b[k] = mean over the group of G[., k]

* Rewards earned before a segment began are left out, which changes no expectation: given the past,
  the mean of grad log p is 0.
* With leave_one_out, b comes from the other rollouts alone. They are independent of this one, also
  in their number of turns, so without scaling the policy gradient estimate is unbiased.
* With the mean over all rollouts, every A is (n - 1) / n times that: the same direction.
* The scale is one number per group (or step), from its returns at all turns. Dividing turn by turn,
  as is common, weights a turn by how much the other rollouts differ there, and is biased.

With "turn", G[i, k] contains only the spans that end before the next sampled segment begins, and
none for k beyond the last: a line with a syntax error is penalised alone, not the lines before it.
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
"""Added to a standard deviation, in reward units, as in TRL."""


def centred(rewards: Sequence[float], *, baseline: str = "mean") -> list[float]:
    """Subtract the baseline of the group: its mean, or with leave_one_out the mean of the others
    (RLOO, arXiv:2402.14740). Exactly 0.0 where all rewards are equal (within EQUAL_WITHIN).

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
    """Whether two rewards differ by more than EQUAL_WITHIN."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > EQUAL_WITHIN


def assign_advantages(groups: Sequence[Group], config: LossConfig) -> None:
    """Set the advantages of all rollouts of a step.

    Each is relative to the valid rollouts (in_baseline) of its group. scale_rewards: `group`
    divides by the sample deviation of the group's rewards plus EPS (arXiv:2402.03300, sec. 4.1.2,
    as in TRL), `batch` by that of all rewards of the step, `none` does not divide
    (arXiv:2503.20783).
    """
    valid = [[r for r in group.rollouts if r.in_baseline] for group in groups]
    for group in groups:
        for rollout in group.rollouts:
            rollout.advantage, rollout.segment_advantages = 0.0, None
    if config.multi_objective_aggregation == "normalize_then_sum":
        _gdpo(groups, valid, config.baseline)
    else:
        returns = [_returns(rollouts, config.span_credit) for rollouts in valid]
        step_returns = [value for rows in returns for row in rows for value in row]
        for group, rollouts, rows in zip(groups, valid, returns, strict=True):
            group_returns = [value for row in rows for value in row]
            scale = {"group": group_returns, "batch": step_returns, "none": []}[
                config.scale_rewards
            ]
            columns = list(zip(*rows, strict=True))
            values = [_centred_of_task(group, column, config.baseline) for column in columns]
            _assign(rollouts, values, _one_over_deviation(scale))
    if config.branch_credit == "hard":
        for rollouts in valid:
            _average_shared(rollouts)
    for rollout in (r for rollouts in valid for r in rollouts if not r.trained):
        rollout.advantage, rollout.segment_advantages = 0.0, None


def has_gradient(group: Group) -> bool:
    """Whether some sampled token of the group has a nonzero advantage.

    Reads the advantages that `assign_advantages` set.
    """
    pairs = [pair for rollout in group.rollouts for pair in _sampled_with_advantages(rollout)]
    return any(value and len(segment.token_ids) for segment, value in pairs)


def why_dead(group: Group) -> str | None:
    """The reason why a group has no gradient, for the metrics; None if it has one.

    `broken`: fewer than two valid rollouts; `silent`: no token was sampled; otherwise no contrast:
    `all_solved` if every rollout is (Rollout.solved), else `all_equal`.
    """
    if has_gradient(group):
        return None
    valid = [rollout for rollout in group.rollouts if rollout.in_baseline]
    if len(valid) < 2:
        return "broken"
    if not any(rollout.num_sampled for rollout in valid):
        return "silent"
    return "all_solved" if all(rollout.solved for rollout in valid) else "all_equal"


def _centred_of_task(group: Group, rewards: Sequence[float], baseline: str) -> list[float]:
    try:
        return centred(rewards, baseline=baseline)
    except ValueError as error:
        raise ValueError(f"task {group.task.id}: {error}") from None


def _one_over_deviation(rewards: Sequence[float]) -> float:
    return 1.0 / (stdev(rewards) + EPS) if len(rewards) > 1 else 1.0


def _gdpo(groups: Sequence[Group], valid: Sequence[list[Rollout]], baseline: str) -> None:
    """GDPO (arXiv:2601.05242) as TRL computes it: z-scores of each reward part by group, weighted
    and summed, then whitened over the step.

    A part without contrast adds nothing. A part that does not apply to a rollout is normalised
    without that rollout. The parts are already multiplied by their weights, and a z-score would
    keep only the sign of a weight: so each is divided by its weight first.
    """
    for group, rollouts in zip(groups, valid, strict=True):
        parts = [reward_parts(rollout) for rollout in rollouts]
        weights = {name: w for rollout in rollouts for name, w in rollout.weights.items()}
        for name in sorted({name for part in parts for name in part}):
            pairs = zip(rollouts, parts, strict=True)
            applicable = [
                (r, part.get(name, 0.0)) for r, part in pairs if name not in r.not_applicable
            ]
            weight = weights.get(name, 1.0)
            values = [value / (weight or 1.0) for _, value in applicable]
            factor = weight * _one_over_deviation(values)
            for (rollout, _), value in zip(
                applicable, _centred_of_task(group, values, baseline), strict=True
            ):
                rollout.advantage += value * factor
    summed = [rollout.advantage for rollouts in valid for rollout in rollouts]
    if not has_contrast(summed):
        return
    mean, factor = fmean(summed), _one_over_deviation(summed)
    for rollouts in valid:
        if any(rollout.advantage for rollout in rollouts):  # dead groups keep their zeros
            for rollout in rollouts:
                rollout.advantage = (rollout.advantage - mean) * factor


def reward_parts(rollout: Rollout) -> dict[str, float]:
    """All rewards of the rollout by name; their sum is its reward.

    `partial` is merged into the part of which it is a share, and answer_efficiency into the answer:
    normalised separately, one would cancel the other.
    """
    parts = dict(rollout.rewards)
    for span in rollout.span_rewards:
        parts[span.name] = parts.get(span.name, 0.0) + span.value
    main_part = "solved" if "solved" in parts else "answer"
    for name, target in (("partial", main_part), ("answer_efficiency", "answer")):
        if share := parts.pop(name, 0.0):
            parts[target] = parts.get(target, 0.0) + share
    return parts


def turn_returns(rollout: Rollout, span_credit: str = "return_to_go") -> list[float]:
    """The return of each sampled segment, for every LossConfig.span_credit except "rollout"."""
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
    """One row per rollout: the return of each turn, padded to the longest; or only its reward."""
    by_turn = span_credit in ("return_to_go", "turn")
    if not by_turn or not any(rollout.span_rewards for rollout in rollouts):
        return [[rollout.reward] for rollout in rollouts]
    rows = [turn_returns(rollout, span_credit) or [rollout.reward] for rollout in rollouts]
    longest = max(map(len, rows))
    for rollout, row in zip(rollouts, rows, strict=True):
        only_turn = span_credit == "turn"
        row += [sum(rollout.rewards.values()) if only_turn else row[-1]] * (longest - len(row))
    return rows


def _assign(rollouts: Sequence[Rollout], by_turn: Sequence[Sequence[float]], factor: float) -> None:
    for i, rollout in enumerate(rollouts):
        rollout.advantage = by_turn[0][i] * factor
        if len(by_turn) > 1:
            turn_values = iter(by_turn)
            rollout.segment_advantages = [
                next(turn_values)[i] * factor if segment.sampled else 0.0
                for segment in rollout.all_segments
            ]


def _average_shared(rollouts: Sequence[Rollout]) -> None:
    """ARPO's hard credit (arXiv:2507.19849): segments that branches share get the mean of the
    branches.

    minibatches.py then trains on each of their tokens once. With `soft` a shared token has one loss
    term per branch, each with that branch's advantage.
    """
    owners: dict[int, list[float]] = {}
    for rollout in rollouts:
        for segment, value in _sampled_with_advantages(rollout):
            owners.setdefault(id(segment), []).append(value)
    if all(len(values) == 1 for values in owners.values()):
        return
    for rollout in rollouts:
        sampled = {id(segment) for segment, _ in _sampled_with_advantages(rollout)}
        rollout.segment_advantages = [
            fmean(owners[id(segment)]) if id(segment) in sampled else 0.0
            for segment in rollout.all_segments
        ]


def _sampled_with_advantages(rollout: Rollout) -> list[tuple[Segment, float]]:
    advantages = rollout.segment_advantages or [rollout.advantage] * len(rollout.all_segments)
    pairs = zip(rollout.all_segments, advantages, strict=True)
    return [(segment, value) for segment, value in pairs if segment.sampled]
