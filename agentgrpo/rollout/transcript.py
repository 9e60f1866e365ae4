"""The tokens of one rollout while it is played, also where its history is rendered again.

A prompt that is rendered again from messages may differ from the ids that the engine has: templates
drop thoughts, and text does not always encode back to the sampled ids. Each such prompt is compared
with the current ids, as in TRL and slime:

    CLEAN    it begins with all of them: the rest is appended, unsampled
    REALIGN  it differs only inside the last sampled turn, by few tokens: these are replaced by the
             prompt's version, unsampled; the turn's beginning is still trained on
    FORK     it differs before that: the row is closed and another begins with the whole prompt

So the engine's prompt is always the row as it stands. Every sampled token stays in exactly one row
(but for those that REALIGN replaced, which the policy no longer sees); all rows are one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from agentgrpo.types import Float32, Int32, Segment


class Drift(StrEnum):
    """How a prompt that was rendered again relates to the current ids."""

    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


FORK_FROM = 1024
"""From so many differing tokens at the end of a turn on, its row is closed and trained on as it is,
and the rewritten one is another."""


def classify(held: Int32, prompt: Int32, turn_start: int, fork_from: int) -> tuple[Drift, int]:
    """What to do about a prompt, and how many tokens it shares with what is held.

    `turn_start`: where in held the last sampled turn begins. So many differing tokens as
    `fork_from` at the end of held are too many to realign.

    >>> ten = np.arange(1, 11, dtype=np.int32)
    >>> classify(ten, np.array([*ten, 11], np.int32), 5, 1024)
    (<Drift.CLEAN: 'clean'>, 10)
    >>> classify(ten, np.array([1, 2, 3, 4, 5, 6, 7, 99, 100], np.int32), 5, 1024)
    (<Drift.REALIGN: 'realign'>, 7)
    >>> classify(ten, np.array([1, 2, 50, 4, 5, 6, 7, 8, 9, 10], np.int32), 5, 1024)
    (<Drift.FORK: 'fork'>, 2)
    """
    length = min(len(held), len(prompt))
    differs = np.flatnonzero(held[:length] != prompt[:length])
    shared = int(differs[0]) if len(differs) else length
    drift = len(held) - shared
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
        """The sampled ids that the last rerender() took from the row."""
        self._begin(prompt)

    def _begin(self, prompt: Int32) -> None:
        self._length = 0
        self._ids = np.empty(0, np.int32)
        self.segments: list[Segment] = []
        """The current row."""
        self.give(prompt)
        self.turn_start = self._length
        """Where the last sampled turn begins; where the prompt ends, if there is none."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Transcript:
        """The transcript whose current row is these segments."""
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
        """The current row, contiguous; a view that the next change makes stale."""
        return self._ids[: self._length]

    @property
    def turn(self) -> Int32:
        """What follows turn_start: the last sampled turn, as long as nothing was given since."""
        return self.ids[self.turn_start :]

    def give(self, token_ids: Int32) -> None:
        """Append tokens that the policy did not sample."""
        self._append(Segment(token_ids))

    def sample(self, token_ids: Int32, logprobs: Float32) -> None:
        """Append a turn as the engine returned it."""
        self.turn_start = self._length
        self._append(Segment(token_ids, logprobs))

    def rerender(self, prompt: Int32) -> Drift:
        """Make the current row equal to a prompt that was rendered again; says how.

        After a REALIGN, `replaced` has the sampled ids that the row lost.
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
        """Drop all tokens from `length` on; returns those of them that were sampled."""
        dropped: list[int] = []
        while self._length > length:
            last = self.segments.pop()
            self._length -= len(last.token_ids)
            kept = length - self._length
            if last.sampled:
                dropped = [*last.token_ids[max(0, kept) :].tolist(), *dropped]
            if kept > 0 or (kept == 0 and last.sampled):  # an empty turn is still one
                logprobs = None if last.logprobs is None else last.logprobs[:kept]
                self._append(Segment(last.token_ids[:kept], logprobs))
        return dropped

    def _append(self, segment: Segment) -> None:
        start, end = self._length, self._length + len(segment.token_ids)
        if end > len(self._ids):
            room = max(end, 2 * len(self._ids), 1024)
            self._ids = np.concatenate([self._ids, np.empty(room - len(self._ids), np.int32)])
        self._ids[start:end] = segment.token_ids
        self.segments.append(segment)
        self._length = end
