"""Checks the lines of metrics.jsonl against the rollouts that they summarise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from agentgrpo.config import TrainConfig
from agentgrpo.inspect.verify.advantages import divergences_of, is_sample, num_sampled, reward_of
from agentgrpo.inspect.verify.tokens import gaps_of
from agentgrpo.types import Group, Rollout, Status

FLOAT32 = 1e-4
"""Relative tolerance for float32 sums."""


def line_faults(
    row: Mapping[str, Any], expected: Mapping[str, float], rel_tol: float = 1e-9,
    abs_tol: float = 1e-9,
) -> Iterator[str]:  # fmt: skip
    """Numbers of a line that are missing or wrong."""
    for name, value in expected.items():
        recorded = row.get(name)
        if not _is_number(recorded) or not math.isclose(
            recorded, value, rel_tol=rel_tol, abs_tol=abs_tol
        ):
            yield f"{name}: expected {value:.6g} from the rollouts, got {recorded!r:.40}"


def rollout_means(groups: Sequence[Group], area: str) -> dict[str, float]:
    """Counts of rollouts, and means over those without an infrastructure error."""
    rollouts = [r for group in groups for r in group.rollouts]
    valid = [r for r in rollouts if r.status is not Status.INFRA_ERROR]
    columns: dict[str, list[float]] = {
        "reward": [reward_of(r) for r in valid],
        "answered": [r.answer is not None for r in valid],
        "sampled_tokens": [num_sampled(r.rows) for r in valid],
    }
    solved = [solved_of(r) for r in valid]
    if any(value is not None for value in solved):
        columns["solved"] = [bool(value) for value in solved]
    for name in {name for r in valid for name in r.stats}:
        columns[name] = [r.stats.get(name, 0.0) for r in valid]
    for status in Status:
        columns[f"status_{status}"] = [r.status is status for r in valid]
    means = {name: float(np.mean(values)) for name, values in columns.items() if values}
    counts = {"rollouts": float(len(rollouts)), "infra_errors": float(len(rollouts) - len(valid))}
    return {f"{area}/{name}": value for name, value in {**counts, **means}.items()}


def solved_of(rollout: Rollout) -> bool | None:
    """Whether it solved its task; None: not recorded."""
    for record in (rollout.stats, rollout.rewards):
        if "solved" in record:
            return record["solved"] > 0
    return rollout.rewards["answer"] > 0 if "answer" in rollout.rewards else None


def step_sums(
    row: Mapping[str, Any], groups: Sequence[Group], config: TrainConfig
) -> dict[str, float]:
    """Means, groups with a gradient and the engine's token counts of a training step."""
    rollouts = [r for group in groups for r in group.rollouts]
    taught = config.teacher.teaches
    sums = {
        **rollout_means(groups, "rollout"),
        "rollout/groups": len(groups),
        "rollout/live_groups": sum(
            any(_has_gradient(r, taught) for r in g.rollouts) for g in groups
        ),
    }
    unrecorded = any(
        r.stats.get(name)
        for r in rollouts
        for name in ("frozen_turns", "probe_turns", "undelivered")
    )  # turns of a program that are in no row
    if config.rollout.sampler:
        sums["rollout/total_sampled_tokens"] = sum(num_sampled(r.rows) for r in rollouts)
    elif not (unrecorded or row.get("rollout/retries") or row.get("rollout/diverged_forks")):
        turns = [t for r in rollouts for t in r.turns if t.prompt_tokens >= (r.forked_at or 0)]
        sums["rollout/total_sampled_tokens"] = sum(turn.sampled_tokens for turn in turns)
        sums["rollout/prompt_tokens"] = sum(turn.prompt_tokens for turn in turns)
        sums["rollout/branches"] = sum(r.parent is not None for r in rollouts)
        if not config.reward.functions:  # they fail after the sampler has counted
            broken = sum(r.status is Status.INFRA_ERROR for r in rollouts)
            sums["rollout/infra_failures"] = broken
    return sums


def _has_gradient(rollout: Rollout, taught: bool) -> bool:
    if taught:  # a teacher gives every sampled token a gradient
        return is_sample(rollout) and num_sampled(rollout.rows) > 0
    segments = rollout.all_segments
    each = rollout.segment_advantages or [rollout.advantage] * len(segments)
    pairs = zip(segments, each, strict=False)
    return any(value for s, value in pairs if s.sampled and len(s.token_ids))


def learner_faults(
    row: Mapping[str, Any], groups: Sequence[Group], *, step: int, terms: int, config: TrainConfig,
    limit: float,
) -> Iterator[str]:  # fmt: skip
    """Check the learner's metrics of a step against the rollouts.

    `step` counts from 0; `terms` is the number of packed loss terms; `limit` in nats bounds the
    gap between sampler and learner, for the probes too.
    """
    loss, learner = config.loss, config.learner
    if learner.decay == "constant":
        share = min(1.0, (step + 1) / learner.warmup_steps) if learner.warmup_steps else 1.0
        yield from line_faults(row, {"learner/learning_rate": learner.learning_rate * share})
    if terms and loss.top_entropy_quantile == 1:
        number = {"learner/num_tokens": float(terms * loss.num_iterations)}
        yield from line_faults(row, number)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if segments := [gaps for rollout in rollouts for gaps in gaps_of(rollout)]:
        gaps = np.concatenate(segments).astype(np.float64)
        views = [view for rollout in rollouts for view in rollout.entropies or ()]
        entropies = np.concatenate([*(view for view in views if view is not None), np.zeros(0)])
        kl = float((np.expm1(np.minimum(gaps, 20)) - gaps).mean())
        expected = {"learner/mismatch_kl": kl}
        if loss.correction_level == "token":
            ratio = np.exp(np.clip(gaps, -20, 20))
            low = loss.vllm_importance_sampling_clip_min or 0.0
            high = loss.vllm_importance_sampling_clip_max or math.inf
            bounded = ((ratio < low) | (ratio > high)) & loss.corrects
            expected["learner/mismatch_modified"] = float(bounded.mean())
            for name, function in (("min", np.min), ("mean", np.mean), ("max", np.max)):
                expected[f"learner/mismatch_ratio_{name}"] = float(function(ratio))
        # later updates and iterations use policies that no record holds
        single_update = loss.num_iterations * loss.num_mini_batches == 1
        if single_update and loss.top_entropy_quantile == 1:
            expected["learner/entropy_mean"] = float(entropies.sum() / max(len(entropies), 1))
            expected["learner/sampler_gap_max"] = float(np.abs(gaps).max())
        if config.teacher.teaches:
            taught = [s for r in rollouts for s in r.teacher_logprobs or () if s is not None]
            expected["learner/teacher_terms"] = float(sum(map(len, taught)))
        yield from line_faults(row, expected, FLOAT32)
        if config.teacher.teaches and config.teacher.topk and loss.num_iterations == 1:
            columns = [divergences_of(rollout, config.teacher.topk) for rollout in rollouts]
            teacher_kl = float(np.mean(np.concatenate(columns)))
            yield from line_faults(row, {"learner/teacher_kl": teacher_kl}, FLOAT32, 1e-6)
    mean, most = (row.get(f"engine/{name}_dlogp") for name in ("mean", "max"))
    if not (_is_number(mean) and _is_number(most) and 0 <= mean <= most <= limit):
        yield (
            f"engine/mean_dlogp, engine/max_dlogp: expected at most {limit:.3g}, "
            f"got {mean!r:.20}, {most!r:.20}"
        )


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)
