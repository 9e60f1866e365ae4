"""The formulas again, written one sequence at a time in float64 and left to autograd.

Nothing is shared with kernels/: no packing, no masks (masked tokens are simply absent), no fused
derivative, no trick for small probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def dense_logp(
    logits: Tensor, target: Tensor, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of [T, V] logits, by log_softmax."""
    x = logits.double()
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    log_p = torch.log_softmax(x / temperature, -1)
    entropy = -torch.where(log_p.exp() > 0, log_p.exp() * log_p, 0.0).sum(-1)
    return log_p.gather(-1, target[:, None])[:, 0], entropy


@dataclass
class Sample:
    """One sequence's trained tokens, [m] float64 each."""

    logp: Tensor
    old: Tensor
    advantage: Tensor
    ref: Tensor
    sampler: Tensor
    entropy: Tensor
    weight: Tensor
    entropy_weight: Tensor


def sample_loss(s: Sample, o: dict[str, Any], threshold: float | None, corrects: bool) -> Tensor:
    """The weighted loss of one sequence under Objective(**o)."""
    if not len(s.logp):
        return s.logp.sum()
    kind = o["loss_type"]
    ratio = importance(s, o)
    keep = (
        torch.ones_like(s.logp) if threshold is None else (s.entropy.detach() >= threshold).double()
    )
    correction = sampler_correction(s, o) if corrects else torch.ones_like(s.logp)
    policy = policy_loss(s, o, ratio, keep, correction)
    if kind != "gmpo":
        policy = policy * keep
    if kind != "vespo":
        policy = policy * correction
    if o.get("off_policy_mask_threshold") is not None:
        behind = s.sampler if corrects else s.old
        gap = behind - s.logp.detach()
        drift = torch.where(gap.isfinite(), gap, 0.0).mean()
        policy = torch.where(
            (s.advantage >= 0) | (drift <= o["off_policy_mask_threshold"]), policy, 0.0
        )
    total = policy + o.get("beta", 0.0) * kl_penalty(s, o, ratio)
    bonus = o.get("entropy_coef", 0.0) * s.entropy_weight * s.entropy * keep
    out: Tensor = (s.weight * total - bonus).sum()
    return out


def importance(s: Sample, o: dict[str, Any]) -> Tensor:
    log_ratio = s.logp - s.old
    level = o.get("importance_sampling_level", "token")
    if level == "token":
        return torch.exp(log_ratio)
    mean = log_ratio.sum() / len(log_ratio)
    if level == "sequence":
        return torch.exp(mean).expand(len(log_ratio))
    return torch.exp(mean.detach()) * torch.exp(s.logp - s.logp.detach())


def policy_loss(
    s: Sample, o: dict[str, Any], ratio: Tensor, keep: Tensor, correction: Tensor
) -> Tensor:
    kind, adv = o["loss_type"], s.advantage
    low = o.get("epsilon", 0.4 if kind == "gmpo" else 0.2)
    high = o.get("epsilon_high", low)
    out = []
    if kind == "vespo":
        log_w = (s.logp - s.old).detach().sum()
        log_w = log_w + torch.log(correction).clamp(math.log(1e-8), 20).sum()
        log_w = log_w.clamp(math.log(1e-8), 20)
    if kind == "gmpo":
        parts = [
            min(r, high) if a > 0 else max(r, -low)
            for r, a in zip((s.logp - s.old).unbind(), adv.tolist(), strict=True)
        ]
        logs = torch.stack([torch.as_tensor(p, dtype=torch.float64) for p in parts])
        geometric = torch.exp((logs * keep).sum() / max(keep.sum().item(), 1.0))
    for i, a in enumerate(adv.tolist()):
        r = ratio[i]
        if kind == "cispo":
            out.append(-min(r.item(), high) * a * s.logp[i])
        elif kind == "sapo":
            tau = (
                o.get("sapo_temperature_pos", 1.0) if a > 0 else o.get("sapo_temperature_neg", 1.05)
            )
            out.append(-a * 4 / tau / (1 + torch.exp(-tau * (r - 1))))
        elif kind == "vespo":
            k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            phi = (
                math.exp(lam)
                * math.exp(log_w.item()) ** k
                * math.exp(-lam * math.exp(log_w.item()))
            )
            out.append(-phi * a * s.logp[i])
        elif kind == "gmpo":
            out.append(-geometric * a)
        else:
            out.append(clipped(r, a, low, high, o))
    return torch.stack(out)


def clipped(r: Tensor, a: float, low: float, high: float, o: dict[str, Any]) -> Tensor:
    free = (
        r
        if o.get("delta") is None or r.item() <= o["delta"]
        else torch.tensor(o["delta"], dtype=torch.float64)
    )
    nearest = max(1 - low, min(r.item(), 1 + high))
    bounded = r if nearest == r.item() else torch.tensor(nearest, dtype=torch.float64)
    loss = -(free * a if free.item() * a <= bounded.item() * a else bounded * a)
    if o.get("clip_ratio_c") is not None and a < 0 and loss.item() > -o["clip_ratio_c"] * a:
        capped: Tensor = 0 * r - o["clip_ratio_c"] * a
        return capped
    out: Tensor = loss.double() + 0 * r
    return out


def sampler_correction(s: Sample, o: dict[str, Any]) -> Tensor:
    level, how = o.get("vllm_importance_sampling_mode", "sequence_mask").split("_")
    gap = s.old - s.sampler
    gap = torch.where(torch.isfinite(gap), gap, torch.zeros_like(gap))
    if level == "sequence":
        gap = gap.sum().expand(len(gap))
    elif level == "geometric":
        gap = gap.mean().expand(len(gap))
    low = o.get("vllm_importance_sampling_clip_min")
    high = o.get("vllm_importance_sampling_clip_max", 3.0)
    out = []
    for ratio in torch.exp(gap).tolist():
        inside = (low is None or ratio >= low) and (high is None or ratio <= high)
        if inside:
            out.append(ratio)
        elif how == "mask":
            out.append(0.0)
        else:
            out.append(low if low is not None and ratio < low else high)
    return torch.tensor(out, dtype=torch.float64)


def kl_penalty(s: Sample, o: dict[str, Any], ratio: Tensor) -> Tensor:
    if not o.get("beta"):
        return torch.zeros_like(s.logp)
    d = s.ref - s.logp
    kl: Tensor = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}[o.get("kl_estimator", "k3")]
    return kl * ratio if o.get("use_bias_correction_kl", True) else kl
