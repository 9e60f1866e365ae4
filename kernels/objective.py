"""What each loss is, and which objective grpo_loss computes: every option, checked before a tensor.

LOSSES is the one list of losses. The kernels, the reference, the weights, the config and
docs/losses.md read it; the proof of a run has its own, which a test holds against it.
`python -m agentgrpo.kernels.objective` prints that page's table.

Names and defaults are TRL 1.16's (GRPOConfig; GMPOConfig for gmpo) where TRL has the option, verl
0.9.1's otherwise, said at the option. What differs is in docs/coming-from.md, with the reason.
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
"""What a setting may be; beyond it lies only a slip of the hand."""
NORMALISERS: dict[str, Callable[[Any, int, Any, Any, int], Any]] = {
    "sequence_mean": lambda length, samples, tokens, share, budget: 1 / (length * samples),
    "token_mean": lambda length, samples, tokens, share, budget: 1 / tokens,
    "step_token_mean": lambda length, samples, tokens, share, budget: 1 / share,
    "budget": lambda length, samples, tokens, share, budget: 1 / (samples * budget),
    "sequence_sum": lambda length, samples, tokens, share, budget: 1 / samples,
}
"""What a trained token weighs in the loss of an update, from its sample's trained tokens, the
samples of the update B, the trained tokens of the update, those of the step divided by its updates,
and the largest number of tokens of a sample; numbers or tensors, at least 1.

B is TRL's: every sample of the update, those without a trained token too (masked ones, say), so
that masking a sample does not make the others count for more. The token means, which have no B, do
that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossType:
    """What tells a loss from the others: a row of LOSSES, or a loss of your own."""

    term: str | Callable[..., Any]
    """Its token loss: the name of a function of grpo_reference.TERMS, or a function
    term(batch, objective, ratio) -> [N]; see docs/losses.md."""
    normaliser: Normaliser = "token_mean"
    kernel: str | None = None
    """The branch of the Triton kernel that computes it; None: PyTorch does, everywhere. "weighted":
    its term is not the loss but the weight w of -sg(w) A logp, with the gradient of logp alone."""
    whole_sequence: bool = False
    """Its terms read the other terms of their sequence."""
    reads: tuple[str, ...] = ()
    """The settings of Objective that it reads, of those that not every loss reads."""
    needs: tuple[str, ...] = ()
    """Those that have no default for it."""
    epsilon: float = 0.2
    """The default of the setting."""
    corrected: bool = True
    """The default of vllm_importance_sampling_correction and of use_bias_correction_kl."""
    largest_epsilon: float = 1.0
    bounds: Callable[[float, float], tuple[float, float]] | None = None
    """From epsilon and epsilon_high to what the ratio is clipped at; None: it never is."""
    bounds_probability: bool = False
    """The bounds are on p - p_old of the sampled token, and not on the ratio."""
    folds: tuple[str, ...] = ()
    """The factors of a term (grpo_reference.Factors) that its own rule takes in, so that they do
    not multiply it as well."""
    formula: str = ""
    paper: str = ""


_CLIP = ("epsilon", "epsilon_high")


def _clipped(normaliser: Normaliser, paper: str) -> LossType:
    """The clipped surrogate; these losses differ in their normaliser alone."""
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
"""The settings that only some losses read."""


