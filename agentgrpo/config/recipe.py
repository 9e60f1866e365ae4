"""The sections that a recipe has besides those of a training run (config/).

One file holds a whole recipe: data flywheel -> fine-tuning -> curriculum -> measures. What they
share (model, agent, environment, engine, learner) is said once, in the sections of a run.
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
from agentgrpo.config.section import Need, PathOrName, forbid_unused

CURRICULUM_NEEDS: tuple[Need, ...] = (
    ("by_kind", 'curriculum.selection = "pareto"', lambda c: c.selection == "pareto"),
)  # fmt: skip


class FlywheelConfig(Section):
    """How trajectories are made, repaired and kept (recipe/flywheel.py).

    The generator, which plays and continues, is the run's own model: its tokens are trained on.
    """

    tasks: Positive = 64
    """Training tasks that are worked on, from the start of the stream."""
    reflector: str = "policy"
    """Endpoint that analyses a flawed step and writes a new one."""
    critic: str = "policy"
    """Endpoint that finds redundant and flawed steps and rewrites thoughts."""
    rounds: NotNegative = 3
    """How often a trajectory is chosen from a question's buffer and worked on."""
    operators: tuple[
        Literal["fresh", "redundant", "refinement", "reflection", "step_hint", "trajectory_hint"],
        ...,
    ] = ("fresh", "redundant", "refinement", "reflection", "step_hint", "trajectory_hint")
    """What is done: the first three to a right trajectory, the last three to a wrong one."""
    step_hints: tuple[str, ...] = ("Wait, I should check this step with a tool. ",)
    """One is chosen at random and begins the turn after the flawed step."""
    trajectory_hints: tuple[str, ...] = ("Wait, I should check this answer with a tool. ",)
    """One is chosen at random and takes the place of a wrong answer."""
    marks: Annotated[tuple[str, ...], Field(min_length=1)] = ("<code>", "Answer:")
    """What a turn does begins with the first of these; the thought is what comes before."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    critic_temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    max_reply_tokens: Positive = 512
    """Of the reflector and the critic."""
    concurrency: Positive = 16
    """Questions worked on at once."""
    extra_turns: NotNegative = 2
    """Turns that a repaired trajectory may have beyond rollout.max_turns."""
    keep: Positive = 2
    """Trajectories of a question that go into the fine-tuning set: right, well formed, all
    different; those with the fewest tool calls, then the fewest tokens."""


class SftConfig(Section):
    """Fine-tuning (recipe/sft.py)."""

    data: PathOrName | None = None
    """A .jsonl file of rollouts (a run's rollouts.jsonl, the flywheel's sft.jsonl), or of
    conversations: {"messages": [...]}. Left out: sft.jsonl in out_dir/flywheel."""
    keep: Literal["all", "solved"] = "all"
    """Of rollouts: all, or those that are solved (reward.solved_at, else a part `solved`, else
    `answer` above 0)."""
    epochs: Positive = 3
    batch_size: Positive = 16
    """Examples of one optimizer step."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Left out: learner.learning_rate."""


