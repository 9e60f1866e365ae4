"""Loss weights, the objective's options, and the mismatch metrics of an update.

The loss of an update is sum(weight * token loss). Weights are computed over all samples of the
update, including masked ones and those without an advantage, so that neither dropping dead groups
nor splitting into batches changes a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.config import LossConfig, TrainConfig
from agentgrpo.config.read import load_callable
from agentgrpo.kernels.objective import NORMALISERS, LossType, Objective, loss_of, needs_sequences
from agentgrpo.types import Float32, Group, Int32, Metrics, Rollout


def objective_of(config: LossConfig) -> Objective:
    """The kernel's options of a config. A user-defined loss is loaded and tried on three tokens.

    ValueError: the function does not exist, fails on three tokens, or returns no finite per-token
    loss with a gradient. The message names the key.
    """
    if ":" not in config.loss_type:
        return config
    function = load_callable(config.loss_type, key="loss.loss_type")
    options: dict[str, Any] = {
        field.name: getattr(config, field.name) for field in fields(Objective)
    }
    objective = Objective(**{**options, "loss_type": replace(config.row, term=function)})
    try:
        _check_custom_loss(objective)
    except Exception as error:
        raise ValueError(
            f"loss.loss_type: {config.loss_type!r} fails on three tokens: "
            f"{type(error).__name__}: {error}"
        ) from error
    return objective


def _check_custom_loss(objective: Objective) -> None:
    """Compute a small loss and its gradient, so that a wrong function fails before the run."""
    import torch  # not at the top: without a custom loss, no torch is needed before the model

    from agentgrpo.kernels.grpo_loss import prepare
    from agentgrpo.kernels.grpo_reference import importance, term

    # two ratios are exactly 1, as all are in the first (often the only) update of a step
    logp = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    old, sequence = logp.detach() - torch.tensor([0.0, 0.1, 0.0]), torch.tensor([0, 0, 1])
    batch = prepare(
        objective, logp, old, torch.tensor([1.0, 1.0, -1.0]), torch.ones(3), mask_N=None,
        ref_logp_N=old, sampler_logp_N=old, entropy_N=-old, sequence_N=sequence,
    )  # fmt: skip
    losses = term(batch, objective, importance(batch, objective))
    if not losses.requires_grad:
        raise ValueError("its result has no gradient")
    (slope,) = torch.autograd.grad(losses.sum(), logp)
    for name, values in (("losses are", losses), ("gradient is", slope)):
        if not values.isfinite().all():
            raise ValueError(f"its {name} {values.tolist()}; expected finite numbers")
    if not slope.any():
        raise ValueError("its gradient is 0 for every token, so that nothing would be learned")


def reads_whole_rollouts(config: LossConfig) -> bool:
    """Whether a token's loss depends on other tokens of its rollout, in any row."""
    return needs_sequences(config, has_sampler_logp=True)


def reads_all_tokens(config: TrainConfig) -> bool:
    """Whether tokens without an advantage move the loss."""
    loss, teaches = config.loss, config.teacher.teaches
    return bool(teaches or loss.beta or loss.entropy_coef or loss.top_entropy_quantile < 1)


def is_trained(rollout: Rollout) -> bool:
    """Whether tokens of the rollout enter the loss."""
    return rollout.trained and rollout.num_sampled > 0


def token_weights(
    groups: Sequence[Group],
    loss_type: str | LossType,
    max_sampled_tokens: int,
    *,
    num_samples: int | None = None,
    share_of_tokens: float | None = None,
) -> list[float]:
    """One weight per rollout, in group and rollout order, for each of its sampled tokens; 0.0 for
    rollouts that are not trained on.

    `num_samples`: B of kernels.objective.NORMALISERS. None: the rollouts of the groups, including
    masked ones and those that sampled nothing, as in TRL; excluding rollouts that failed for
    infrastructure reasons or that rollout treatment drops. `share_of_tokens`: trained tokens of the
    step divided by its number of updates; None: there is one update.
    """
    weight = NORMALISERS[loss_of(loss_type).normaliser]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [r.num_sampled if is_trained(r) else 0 for r in rollouts]
    samples = sum(r.in_baseline for r in rollouts) if num_samples is None else num_samples
    share = sum(lengths) if share_of_tokens is None else share_of_tokens
    return [
        weight(length, samples, sum(lengths), share, max_sampled_tokens) if length else 0.0
        for length in lengths
    ]


def mismatch_metrics(gap_N: Float32, sample_N: Int32, objective: Objective) -> Metrics:
    """Mismatch between the sampler's and the learner's policy on the sampled tokens, before
    clipping.

    `gap_N` is the learner's log-probability minus the sampler's, in nats; not finite where the
    sampler returned none, which counts as 0. `mismatch_modified`: the share of tokens whose ratio
    is clipped or zeroed. `mismatch_kl`: mean k3 estimate of KL(sampler || learner) in nats. Empty
    without tokens.
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
    return {
        "mismatch_ratio_min": float(ratio.min()),
        "mismatch_ratio_mean": float(ratio.mean()),
        "mismatch_ratio_max": float(ratio.max()),
        "mismatch_modified": float(((ratio < low) | (ratio > high)).mean() * objective.corrects),
        "mismatch_kl": float((np.expm1(np.minimum(gap, 20)) - gap).mean()),
    }
