"""The few values that travel through a training step, in the order in which they are made.

Task -> Rollout (a list of Segments) -> Group -> PackedBatch (in learn/batch.py). Everything else is
local to a module. Token ids and log-probabilities live in numpy arrays from the first
token on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

# written out: NDArray of numpy 2.5 does not tell its dtype to those who read records by type
Int32 = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Float32 = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]


class Status(StrEnum):
    """How a rollout ended. What training makes of each: rollout/limits.py, TREATMENTS."""

    COMPLETED = "completed"
    """The agent or its environment said so."""
    TRUNCATED_LENGTH = "truncated_length"
    """No token budget left: the last turn was cut, or no further turn fits."""
    TRUNCATED_TURNS = "truncated_turns"
    """No turn budget left."""
    TRUNCATED_CALLS = "truncated_calls"
    """Asked for more tool calls than it had, was told so, and did it again."""
    MALFORMED = "malformed"
    """Too many actions in a row whose form was wrong."""
    TIMED_OUT = "timed_out"
    """Took more wall-clock time than it was given, which the machine's load has a part in."""
    INFRA_ERROR = "infra_error"
    """The machine failed, not the model: leaves the group and its baseline, is never trained on."""


class Treatment(StrEnum):
    """What training makes of a rollout."""

    TRAIN = "train"
    """Its reward counts in the group's baseline, its tokens are trained on."""
    MASK = "mask"
    """It counts in the baseline and as a sample of its update; its tokens are not trained on."""
    DROP = "drop"
    """As if it had not been played."""
    RETRY = "retry"
    """Played again, at most rollout.max_retries times; the last try is dropped if it too fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to solve."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages the conversation starts from, as `{"role": ..., "content": ...}`, and what else
    a template reads (tool_calls, name)."""
    spec: Mapping[str, Any]
    """What the environment needs to score it; the agent never sees this."""
    is_text: bool = False
    """The question was text, which became the one message of the user: reward functions in TRL's
    form are then shown text too."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens with one origin: sampled by the policy, or given to it.

    Immutable and compared by identity, so forked rollouts share their common segments and a
    shared one is trained once.
    """

    token_ids: Int32
    logprobs: Float32 | None = None
    """Sampling log-probabilities in nats, one per token; None if the policy did not sample them."""

    def __post_init__(self) -> None:
        if self.token_ids.dtype != np.int32 or self.token_ids.ndim != 1:
            raise ValueError(
                f"token_ids must be 1-d int32, got {self.token_ids.ndim}-d {self.token_ids.dtype}"
            )
        if self.logprobs is not None and (
            self.logprobs.dtype != np.float32 or self.logprobs.shape != self.token_ids.shape
        ):
            raise ValueError(
                f"{len(self.token_ids)} tokens need as many float32 logprobs, "
                f"got {self.logprobs.shape} {self.logprobs.dtype}"
            )

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled these tokens: the loss mask, said once."""
        return self.logprobs is not None


@dataclass(frozen=True, slots=True)
class SpanReward:
    """What a stretch of a rollout was worth, by itself."""

    start: int
    end: int
    """Tokens [start, end) of the rollout's rows, the prompt's counted."""
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the engine itself says of one request: the proof that a record holds what it saw."""

    row: int = 0
    """Which of the rollout's rows it belongs to."""
    prompt_tokens: int
    prompt_hash: str
    """token_hash() of the prompt's ids, as the engine reports them."""
    sampled_tokens: int
    sampled_hash: str
    """token_hash() of the ids it sampled."""
    finish_reason: str
    replaced: list[int] = field(default_factory=list)
    """The last of the sampled ids, where a prompt that was rendered again had others (REALIGN)."""
    asked_tokens: int | None = None
    """What the request itself allowed (a program's max_tokens), where that is not the run's
    budget."""

    @classmethod
    def of(cls, prompt: Int32, sampled: Int32, finish_reason: str) -> Turn:
        """The account of a request, from the ids that the engine itself gives."""
        return cls(
            prompt_tokens=len(prompt),
            prompt_hash=token_hash(prompt),
            sampled_tokens=len(sampled),
            sampled_hash=token_hash(sampled),
            finish_reason=finish_reason,
        )


def token_hash(token_ids: Int32) -> str:
    """BLAKE2b-128 of the ids as little-endian int32, in hexadecimal digits.

    >>> token_hash(np.array([1, 2], np.int32))
    '2cc5e4d47c5f3c5fbe635a5a5b7bb392'
    """
    data = np.ascontiguousarray(token_ids, "<i4").tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


