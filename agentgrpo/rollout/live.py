"""What is known of a rollout while it is played (play.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from agentgrpo.actions import Action, Message
from agentgrpo.envs.base import AnyEpisode
from agentgrpo.rollout.branch import Step
from agentgrpo.rollout.limits import Spent
from agentgrpo.rollout.transcript import Transcript
from agentgrpo.types import Rollout, Segment, SpanReward, Turn


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """A rollout being played."""

    rollout: Rollout
    episode: AnyEpisode
    transcript: Transcript
    """Its tokens; `rollout` has the same lists of segments."""
    spent: Spent
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
    """The conversation so far, where it is rendered anew for each turn."""
    asked_for: Action | None = None
    """The policy's action for which the engine is speaking in a second role."""

    def took(self, name: str) -> None:
        """Count the time since it was last asked where its time went."""
        now, timings = time.perf_counter(), self.rollout.timings
        timings[name] = timings.get(name, 0.0) + now - self.since
        self.since = now


@dataclass(slots=True, kw_only=True, eq=False)
class Fork:
    """Where a rollout branches off: what it has in common with its parent."""

    parent: int | None
    segments: list[Segment]
    spent: Spent
    stats: dict[str, float]
    span_rewards: list[SpanReward]
    turns: list[Turn]
    history: list[Step]
    first_entropy: float | None
    consecutive: int

    @classmethod
    def of(cls, live: Live, index: int) -> Fork:
        """Off the rollout of this index, whose last segment is the tool's answer."""
        return cls(
            parent=index,
            segments=list(live.rollout.segments),
            spent=replace(live.spent, calls=live.spent.calls.copy()),
            stats=dict(live.rollout.stats),
            span_rewards=list(live.rollout.span_rewards),
            turns=list(live.rollout.turns),
            history=list(live.history),
            first_entropy=live.first_entropy,
            consecutive=live.consecutive,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """A rollout that waits for its place."""

    index: int
    attempt: int = 0
    fork: Fork | None = None
    since: float = field(default_factory=lambda: time.perf_counter())
    """When it was queued."""
