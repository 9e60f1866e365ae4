"""Limits of a rollout, the status with which it ends at each, and how training treats that.

Limits are exact: what fits exactly is kept, one token over is not, and a budget of zero is valid.
A policy that exceeds a limit of calls is warned once, so that it can still answer.
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
    # trained on: the policy can learn from its reward to be shorter, to make fewer calls and to
    # keep to the form; "mask" would be DAPO's overlong filtering (arXiv:2503.14476, 3.4)
    Status.TRUNCATED_LENGTH: Treatment.TRAIN,
    Status.TRUNCATED_TURNS: Treatment.TRAIN,
    Status.TRUNCATED_CALLS: Treatment.TRAIN,
    Status.MALFORMED: Treatment.TRAIN,
    # not the policy's doing alone
    Status.TIMED_OUT: Treatment.DROP,
    Status.INFRA_ERROR: Treatment.RETRY,
}
"""Defaults; `rollout.treatment` overrides them."""


def treatment_of(status: Status, config: RolloutConfig) -> Treatment:
    """The treatment that the config sets, else the default."""
    return config.treatment.get(status, TREATMENTS[status])


def called_tools(action: Action) -> tuple[str, ...]:
    """Names of the tools that an action calls; code counts under the name of its language."""
    if isinstance(action, RunCode):
        return (action.language,)
    if isinstance(action, CallTools):
        return tuple(call.name for call in action.calls)
    return ()


@dataclass(slots=True)
class RolloutBudget:
    """What one rollout has used so far. The caller counts the tokens."""

    config: RolloutConfig
    prompt_length: int
    max_model_len: int
    turns: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    malformed: int = 0
    """Malformed actions in a row."""
    refusals: int = 0
    """Actions with more calls than were left."""
    started: float = field(default_factory=lambda: time.monotonic())

    @property
    def max_length(self) -> int:
        """Limit of the rollout's tokens, including its prompt."""
        response = self.config.max_response_tokens
        if response is None:
            return self.max_model_len
        return min(self.max_model_len, self.prompt_length + response)

    def end(self, length: int) -> Status | None:
        """The status with which the rollout ends after `length` tokens; None: another turn fits."""
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
        """Token limit of the next turn after `length` tokens."""
        return min(self.config.max_turn_tokens, self.max_length - length)

    def fits(self, length: int) -> bool:
        return length <= self.max_length

    def overdue(self) -> bool:
        seconds = self.config.max_seconds
        return seconds is not None and time.monotonic() - self.started >= seconds

    def refuse(self, action: Action) -> str | None:
        """Count an action's calls, or return the error message with which all are refused.

        Code that submits the answer runs after the last call too, and counts as refused.
        """
        names = called_tools(action)
        refusal = self._refusal(names)
        if refusal is not None:
            self.refusals += 1
            if not (isinstance(action, RunCode) and action.submits):
                return refusal
        self.calls += Counter(names)
        return None

    def _refusal(self, names: tuple[str, ...]) -> str | None:
        for name, count in Counter(names).items():
            limit = self.config.max_calls_of.get(name, count + self.calls[name])
            if count > limit - self.calls[name]:
                return _refusal_message(limit - self.calls[name], f"{name} ", count)
        total = self.config.max_tool_calls
        num_left = total - self.calls.total() if total is not None else len(names)
        return _refusal_message(num_left, "", len(names)) if len(names) > num_left else None


def _refusal_message(num_left: int, kind: str, num_requested: int) -> str:
    num_left = max(0, num_left)  # below 0 after a submission beyond the last call
    return (
        f"Error: not run. {num_left} {kind}call{'' if num_left == 1 else 's'} left, "
        f"{num_requested} asked for. Answer with what you have."
    )
