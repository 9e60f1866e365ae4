"""RolloutView, the argument of reward functions, and the two functions that are built in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentgrpo.types import Rollout

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


@dataclass(frozen=True)
class RolloutView:
    """A finished rollout for a reward: its fields, and its texts (decoded on first access).

    The fields are those of Rollout: `task` with its hidden `spec`, `answer`, `status`, `stats`
    (counts and costs by name) and so on.
    """

    rollout: Rollout
    decode: Decode

    def __getattr__(self, name: str) -> Any:
        # Without this check, copy and pickle would look up __deepcopy__ and the like before
        # `rollout` is set, and recurse without end.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.rollout, name)

    @cached_property
    def turns(self) -> tuple[str, ...]:
        """The policy's text, one entry per turn."""
        return tuple(
            self.decode(s.token_ids.tolist()) for s in self.rollout.all_segments if s.sampled
        )

    @property
    def text(self) -> str:
        return "\n".join(self.turns)

    @cached_property
    def observations(self) -> tuple[str, ...]:
        """Texts after the prompt that the policy did not write: tool results, with the template."""
        segments = [s for row in self.rollout.rows for s in row[1:] if not s.sampled]
        return tuple(self.decode(s.token_ids.tolist()) for s in segments)

    @property
    def turn_spans(self) -> tuple[tuple[int, int], ...]:
        """Token range [start, end) of each turn, for SpanReward."""
        spans, start = [], 0
        for segment in self.rollout.all_segments:
            end = start + len(segment.token_ids)
            if segment.sampled:
                spans.append((start, end))
            start = end
        return tuple(spans)


def length(view: RolloutView) -> float:
    """The negative number of sampled tokens, in thousands."""
    return -view.rollout.num_sampled / 1000


def exact(view: RolloutView) -> float:
    """1 if the answer equals the expected text, ignoring surrounding whitespace; else 0."""
    expected = view.task.spec.get("answer")
    if expected is None:
        raise ValueError(f"task {view.task.id}: its spec has no 'answer'")
    return float(view.answer is not None and view.answer.strip() == str(expected).strip())


BUILT_IN: dict[str, Callable[[RolloutView], float]] = {
    function.__name__: function for function in (length, exact)
}
