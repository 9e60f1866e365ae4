"""What is learned from: reward, optimizer, adapter, objective."""

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
    forbid_unused,
)
from agentgrpo.kernels.objective import Objective


class RewardConfig(Section):
    """What a rollout is worth besides what its environment gives it, in parts (rewards/)."""

    kind: str = "auto"
    """numeric (the answer's last number), math (equality of formulas, math-verify), choice (the
    letter of an option), text (exact match and token F1), none, or your own `module:function`.
    auto: numeric, or none where the environment judges by itself or `functions` has one in TRL's
    form (then without `format`, if it is not set)."""
    answer: PositiveNumber = 1.0
    """Weight of a right final answer."""
    format: NotNegativeNumber = 0.1
    """Weight of having acted without an error and then answered in the asked form."""
    strict: bool = False
    """numeric: accept only an answer that is a number and nothing else, so that reciting numbers
    and ending with the right one does not pay."""
    solved_at: Number | None = None
    """Reward, all parts but those of sigma_tool and sigma_length, from which on a rollout counts as
    solved. None: where its part `solved` (of an environment that judges), else its part `answer`,
    is above 0. Where it has neither, as with a class's get_reward or a rubric of verifiers, no
    share of solved is shown."""
    tool_cost: NotNegativeNumber = 0.0
    """Taken off for every call of a tool, every run of code and every call of sandbox.host_tools by
    that code."""
    cost_per_wall_s: NotNegativeNumber = 0.0
    """Taken off for every second that the rollout's code ran in the sandbox, by the clock."""
    cost_per_cpu_s: NotNegativeNumber = 0.0
    """Taken off for every second of CPU time of all processes of its code."""
    cost_per_mib: NotNegativeNumber = 0.0
    """Taken off for every MiB that its code printed or exchanged with sandbox.host_tools."""
    sigma_tool: NotNegativeNumber = 0.0
    """With this or sigma_length above 0 a rollout is also compared with its group by what it spent
    (rewards/efficiency.py). This one: how much a tool call above the group's mean costs. Both fall
    linearly to 0 at the run's last step."""
    sigma_length: NotNegativeNumber = 0.0
    """How much a standard deviation of sampled tokens above the group's mean costs."""

    functions: dict[str, Number] = {}
    """More parts, as `module:function` (yours) or a built-in name = weight, or a list of these,
    each of weight 1 (rewards/scoring.py). Functions in TRL's form, which take `completions`, work
    as they are (rewards/trl_functions.py)."""
    on_error: Literal["drop", "raise"] = "drop"
    """A function that fails takes its rollout out of the group, and says so; or stops the run."""

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
"""Of the adapters that vLLM can be started for."""


class LoraConfig(Section):
    """Low-rank adapters instead of the weights (peft); rank 0 trains the weights themselves.

    vLLM is handed the adapter alone, in memory; the model below it is one replica for both.
    """

    rank: NotNegative = 0
    """Of the adapters; 0: none."""
    alpha: PositiveNumber = 32.0
    """The update is alpha / rank * B A."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get one; empty: all but the head, or those of the adapter
    that training goes on from."""

    @pydantic.model_validator(mode="after")
    def _can_be_served(self) -> LoraConfig:
        room_for_adapters(self.rank)
        return self


def room_for_adapters(rank: int) -> int:
    """The rank that the sampler has room for; 0: it has none."""
    if rank > LORA_RANKS[-1]:
        raise ValueError(
            f"learner.lora.rank: vLLM serves adapters up to rank {LORA_RANKS[-1]}, got {rank}"
        )
    return next(size for size in (0, *LORA_RANKS) if size >= rank)


