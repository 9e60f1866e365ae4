"""Options of grpo_loss and the table of losses; every option is checked before a tensor is touched.

LOSSES is the only list of losses. The kernels, the reference, the weights, the config and
docs/losses.md read it. `agentgrpo verify` has its own list, which a test compares with this one.
`python -m agentgrpo.kernels.objective` prints the page's table.

Names and defaults are those of TRL 1.16 (GRPOConfig; GMPOConfig for gmpo) where TRL has the option,
and of verl 0.9.1 otherwise, as noted at the option. Differences and their reasons are in
docs/coming-from.md.
"""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Literal, get_args

Level = Literal["token", "sequence", "sequence_token"]
Estimator = Literal["k1", "k2", "k3"]
Correction = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask",
    "geometric_truncate", "geometric_mask",
]  # fmt: skip
Normaliser = Literal["sequence_mean", "token_mean", "step_token_mean", "budget", "sequence_sum"]
LEVELS, KL_ESTIMATORS, CORRECTIONS = get_args(Level), get_args(Estimator), get_args(Correction)

LARGEST = 1e6
"""Upper limit of every numeric setting, to catch typing errors."""
NORMALISERS: dict[str, Callable[[Any, int, Any, Any, int], Any]] = {
    "sequence_mean": lambda length, samples, tokens, share, budget: 1 / (length * samples),
    "token_mean": lambda length, samples, tokens, share, budget: 1 / tokens,
    "step_token_mean": lambda length, samples, tokens, share, budget: 1 / share,
    "budget": lambda length, samples, tokens, share, budget: 1 / (samples * budget),
    "sequence_sum": lambda length, samples, tokens, share, budget: 1 / samples,
}
"""The weight of a trained token in the loss of an update, as a function of its sample's trained
tokens, the update's samples B, the update's trained tokens, the step's trained tokens divided by
its updates, and the token budget of a sample; numbers or tensors, at least 1.

B is TRL's: every sample of the update, including those without a trained token (such as masked
ones), so that masking a sample does not increase the weight of the others. The token means, which
have no B, do increase it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossType:
    """Definition of a loss: a row of LOSSES, or your own loss."""

    term: str | Callable[..., Any]
    """A name in grpo_reference.TERMS, or term(batch, objective, ratio) -> [N] (docs/losses.md)."""
    normaliser: Normaliser = "token_mean"
    kernel: str | None = None
    """The branch of the Triton kernel; None: PyTorch on every device. "weighted": the term is not
    the loss but the weight w of -sg(w) A logp, with the gradient of logp alone."""
    whole_sequence: bool = False
    """A term's loss depends on other terms of its sequence."""
    reads: tuple[str, ...] = ()
    """Settings of Objective that this loss reads, among those that not every loss reads."""
    needs: tuple[str, ...] = ()
    """Settings without a default for this loss."""
    epsilon: float = 0.2
    """Default of Objective.epsilon."""
    corrected: bool = True
    """Default of vllm_importance_sampling_correction and use_bias_correction_kl."""
    largest_epsilon: float = 1.0
    bounds: Callable[[float, float], tuple[float, float]] | None = None
    """Maps epsilon and epsilon_high to the bounds of the ratio; None: it is not clipped."""
    bounds_probability: bool = False
    """The bounds apply to p - p_old of the sampled token instead of the ratio."""
    folds: tuple[str, ...] = ()
    """Factors (grpo_reference.Factors) that the loss's own rule contains already."""
    formula: str = ""
    paper: str = ""


_CLIP = ("epsilon", "epsilon_high")


def _clipped(normaliser: Normaliser, paper: str) -> LossType:
    """The clipped surrogate; these losses differ only in their normaliser."""
    return LossType(
        term="clipped", kernel="clipped", normaliser=normaliser, paper=paper,
        reads=(*_CLIP, "delta", "clip_ratio_c"), bounds=lambda low, high: (1 - low, 1 + high),
        formula="-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A); "
        "where A < 0 at most -clip_ratio_c A",
    )  # fmt: skip


