"""The formulas of grpo_loss.py in PyTorch: the CPU path, and the reference for the Triton kernel.

Any device, fp32 or fp64, differentiable by autograd. Also the parts that both paths share: the
batch with its masked terms zeroed, the factors without gradient, and the metrics.

Shape suffixes: N terms, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .objective import Objective
from .reduce import Metrics

MAX_LOG_RATIO = 20.0
_LOG_1E_8 = -18.420680743952367


class Factors(NamedTuple):
    """Factors of a term's policy loss, without gradient; None: 1."""

    high_entropy: Tensor | None = None
    on_policy: Tensor | None = None
    correction: Tensor | None = None

    def product(self, objective: Objective, dtype: torch.dtype) -> Tensor | None:
        """The product of all factors that the loss's own rule does not contain."""
        folds, pairs = objective.row.folds, zip(self._fields, self, strict=True)
        present = [x.to(dtype) for name, x in pairs if x is not None and name not in folds]
        return math.prod(present[1:], start=present[0]) if present else None


class Batch(NamedTuple):
    """The terms of a call, [N] each; masked terms hold zeros."""

    logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    weight: Tensor
    mask: Tensor
    ref_logp: Tensor | None
    sampler_logp: Tensor | None
    entropy: Tensor | None
    sequence: Tensor | None
    num_sequences: int
    factors: Factors = Factors()

    @property
    def log_ratio(self) -> Tensor:
        """Log-ratio to the old policy, clamped so that its exp is finite."""
        return (self.logp - self.old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_sum(self, x: Tensor) -> Tensor:
        """[N]: for each term the sum of x over the terms of its sequence."""
        if self.sequence is None:
            raise ValueError(
                "loss_type: a loss that reads whole sequences needs whole_sequence=True in its "
                "LossType"
            )
        zeros = x.new_zeros(self.num_sequences)
        return zeros.index_add(0, self.sequence, torch.where(self.mask, x, 0.0))[self.sequence]

    def sequence_mean(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """[N]: the same for the mean, over the terms where keep is True."""
        count = torch.ones_like(x) if keep is None else keep.to(x.dtype)
        return self.sequence_sum(x * count) / self.sequence_sum(count).clamp(min=1.0)


# --------------------------------------------------------------------------- the formulas


def importance(batch: Batch, objective: Objective) -> Tensor:
    """The ratio r at the objective's level."""
    if objective.importance_sampling_level == "token":
        return batch.log_ratio.exp()
    mean = batch.sequence_mean(batch.log_ratio)
    if objective.importance_sampling_level == "sequence_token":
        mean = mean.detach() + batch.logp - batch.logp.detach()
    return mean.exp()


def term(batch: Batch, objective: Objective, ratio: Tensor) -> Tensor:
    """Evaluate the loss's own function: per term its loss or, for "weighted" losses, its weight.

    Raises:
        ValueError: The result is not one number per term.
    """
    function = objective.row.term
    if isinstance(function, str) and function not in TERMS:
        raise ValueError(f"loss_type: {function!r} is neither a function of kernels/ nor loaded")
    result = (TERMS[function] if isinstance(function, str) else function)(batch, objective, ratio)
    if not isinstance(result, Tensor) or (result.shape, result.dtype) != (ratio.shape, ratio.dtype):
        got = (result.dtype, tuple(result.shape)) if isinstance(result, Tensor) else result
        expected = (ratio.dtype, tuple(ratio.shape))
        raise ValueError(f"loss_type: expected a loss per term, {expected}, got {got}")
    return result


def _policy(batch: Batch, objective: Objective, ratio: Tensor) -> Tensor:
    if objective.row.kernel != "weighted":
        return term(batch, objective, ratio)
    return -term(batch, objective, ratio).detach() * batch.advantage * batch.logp


def _clipped(batch: Batch, objective: Objective, ratio: Tensor) -> Tensor:
    adv = batch.advantage
    free = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
    loss = -torch.minimum(free * adv, ratio.clamp(*objective.clip_bounds) * adv)
    if objective.clip_ratio_c is None:
        return loss
    return torch.where(adv < 0, torch.minimum(loss, -objective.clip_ratio_c * adv), loss)


def _cispo(_: Batch, objective: Objective, ratio: Tensor) -> Tensor:
    return ratio.clamp(max=objective.clip_high)


def _sapo(batch: Batch, objective: Objective, ratio: Tensor) -> Tensor:
    adv = batch.advantage
    tau = _by_sign(adv > 0, objective.sapo_temperature_pos, objective.sapo_temperature_neg, adv)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * adv


def _log_product(batch: Batch, objective: Objective) -> Tensor:
    """The log of the product of a sequence's ratios and corrections (or its one correction)."""
    log_w = batch.sequence_sum(batch.log_ratio.detach())
    if batch.factors.correction is not None:
        logs = batch.factors.correction.log().clamp(_LOG_1E_8, MAX_LOG_RATIO)
        log_w = log_w + (
            batch.sequence_sum(logs) if objective.correction_level == "token" else logs
        )
    return log_w.clamp(_LOG_1E_8, MAX_LOG_RATIO)


def _dppo(batch: Batch, objective: Objective, ratio: Tensor) -> Tensor:
    below, above = clipped_terms(batch, objective, ratio)
    return torch.where(below | above, 0.0, -ratio * batch.advantage)


def _topr(batch: Batch, objective: Objective, _: Tensor) -> Tensor:
    log_w = _log_product(batch, objective)  # 0 * log_w below keeps NaN
    return torch.where(batch.advantage >= 0, 0 * log_w, log_w.clamp(max=0)).exp()


def _vespo(batch: Batch, objective: Objective, _: Tensor) -> Tensor:
    log_w = _log_product(batch, objective)
    positive = batch.advantage >= 0
    k = _by_sign(positive, objective.vespo_k_pos, objective.vespo_k_neg, log_w)
    lam = _by_sign(positive, objective.vespo_lambda_pos, objective.vespo_lambda_neg, log_w)
    lam = lam.clamp(min=1e-4)
    return (lam + k * log_w - lam * log_w.exp()).exp()


def _gmpo(batch: Batch, objective: Objective, _: Tensor) -> Tensor:
    log_ratio, adv = batch.log_ratio, batch.advantage
    one_sided = torch.where(
        adv > 0, log_ratio.clamp(max=objective.clip_high), log_ratio.clamp(min=-objective.clip_low)
    )
    return -batch.sequence_mean(one_sided, batch.factors.high_entropy).exp() * adv


TERMS: dict[str, Callable[[Batch, Objective, Tensor], Tensor]] = {
    "clipped": _clipped, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo, "gmpo": _gmpo,
    "topr": _topr, "dppo": _dppo,
}  # fmt: skip
"""By LossType.term."""


def _by_sign(positive: Tensor, pos: float, neg: float, like: Tensor) -> Tensor:
    """Select pos or neg in like's dtype; where() of two Python floats would round them to fp32."""
    return torch.where(positive, like.new_tensor(pos), like.new_tensor(neg))


def _kl(batch: Batch, objective: Objective, ratio: Tensor) -> Tensor:
    assert batch.ref_logp is not None
    gap = (batch.ref_logp - batch.logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl = {"k1": lambda: -gap, "k2": lambda: gap.square() / 2, "k3": lambda: gap.expm1() - gap}[
        objective.kl_estimator
    ]()
    return kl * ratio if objective.corrects_kl else kl


def _sampler_gap(batch: Batch) -> Tensor:
    """The gap old - sampler, 0 where the sampler's log-probability is not finite."""
    assert batch.sampler_logp is not None
    gap = batch.old_logp - batch.sampler_logp
    return torch.where(gap.isfinite(), gap, 0.0)


def _correction(batch: Batch, objective: Objective) -> Tensor:
    gap = _sampler_gap(batch)
    if objective.correction_level != "token":
        total = objective.correction_level == "sequence"
        gap = batch.sequence_sum(gap) if total else batch.sequence_mean(gap)
    ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low = objective.vllm_importance_sampling_clip_min
    high = objective.vllm_importance_sampling_clip_max
    low, high = 0.0 if low is None else low, float("inf") if high is None else high
    if objective.correction_truncates:
        return ratio.clamp(low, high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _on_policy(batch: Batch, threshold: float) -> Tensor:
    sampled_logp = batch.old_logp if batch.sampler_logp is None else batch.sampler_logp
    gap = sampled_logp - batch.logp
    drift = batch.sequence_mean(torch.where(gap.isfinite(), gap, 0.0))
    return (batch.advantage >= 0) | (drift <= threshold)


@torch.no_grad()
def find_factors(
    batch: Batch, objective: Objective, entropy_threshold: Tensor | float | None
) -> Factors:
    """The factors of each term, from detached values."""
    high_entropy = on_policy = correction = None
    if entropy_threshold is not None:
        assert batch.entropy is not None
        high_entropy = torch.ge(batch.entropy, entropy_threshold)
    if objective.off_policy_mask_threshold is not None:
        on_policy = _on_policy(batch, objective.off_policy_mask_threshold)
    if batch.sampler_logp is not None and objective.corrects:
        correction = _correction(batch, objective)
    return Factors(high_entropy, on_policy, correction)


def torch_loss(batch: Batch, objective: Objective) -> tuple[Tensor, Metrics]:
    """The weighted sum without the entropy bonus, and the metrics that depend on the loss type."""
    ratio = importance(batch, objective)
    loss = _policy(batch, objective, ratio)
    factor = batch.factors.product(objective, ratio.dtype)
    if factor is not None:
        loss = loss * factor
    metrics = _ratio_metrics(batch, objective, ratio.detach())
    if objective.beta:
        kl = _kl(batch, objective, ratio)
        loss = loss + objective.beta * kl
        metrics["ref_kl"] = _mean(batch, kl.detach())
    return (batch.weight * loss).sum(), metrics


# --------------------------------------------------------------------------- metrics


def _mean(batch: Batch, x: Tensor) -> Tensor:
    return torch.where(batch.mask, x, 0.0).sum() / batch.mask.sum().clamp(min=1)


def _largest(batch: Batch, x: Tensor) -> Tensor:
    """The maximum of values >= 0; 0 if there are none."""
    return torch.where(batch.mask, x, 0.0).max() if len(x) else x.new_zeros(())


def clipped_terms(batch: Batch, objective: Objective, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(below, above): terms outside the clip bounds whose advantage pushes further outside."""
    low, high = objective.clip_bounds
    compared = ratio
    if objective.row.bounds_probability:
        compared = batch.logp.exp() - batch.old_logp.exp()
    return (compared < low) & (batch.advantage < 0), (compared > high) & (batch.advantage > 0)


@torch.no_grad()
def _ratio_metrics(batch: Batch, objective: Objective, ratio: Tensor) -> Metrics:
    below, above = clipped_terms(batch, objective, ratio)
    log_ratio = batch.log_ratio
    return {
        "ratio_mean": _mean(batch, ratio),
        "ratio_max": _largest(batch, ratio),
        "clip_low_fraction": _mean(batch, below.to(ratio.dtype)),
        "clip_high_fraction": _mean(batch, above.to(ratio.dtype)),
        "approx_kl": _mean(batch, log_ratio.expm1() - log_ratio),
    }


@torch.no_grad()
def batch_metrics(batch: Batch) -> Metrics:
    """The metrics that do not depend on the loss type."""
    factors = batch.factors
    metrics = {"num_tokens": batch.mask.sum()}
    if batch.entropy is not None:
        metrics["entropy_mean"] = _mean(batch, batch.entropy)
    if batch.sampler_logp is not None:
        gap = _sampler_gap(batch)
        # k3 estimate of KL(sampler || learner), whose sign does not cancel
        metrics["sampler_kl"] = _mean(batch, gap.clamp(max=MAX_LOG_RATIO).expm1() - gap)
        metrics["sampler_gap_mean"] = _mean(batch, gap.abs())
        metrics["sampler_gap_max"] = _largest(batch, gap.abs())
    if factors.correction is not None:
        metrics["correction_mean"] = _mean(batch, factors.correction)
        metrics["correction_max"] = _largest(batch, factors.correction)
        metrics["correction_zero_fraction"] = _mean(batch, (factors.correction == 0).float())
    if factors.on_policy is not None:
        metrics["off_policy_fraction"] = _mean(batch, (~factors.on_policy).float())
    return metrics
