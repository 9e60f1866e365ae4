"""Settings of learning: reward, optimizer, adapter, loss, teacher."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from agentgrpo.config.section import (
    NotNegative,
    NotNegativeNumber,
    Number,
    PathOrName,
    Positive,
    PositiveNumber,
    Section,
    describe,
)
from agentgrpo.kernels.objective import Objective


class RewardConfig(Section):
    """The reward, in parts, in addition to the environment's own rewards (rewards/)."""

    kind: str = "auto"
    """numeric (the answer's last number), math (equality of formulas, math-verify), choice (the
    letter of an option), text (exact match and token F1), none, or your own `module:function`.
    auto: numeric, or none if the environment judges by itself or `functions` has one with TRL's
    signature (then also without `format`, unless it is set)."""
    answer: PositiveNumber = 1.0
    """Weight of a correct final answer."""
    format: NotNegativeNumber = 0.1
    """Weight of having acted without errors and then answered in the expected form."""
    strict: bool = False
    """numeric: accept only an answer that is a single number, so that listing numbers and ending
    with the correct one earns nothing."""
    solved_at: Number | None = None
    """Reward from which a rollout counts as solved, without the parts of sigma_tool and
    sigma_length. None: solved if the part `solved` (of an environment that judges), else the part
    `answer`, is above 0. Without either, as with a class's get_reward or a rubric of verifiers, no
    share of solved rollouts is reported."""
    tool_cost: NotNegativeNumber = 0.0
    """Cost of each tool call, each code step and each call of sandbox.host_tools by that code."""
    cost_per_wall_s: NotNegativeNumber = 0.0
    """Cost of each second of wall-clock time that the rollout's code ran in the sandbox."""
    cost_per_cpu_s: NotNegativeNumber = 0.0
    """Cost of each second of CPU time of all processes of its code."""
    cost_per_mib: NotNegativeNumber = 0.0
    """Cost of each MiB that its code printed or exchanged with sandbox.host_tools."""
    sigma_tool: NotNegativeNumber = 0.0
    """Cost of a tool call above the group's mean (rewards/efficiency.py). Falls linearly to 0 at
    the run's last step, like sigma_length."""
    sigma_length: NotNegativeNumber = 0.0
    """Cost of one standard deviation of sampled tokens above the group's mean."""

    functions: dict[str, Number] = {}
    """More parts: `module:function` (yours) or a built-in name = weight, or a list of names, each
    with weight 1 (rewards/scoring.py). Functions with TRL's signature, which take `completions`,
    work unchanged (rewards/trl_functions.py)."""
    on_error: Literal["drop", "raise"] = "drop"
    """If a function fails: drop the rollout from its group and print the error, or stop the run."""

    @pydantic.field_validator("functions", mode="before")
    @classmethod
    def _each_of_weight_one(cls, functions: Any) -> Any:
        if not isinstance(functions, list | tuple):
            return functions
        if not all(isinstance(name, str) for name in functions) or len({*functions}) < len(
            functions
        ):
            raise ValueError(f"reward.functions: expected different names, got {functions!r}")
        return dict.fromkeys(functions, 1.0)


LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's max_lora_rank."""


class LoraConfig(Section):
    """Train low-rank adapters (peft) instead of the weights.

    vLLM receives only the adapter, in memory; both sides share one replica of the base model.
    """

    rank: Annotated[int, Field(ge=0, le=LORA_RANKS[-1])] = 0
    """Rank of the adapters; 0: train the weights themselves."""
    alpha: PositiveNumber = 32.0
    """The update is alpha / rank * B A."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers with an adapter. Empty: all but the head, or those of the adapter
    whose training continues."""


def room_for_adapters(rank: int) -> int:
    """The max_lora_rank with which vLLM must be started; 0: no adapters."""
    if rank > LORA_RANKS[-1]:
        raise ValueError(
            f"learner.lora.rank: expected at most {LORA_RANKS[-1]}, vLLM's limit, got {rank}"
        )
    return next(size for size in (0, *LORA_RANKS) if size >= rank)


class LearnerConfig(Section):
    """The optimizer and the trained parameters (learn/learner.py)."""

    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Peak learning rate."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule from learning_rate after the warm-up to 0 after the last step."""
    warmup_steps: NotNegative = 0
    """Steps of linear warm-up; the first uses learning_rate / warmup_steps."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled, as in AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e11)] = 1.0
    """Gradients are clipped to this norm."""
    trained_layers: Positive | None = None
    """Train only this many of the last transformer layers; None trains everything."""
    lora: LoraConfig = LoraConfig()
    max_tokens: Positive = 2048
    """Packed tokens of one forward and backward pass, at least engine.max_model_len. With
    rollout.history "render" and an objective that reads a rollout's tokens together (GSPO, the
    losses of docs/losses.md that read whole sequences, one of your own, sequence and geometric
    corrections, the off-policy mask), all rows of a rollout must fit; otherwise the run stops
    before the update with an error that names the rollout."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep only the layers' inputs and recompute the rest in the backward pass. auto: on CUDA if
    the preflight's largest pass does not fit without it, and always on several ranks; run.json
    records the choice."""
    use_liger_kernel: bool | Literal["auto"] = "auto"
    """Use liger-kernel's fused RMSNorm, RoPE and SwiGLU in the layers (an optional dependency; its
    losses are not used). auto: on CUDA if it is installed and the model's layers were compared with
    it; the dry run and run.json show the choice."""
    cast_lm_head_to_fp32: bool = False
    """Compute logits in float32 if the weights have 16 bits, without rounding: this changes a
    log-probability by about 0.01 nats. They take twice the memory, within the limit for logits
    (6 GiB on CUDA); beyond it they are recomputed in the backward pass."""
    offload_optimizer: bool = False
    """CUDA: keep the optimizer's state (masters and moments) in page-locked host memory, and copy
    it to the GPU at each update, one parameter at a time."""

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """The learning rate of a step (from 0)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        factor = max(0.0, 1 - done)
        if self.decay == "cosine":
            factor = 0.5 * (1 - math.cos(math.pi * factor))
        return self.learning_rate * factor


