"""A whole run, and what its sections must agree on."""

from __future__ import annotations

from typing import Literal

import pydantic

from agentgrpo.config.learning import LearnerConfig, LossConfig, RewardConfig, TeacherConfig
from agentgrpo.config.playing import (
    OWN_MODELS,
    AgentConfig,
    DataConfig,
    EndpointConfig,
    EngineConfig,
    EnvConfig,
    EvaluationConfig,
    RolloutConfig,
    SandboxConfig,
)
from agentgrpo.config.section import (
    Need,
    NotNegative,
    PathOrName,
    Positive,
    Section,
    Seed,
    UserPath,
    forbid_unused,
)
from agentgrpo.kernels.objective import SPECIAL, readers

BRANCHING = ("probability", "beam_size", "entropy_weight", "entropy_tokens", "top_logprobs",
             "consecutive_penalty", "budget")  # fmt: skip


def _reads_a_file(config: TrainConfig) -> bool:
    return bool({config.data.train, config.data.heldout_source} - {"word_problems", "env"})


NEEDS: tuple[Need, ...] = (
    ("learner.lora.alpha learner.lora.target_modules",
     "learner.lora.rank above 0", lambda c: c.learner.lora.rank),
    ("reward.on_error", "reward.functions", lambda c: c.reward.functions),
    ("rollout.max_refills", "rollout.refill_below above 0",
     lambda c: c.rollout.refill_below or not c.rollout.max_refills),
    (" ".join(f"rollout.branching.{key}" for key in BRANCHING) + " loss.branch_credit",
     "rollout.branching.initial above 0", lambda c: c.rollout.branching.initial),
    ("rollout.branching.aepo_beta", 'rollout.branching.budget = "aepo"',
     lambda c: c.rollout.branching.budget == "aepo"),
    ("env.user.max_replies", "a mode but 'nobody'", lambda c: c.env.user.mode != "nobody"),
    ("sandbox.host_cache sandbox.host_budget", "sandbox.host_tools",
     lambda c: c.sandbox.host_tools),
    ("data.question data.answer data.drop_last_message data.id data.columns",
     "a file as data.train or data.heldout", _reads_a_file),
    ("loss.kl_estimator loss.use_bias_correction_kl", "loss.beta above 0",
     lambda c: c.loss.beta),
    ("loss.vllm_importance_sampling_clip_max loss.vllm_importance_sampling_clip_min",
     "loss.vllm_importance_sampling_correction", lambda c: c.loss.corrects),
    *((f"loss.{key}", f"loss.loss_type = {' or '.join(readers(key))}",
       lambda c, key=key: key in c.loss.row.reads) for key in SPECIAL),
    ("evaluation.top_p evaluation.top_k",
     "evaluation.temperature above 0 (measures.temperature, of `agentgrpo evaluate`)",
     lambda c: c.draws_heldout),
)  # fmt: skip
"""What does nothing alone."""