class LearnerConfig(Section):
    """The optimizer and what it may change (learn/learner.py)."""

    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """At its highest."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """From learning_rate after the warm-up to 0 after the last step."""
    warmup_steps: NotNegative = 0
    """Steps in which the learning rate rises linearly, the first one at 1 / warmup_steps of it."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled, as AdamW has it."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e11)] = 1.0
    """Longer gradients are scaled down to this norm."""
    trained_layers: Positive | None = None
    """Train the last so many transformer layers and nothing else; None trains everything."""
    lora: LoraConfig = LoraConfig()
    max_tokens: Positive = 2048
    """Packed tokens of one forward and backward pass, at least engine.max_model_len. With
    rollout.history "render" and an objective that reads a rollout's tokens together (GSPO, those
    losses of docs/losses.md that read whole sequences, one of your own, sequence and geometric
    corrections, the off-policy mask) all rows of a rollout must fit; one that does not is named,
    and the run stops before the update."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep the layers' inputs only and compute the rest again in the backward pass. auto: on CUDA
    where the preflight's largest pass does not fit without it, and always on several ranks;
    run.json says what was chosen."""
    use_liger_kernel: bool | Literal["auto"] = "auto"
    """RMSNorm, RoPE and SwiGLU of the layers as one kernel each, of liger-kernel (not a dependency
    of ours; its losses are not used). auto: on CUDA where it is installed and the model's layers
    were compared with it; the dry run and run.json say what was taken."""
    cast_lm_head_to_fp32: bool = False
    """Logits in float32 where the weights have 16 bit, and not rounded to these: that moves a
    log-probability by about 0.01 nats. They take twice the memory, of as much as they are given
    (6 GiB on CUDA): with more rows they are computed again in the backward pass."""
    offload_optimizer: bool = False
    """CUDA: the optimizer's state, masters and moments, waits in page-locked host memory, and
    passes through the card at each update, a parameter at a time."""

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """The learning rate of a step, counted from 0, of total_steps."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        left = max(0.0, 1 - done)
        if self.decay == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return self.learning_rate * left


class LossConfig(Section, Objective):  # type: ignore[misc]  # both are frozen, says pydantic alone
    """The objective, under TRL's names (docs/losses.md has formulas and papers)."""

    loss_type: str = "dapo"
    """A name of the table in docs/losses.md, or `module:function`: a token loss of your own. Also
    chooses the normaliser."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train on this share of the step's tokens only, those of highest entropy; rollouts without an
    advantage count. The threshold is found before the step's first update, and so is how many of an
    update's tokens are above it, which the entropy bonus is divided by."""
    num_iterations: Positive = 1
    """Passes over the rollouts of a step."""
    num_mini_batches: Positive = 1
    """Optimizer updates per pass, each on its share of the groups. With more than one update in all
    the ratio leaves 1 and clipping begins."""
    old_logps: Literal["recomputed", "sampler"] = "recomputed"
    """What the ratio is taken to. recomputed: the policy before the step, on the learner's own path
    (of the first forward pass if there is one update, else of an extra one); the difference to the
    sampler is corrected for below. sampler: as recorded, with no extra pass (but for
    top_entropy_quantile); the difference is then a part of the ratio and clipped with it."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide centred rewards by the standard deviation of the group, of the whole step, or not
    (Dr. GRPO). true and false are group and none, as in TRL."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or of the others in it (RLOO)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """normalize_then_sum: GDPO, each part of the reward is normalised in its group by itself, then
    times its weight (of a cost: its rate)."""
    span_credit: Literal["auto", "rollout", "return_to_go", "turn"] = "auto"
    """What rewards of single turns or lines (Rollout.span_rewards) count for. rollout: all of it;
    return_to_go: what was sampled before they were given; turn: their own turn or line alone
    (learn/advantages.py has the estimators). auto: turn at a console, else rollout."""
    branch_credit: Literal["soft", "hard"] = "soft"
    """What ARPO's branches share counts in each of them, with its advantage (soft), or once, with
    the mean of their advantages (hard)."""

    @pydantic.field_validator("scale_rewards", mode="before")
    @classmethod
    def _scale(cls, value: Any) -> Any:
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value

    @pydantic.model_validator(mode="after")
    def _credits(self) -> LossConfig:
        if self.multi_objective_aggregation == "normalize_then_sum":
            for key, value, needed in (
                ("span_credit", self.span_credit, "rollout"),
                ("scale_rewards", self.scale_rewards, "group"),
            ):
                if value not in (needed, "auto"):
                    raise ValueError(
                        f"{key} must be {needed!r} with multi_objective_aggregation = "
                        f"'normalize_then_sum', got {value!r}"
                    )
        return self

    @pydantic.model_validator(mode="after")
    def _goes_together(self) -> LossConfig:
        try:
            self.check()
        except ValueError as error:
            raise ValueError(f"loss.{error}") from None
        return self


describe(LossConfig, Objective)


class TeacherConfig(Section):
    """A second opinion on each sampled token: on-policy distillation (learn/teacher.py)."""

    model: PathOrName | None = None
    """Another model with the same tokenizer, named as `model` is: held beside the policy. Or
    `endpoint:NAME` (kind http): it is behind vLLM's server, which gives log-probabilities of given
    tokens, at temperature 1."""
    feedback: str = ""
    """The teacher is the policy itself, which has read more of the task: `errors`, what the
    environment said that was wrong with this attempt; `solutions`, another rollout of the group
    that solved it; or your own `module:function`, called with the rollout as a reward function is,
    returning a text, which is read as it is. A rollout without a text has no such part."""
    weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """A token's advantage is weight * the teacher's + (1 - weight) * its group's. 0: no teacher."""
    topk: Annotated[int, Field(ge=0, le=1000)] = 0
    """0: the teacher is compared with the policy at the sampled token alone. Otherwise over its so
    many likeliest tokens and all others together, and their divergence, times weight, is a loss
    beside the group's advantages (TRL's topk_logits, with a tail)."""
    clip: PositiveNumber = 20.0
    """The teacher's advantage is at most this, and at least minus this, in nats."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """feedback: the teacher's weights are an average of the policy's past ones, which keeps this
    share of itself at each optimizer update. 0: they are the policy's, which takes no memory, and
    nothing holds the teacher where it was."""
    max_feedback_tokens: Positive = 2048
    """Of a text that it reads; the middle of longer ones is left out."""

    @property
    def teaches(self) -> bool:
        """Whether there is one."""
        return self.weight > 0 and bool(self.model or self.feedback)

    @property
    def average(self) -> float:
        """`decay`, where there is an average."""
        return self.decay if self.teaches and self.feedback else 0.0

    @property
    def endpoint(self) -> str | None:
        """The name of the one that it is behind."""
        kind, _, name = (self.model or "").partition(":")
        return name if kind == "endpoint" else None

    @pydantic.model_validator(mode="after")
    def _is_one(self) -> TeacherConfig:
        if self.model and self.feedback:
            raise ValueError(
                f"teacher.model {self.model!r} and teacher.feedback {self.feedback!r}: only one"
            )
        need = "decay", "teacher.feedback", lambda c: c.feedback or not c.decay
        alone = "clip", "teacher.topk = 0", lambda c: not c.topk
        forbid_unused(self, [need, alone], "teacher.")
        return self
