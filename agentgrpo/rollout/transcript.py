"""Transcript: the tokens of one rollout while it is played, also when its history is re-rendered.

A prompt that is rendered again from messages need not start with the engine's ids: templates drop
thoughts, and text does not always encode back to the sampled ids. Each such prompt is compared with
the current ids, as in TRL and slime:

    CLEAN    it starts with all current ids: the rest is appended, as not sampled
    REALIGN  it differs only within the last sampled turn, by few tokens: these are replaced by the
             prompt's, as not sampled; the start of the turn is still trained on
    FORK     it differs earlier: the row is closed, and a new row starts with the whole prompt

So the engine's prompt always equals the current row. Every sampled token is in exactly one row,
except those that REALIGN replaced, which the policy does not see any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from agentgrpo.types import Float32, Int32, Segment


class Drift(StrEnum):
    """How a re-rendered prompt relates to the current ids."""

    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


FORK_FROM = 1024
"""Number of differing tokens at the end of a turn from which it forks instead of realigning, so
that the sampled turn is still trained on as it is."""


def classify(ids: Int32, prompt: Int32, turn_start: int, fork_from: int) -> tuple[Drift, int]:
    """Compare a re-rendered prompt with the current ids. Returns the number of shared tokens too.

    `turn_start`: position in ids where the last sampled turn begins. `fork_from`: see FORK_FROM.
    """
    length = min(len(ids), len(prompt))
    differs = np.flatnonzero(ids[:length] != prompt[:length])
    shared = int(differs[0]) if len(differs) else length
    drift = len(ids) - shared
    if drift == 0:
        return Drift.CLEAN, shared
    if shared >= turn_start and drift < fork_from:
        return Drift.REALIGN, shared
    return Drift.FORK, shared


class Transcript:
    """Rows of tokens that grow, as segments and as the int32 ids that the engine is sent."""

    def __init__(self, prompt: Int32) -> None:
        self.closed_rows: list[list[Segment]] = []
        """Rows that ended in a FORK, oldest first."""
        self.replaced: list[int] = []
        """The sampled ids that the last rerender() removed from the row."""
        self._begin(prompt)

    def _begin(self, prompt: Int32) -> None:
        self._length = 0
        self._ids = np.empty(0, np.int32)
        self.segments: list[Segment] = []
        """The current row."""
        self.give(prompt)
        self.turn_start = self._length
        """Where the last sampled turn begins; the end of the prompt if there is none."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Transcript:
        """A transcript whose current row consists of these segments."""
        transcript = cls(segments[0].token_ids)
        transcript.segments = list(segments[:1])
        for segment in segments[1:]:
            if segment.sampled:
                transcript.turn_start = transcript._length
            transcript._append(segment)
        return transcript

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> Int32:
        """The current row as a contiguous view, invalid after the next change."""
        return self._ids[: self._length]

    @property
    def turn(self) -> Int32:
        """The ids from turn_start on: the last sampled turn, if nothing was given since."""
        return self.ids[self.turn_start :]

    def give(self, token_ids: Int32) -> None:
        """Append tokens that the policy did not sample."""
        self._append(Segment(token_ids))

    def sample(self, token_ids: Int32, logprobs: Float32) -> None:
        """Append a turn as the engine returned it."""
        self.turn_start = self._length
        self._append(Segment(token_ids, logprobs))

    def rerender(self, prompt: Int32) -> Drift:
        """Make the current row equal to a re-rendered prompt.

        After a REALIGN, `replaced` has the sampled ids that were removed.
        """
        drift, shared = classify(self.ids, prompt, self.turn_start, FORK_FROM)
        if drift is Drift.FORK:
            self.closed_rows.append(self.segments)
            self.replaced = []
            self._begin(prompt)
        else:
            self.replaced = self._cut(shared)
            if len(prompt) > shared:
                self.give(prompt[shared:])
        return drift

    def _cut(self, length: int) -> list[int]:
        """Drop all tokens from `length` on. Returns the sampled ones among them."""
        dropped: list[int] = []
        while self._length > length:
            last = self.segments.pop()
            self._length -= len(last.token_ids)
            num_left = length - self._length
            if last.sampled:
                dropped = [*last.token_ids[max(0, num_left) :].tolist(), *dropped]
            # a turn of which nothing is left stays as an empty segment: it still counts as a turn
            if num_left > 0 or (num_left == 0 and last.sampled):
                logprobs = None if last.logprobs is None else last.logprobs[:num_left]
                self._append(Segment(last.token_ids[:num_left], logprobs))
        return dropped

    def _append(self, segment: Segment) -> None:
        start, end = self._length, self._length + len(segment.token_ids)
        if end > len(self._ids):
            room = max(end, 2 * len(self._ids), 1024)
            self._ids = np.concatenate([self._ids, np.empty(room - len(self._ids), np.int32)])
        self._ids[start:end] = segment.token_ids
        self.segments.append(segment)
        self._length = end