class TrainConfig(Section):
    """A whole run."""

    model: PathOrName
    """Model directory, hub name, or package:NAME for a model inside an installed package. Or the
    folder of a LoRA adapter to one, which training goes on from: learner.lora must be as it was."""
    out_dir: UserPath
    """Where checkpoints/, metrics.jsonl and rollouts.jsonl go. Created if missing."""
    steps: Positive = 200
    """Optimizer steps."""
    seed: Seed = 0
    """Of the data's order and of what is sampled."""
    save_every: Positive = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Positive = 2
    """Older ones are removed."""
    eval_every: NotNegative = 25
    """Steps between held-out evaluations besides the first and the last; 0: only those two."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where the numbers of metrics.jsonl go too, each by its own library (records/trackers.py)."""

    preflight: Literal["auto", "always", "never"] = "auto"
    """Before the first step, play through the largest forward and backward pass and one sleep, to
    learn at once what does not fit. auto: on CUDA; a CPU would swap rather than say so."""

    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    env: EnvConfig = EnvConfig()
    endpoints: dict[str, EndpointConfig] = {}
    """Models by name, which play customers (env.options.mode), sum up (env.options.summary) and
    judge, and searches. Two need no section: `policy`, the run's own model, and `reference`, the
    same without its LoRA adapter."""
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sandbox: SandboxConfig = SandboxConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig = TeacherConfig()

    def on(self, device: str) -> TrainConfig:
        """What the device decides, decided: rollout.deterministic, engine.async_scheduling."""
        waits = self.rollout.deterministic in (True, device)
        ahead = self.engine.async_scheduling
        if ahead is None:
            ahead = device == "cuda" and not waits
        return self.model_copy(
            update={
                "rollout": self.rollout.model_copy(update={"deterministic": waits}),
                "engine": self.engine.model_copy(update={"async_scheduling": ahead}),
            }
        )

    def seed_of(self, step: int, refill: int) -> int:
        """The seed of what is sampled in a step: another in each, the same in every repetition."""
        return (self.seed * 1_000_003 + step) * 101 + refill

    @property
    def credited(self) -> LossConfig:
        """The loss, with who earns a reward of a line decided by who plays."""
        if self.loss.span_credit != "auto":
            return self.loss
        summed = self.loss.multi_objective_aggregation == "sum_then_normalize"
        console = summed and (self.agent.kind == "repl" or self.env.kind == "console")
        return self.loss.model_copy(update={"span_credit": "turn" if console else "rollout"})

    @pydantic.field_validator("endpoints")
    @classmethod
    def _new_names(cls, endpoints: dict[str, EndpointConfig]) -> dict[str, EndpointConfig]:
        for name in OWN_MODELS:
            if name in endpoints:
                raise ValueError(f"endpoints.{name}: the name is that of one of the run's own")
        return endpoints

    @property
    def draws_heldout(self) -> bool:
        """Whether held-out tasks are sampled from a distribution, and not greedily."""
        return self.evaluation.temperature > 0

    @pydantic.model_validator(mode="after")
    def _does_something(self) -> TrainConfig:
        forbid_unused(self, NEEDS)
        return self

    @pydantic.model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        limit = self.rollout.call_timeout_s
        if limit is not None and limit <= self.sandbox.timeout_s:
            raise ValueError(
                f"rollout.call_timeout_s must be above sandbox.timeout_s "
                f"{self.sandbox.timeout_s:g}, got {limit:g}"
            )
        if self.rollout.max_turn_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"rollout.max_turn_tokens must be below engine.max_model_len "
                f"{self.engine.max_model_len}, got {self.rollout.max_turn_tokens}"
            )
        for key in ("cost_per_wall_s", "cost_per_cpu_s"):
            if getattr(self.reward, key) and self.rollout.deterministic is not False:
                raise ValueError(
                    f"reward.{key} {getattr(self.reward, key)} and rollout.deterministic "
                    f"{self.rollout.deterministic!r} exclude each other: a reward of measured time "
                    "does not repeat"
                )
        if self.loss.num_mini_batches > self.rollout.tasks_per_step:
            raise ValueError(
                f"loss.num_mini_batches must be at most rollout.tasks_per_step "
                f"{self.rollout.tasks_per_step}, got {self.loss.num_mini_batches}"
            )
        if self.learner.lora.rank and self.learner.trained_layers is not None:
            raise ValueError(
                f"learner.trained_layers {self.learner.trained_layers} and learner.lora.rank "
                "exclude each other; learner.trained_layers=none unsets it"
            )
        if self.learner.lora.rank and self.engine.sleep_level == 2:
            raise ValueError(
                "engine.sleep_level 2 drops weights that an adapter does not hold: use 1 with "
                f"learner.lora.rank {self.learner.lora.rank}"
            )
        if self.learner.max_tokens < self.engine.max_model_len:
            raise ValueError(
                f"learner.max_tokens must hold the longest rollout, engine.max_model_len "
                f"{self.engine.max_model_len}, got {self.learner.max_tokens}"
            )
        return self