def loss_of(loss_type: str | LossType) -> LossType:
    """The row of a name, ValueError if there is none; a loss of your own is its own.

    "module:function" is one too. It stays a name until learn/token_weights.py loads it.
    """
    if isinstance(loss_type, LossType):
        return loss_type
    if ":" in loss_type:
        return LossType(term=loss_type, whole_sequence=True, reads=SPECIAL)
    _one_of("loss_type", loss_type, (*LOSSES, "'module:function'"))
    return LOSSES[loss_type]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Options of grpo_loss, whose module has the formulas. config.LossConfig has them as keys.

    Raises:
        ValueError: naming the option, what it must be and what it was.
    """

    loss_type: str | LossType = "dapo"
    """A name of LOSSES, or a loss of your own."""
    normaliser: Normaliser | None = None
    """What a token weighs, however an update is split: sequence_mean, the mean over the update's
    rollouts of their token means; token_mean, over its tokens; step_token_mean, the same with the
    step's tokens divided by its updates; budget, a constant per rollout; sequence_sum, per rollout
    (verl's loss_agg_mode). None: the loss type's own; token_mean for a loss of your own."""
    importance_sampling_level: Level = "token"
    """sequence: GSPO (arXiv:2507.18071), the geometric mean of a sequence's ratios stands for each;
    sequence_token: GSPO-token, the same value with each token's own gradient (TRL experimental;
    verl's gspo)."""
    epsilon: float | None = None
    """Lower clip range. None: 0.2; 0.4, in log space, for gmpo."""
    epsilon_high: float | None = None
    """Upper clip range; None: epsilon. For cispo the bound itself, not its distance from 1, and
    required there (ScaleRL: 5.0)."""
    delta: float | None = None
    """Two-sided clipping (INTELLECT-2): the unclipped ratio is bounded by delta too. None: off."""
    clip_ratio_c: float | None = None
    """Dual clip (verl; arXiv:1912.09729): where A < 0 the loss is at most -clip_ratio_c A. Above 1;
    verl's default is 3.0. None: off."""
    sapo_temperature_pos: float = 1.0
    """Of the soft gate for tokens of positive advantage (sapo)."""
    sapo_temperature_neg: float = 1.05
    """The same for negative advantage."""
    vespo_k_pos: float = 2.0
    """Exponent of the weight for sequences of positive advantage (vespo)."""
    vespo_lambda_pos: float = 3.0
    """Decay of that weight."""
    vespo_k_neg: float = 3.0
    """Exponent for negative advantage."""
    vespo_lambda_neg: float = 2.0
    """Decay for negative advantage."""
    beta: float = 0.0
    """Weight of the KL penalty against the reference model, in training the policy that it began
    with: a frozen copy, or with lora the adapter as it was. 0: none, and no copy."""
    kl_estimator: Estimator = "k3"
    """Of the penalty: k1 logp - ref; k2 half its square; k3 exp(ref - logp) - (ref - logp) - 1,
    unbiased and never below 0 (TRL's only one; verl's kl_loss_type names kl, mse, low_var_kl)."""
    use_bias_correction_kl: bool | None = None
    """Weight the penalty by the unclipped ratio (DeepSeek-V3.2): its gradient is the KL's. None:
    true; false for gmpo."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the mean entropy of the update's trained tokens, in nats,
    whatever the loss type."""
    vllm_importance_sampling_correction: bool | None = None
    """Weight a token's loss by the bounded ratio exp(old - sampler). None: true; false for gmpo."""
    vllm_importance_sampling_mode: Correction = "token_truncate"
    """A ratio per token, the product of a sequence's, or their geometric mean (Unsloth); bounded,
    or left out where it is outside the bounds."""
    vllm_importance_sampling_clip_max: float | None = 2.0
    """Upper bound of the weight."""
    vllm_importance_sampling_clip_min: float | None = None
    """Lower bound of the weight."""
    off_policy_mask_threshold: float | None = None
    """Leave out sequences of negative advantage that are further than this, in mean nats a token,
    from the policy that sampled them (DeepSeek-V3.2). None: none are."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError, see above."""
        loss = self.row
        _one_of("normaliser", loss.normaliser, tuple(NORMALISERS))
        _one_of("importance_sampling_level", self.importance_sampling_level, LEVELS)
        _one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _one_of("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, CORRECTIONS)
        kinds = {field.name: str(field.type) for field in fields(Objective)}
        for name, value in vars(self).items():  # of a section of a config: it has more
            kind = kinds.get(name, type(value).__name__)
            absent = value is None and kind != "float"
            size = float(abs(value)) if isinstance(value, Real) else math.nan
            if kind.startswith("float") and not absent and not size <= LARGEST:
                raise ValueError(f"{name}: expected a number up to {LARGEST:g}, got {value!r}")
        _check_clipping(self)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            _above(name, getattr(self, name), 0.0)
        if self.beta < 0:
            raise ValueError(f"beta: expected >= 0, got {self.beta}")
        own_rule = loss.whole_sequence and self.loss_type in LOSSES
        unread = own_rule and not (self.beta and self.corrects_kl)
        if self.importance_sampling_level != "token" and unread:
            raise ValueError(
                f"importance_sampling_level: {self.loss_type} weighs sequences by its own rule: "
                f"{self.importance_sampling_level!r} does nothing without beta and "
                "use_bias_correction_kl"
            )

    @property
    def row(self) -> LossType:
        """What loss_type says, and normaliser."""
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
        """Beyond which a term counts as clipped; (0, inf) where nothing is."""
        bounds = self.row.bounds
        return (0.0, math.inf) if bounds is None else bounds(self.clip_low, self.clip_high)

    @property
    def corrects(self) -> bool:
        """vllm_importance_sampling_correction, or the loss's default."""
        said = self.vllm_importance_sampling_correction
        return self.row.corrected if said is None else said

    @property
    def corrects_kl(self) -> bool:
        """use_bias_correction_kl, or the loss's default."""
        said = self.use_bias_correction_kl
        return self.row.corrected if said is None else said

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
    """LOSSES in Markdown, for docs/losses.md: each formula once, then a row for each loss."""
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
