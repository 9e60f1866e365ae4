"""Independent formulas, one sequence at a time in float64, differentiated by autograd.

They share nothing with kernels/: no packing, no masks (masked tokens are simply absent), no fused
derivative, no trick for small probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def assert_close(ours: Sequence[Tensor], want: Sequence[Tensor], tolerance: float) -> None:
    """Relative to the largest element, which bounds the rounding of a sum."""
    for got, expected in zip(ours, want, strict=True):
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(
            got.double(), expected.double(), rtol=tolerance, atol=tolerance * scale
        )


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
    entropy_weight: float
    """1 / tokens that the entropy is a mean over."""


def sample_loss(s: Sample, o: dict[str, Any], threshold: float | None, corrects: bool) -> Tensor:
    """The weighted loss of one sequence under Objective(**o)."""
    if not len(s.logp):
        return s.logp.sum()
    kind = o["loss_type"]
    by_itself = kind != "gmpo"  # whose trainer in TRL knows no correction
    sampled, corrects = corrects, corrects and o.get(CORRECTS, by_itself)
    ratio = importance(s, o)
    keep = (
        torch.ones_like(s.logp) if threshold is None else (s.entropy.detach() >= threshold).double()
    )
    correction = sampler_correction(s, o) if corrects else torch.ones_like(s.logp)
    policy = ORACLES[kind].policy(s, {**o, **bounds(o)}, ratio, keep, correction)
    if kind != "gmpo":
        policy = policy * keep
    if kind not in ("vespo", "topr"):
        policy = policy * correction
    if o.get("off_policy_mask_threshold") is not None:
        behind = s.sampler if sampled else s.old
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


def bounds(o: dict[str, Any]) -> dict[str, float]:
    low = o.get("epsilon", 0.4 if o["loss_type"] == "gmpo" else 0.2)
    return {"low": low, "high": o.get("epsilon_high", low)}


def clipped(s: Sample, o: dict[str, Any], ratio: Tensor, *_: Tensor) -> Tensor:
    out = []
    for r, a in zip(ratio.unbind(), s.advantage.tolist(), strict=True):
        free = r
        if o.get("delta") is not None and r.item() > o["delta"]:
            free = torch.tensor(o["delta"], dtype=torch.float64)
        nearest = max(1 - o["low"], min(r.item(), 1 + o["high"]))
        bounded = r if nearest == r.item() else torch.tensor(nearest, dtype=torch.float64)
        loss = -(free * a if free.item() * a <= bounded.item() * a else bounded * a)
        if o.get("clip_ratio_c") is not None and a < 0 and loss.item() > -o["clip_ratio_c"] * a:
            loss = -torch.tensor(o["clip_ratio_c"] * a, dtype=torch.float64)
        out.append(loss.double() + 0 * r)
    return torch.stack(out)


def cispo(s: Sample, o: dict[str, Any], ratio: Tensor, *_: Tensor) -> Tensor:
    weights = [min(r, o["high"]) for r in ratio.tolist()]
    return -torch.tensor(weights, dtype=torch.float64) * s.advantage * s.logp


def sapo(s: Sample, o: dict[str, Any], ratio: Tensor, *_: Tensor) -> Tensor:
    out = []
    for r, a in zip(ratio.unbind(), s.advantage.tolist(), strict=True):
        tau = o.get("sapo_temperature_pos", 1.0) if a > 0 else o.get("sapo_temperature_neg", 1.05)
        out.append(-a * 4 / tau / (1 + torch.exp(-tau * (r - 1))))
    return torch.stack(out)


def vespo(s: Sample, o: dict[str, Any], ratio: Tensor, keep: Tensor, correction: Tensor) -> Tensor:
    log_w = (s.logp - s.old).detach().sum()
    logs = torch.log(correction).clamp(math.log(1e-8), 20)
    log_w = log_w + (logs.sum() if o.get(CORRECTION, "token").startswith("token") else logs[0])
    w = math.exp(log_w.clamp(math.log(1e-8), 20).item())
    out = []
    for i, a in enumerate(s.advantage.tolist()):
        k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        out.append(-math.exp(lam) * w**k * math.exp(-lam * w) * a * s.logp[i])
    return torch.stack(out)


def gmpo(s: Sample, o: dict[str, Any], ratio: Tensor, keep: Tensor, *_: Tensor) -> Tensor:
    parts = [
        min(r, o["high"]) if a > 0 else max(r, -o["low"])
        for r, a in zip((s.logp - s.old).unbind(), s.advantage.tolist(), strict=True)
    ]
    logs = torch.stack([torch.as_tensor(p, dtype=torch.float64) for p in parts])
    geometric = torch.exp((logs * keep).sum() / max(keep.sum().item(), 1.0))
    return torch.stack([-geometric * a for a in s.advantage.tolist()])


def topr(s: Sample, o: dict[str, Any], ratio: Tensor, keep: Tensor, correction: Tensor) -> Tensor:
    """Positives by plain likelihood, negatives by pi / mu of the whole sequence, tapered to 1."""
    each = correction.tolist()
    if not o.get(CORRECTION, "token").startswith("token"):  # the sequence's, once
        each[1:] = [1.0] * (len(each) - 1)
    product = 1.0
    for new, old, bounded in zip(s.logp.tolist(), s.old.tolist(), each, strict=True):
        product *= math.exp(new) / math.exp(old) * max(bounded, 1e-8)
    taper = [1.0 if a >= 0 else min(max(product, 1e-8), 1.0) for a in s.advantage.tolist()]
    return -torch.tensor(taper, dtype=torch.float64) * s.advantage * s.logp


def dppo(s: Sample, o: dict[str, Any], ratio: Tensor, *_: Tensor) -> Tensor:
    """Out of reach is what the advantage pushes further than |p - p_old| may be."""
    out = []
    for i, a in enumerate(s.advantage.tolist()):
        moved = math.exp(s.logp[i].item()) - math.exp(s.old[i].item())
        out_of_reach = moved > o["high"] if a > 0 else -moved > o["low"]
        out.append(-ratio[i] * a * (not out_of_reach))
    return torch.stack(out)


def mean_of_means(length: int, samples: int, tokens: int, budget: int) -> float:
    return 1 / samples / length


def mean(length: int, samples: int, tokens: int, budget: int) -> float:
    """Of one update that is a step."""
    return 1 / tokens


class Oracle(NamedTuple):
    """A loss as defined by its paper."""

    policy: Callable[..., Tensor]
    weight: Callable[[int, int, int, int], float]
    """Of a token, from its sample's length, the samples of the step, its tokens, and the budget."""
    cases: dict[str, dict[str, Any]]
    """Options to compare it with, besides loss_type."""


