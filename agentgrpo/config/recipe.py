"""The config sections of a recipe, in addition to those of a training run.

One file contains a whole recipe: data flywheel -> fine-tuning -> curriculum -> measures. The
sections of a run (model, agent, environment, engine, learner) apply to all of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from agentgrpo.config import (
    NO_REFERENCE,
    OWN_MODELS,
    NotNegative,
    Positive,
    Section,
    TrainConfig,
)
from agentgrpo.config.section import Need, PathOrName, Rule, forbid_unused, require_rules

NEEDS: tuple[Need, ...] = (
    ("curriculum.by_kind", 'curriculum.selection = "pareto"',
     lambda c: c.curriculum.selection == "pareto"),
)  # fmt: skip
RULES: tuple[Rule, ...] = (
    ("curriculum.epochs", "none with curriculum.steps = {c.curriculum.steps}",
     lambda c: c.curriculum.epochs is None or "steps" not in c.curriculum.model_fields_set),
    ("measures.pass_k", "at most measures.attempts = {c.measures.attempts}",
     lambda c: max(c.measures.pass_k, default=0) <= c.measures.attempts),
    ("measures.temperature", "above 0 with measures.attempts = {c.measures.attempts}",
     lambda c: c.measures.attempts == 1 or c.measures.temperature > 0),
    ("measures.judge", "an endpoint if and only if measures.quality = 'judge'",
     lambda c: (c.measures.quality == "judge") == bool(c.measures.judge)),
)  # fmt: skip


class FlywheelConfig(Section):
    """Generates, repairs and selects trajectories (recipe/flywheel.py).

    The generator, which plays and continues rollouts, is the run's own model: its tokens are
    trained on.
    """

    tasks: Positive = 64
    """Number of training tasks, from the start of the stream."""
    reflector: str = "policy"
    """Endpoint that analyses a flawed step and writes a new one."""
    critic: str = "policy"
    """Endpoint that finds redundant and flawed steps and rewrites thoughts."""
    rounds: NotNegative = 3
    """How often a trajectory of a question's buffer is selected and changed."""
    operators: tuple[
        Literal["fresh", "redundant", "refinement", "reflection", "step_hint", "trajectory_hint"],
        ...,
    ] = ("fresh", "redundant", "refinement", "reflection", "step_hint", "trajectory_hint")
    """Changes that are made: the first three to a correct trajectory, the last three to a wrong
    one."""
    step_hints: tuple[str, ...] = ("Wait, I should check this step with a tool. ",)
    """One of them, chosen at random, starts the turn after the flawed step."""
    trajectory_hints: tuple[str, ...] = ("Wait, I should check this answer with a tool. ",)
    """One of them, chosen at random, replaces a wrong answer."""
    marks: Annotated[tuple[str, ...], Field(min_length=1)] = ("<code>", "Answer:")
    """A turn's action starts with the first of these; the text before it is the thought."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    critic_temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    max_reply_tokens: Positive = 512
    """Of the reflector and the critic."""
    concurrency: Positive = 16
    """Questions in work at once."""
    extra_turns: NotNegative = 2
    """Turns that a repaired trajectory may have beyond rollout.max_turns."""
    keep: Positive = 2
    """Trajectories of a question for the fine-tuning set: correct, well formed, all different;
    those with the fewest tool calls, then the fewest tokens."""


class SftConfig(Section):
    """Fine-tuning (recipe/sft.py)."""

    data: PathOrName | None = None
    """A .jsonl file of rollouts (a run's rollouts.jsonl, the flywheel's sft.jsonl), or of
    conversations: {"messages": [...]}. None: sft.jsonl in out_dir/flywheel."""
    keep: Literal["all", "solved"] = "all"
    """Of rollouts: all, or the solved ones (reward.solved_at, else the part `solved`, else the part
    `answer` above 0)."""
    epochs: Positive = 3
    batch_size: Positive = 16
    """Examples per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """None: learner.learning_rate."""