LOSSES: dict[str, LossType] = {
    "grpo": _clipped("sequence_mean", "arXiv:2402.03300"),
    "bnpo": _clipped("token_mean", "TRL"),
    "dr_grpo": _clipped("budget", "arXiv:2503.20783"),
    "dapo": _clipped("step_token_mean", "arXiv:2503.14476"),
    "luspo": _clipped("sequence_sum", "arXiv:2602.05261"),
    "cispo": LossType(
        term="cispo", kernel="weighted", reads=("epsilon_high",), needs=("epsilon_high",),
        normaliser="step_token_mean",
        bounds=lambda _low, high: (0.0, high), paper="arXiv:2506.13585",
        formula="-sg(min(r, epsilon_high)) A logp",
    ),
    "sapo": LossType(
        term="sapo", kernel="sapo", normaliser="sequence_mean", paper="arXiv:2511.20347",
        reads=("sapo_temperature_pos", "sapo_temperature_neg"),
        formula="-sigmoid(tau (r - 1)) (4 / tau) A, tau = sapo_temperature_pos if A > 0 else _neg",
    ),
    "vespo": LossType(
        term="vespo", kernel="weighted", whole_sequence=True, folds=("correction",),
        reads=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        formula="-sg(phi) A logp, log phi = lambda + k log w - lambda w, where w is the product of "
        "the sequence's r and corrections, in 1e-8 .. e^20; k and lambda by the sign of A",
        normaliser="step_token_mean", paper="arXiv:2602.10693",
    ),
    "gmpo": LossType(
        term="gmpo", normaliser="sequence_mean", whole_sequence=True, folds=("high_entropy",),
        reads=_CLIP, epsilon=0.4, largest_epsilon=math.inf, corrected=False,
        paper="arXiv:2507.20673",
        bounds=lambda low, high: (math.exp(-low), math.exp(high)),
        formula="-exp(sequence mean of log r, clipped to -epsilon .. epsilon_high on the side that "
        "A pushes to) A",
    ),
    "topr": LossType(
        term="topr", kernel="weighted", whole_sequence=True, folds=("correction",),
        normaliser="sequence_sum", paper="arXiv:2503.14286",
        formula="-sg(w) A logp, w = 1 where A >= 0, else the product of the sequence's r and "
        "corrections, in 1e-8 .. 1",
    ),
    "dppo": LossType(
        term="dppo", kernel="dppo", reads=_CLIP, bounds=lambda low, high: (-low, high),
        bounds_probability=True, paper="arXiv:2602.04879, binary TV; prime-rl, SkyRL",
        formula="-r A, but 0 where A > 0 and p - p_old > epsilon_high, or A < 0 and "
        "p_old - p > epsilon; p = exp(logp)",
    ),
}  # fmt: skip
"""r: the ratio to the old policy at importance_sampling_level; A: advantage; sg: no gradient."""


SPECIAL = tuple(dict.fromkeys(setting for loss in LOSSES.values() for setting in loss.reads))
"""Settings that only some losses read."""


