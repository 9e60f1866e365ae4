"""The state of rollouts that are played (play.py) or queued."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentgrpo.actions import Action, Message
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.base import AnyEpisode
from agentgrpo.envs.runner import NOTHING
from agentgrpo.rollout.branch import Step
from agentgrpo.rollout.limits import RolloutBudget
from agentgrpo.rollout.transcript import Transcript
from agentgrpo.types import COUNTS, Int32, Rollout, Status, Task


@dataclass(slots=True, kw_only=True, eq=False)
class RunningRollout:
    """A rollout being played."""

    rollout: Rollout
    episode: AnyEpisode
    transcript: Transcript
    """Its tokens. `rollout` refers to the same lists of segments."""
    budget: RolloutBudget
    attempt: int
    since: float
    """Start of the current wait, by time.perf_counter()."""
    history: list[Step] = field(default_factory=list)
    """The episode's steps, if a branch might have to replay them."""
    after_tool: bool = False
    """The current turn follows a tool's result."""
    first_entropy: float | None = None
    consecutive: int = 0
    """Number of branchings in a row that led here."""
    messages: list[Message] = field(default_factory=list)
    """The conversation so far, with rollout.history = "render"."""
    message_start: int = 0
    """Position in the row where the policy's current message begins."""
    thought: str = ""
    """Opening tag of the thought that the current turn continues; "" if none."""
    roles: list[str] = field(default_factory=list)
    """Roles of the messages before the current turn."""
    asked_for: Action | None = None
    """The policy's action for which the engine is sampling a second role."""

    @classmethod
    def from_prompt(
        cls, prompt: Int32, messages: Sequence[Message] = (), message_start: int = 0, *,
        pending: QueuedRollout, task: Task, config: RolloutConfig, limit: int,
    ) -> RunningRollout:  # fmt: skip
        """A rollout without a parent and without its episode; `limit`: engine.max_model_len."""
        transcript = Transcript(prompt)
        rollout = Rollout(
            task=task,
            segments=transcript.segments,
            closed_rows=transcript.closed_rows,
            status=Status.COMPLETED,
            stats=dict.fromkeys(COUNTS, 0.0),
        )
        return cls(
            rollout=rollout,
            episode=NOTHING,
            transcript=transcript,
            budget=RolloutBudget(config, len(prompt), limit),
            attempt=pending.attempt,
            since=pending.since,
            messages=[*messages],
            message_start=message_start,
            roles=[message["role"] for message in messages],
        )

    def fork(self, parent: int) -> RunningRollout:
        """A branch at the same position, whose episode does not have that state yet."""
        transcript = Transcript.of(self.rollout.segments)
        rollout = Rollout(
            task=self.rollout.task,
            segments=transcript.segments,
            closed_rows=transcript.closed_rows,
            status=Status.COMPLETED,
            parent=parent,
            forked_at=len(transcript),
            stats=dict(self.rollout.stats),
            span_rewards=list(self.rollout.span_rewards),
            turns=list(self.rollout.turns),
            feedback=list(self.rollout.feedback),
            tool_messages=list(self.rollout.tool_messages),
        )
        return replace(
            self, rollout=rollout, transcript=transcript, attempt=0, since=time.perf_counter(),
            budget=replace(self.budget, calls=self.budget.calls.copy()), history=list(self.history),
            after_tool=True, messages=[], roles=list(self.roles),
        )  # fmt: skip

    def add_time(self, name: str) -> None:
        now, timings = time.perf_counter(), self.rollout.timings
        timings[name] = timings.get(name, 0.0) + now - self.since
        self.since = now


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRollout:
    """A rollout in the queue."""

    index: int
    attempt: int = 0
    fork: RunningRollout | None = None
    """Its state at the branching point; None: it starts from the prompt."""
    copy: Any = None
    """A snapshot of the parent's episode; None: the parent's actions are replayed."""
    since: float = field(default_factory=lambda: time.perf_counter())
    """When it was queued."""