class CurriculumConfig(Section):
    """Stages of rollout -> selection -> training (recipe/curriculum.py)."""

    start: Literal["model", "sft"] = "model"
    """Start of the first stage: config.model, or the last checkpoint in out_dir/sft."""
    stages: Positive = 3
    candidates: Positive = 256
    """Training tasks that a stage plays before it trains, different ones in each stage."""
    group_size: Annotated[int, Field(ge=2, le=10**6)] = 8
    """Rollouts of each candidate."""
    select: Positive = 64
    """Candidates to train on; fewer if `selection` leaves fewer."""
    selection: Literal["pareto", "random"] = "pareto"
    """pareto: the most useful ones of those with both correct and wrong rollouts
    (recipe/pareto.py). random: any, as a baseline."""
    chunk: Positive = 32
    """Candidates played between two writes to disk, which a kill can lose."""
    steps: Annotated[tuple[Positive, ...], Field(min_length=1)] = (100,)
    """Optimizer steps of each stage; the last number applies to all further stages."""
    epochs: Positive | None = None
    """Instead of steps: passes of a stage over its selection, with rollout.tasks_per_step tasks per
    step, rounded up."""
    by_kind: bool = False
    """Select separately for each kind of task (spec["kind"]), so that tasks with graded rewards do
    not lose to those that are right or wrong, whose rewards vary more."""


class MeasuresConfig(Section):
    """Measures of `agentgrpo evaluate` (recipe/measures.py)."""

    quality: Literal["answer", "f1", "exact", "math", "judge"] = "answer"
    """answer: the reward's part of that name; f1, exact, math: the answer compared with
    spec["answer"]; judge: as the model `judge` decides."""
    judge: str = ""
    """Endpoint for quality = "judge"."""
    conciseness_judge: str = ""
    """Endpoint that identifies redundant tool calls; "": conciseness is not measured."""
    attempts: Positive = 1
    """Rollouts of each held-out task."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 is greedy."""
    pass_k: tuple[Positive, ...] = ()
    """pass@k and pass^k for these k, at most `attempts`."""


class RecipeConfig(TrainConfig):
    """Settings of a recipe."""

    flywheel: FlywheelConfig = FlywheelConfig()
    sft: SftConfig = SftConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    measures: MeasuresConfig = MeasuresConfig()

    @property
    def draws_heldout(self) -> bool:
        return super().draws_heldout or self.measures.temperature > 0

    @pydantic.model_validator(mode="after")
    def _fits_the_recipe(self) -> RecipeConfig:
        forbid_unused(self, NEEDS)
        require_rules(self, RULES)
        used = {
            "flywheel.reflector": self.flywheel.reflector,
            "flywheel.critic": self.flywheel.critic,
            "measures.judge": self.measures.judge,
            "measures.conciseness_judge": self.measures.conciseness_judge,
        }
        for key, name in used.items():
            if name and name not in (*OWN_MODELS, *self.endpoints):
                known = ", ".join([*OWN_MODELS, *self.endpoints])
                raise ValueError(f"{key}: expected an endpoint ({known}), got {name!r}")
            if name in self.endpoints and self.endpoints[name].kind == "retriever":
                raise ValueError(f"{key}: expected a model, got the retriever {name!r}")
            if name == "reference" and not self.learner.lora.rank:
                raise ValueError(f"{key}: {NO_REFERENCE}")
            is_engine = name in OWN_MODELS or (name and self.endpoints[name].kind == "engine")
            is_divided = self.engine.tensor_parallel_size > 1
            if is_engine and is_divided and key.startswith("measures."):
                raise ValueError(
                    f"{key}: {name!r} would run on one rank only, but engine.tensor_parallel_size "
                    f"is {self.engine.tensor_parallel_size}. Name an endpoint of another kind"
                )
        if "flywheel" in self.model_fields_set:
            self.require_sessions()
        return self

    def require_sessions(self) -> None:
        """Check that there are enough sandbox sessions for the flywheel."""
        if 3 * self.flywheel.concurrency > self.sandbox.max_live:
            raise ValueError(
                "flywheel.concurrency: expected at most a third of sandbox.max_live = "
                f"{self.sandbox.max_live}, since each question plays up to three trajectories at "
                f"once, got {self.flywheel.concurrency}"
            )

    def of_run(self, **changes: Any) -> TrainConfig:
        """The config of one training run of the recipe, with changed settings."""
        table = self.model_dump(include=set(TrainConfig.model_fields), exclude_unset=True)
        if not self.evaluation.temperature:  # then only `agentgrpo evaluate` uses these
            for key in ("top_p", "top_k"):
                table.get("evaluation", {}).pop(key, None)
        for dotted, value in changes.items():
            *parents, leaf = dotted.split(".")
            section = table
            for parent in parents:
                section = section.setdefault(parent, {})
            section[leaf] = value
        return TrainConfig.model_validate(table)