class LossConfig(Section, Objective):  # type: ignore[misc]  # mypy does not know pydantic's frozen
    """The objective, with TRL's names (docs/losses.md has formulas and papers)."""

    loss_type: str = "dapo"
    """A name in the table of docs/losses.md, or `module:function`, a token loss of your own. It
    also determines the normaliser."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train only on this share of the step's tokens, those with the highest entropy; tokens of
    rollouts without an advantage count too. The threshold, and the number of tokens above it in
    each update, by which the entropy bonus is divided, are computed before the first update."""
    num_iterations: Positive = 1
    """Passes over the rollouts of a step."""
    num_mini_batches: Positive = 1
    """Optimizer updates per pass, each on its share of the groups. With more than one update in a
    step the ratio leaves 1 and clipping begins."""
    old_logps: Literal["recomputed", "sampler"] = "recomputed"
    """Denominator of the ratio. recomputed: the policy before the step as the learner computes it
    (in the first forward pass if there is one update, else in an extra one); the difference to the
    sampler is corrected for below. sampler: the recorded log-probabilities, without an extra pass
    (except for top_entropy_quantile); the difference is then part of the ratio and clipped with it.
    """
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide centred rewards by the standard deviation of the group, of the whole step, or not at
    all (Dr. GRPO). true and false mean group and none, as in TRL."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Baseline of a reward: the mean of its group, or of the others in the group (RLOO)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """normalize_then_sum: GDPO, which normalises each part of the reward in its group, then
    multiplies it by its weight (for a cost: its rate)."""
    span_credit: Literal["auto", "rollout", "return_to_go", "turn"] = "auto"
    """Tokens that rewards of single turns or lines (Rollout.span_rewards) are credited to. rollout:
    all; return_to_go: those sampled before the reward; turn: only their own turn or line
    (estimators: learn/advantages.py). auto: turn at a console, else rollout."""
    branch_credit: Literal["soft", "hard"] = "soft"
    """Tokens shared by ARPO's branches count in each branch with its advantage (soft), or once with
    the mean of the advantages (hard)."""

    @pydantic.field_validator("scale_rewards", mode="before")
    @classmethod
    def _scale(cls, value: Any) -> Any:
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value

    @pydantic.model_validator(mode="after")
    def _goes_together(self) -> LossConfig:
        try:
            self.check()
        except ValueError as error:
            raise ValueError(f"loss.{error}") from None
        return self


describe(LossConfig, Objective)


class TeacherConfig(Section):
    """On-policy distillation: a teacher scores each sampled token (learn/teacher.py)."""

    model: PathOrName | None = None
    """Another model with the same tokenizer, named like `model`, loaded next to the policy. Or
    `endpoint:NAME` (kind http): a model behind vLLM's server, which returns log-probabilities of
    given tokens at temperature 1."""
    feedback: str = ""
    """The teacher is the policy itself with additional text in its prompt: `errors`, the
    environment's error messages for this attempt; `solutions`, another rollout of the group that
    solved the task; or your own `module:function`, called with the rollout like a reward function,
    whose returned text is used unchanged. A rollout without a text has no teacher's part."""
    weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """A token's advantage is weight * the teacher's + (1 - weight) * its group's. 0: no teacher."""
    topk: Annotated[int, Field(ge=0, le=1000)] = 0
    """0: compare teacher and policy at the sampled token only. Otherwise over this many of the
    teacher's most likely tokens, with all others as one; their divergence, times weight, is a loss
    in addition to the group's advantages (TRL's topk_logits, with a tail)."""
    clip: PositiveNumber = 20.0
    """Limit of the teacher's advantage in nats, in both directions."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """feedback: the teacher's weights are an exponential average of the policy's, which keeps this
    share at each optimizer update. 0: the policy's current weights, which needs no memory; the
    teacher then changes with the policy."""
    max_feedback_tokens: Positive = 2048
    """Limit of a feedback text; the middle of longer ones is left out."""

    @property
    def teaches(self) -> bool:
        """Whether there is a teacher."""
        return self.weight > 0 and bool(self.model or self.feedback)

    @property
    def average(self) -> float:
        """`decay` if the teacher is an average of the policy's weights, else 0."""
        return self.decay if self.teaches and self.feedback else 0.0

    @property
    def endpoint(self) -> str | None:
        """Name of the teacher's endpoint, if it has one."""
        kind, _, name = (self.model or "").partition(":")
        return name if kind == "endpoint" else None
