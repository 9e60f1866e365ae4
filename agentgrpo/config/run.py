"""The config of a training run, and the checks across its sections."""

from __future__ import annotations

import math
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
    Rule,
    Section,
    Seed,
    UserPath,
    forbid_unused,
    require_rules,
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
    ("teacher.decay", "teacher.feedback", lambda c: c.teacher.feedback or not c.teacher.decay),
    ("teacher.clip", "teacher.topk = 0", lambda c: not c.teacher.topk),
)  # fmt: skip
"""Settings that have no effect without another one."""
RULES: tuple[Rule, ...] = (
    ("engine.weights", "'copy' with engine.sleep_level = 2, which drops the weights",
     lambda c: c.engine.sleep_level == 1 or c.engine.weights == "copy"),
    ("engine.weights", "'copy' with engine.tensor_parallel_size = {c.engine.tensor_parallel_size}, "
     "which divides the weights",
     lambda c: c.engine.tensor_parallel_size == 1 or c.engine.weights != "shared"),
    ("engine.sleep_level", "1 with learner.lora.rank, since 2 drops weights that the adapter does "
     "not contain", lambda c: c.engine.sleep_level == 1 or not c.learner.lora.rank),
    ("rollout.treatment.infra_error", "'drop' or 'retry', since the machine failed, not the policy",
     lambda c: c.rollout.treatment.get("infra_error") not in ("train", "mask")),
    ("rollout.tasks_per_step", "at most 1,000,000 rollouts per step with rollout.group_size = "
     "{c.rollout.group_size}", lambda c: c.rollout.tasks_per_step * c.rollout.group_size <= 10**6),
    ("rollout.branching.initial", "0 with rollout.history = 'render', since branches share "
     "appended tokens",
     lambda c: c.rollout.history == "append" or not c.rollout.branching.initial),
    ("rollout.branching.initial", "below rollout.group_size = {c.rollout.group_size}",
     lambda c: c.rollout.branching.initial < c.rollout.group_size),
    ("rollout.call_timeout_s", "above sandbox.timeout_s = {c.sandbox.timeout_s:g}",
     lambda c: (c.rollout.call_timeout_s or math.inf) > c.sandbox.timeout_s),
    ("rollout.max_turn_tokens", "below engine.max_model_len = {c.engine.max_model_len}",
     lambda c: c.rollout.max_turn_tokens < c.engine.max_model_len),
    ("data.heldout", "another source than 'split' with data.train = 'word_problems', which is "
     "endless", lambda c: (c.data.train, c.data.heldout) != ("word_problems", "split")),
    *((f"reward.{key}", "0 with rollout.deterministic = {c.rollout.deterministic!r}, since "
       "measured time differs from run to run",
       lambda c, key=key: not (getattr(c.reward, key) and c.rollout.deterministic))
      for key in ("cost_per_wall_s", "cost_per_cpu_s")),
    ("learner.trained_layers", "none with learner.lora.rank (learner.trained_layers=none unsets "
     "it)", lambda c: c.learner.trained_layers is None or not c.learner.lora.rank),
    ("learner.max_tokens", "at least engine.max_model_len = {c.engine.max_model_len}, the longest "
     "rollout", lambda c: c.learner.max_tokens >= c.engine.max_model_len),
    ("loss.num_mini_batches", "at most rollout.tasks_per_step = {c.rollout.tasks_per_step}",
     lambda c: c.loss.num_mini_batches <= c.rollout.tasks_per_step),
    *((f"loss.{key}", f"{value!r} with multi_objective_aggregation = 'normalize_then_sum'",
       lambda c, key=key, value=value: c.loss.multi_objective_aggregation == "sum_then_normalize"
       or getattr(c.loss, key) in (value, "auto"))
      for key, value in (("span_credit", "rollout"), ("scale_rewards", "group"))),
    ("teacher.feedback", "none with teacher.model", lambda c: not (c.teacher.model
                                                                   and c.teacher.feedback)),
)  # fmt: skip
"""What a setting must be because of others."""


class TrainConfig(Section):
    """Top-level settings of a training run."""

    model: PathOrName
    """Model directory, Hub name, or package:NAME for a model inside an installed package. Or the
    folder of a LoRA adapter, whose training continues; learner.lora must be the adapter's."""
    out_dir: UserPath
    """Folder for checkpoints/, metrics.jsonl and rollouts.jsonl. Created if missing."""
    steps: Positive = 200
    """Optimizer steps."""
    seed: Seed = 0
    """Seed of the data's order and of sampling."""
    save_every: Positive = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints to keep; older ones are deleted."""
    eval_every: NotNegative = 25
    """Steps between held-out evaluations, in addition to the first and the last; 0: only those two.
    """
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers that receive the metrics too (records/trackers.py). Each needs its library."""

    preflight: Literal["auto", "always", "never"] = "auto"
    """Before the first step, run the largest forward and backward pass and one sleep, to find out
    at once whether they fit in memory. auto: on CUDA; a CPU would swap instead of failing."""

    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    env: EnvConfig = EnvConfig()
    endpoints: dict[str, EndpointConfig] = {}
    """By name: models that play users, summarise (env.options.summary) or judge, and search
    servers. Two names need no section: `policy`, the run's own model, and `reference`, the same
    without its LoRA adapter."""
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sandbox: SandboxConfig = SandboxConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig = TeacherConfig()

    def on(self, device: str) -> TrainConfig:
        """Resolve the settings that depend on the device: deterministic and async_scheduling."""
        deterministic = self.rollout.deterministic in (True, device)
        async_scheduling = self.engine.async_scheduling
        if async_scheduling is None:
            async_scheduling = device == "cuda" and not deterministic
        return self.model_copy(
            update={
                "rollout": self.rollout.model_copy(update={"deterministic": deterministic}),
                "engine": self.engine.model_copy(update={"async_scheduling": async_scheduling}),
            }
        )

    def seed_of(self, step: int, refill: int) -> int:
        """The sampling seed of a step's round, different for each."""
        return (self.seed * 1_000_003 + step) * 101 + refill

    @property
    def credited(self) -> LossConfig:
        """The loss with span_credit "auto" resolved: "turn" at a console, else "rollout"."""
        if self.loss.span_credit != "auto":
            return self.loss
        is_sum = self.loss.multi_objective_aggregation == "sum_then_normalize"
        is_console = self.agent.kind == "repl" or self.env.kind == "console"
        credit = "turn" if is_sum and is_console else "rollout"
        return self.loss.model_copy(update={"span_credit": credit})

    @pydantic.field_validator("endpoints")
    @classmethod
    def _new_names(cls, endpoints: dict[str, EndpointConfig]) -> dict[str, EndpointConfig]:
        for name in OWN_MODELS:
            if name in endpoints:
                raise ValueError(f"endpoints.{name}: the name is reserved for the run's own model")
        return endpoints

    @property
    def draws_heldout(self) -> bool:
        """Whether held-out tasks are sampled, not decoded greedily."""
        return self.evaluation.temperature > 0

    @pydantic.model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        forbid_unused(self, NEEDS)
        require_rules(self, RULES)
        return self
