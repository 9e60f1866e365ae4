"""The lines of metrics.jsonl against the rollouts that they sum up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from agentgrpo.config import TrainConfig
from agentgrpo.proof.credit import is_sample, num_sampled, reward_of
from agentgrpo.types import Group, Rollout, Status

FLOAT32 = 1e-4
"""Relative; for what a device summed in float32."""


def line_faults(row: Mapping[str, Any], area: str, wanted: Mapping[str, float]) -> Iterator[str]:
    """Where an area of a line says another number than it should, or lacks one."""
    for name, value in wanted.items():
        said = row.get(f"{area}/{name}")
        if not _is_number(said):
            yield f"{area}/{name} is {said!r:.40}, the rollouts give {value:.6g}"
        elif not math.isclose(said, value, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{area}/{name} is {said:.6g}, the rollouts give {value:.6g}"


def played(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the rollouts that the machine did not break."""
    rollouts = [r for group in groups for r in group.rollouts]
    valid = [r for r in rollouts if r.status is not Status.INFRA_ERROR]
    sums = {"rollouts": len(rollouts), "infra_errors": len(rollouts) - len(valid)}
    if not valid:
        return {name: float(count) for name, count in sums.items()}
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
    return {**sums, **{name: float(np.mean(values)) for name, values in columns.items()}}


def solved_of(rollout: Rollout) -> bool | None:
    """Whether it solved its task; None where nobody says."""
    for told in (rollout.stats, rollout.rewards):
        if "solved" in told:
            return told["solved"] > 0
    return rollout.rewards["answer"] > 0 if "answer" in rollout.rewards else None


def live(groups: Sequence[Group]) -> dict[str, float]:
    """How many groups have a gradient, and why the others have none."""
    counts = {"groups": float(len(groups)), "live_groups": 0.0}
    for group in groups:
        counts[_life(group)] = counts.get(_life(group), 0.0) + 1
    return counts


def _life(group: Group) -> str:
    for rollout in group.rollouts:
        segments = rollout.all_segments
        each = rollout.segment_advantages or [rollout.advantage] * len(segments)
        if any(v for s, v in zip(segments, each, strict=False) if s.sampled and len(s.token_ids)):
            return "live_groups"
    samples = [r for r in group.rollouts if is_sample(r)]
    if len(samples) < 2:
        return "dead_broken"
    if not any(num_sampled(r.rows) for r in samples):
        return "dead_silent"
    return "dead_all_solved" if all(map(solved_of, samples)) else "dead_all_equal"


def engine_faults(
    row: Mapping[str, Any], groups: Sequence[Group], config: TrainConfig
) -> Iterator[str]:
    """What the sampler counted, where no rollout was played that is not recorded."""
    counts = {name: row.get(f"rollout/{name}") for name in ("retries", "diverged_forks")}
    rollouts = [r for group in groups for r in group.rollouts]
    if config.rollout.sampler:
        total = sum(num_sampled(r.rows) for r in rollouts)
        yield from line_faults(row, "rollout", {"total_sampled_tokens": total})
        return
    if not all(_is_number(count) and count >= 0 for count in counts.values()):
        yield f"no count of {' and '.join(counts)}"
    broken = sum(r.status is Status.INFRA_ERROR for r in rollouts)
    own = [t for r in rollouts for t in r.turns if t.prompt_tokens >= (r.forked_at or 0)]
    sums = {
        "total_sampled_tokens": sum(turn.sampled_tokens for turn in own),
        "prompt_tokens": sum(turn.prompt_tokens for turn in own),
        "branches": sum(r.parent is not None for r in rollouts),
    }
    aside = sum(r.stats.get(of, 0.0) for r in rollouts for of in ("frozen_turns", "undelivered"))
    if not any(counts.values()):
        if aside:  # turns of a program that are sampled and in no row: these are the least
            for name in ("total_sampled_tokens", "prompt_tokens"):
                least, said = sums.pop(name), row.get(f"rollout/{name}")
                if not _is_number(said) or said < least:
                    yield f"rollout/{name} is {said!r:.40}, the rollouts give {least}"
        yield from line_faults(row, "rollout", sums)
        if not config.reward.functions:  # which fail after the sampler has counted
            yield from line_faults(row, "rollout", {"infra_failures": broken})
    cached = row.get("rollout/cached_tokens")
    if not _is_number(cached) or not 0 <= cached <= row.get("rollout/prompt_tokens", 0):
        yield f"rollout/cached_tokens is {cached!r:.40}, of the prompts' tokens"


