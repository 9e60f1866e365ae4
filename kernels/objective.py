"""Which objective grpo_loss computes: every option, checked once, before any tensor is seen.

Names and defaults are TRL 1.16's (GRPOConfig; GMPOConfig for gmpo) where TRL has the option, verl
0.9.1's otherwise, said at the option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Same token formula, the clipped surrogate: they differ in the weights alone (term_weights)."""

LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo", "gmpo")
LEVELS = ("token", "sequence", "sequence_token")
CORRECTIONS = tuple(
    f"{of}_{how}" for of in ("token", "sequence", "geometric") for how in ("truncate", "mask")
)
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Options of grpo_loss; its docstring has the formulas.

    Raises:
        ValueError: naming the option, what it must be and what it was.
    """

    loss_type: str = "dapo"
    """grpo, bnpo, dr_grpo, dapo (arXiv:2503.14476), luspo (2602.05261): the clipped surrogate;
    cispo (2506.13585), sapo (2511.20347), vespo (2602.10693), gmpo (2507.20673)."""

    importance_sampling_level: str = "token"
    """token; sequence: GSPO (arXiv:2507.18071), the geometric mean of a sequence's ratios stands
    for each; sequence_token: GSPO-token, the same value with each token's own gradient (TRL
    experimental; verl's gspo)."""

    epsilon: float | None = None
    """Lower clip range. None: 0.2, and 0.4 in log space for gmpo."""

    epsilon_high: float | None = None
    """Upper clip range; None: epsilon. For cispo the bound itself, not its distance from 1, and
    required there (ScaleRL: 5.0)."""

    delta: float | None = None
    """Two-sided clipping (INTELLECT-2): the unclipped ratio is bounded by delta too. None: off."""

    clip_ratio_c: float | None = None
    """Dual clip (verl; arXiv:1912.09729): where A < 0 the loss is at most -clip_ratio_c * A. > 1.
    verl's default is 3.0; None, ours and TRL's: off."""

    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05

    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    beta: float = 0.0
    """Weight of the KL penalty against the reference model; 0 reads no ref_logp."""

    kl_estimator: str = "k3"
    """k1: logp - ref; k2: its square / 2; k3: exp(ref - logp) - (ref - logp) - 1 (TRL's only one;
    verl's kl_loss_type names kl, mse, low_var_kl)."""

    use_bias_correction_kl: bool = True
    """Multiply the KL by the unclipped ratio (DeepSeek-V3.2), gradient included."""

    entropy_coef: float = 0.0
    """Entropy bonus: loss -= entropy_coef * sum entropy_weight * entropy."""

    vllm_importance_sampling_correction: bool = True
    """Weight the policy term by exp(old - sampler), bounded, where sampler_logp is given."""

    vllm_importance_sampling_mode: str = "sequence_mask"
    """{token, sequence, geometric}_{truncate, mask}: a ratio per token, the product of a
    sequence's, or their geometric mean (Unsloth); bounded, or zeroed outside the bounds."""

    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None

    off_policy_mask_threshold: float | None = None
    """DeepSeek-V3.2: drop the terms with A < 0 of sequences whose mean log(sampler / policy) is
    above this. None: off."""

    def __post_init__(self) -> None:
        _one_of("loss_type", self.loss_type, LOSS_TYPES)
        _one_of("importance_sampling_level", self.importance_sampling_level, LEVELS)
        _one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _one_of("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, CORRECTIONS)
        _check_clipping(self)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            _above(name, getattr(self, name), 0.0)
        for name in ("beta", "entropy_coef", "off_policy_mask_threshold"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name}: expected a finite number, got {value}")
        if self.importance_sampling_level != "token" and self.loss_type in ("vespo", "gmpo"):
            raise ValueError(
                "importance_sampling_level: vespo and gmpo weigh sequences by their own rule, "
                f"expected 'token', got {self.importance_sampling_level!r}"
            )

    @property
    def clip_low(self) -> float:
        if self.epsilon is not None:
            return self.epsilon
        return 0.4 if self.loss_type == "gmpo" else 0.2

    @property
    def clip_high(self) -> float:
        return self.clip_low if self.epsilon_high is None else self.epsilon_high

    @property
    def correction_level(self) -> str:
        """token, sequence or geometric."""
        return self.vllm_importance_sampling_mode.split("_")[0]

    @property
    def correction_truncates(self) -> bool:
        return self.vllm_importance_sampling_mode.endswith("truncate")


def needs_sequences(objective: Objective, has_sampler_logp: bool) -> bool:
    """Whether a term's loss depends on the other terms of its sequence: grpo_loss reads sequence_N.

    Args:
        objective: the options.
        has_sampler_logp: grpo_loss is given sampler_logp_N.
    """
    corrects = has_sampler_logp and objective.vllm_importance_sampling_correction
    return (
        objective.importance_sampling_level != "token"
        or objective.loss_type in ("vespo", "gmpo")
        or objective.off_policy_mask_threshold is not None
        or (corrects and objective.correction_level != "token")
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def _above(name: str, value: float | None, bound: float) -> None:
    if value is not None and not value > bound:
        raise ValueError(f"{name}: expected > {bound}, got {value}")


def _check_clipping(objective: Objective) -> None:
    low, high = objective.clip_low, objective.clip_high
    if not low >= 0 or (objective.loss_type in CLIPPED and low > 1):
        raise ValueError(f"epsilon: expected 0 .. 1 (for gmpo >= 0), got {low}")
    if not high >= 0:
        raise ValueError(f"epsilon_high: expected >= 0, got {high}")
    if objective.loss_type == "cispo" and objective.epsilon_high is None:
        raise ValueError(
            "epsilon_high: cispo needs it, as the bound of the ratio itself (ScaleRL: 5.0)"
        )
    for name in ("delta", "clip_ratio_c"):
        value = getattr(objective, name)
        if value is not None and objective.loss_type not in CLIPPED:
            raise ValueError(
                f"{name}: only for {', '.join(CLIPPED)}, got {value} with {objective.loss_type}"
            )
    _above("delta", objective.delta, 0.0)
    _above("clip_ratio_c", objective.clip_ratio_c, 1.0)
    smallest, largest = (
        objective.vllm_importance_sampling_clip_min,
        objective.vllm_importance_sampling_clip_max,
    )
    _above("vllm_importance_sampling_clip_max", largest, 0.0)
    highest = math.inf if largest is None else largest
    if smallest is not None and not 0 <= smallest <= highest:
        raise ValueError(
            f"vllm_importance_sampling_clip_min: expected 0 .. clip_max ({highest}), got {smallest}"
        )