CORRECTION, LEVEL = "vllm_importance_sampling_mode", "importance_sampling_level"
CORRECTS = "vllm_importance_sampling_correction"
CLIP_MAX = "vllm_importance_sampling_clip_max"
ORACLES: dict[str, Oracle] = {
    "grpo": Oracle(clipped, mean_of_means, {
        "grpo": {},
        "delta": {"delta": 1.4},
        "delta inside the clip range": {"epsilon": 0.5, "delta": 1.1},
        "gspo": {LEVEL: "sequence", "epsilon": 0.02, CORRECTION: "sequence_mask"},
        "gspo delta": {LEVEL: "sequence", "delta": 1.01},
        "gspo-token": {LEVEL: "sequence_token", "epsilon": 0.05},
    }),
    "bnpo": Oracle(clipped, mean, {"bnpo": {}}),
    "dr_grpo": Oracle(clipped, lambda m, samples, n, budget: 1 / samples / budget, {"dr_grpo": {}}),
    "dapo": Oracle(clipped, mean, {
        "dapo": {},
        "asymmetric": {"epsilon": 0.1, "epsilon_high": 0.28, CORRECTION: "sequence_mask"},
        "dual clip": {"clip_ratio_c": 1.3},
    }),
    "luspo": Oracle(clipped, lambda m, samples, n, budget: 1 / samples, {
        "luspo": {}, "gspo luspo": {LEVEL: "sequence", CORRECTION: "sequence_mask"},
    }),
    "cispo": Oracle(cispo, mean, {
        "cispo": {"epsilon_high": 1.1, CORRECTION: "sequence_mask"},
        "cispo sequence": {"epsilon_high": 1.02, LEVEL: "sequence"},
        "cispo kl": {"epsilon_high": 1.1, "beta": 0.2, "kl_estimator": "k2"},
    }),
    "sapo": Oracle(sapo, mean_of_means, {
        "sapo": {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 0.7},
        "sapo sequence": {LEVEL: "sequence", CORRECTION: "sequence_mask"},
        "sapo kl": {"beta": 0.2},
    }),
    "vespo": Oracle(vespo, mean, {
        "vespo": {},
        "vespo token mask": {CORRECTION: "token_mask", CLIP_MAX: 1.2},
        "vespo sequence mask": {CORRECTION: "sequence_mask", CLIP_MAX: 1.1},
        "vespo kl": {"beta": 0.2},
        "vespo sequence kl": {"beta": 0.2, LEVEL: "sequence"},
    }),
    "gmpo": Oracle(gmpo, mean_of_means, {
        "gmpo": {
            "epsilon": 0.1, "epsilon_high": 0.2, CORRECTION: "sequence_mask", CORRECTS: True,
        },
        "gmpo corrected kl": {"beta": 0.2, "use_bias_correction_kl": True, LEVEL: "sequence"},
        "gmpo defaults": {},
        "gmpo kl": {"beta": 0.2},
    }),
    "topr": Oracle(topr, lambda m, samples, n, budget: 1 / samples, {
        "topr": {}, "topr token mask": {CORRECTION: "token_mask", CLIP_MAX: 1.2},
        "topr sequence": {CORRECTION: "sequence_truncate", CLIP_MAX: 1.1},
        "topr kl": {"beta": 0.2},
    }),
    "dppo": Oracle(dppo, mean, {
        "dppo": {}, "dppo narrow": {"epsilon": 0.02, "epsilon_high": 0.05},
        "dppo sequence": {LEVEL: "sequence", "epsilon": 0.05}, "dppo kl": {"beta": 0.2},
    }),
}  # fmt: skip
CASES = {
    name: {"loss_type": loss_type, **options}
    for loss_type, oracle in ORACLES.items()
    for name, options in oracle.cases.items()
}


def sampler_correction(s: Sample, o: dict[str, Any]) -> Tensor:
    level, how = o.get(CORRECTION, "token_truncate").split("_")
    gap = s.old - s.sampler
    gap = torch.where(torch.isfinite(gap), gap, torch.zeros_like(gap))
    if level == "sequence":
        gap = gap.sum().expand(len(gap))
    elif level == "geometric":
        gap = gap.mean().expand(len(gap))
    low = o.get("vllm_importance_sampling_clip_min")
    high = o.get(CLIP_MAX, 2.0)
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
    return kl * ratio if o.get("use_bias_correction_kl", o["loss_type"] != "gmpo") else kl