def learner_faults(
    row: Mapping[str, Any], groups: Sequence[Group], *, step: int, terms: int, config: TrainConfig,
    limit: float,
) -> Iterator[str]:  # fmt: skip
    """What the learner says that it made of a step, against what the rollouts say it made of them.

    With more than one update, entropies and gaps are also of policies that no record holds.

    Args:
        row: of metrics.jsonl.
        groups: of the step.
        step: counted from 0.
        terms: loss terms that it was packed into.
        config: of the run.
        limit: largest difference of the probes' log-probabilities in nats.
    """
    c = config.learner
    if c.decay == "constant":
        share = min(1.0, (step + 1) / c.warmup_steps) if c.warmup_steps else 1.0
        yield from line_faults(row, "learner", {"learning_rate": c.learning_rate * share})
    one_update = config.loss.num_iterations * config.loss.num_mini_batches == 1
    whole = config.loss.top_entropy_quantile == 1
    seen = _seen(groups)
    if terms and whole:
        number = {"num_tokens": float(terms * config.loss.num_iterations)}
        yield from line_faults(row, "learner", number)
    wanted = _mismatch(seen, config) if seen.shape[1] else {}
    if seen.shape[1] and one_update and whole:
        wanted["entropy_mean"] = float(seen[1].mean())
        wanted["sampler_gap_max"] = float(np.abs(seen[0]).max())
    for name, value in wanted.items():
        said = row.get(f"learner/{name}")
        if not _is_number(said) or not math.isclose(said, value, rel_tol=FLOAT32, abs_tol=1e-9):
            yield f"learner/{name} is {said!r:.20}, its tokens give {value:.6g}"
    mean, most = (row.get(f"engine/{name}_dlogp") for name in ("mean", "max"))
    if not (_is_number(mean) and _is_number(most) and 0 <= mean <= most <= limit):
        yield f"engine: the probes are {mean!r:.20}, {most!r:.20} apart, promised {limit:.3g}"


def _mismatch(seen: NDArray[np.float64], config: TrainConfig) -> dict[str, float]:
    """How far the sampler was off, over all terms."""
    gap, loss = seen[0], config.loss
    wanted = {"mismatch_kl": float((np.expm1(np.minimum(gap, 20)) - gap).mean())}
    if loss.correction_level != "token":
        return wanted
    low = loss.vllm_importance_sampling_clip_min or 0.0
    high = loss.vllm_importance_sampling_clip_max or math.inf
    ratio = np.exp(np.clip(gap, -20, 20))
    bounded = ((ratio < low) | (ratio > high)) & loss.corrects
    wanted["mismatch_modified"] = float(bounded.mean())
    for name, of in (("min", np.min), ("mean", np.mean), ("max", np.max)):
        wanted[f"mismatch_ratio_{name}"] = float(of(ratio))
    return wanted


def _seen(groups: Sequence[Group]) -> NDArray[np.float64]:
    """[2, terms]: the learner's log-probability less the sampler's, and its entropy."""
    parts = [np.zeros((2, 0))]
    for rollout in (r for group in groups for r in group.rollouts):
        views = zip(
            rollout.all_segments, rollout.learner_logprobs or (), rollout.entropies or (),
            strict=False,
        )  # fmt: skip
        for segment, logp, entropy in views:
            if segment.logprobs is None or logp is None or entropy is None:
                continue
            if len(logp) == len(segment.logprobs) == len(entropy):
                parts.append(np.stack([logp - segment.logprobs, entropy]))
    return np.concatenate(parts, 1)


def form_faults(row: Mapping[str, Any]) -> Iterator[str]:
    """A line has a step, the chain's two hashes, and numbers, of which times add up."""
    kinds = {"step": (int,), "rollouts_hash": (str,), "previous_hash": (str,)}
    for name, value in {**dict.fromkeys(kinds), **row}.items():
        if type(value) not in kinds.get(name, (int, float) if "/" in name else ()):
            yield f"{name} is {value!r:.20}"
    seconds = {name: value for name, value in row.items() if name.endswith("_s")}
    if not all(_is_number(value) and value >= 0 for value in seconds.values()):
        yield "a time that can be none"
        return
    parts = {name: value for name, value in seconds.items() if name.startswith("time/")}
    whole = parts.pop("time/total_s", None)
    if parts and (whole is None or not math.isclose(sum(parts.values()), whole, rel_tol=1e-6)):
        yield f"time/total_s is {whole!r:.20}, its parts give {sum(parts.values()):.6g}"


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)
