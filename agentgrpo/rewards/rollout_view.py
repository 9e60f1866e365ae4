"""What a reward function sees of a rollout, and those that are shipped by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentgrpo.types import Rollout, Task

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


@dataclass(frozen=True)
class RolloutView:
    """A finished rollout for a reward: all that it has, and its texts, decoded when asked for."""

    rollout: Rollout
    decode: Decode

    @property
    def task(self) -> Task:
        """With the hidden spec."""
        return self.rollout.task

    @property
    def answer(self) -> str | None:
        return self.rollout.answer

    @property
    def stats(self) -> Mapping[str, float]:
        """Counts and costs of the episode: turns, tool_calls, tool_errors, ..."""
        return self.rollout.stats

    def __getattr__(self, name: str) -> Any:
        """What else the rollout has: status, rewards, num_sampled, ..."""
        if name.startswith("_"):  # nothing of Python's own protocols
            raise AttributeError(name)
        return getattr(self.rollout, name)

    @cached_property
    def turns(self) -> tuple[str, ...]:
        """What the policy wrote, turn by turn."""
        return tuple(
            self.decode(s.token_ids.tolist()) for s in self.rollout.all_segments if s.sampled
        )

    @property
    def text(self) -> str:
        """All that the policy wrote, and nothing that it was shown."""
        return "\n".join(self.turns)

    @cached_property
    def observations(self) -> tuple[str, ...]:
        """What it was shown after the prompt: tools' answers with the template around them."""
        given = [s for row in self.rollout.rows for s in row[1:] if not s.sampled]
        return tuple(self.decode(s.token_ids.tolist()) for s in given)

    @property
    def turn_spans(self) -> tuple[tuple[int, int], ...]:
        """Token range of each turn, for SpanReward."""
        spans, start = [], 0
        for segment in self.rollout.all_segments:
            end = start + len(segment.token_ids)
            if segment.sampled:
                spans.append((start, end))
            start = end
        return tuple(spans)


def length(view: RolloutView) -> float:
    """Minus the sampled tokens, in thousands."""
    return -view.rollout.num_sampled / 1000


def exact(view: RolloutView) -> float:
    """One for an answer that is the expected text, but for space around it."""
    expected = view.task.spec.get("answer")
    if expected is None:
        raise ValueError("the task's spec has no 'answer'")
    return float(view.answer is not None and view.answer.strip() == str(expected).strip())


BUILT_IN: dict[str, Callable[[RolloutView], float]] = {
    function.__name__: function for function in (length, exact)
}
