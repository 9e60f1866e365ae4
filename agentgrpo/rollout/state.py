"""The state of a rollout while it is played (play.py)."""

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
    """Its tokens; `rollout` has the same lists of segments."""
    budget: RolloutBudget
    attempt: int
    since: float
    """When it began to wait for what it waits for: on the clock of time.perf_counter()."""
    history: list[Step] = field(default_factory=list)
    """What its episode was asked and answered, where a branch might need it."""
    after_tool: bool = False
    """The turn that is being sampled follows a tool's answer."""
    first_entropy: float | None = None
    consecutive: int = 0
    """Branchings in a row that led here."""
    messages: list[Message] = field(default_factory=list)
    """The conversation so far, where it is rendered again for each turn."""
    message_start: int = 0
    """Where in the row the policy's own message begins whose last turn is being sampled."""
    thought: str = ""
    """What opened the thought in which the turn that is being sampled begins; "": in none."""
    roles: list[str] = field(default_factory=list)
    """Those of the messages before the turn that is being sampled."""
    asked_for: Action | None = None
    """The policy's action for which the engine is speaking in a second role."""

    @classmethod
    def behind(
        cls, prompt: Int32, messages: Sequence[Message] = (), message_start: int = 0, *,
        pending: QueuedRollout, task: Task, config: RolloutConfig, limit: int,
    ) -> RunningRollout:  # fmt: skip
        """One that begins alone, whose episode is yet to be made; `limit`: the engine's."""
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

    def fork(self, parent: int, transcript: Transcript) -> RunningRollout:
        """Another at the same place, whose episode is yet to be brought there."""
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

    def took(self, name: str) -> None:
        """Count the time since it was last asked where its time went."""
        now, timings = time.perf_counter(), self.rollout.timings
        timings[name] = timings.get(name, 0.0) + now - self.since
        self.since = now


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRollout:
    """A rollout that waits for its place."""

    index: int
    attempt: int = 0
    fork: RunningRollout | None = None
    """Where it branches off; None: it begins alone."""
    copy: Any = None
    """Of its parent's episode; None: the parent's actions are repeated."""
    since: float = field(default_factory=lambda: time.perf_counter())
    """When it was queued."""