def loss_of(loss_type: str | LossType) -> LossType:
    """The row of a name; ValueError if there is none. A LossType is returned unchanged.

    "module:function" is a valid name too; learn/token_weights.py loads it.
    """
    if isinstance(loss_type, LossType):
        return loss_type
    if ":" in loss_type:
        return LossType(term=loss_type, whole_sequence=True, reads=SPECIAL)
    _one_of("loss_type", loss_type, (*LOSSES, "'module:function'"))
    return LOSSES[loss_type]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Options of grpo_loss, whose module has the formulas. config.LossConfig has the same keys.

    Raises:
        ValueError: An invalid option; the message has its name, the expected values and the value.
    """

    loss_type: str | LossType = "dapo"
    """A name of LOSSES, or your own loss."""
    normaliser: Normaliser | None = None
    """How token losses are averaged, for any split of an update: sequence_mean, the mean over the
    update's rollouts of their token means; token_mean, over its tokens; step_token_mean, the same
    with the step's tokens divided by its updates; budget, a constant per rollout; sequence_sum, a
    sum per rollout (verl's loss_agg_mode). None: the loss type's default; token_mean for your own
    loss."""
    importance_sampling_level: Level = "token"
    """sequence: GSPO (arXiv:2507.18071), every token gets the geometric mean of its sequence's
    ratios; sequence_token: GSPO-token, the same value with each token's own gradient (TRL
    experimental; verl's gspo)."""
    epsilon: float | None = None
    """Lower clip range. None: 0.2; 0.4, in log space, for gmpo."""
    epsilon_high: float | None = None
    """Upper clip range; None: epsilon. For cispo the bound itself, not its distance from 1, and
    required there (ScaleRL: 5.0)."""
    delta: float | None = None
    """Two-sided clipping (INTELLECT-2): delta is an upper bound of the unclipped ratio. None:
    off."""
    clip_ratio_c: float | None = None
    """Dual clip (verl; arXiv:1912.09729): where A < 0 the loss is at most -clip_ratio_c A. Must be
    above 1; verl's default is 3.0. None: off."""
    sapo_temperature_pos: float = 1.0
    """Temperature of the soft gate for tokens of positive advantage (sapo)."""
    sapo_temperature_neg: float = 1.05
    """Temperature for negative advantage (sapo)."""
    vespo_k_pos: float = 2.0
    """Exponent of the weight for sequences of positive advantage (vespo)."""
    vespo_lambda_pos: float = 3.0
    """Decay of that weight (vespo)."""
    vespo_k_neg: float = 3.0
    """Exponent for negative advantage (vespo)."""
    vespo_lambda_neg: float = 2.0
    """Decay for negative advantage (vespo)."""
    beta: float = 0.0
    """Weight of the KL penalty against the reference model. In training this is the initial policy:
    a frozen copy, or with lora the initial adapter. 0: no penalty and no copy."""
    kl_estimator: Estimator = "k3"
    """Estimator of the KL penalty: k1 is logp - ref; k2 half its square; k3 exp(ref - logp) -
    (ref - logp) - 1, unbiased and never below 0 (TRL's only one; verl's kl_loss_type: kl, mse,
    low_var_kl)."""
    use_bias_correction_kl: bool | None = None
    """Weight the penalty by the unclipped ratio (DeepSeek-V3.2), so that its gradient is that of
    the KL. None: true; false for gmpo."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the mean entropy of the update's trained tokens, in nats, for
    every loss type."""
    vllm_importance_sampling_correction: bool | None = None
    """Weight a token's loss by the bounded ratio exp(old - sampler). None: true; false for gmpo."""
    vllm_importance_sampling_mode: Correction = "token_truncate"
    """Ratio per token, product over the sequence, or geometric mean (Unsloth); truncate: clipped to
    the bounds, mask: the token is left out if the ratio is outside the bounds."""
    vllm_importance_sampling_clip_max: float | None = 2.0
    """Upper bound of the weight."""
    vllm_importance_sampling_clip_min: float | None = None
    """Lower bound of the weight."""
    off_policy_mask_threshold: float | None = None
    """Leave out sequences of negative advantage whose log-probability differs from the sampler's by
    more than this, in mean nats per token (DeepSeek-V3.2). None: none are left out."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        loss = self.row
        _one_of("normaliser", loss.normaliser, tuple(NORMALISERS))
        _one_of("importance_sampling_level", self.importance_sampling_level, LEVELS)
        _one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _one_of("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, CORRECTIONS)
        types = {field.name: str(field.type) for field in fields(Objective)}
        for name, value in vars(self).items():  # a config section has more fields
            type_name = types.get(name, type(value).__name__)
            is_default = value is None and type_name != "float"
            size = float(abs(value)) if isinstance(value, Real) else math.nan
            if type_name.startswith("float") and not is_default and not size <= LARGEST:
                raise ValueError(f"{name}: expected a number up to {LARGEST:g}, got {value!r}")
        _check_clipping(self)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            _above(name, getattr(self, name), 0.0)
        if self.beta < 0:
            raise ValueError(f"beta: expected >= 0, got {self.beta}")
        is_shipped_rule = loss.whole_sequence and self.loss_type in LOSSES
        has_no_effect = is_shipped_rule and not (self.beta and self.corrects_kl)
        if self.importance_sampling_level != "token" and has_no_effect:
            raise ValueError(
                f"importance_sampling_level: {self.loss_type} weighs sequences by its own rule: "
                f"{self.importance_sampling_level!r} does nothing without beta and "
                "use_bias_correction_kl"
            )

    @property
    def row(self) -> LossType:
        """The loss type's row, with the normaliser of this objective."""
        loss = loss_of(self.loss_type)
        return loss if self.normaliser is None else replace(loss, normaliser=self.normaliser)

    @property
    def clip_low(self) -> float:
        return self.row.epsilon if self.epsilon is None else self.epsilon

    @property
    def clip_high(self) -> float:
        return self.clip_low if self.epsilon_high is None else self.epsilon_high

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Bounds outside which a term counts as clipped; (0, inf) without clipping."""
        bounds = self.row.bounds
        return (0.0, math.inf) if bounds is None else bounds(self.clip_low, self.clip_high)

    @property
    def corrects(self) -> bool:
        """vllm_importance_sampling_correction, or the loss's default."""
        setting = self.vllm_importance_sampling_correction
        return self.row.corrected if setting is None else setting

    @property
    def corrects_kl(self) -> bool:
        """use_bias_correction_kl, or the loss's default."""
        setting = self.use_bias_correction_kl
        return self.row.corrected if setting is None else setting

    @property
    def correction_level(self) -> str:
        """One of token, sequence and geometric."""
        return self.vllm_importance_sampling_mode.split("_")[0]

    @property
    def correction_truncates(self) -> bool:
        return self.vllm_importance_sampling_mode.endswith("truncate")


def needs_sequences(objective: Objective, has_sampler_logp: bool) -> bool:
    """Whether a term's loss depends on other terms of its sequence, so that grpo_loss reads
    sequence_N.

    Args:
        objective: The options.
        has_sampler_logp: Whether grpo_loss gets sampler_logp_N.
    """
    corrects = has_sampler_logp and objective.corrects
    return (
        objective.importance_sampling_level != "token"
        or objective.row.whole_sequence
        or objective.off_policy_mask_threshold is not None
        or (corrects and objective.correction_level != "token")
    )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}{hint}")