COUNTS = ("turns", "tool_calls", "tool_errors", "malformed", "refused_calls")
"""What every rollout counts in its stats."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """One attempt at a task: the prompt, then sampled and observed segments in turn."""

    task: Task
    segments: list[Segment]
    status: Status
    closed_rows: list[list[Segment]] = field(default_factory=list)
    """Earlier rows, oldest first: where a template rewrote history too far, a row ends and the next
    begins with the whole new prompt. Each sampled token is in one row; the rollout counts once."""
    turns: list[Turn] = field(default_factory=list)
    """The engine's own account of its requests, in order."""
    answer: str | None = None
    """What the policy answered in the end; None if it never did in the asked form."""
    error: str | None = None
    """What the machine said; only with Status.INFRA_ERROR."""
    treatment: Treatment = Treatment.TRAIN
    parent: int | None = None
    """Index in the group of the rollout that this one branched off; None if it began alone."""
    forked_at: int | None = None
    """How many tokens it shares with its parent: the parent's segments up to there are its own."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts; their sum is the reward."""
    weights: dict[str, float] = field(default_factory=dict)
    """What the numbers of parts were multiplied by, where that was not 1 from the first: GDPO
    normalises a part without its weight."""
    stats: dict[str, float] = field(default_factory=dict)
    """Counts of the episode (COUNTS, and what its environment adds), for the metrics."""
    not_applicable: list[str] = field(default_factory=list)
    """Parts that do not count for this rollout, where they do for its siblings: they add nothing,
    and GDPO normalises them without it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What reward functions wrote down of it (TRL's log_extra); JSON values."""
    tool_messages: list[tuple[Any, Any]] = field(default_factory=list, metadata={"recorded": False})
    """Of each turn but the last, (name, arguments) of the calls in it, and what its agent then said
    (Agent.observe): for reward functions. Not recorded, since the tokens say it."""
    environment: Any = field(default=None, metadata={"recorded": False})
    """The instance of a class that env.kind = "factory" played it in; until it is scored."""
    span_rewards: list[SpanReward] = field(default_factory=list)
    """Rewards of single turns or lines; `rewards` does not hold them, `reward` counts both."""
    timings: dict[str, float] = field(default_factory=dict)
    """Where its time went, in seconds: waiting for its place (`queue_s`), in the engine
    (`generate_s`), for its environment (`tools_s`, `finish_s`), in between (`own_s`). No two runs
    agree on them."""
    feedback: list[str] = field(default_factory=list)
    """What the environment said that was wrong with each turn, "" for nothing; turns behind its end
    have none. Shown to the policy in a later turn, or, of the last one, never: a teacher reads it
    (config.teacher)."""
    learner_logprobs: list[Float32 | None] | None = None
    """One per segment of all rows, of sampled segments alone: the learner's log-probabilities at
    the rollouts' temperature, in nats, when it first saw them. None: what was not trained on."""
    entropies: list[Float32 | None] | None = None
    """In the same form: the entropy in nats of the distribution each token was drawn from, as the
    learner has it."""
    teacher_logprobs: list[Float32 | None] | None = None
    """In the same form: the teacher's log-probabilities, of what it was given to read."""
    topk_ids: list[Int32 | None] | None = None
    teacher_topk_logprobs: list[Float32 | None] | None = None
    learner_topk_logprobs: list[Float32 | None] | None = None
    """With teacher.topk, where the teacher scored a token: those that it found likeliest there, the
    likeliest first, token by token, what it gave them, and what the learner did at first."""
    token_advantages: list[Float32 | None] | None = None
    """In the same form, with a teacher: what each token was trained with, which is of `advantage`
    and of the teacher's (learn/teacher.py)."""
    advantage: float = 0.0
    segment_advantages: list[float] | None = None
    """One per segment of all rows instead of `advantage`, where rewards of spans are credited to
    what was sampled before them, or branches share segments; of sampled segments alone read."""

    def weighted(self, part: str, weight: float, value: float) -> float:
        """The value times its weight, which is written down as that part's."""
        self.weights[part] = weight
        return weight * value

    @property
    def in_baseline(self) -> bool:
        """Whether its reward counts in its group's baseline."""
        kept = self.treatment in (Treatment.TRAIN, Treatment.MASK)
        return kept and self.status is not Status.INFRA_ERROR

    @property
    def trained(self) -> bool:
        """Whether its tokens are trained on."""
        return self.in_baseline and self.treatment is Treatment.TRAIN

    @property
    def reward(self) -> float:
        return sum(self.rewards.values()) + sum(span.value for span in self.span_rewards)

    @property
    def solved(self) -> bool | None:
        """Whether the task was solved, by whoever says so first; None: nobody does.

        reward.solved_at (rewards/scoring.py counts it in `stats`), then a part `solved`, then a
        part `answer`: above 0.
        """
        said = (self.stats.get("solved"), self.rewards.get("solved"), self.rewards.get("answer"))
        return next((value > 0 for value in said if value is not None), None)

    @property
    def num_calls(self) -> float:
        """Calls of tools, runs of code, and calls of the host's functions by that code."""
        return self.stats.get("tool_calls", 0.0) + self.stats.get("host_calls", 0.0)

    @property
    def token_ids(self) -> Int32:
        return np.concatenate([segment.token_ids for segment in self.segments])

    @property
    def num_sampled(self) -> int:
        return sum(len(s.token_ids) for row in self.rows for s in row if s.sampled)

    @property
    def all_segments(self) -> list[Segment]:
        """The segments of all rows, in order."""
        return [segment for row in self.rows for segment in row]

    @property
    def rows(self) -> list[list[Segment]]:
        """What is trained on: the closed rows, then `segments`."""
        return [*self.closed_rows, self.segments]


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one task, in index order: the unit in which advantages are relative."""

    task: Task
    rollouts: list[Rollout]


Metrics = dict[str, float]
"""Numbers of a step by name; `area/name` once they are written."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the policy sampled for one request."""

    request_id: str
    token_ids: Int32
    """The sampled ids, the stop token (or the whole token a stop string ended in) included."""
    logprobs: Float32
    """Log-probability of each sampled token under the tempered distribution, in nats."""
    finish_reason: str
    """"stop": the turn is whole. "length": max_tokens cut it. Anything else ("error", "abort",
    "repetition"): the engine gave up, and the tokens are useless."""
    stop_reason: int | str | None
    """The stop string or stop token id; None for the end-of-sequence token and for "length"."""
    num_cached_tokens: int
    """How many prompt tokens the prefix cache served."""
    account: Turn
    """Hashes of the prompt that the engine reports having used and of what it sampled."""
    entropies: Float32 = field(default_factory=lambda: np.zeros(0, np.float32))
    """Entropy in nats of the distribution each of the first tokens was drawn from; see
    rollout/branch.py. Empty unless top_logprobs were asked for."""