class CurriculumConfig(Section):
    """Stages of rollout -> selection -> training from the last one (recipe/curriculum.py)."""

    start: Literal["model", "sft"] = "model"
    """What the first stage starts from: config.model, or the last checkpoint in out_dir/sft."""
    stages: Positive = 3
    candidates: Positive = 256
    """Training tasks that a stage's first policy plays, other ones in each stage."""
    group_size: Annotated[int, Field(ge=2, le=10**6)] = 8
    """Rollouts of each candidate."""
    select: Positive = 64
    """Candidates that are trained on; all that `selection` leaves if fewer."""
    selection: Literal["pareto", "random"] = "pareto"
    """pareto: of those with both right and wrong rollouts the ones that teach most
    (recipe/pareto.py). random: any, which is what the other is to be compared with."""
    chunk: Positive = 32
    """Candidates played between two records on disk: what a kill costs at most."""
    steps: Annotated[tuple[Positive, ...], Field(min_length=1)] = (100,)
    """Optimizer steps of each stage; the last number stands for all further ones."""
    epochs: Positive | None = None
    """In place of steps: how often a stage goes through what it selected, rollout.tasks_per_step of
    them a step, the last step rounded up."""
    by_kind: bool = False
    """Kinds of tasks (spec["kind"]) are selected apart, so that graded ones do not lose to those
    that are right or wrong, whose correctness varies more."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> CurriculumConfig:
        forbid_unused(self, CURRICULUM_NEEDS)
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"curriculum.steps {list(self.steps)} and curriculum.epochs {self.epochs} exclude "
                "each other"
            )
        return self


class MeasuresConfig(Section):
    """What `agentgrpo evaluate` reports (recipe/measures.py)."""

    quality: Literal["answer", "f1", "exact", "math", "judge"] = "answer"
    """answer: the reward's part of that name; f1, exact, math: the answer against
    spec["answer"]; judge: by the model `judge`."""
    judge: str = ""
    """Endpoint for quality = "judge"."""
    conciseness_judge: str = ""
    """Endpoint that votes on redundant tool calls; empty: conciseness is not measured."""
    attempts: Positive = 1
    """Rollouts of each held-out task."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 is greedy."""
    pass_k: tuple[Positive, ...] = ()
    """pass@k and pass^k for these k, at most `attempts`."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> MeasuresConfig:
        if self.pass_k and max(self.pass_k) > self.attempts:
            raise ValueError(
                f"measures.pass_k must be at most measures.attempts {self.attempts}, "
                f"got {max(self.pass_k)}"
            )
        if self.attempts > 1 and self.temperature == 0:
            raise ValueError("measures.attempts above 1 need measures.temperature above 0")
        if (self.quality == "judge") != bool(self.judge):
            raise ValueError("measures.judge: the endpoint of quality = 'judge', and of no other")
        return self


class RecipeConfig(TrainConfig):
    """A whole recipe."""

    flywheel: FlywheelConfig = FlywheelConfig()
    sft: SftConfig = SftConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    measures: MeasuresConfig = MeasuresConfig()

    @property
    def draws_heldout(self) -> bool:
        return super().draws_heldout or self.measures.temperature > 0

    @pydantic.model_validator(mode="after")
    def _names_its_endpoints(self) -> RecipeConfig:
        used = {
            "flywheel.reflector": self.flywheel.reflector,
            "flywheel.critic": self.flywheel.critic,
            "measures.judge": self.measures.judge,
            "measures.conciseness_judge": self.measures.conciseness_judge,
        }
        for key, name in used.items():
            if name and name not in (*OWN_MODELS, *self.endpoints):
                known = ", ".join([*OWN_MODELS, *self.endpoints])
                raise ValueError(f"{key}: no endpoint {name!r}; there are: {known}")
            if name in self.endpoints and self.endpoints[name].kind == "retriever":
                raise ValueError(f"{key}: {name!r} finds documents, and writes no text")
            if name == "reference" and not self.learner.lora.rank:
                raise ValueError(f"{key}: {NO_REFERENCE}")
            own = name in OWN_MODELS or (name and self.endpoints[name].kind == "engine")
            divided = self.engine.tensor_parallel_size > 1
            if own and divided and key.startswith("measures."):
                raise ValueError(
                    f"{key}: {name!r} is asked on one rank alone, and engine.tensor_parallel_size "
                    f"is {self.engine.tensor_parallel_size}: name an endpoint"
                )
        if "flywheel" in self.model_fields_set:
            self.require_sessions()
        return self

    def require_sessions(self) -> None:
        """The flywheel has sandbox sessions enough; settings that it never reads are not judged."""
        if 3 * self.flywheel.concurrency > self.sandbox.max_live:
            raise ValueError(
                f"flywheel.concurrency: {self.flywheel.concurrency} questions play up to three "
                f"trajectories each at once, sandbox.max_live is {self.sandbox.max_live}"
            )

    def of_run(self, **changes: Any) -> TrainConfig:
        """The settings of one training run of the recipe, `section.key` changed as given."""
        table = self.model_dump(include=set(TrainConfig.model_fields), exclude_unset=True)
        if not self.evaluation.temperature:  # `agentgrpo evaluate` alone reads these
            for key in ("top_p", "top_k"):
                table.get("evaluation", {}).pop(key, None)
        for dotted, value in changes.items():
            *parents, leaf = dotted.split(".")
            section = table
            for parent in parents:
                section = section.setdefault(parent, {})
            section[leaf] = value
        return TrainConfig.model_validate(table)