def _above(name: str, value: float | None, bound: float) -> None:
    if value is not None and not value > bound:
        raise ValueError(f"{name}: expected > {bound}, got {value}")


def _check_clipping(objective: Objective) -> None:
    loss, low, high = objective.row, objective.clip_low, objective.clip_high
    if not low >= 0 or ("epsilon" in loss.reads and low > loss.largest_epsilon):
        raise ValueError(f"epsilon: expected 0 .. {loss.largest_epsilon:g}, got {low}")
    if not high >= 0:
        raise ValueError(f"epsilon_high: expected >= 0, got {high}")
    for name in loss.needs:
        if getattr(objective, name) is None:
            raise ValueError(f"{name}: {objective.loss_type} needs it, for {loss.formula}")
    for name in ("delta", "clip_ratio_c"):
        value = getattr(objective, name)
        if value is not None and name not in loss.reads:
            raise ValueError(
                f"{name}: only for {', '.join(readers(name))}, got {value} with "
                f"{objective.loss_type}"
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


def readers(setting: str) -> list[str]:
    """The losses that read a setting."""
    return [name for name, loss in LOSSES.items() if setting in loss.reads]


def table() -> str:
    """LOSSES in Markdown, for docs/losses.md: each formula once, then one row per loss."""
    names: dict[tuple[str, bool], list[str]] = {}
    for name, loss in LOSSES.items():
        names.setdefault((loss.formula, loss.whole_sequence), []).append(name)
    lines = ["```text"]
    for (formula, whole_sequence), same in names.items():
        lines.append(", ".join(same) + " (reads whole sequences)" * whole_sequence)
        lines += textwrap.wrap(formula, 96, initial_indent="    ", subsequent_indent="    ")
    lines += ["```", "", "| `loss_type` | normaliser | settings | Triton | from |"]
    lines.append("|---" * 5 + "|")
    for name, loss in LOSSES.items():
        triton = "yes" if loss.kernel else "no"
        cells = (f"`{name}`", loss.normaliser, ", ".join(loss.reads), triton, loss.paper)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201
