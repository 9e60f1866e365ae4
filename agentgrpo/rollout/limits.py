"""Limits of one rollout, how it ends when one is used up, and how training treats each end.

No token passes a limit: what fits exactly is kept, what is one over is not, and a budget of zero is
a budget. The policy sees one message about a limit of calls, so that it can still answer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentgrpo.actions import Action, CallTools, RunCode
from agentgrpo.config import RolloutConfig
from agentgrpo.types import Status, Treatment

TREATMENTS: Mapping[Status, Treatment] = {
    Status.COMPLETED: Treatment.TRAIN,
    # the policy can learn to be shorter, to ask for less and to keep to the form: it is told so by
    # its reward; "mask" is DAPO's overlong filtering (arXiv:2503.14476, 3.4)
    Status.TRUNCATED_LENGTH: Treatment.TRAIN,
    Status.TRUNCATED_TURNS: Treatment.TRAIN,
    Status.TRUNCATED_CALLS: Treatment.TRAIN,
    Status.MALFORMED: Treatment.TRAIN,
    # how long it took is not the policy's doing alone
    Status.TIMED_OUT: Treatment.DROP,
    Status.INFRA_ERROR: Treatment.RETRY,
}
"""What training makes of a rollout by how it ended; `rollout.treatment` overrides it."""


def treatment_of(status: Status, config: RolloutConfig) -> Treatment:
    """What the config, or else TREATMENTS, says of an end."""
    return config.treatment.get(status, TREATMENTS[status])


def called(action: Action) -> tuple[str, ...]:
    """The tools that an action calls, by name; code goes by the name of its language.

    >>> called(RunCode("1"))
    ('python',)
    """
    if isinstance(action, RunCode):
        return (action.language,)
    if isinstance(action, CallTools):
        return tuple(call.name for call in action.calls)
    return ()


@dataclass(slots=True)
class RolloutBudget:
    """What one rollout has used so far. Tokens are counted by the caller, who holds them."""

    config: RolloutConfig
    prompt_length: int
    max_model_len: int
    turns: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    malformed: int = 0
    """Malformed actions since the last one that was not."""
    refusals: int = 0
    """Actions that asked for more calls than were left."""
    started: float = field(default_factory=lambda: time.monotonic())

    @property
    def max_length(self) -> int:
        """Tokens that the rollout may have, its prompt included."""
        response = self.config.max_response_tokens
        if response is None:
            return self.max_model_len
        return min(self.max_model_len, self.prompt_length + response)

    def end(self, length: int) -> Status | None:
        """Why no further turn may be sampled after `length` tokens, if that is so."""
        limit = self.config.max_malformed
        if limit is not None and self.malformed >= limit:
            return Status.MALFORMED
        if self.refusals > 1:
            return Status.TRUNCATED_CALLS
        if self.turns >= self.config.max_turns:
            return Status.TRUNCATED_TURNS
        if length >= self.max_length:
            return Status.TRUNCATED_LENGTH
        return Status.TIMED_OUT if self.overdue() else None

    def turn_tokens(self, length: int) -> int:
        """How many tokens the next turn may have after `length` tokens."""
        return min(self.config.max_turn_tokens, self.max_length - length)

    def fits(self, length: int) -> bool:
        """Whether a rollout may have `length` tokens."""
        return length <= self.max_length

    def overdue(self) -> bool:
        """Whether its wall-clock time is up."""
        seconds = self.config.max_seconds
        return seconds is not None and time.monotonic() - self.started >= seconds

    def refuse(self, action: Action) -> str | None:
        """Count an action's calls, or say why it may not make them: then none is made.

        Code that hands in the answer is made after the last call too, and counts as refused.
        """
        names = called(action)
        refusal = self._refusal(names)
        if refusal is not None:
            self.refusals += 1
            if not (isinstance(action, RunCode) and action.submits):
                return refusal
        self.calls += Counter(names)
        return None

    def _refusal(self, names: tuple[str, ...]) -> str | None:
        wanted = Counter(names)
        for name, count in wanted.items():
            left = self.config.max_calls_of.get(name, count + self.calls[name]) - self.calls[name]
            if count > left:
                return _no_more(left, f"{name} ", count)
        total = self.config.max_tool_calls
        left = total - self.calls.total() if total is not None else len(names)
        return _no_more(left, "", len(names)) if len(names) > left else None


def _no_more(left: int, which: str, asked: int) -> str:
    left = max(0, left)  # where a submission was one more
    return (
        f"Error: not run. {left} {which}call{'' if left == 1 else 's'} left, {asked} asked for. "
        "Answer with what you have."
    )
