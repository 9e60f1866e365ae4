"""What the objective needs to know of a whole update: its options, its normaliser, its mismatch.

The loss of an update is sum(weight * token loss). Weights are taken over every rollout of the
update that is trained on, also those without an advantage, so that neither dropping dead groups nor
splitting into batches changes a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.config import LossConfig
from agentgrpo.kernels.objective import Objective, needs_sequences
from agentgrpo.types import Float32, Group, Int32, Metrics, Rollout

PER_ROLLOUT = ("grpo", "sapo", "gmpo")
PER_TOKEN = ("dapo", "bnpo", "cispo", "vespo")


def objective_of(config: LossConfig) -> Objective:
    """The kernels' options of a config.

    Raises:
        ValueError: they do not go together; names the key.
    """
    shared = {field.name: getattr(config, field.name) for field in fields(Objective)}
    try:
        made = Objective(**shared)
    except ValueError as error:
        raise ValueError(f"loss.{error}") from None
    corrects = made.vllm_importance_sampling_correction and made.correction_level != "token"
    if made.loss_type == "vespo" and corrects:
        raise ValueError(
            "loss.vllm_importance_sampling_mode: vespo multiplies token ratios itself, expected "
            f"'token_truncate' or 'token_mask', got {made.vllm_importance_sampling_mode!r}"
        )
    return made


def reads_whole_rollouts(config: LossConfig) -> bool:
    """Whether a token's loss depends on the other tokens of its rollout, in whichever row."""
    return needs_sequences(objective_of(config), has_sampler_logp=True)


def is_trained(rollout: Rollout) -> bool:
    """Whether the rollout counts in the loss."""
    return rollout.trained and rollout.num_sampled > 0


def token_weights(groups: Sequence[Group], loss_type: str, max_sampled_tokens: int) -> list[float]:
    """One weight per rollout, in group and rollout order, for each of its sampled tokens.

    Args:
        groups: all groups of the update.
        loss_type: with m a rollout's sampled tokens and B the rollouts that are trained on:
            dapo, bnpo, cispo, vespo: 1 / sum m (arXiv:2503.14476); grpo, sapo, gmpo: 1 / (m B), the
            mean over rollouts of their means (arXiv:2402.03300), which favours short ones;
            dr_grpo: 1 / (B max_sampled_tokens), a constant (arXiv:2503.20783); luspo: 1 / B.
        max_sampled_tokens: the budget of one rollout, for dr_grpo.

    Returns:
        Weights; 0.0 for rollouts that are not trained on.

    Raises:
        ValueError: an unknown loss_type.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [r.num_sampled if is_trained(r) else 0 for r in rollouts]
    num_rollouts, num_tokens = sum(length > 0 for length in lengths), sum(lengths)

    def weight(length: int) -> float:
        if loss_type in PER_TOKEN:
            return 1.0 / num_tokens
        if loss_type in PER_ROLLOUT:
            return 1.0 / (num_rollouts * length)
        if loss_type == "dr_grpo":
            return 1.0 / (num_rollouts * max_sampled_tokens)
        if loss_type == "luspo":
            return 1.0 / num_rollouts
        raise ValueError(f"loss_type: {loss_type!r} has no weights here")

    return [weight(length) if length else 0.0 for length in lengths]


TURNS_SHOWN = 8
"""Turns with a mismatch of their own in the metrics; later ones are counted with the last."""


def mismatch_metrics(
    gap_N: Float32, sample_N: Int32, turn_N: Int32, objective: Objective
) -> Metrics:
    """How far the sampler's policy was from the learner's on the sampled tokens, before any bound.

    Args:
        gap_N: the learner's log-probability less the sampler's, in nats; not finite where the
            sampler gave none, which counts as 0.
        sample_N: whose token it is.
        turn_N: of which of its turns, from 0.
        objective: at whose level the ratio is taken, and whose bounds it is held against.

    Returns:
        `mismatch_ratio_{min,mean,max}` of the raw ratio; `mismatch_modified`: the share of tokens
        whose ratio is bounded or zeroed; `mismatch_kl`: mean k3 estimate of KL(sampler || learner)
        in nats. Over all tokens, and over those of turn K as `mismatch_turn_K_...`, the last of
        TURNS_SHOWN with all later ones. Empty without tokens.
    """
    if not len(gap_N):
        return {}
    gap: NDArray[np.float64] = np.where(np.isfinite(gap_N), gap_N, 0.0).astype(np.float64)
    level = gap
    if objective.correction_level != "token":
        total = np.bincount(sample_N, weights=gap).astype(np.float64)
        if objective.correction_level == "geometric":
            total = total / np.maximum(np.bincount(sample_N), 1)
        level = total[sample_N]
    ratio = np.exp(np.clip(level, -20, 20))
    low = objective.vllm_importance_sampling_clip_min or 0.0
    high = objective.vllm_importance_sampling_clip_max or float("inf")
    columns = {
        "ratio": ratio,
        "modified": ((ratio < low) | (ratio > high))
        & objective.vllm_importance_sampling_correction,
        "kl": np.expm1(np.minimum(gap, 20)) - gap,
    }
    turn: Int32 = np.minimum(turn_N, TURNS_SHOWN - 1)
    metrics = _spread("mismatch_", columns, np.ones(len(gap), bool))
    for k in np.unique(turn).tolist():
        metrics |= _spread(f"mismatch_turn_{k}_", columns, turn == k)
    return metrics


def _spread(prefix: str, columns: Mapping[str, NDArray[Any]], chosen_N: NDArray[Any]) -> Metrics:
    ratio = columns["ratio"][chosen_N]
    return {
        f"{prefix}ratio_min": float(ratio.min()),
        f"{prefix}ratio_mean": float(ratio.mean()),
        f"{prefix}ratio_max": float(ratio.max()),
        f"{prefix}modified": float(columns["modified"][chosen_N].mean()),
        f"{prefix}kl": float(columns["kl"][chosen_N].mean()),
    }
