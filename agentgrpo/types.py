"""The values that pass through a training step, in order of creation.

Task -> Rollout (a list of Segments) -> Group -> PackedBatch (in learn/batch.py). Everything else is
local to a module. Token ids and log-probabilities are numpy arrays throughout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

# written out, since code that decodes records by annotation needs the dtype, which numpy 2.5's
# NDArray hides
Int32 = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Float32 = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]


class Status(StrEnum):
    """How a rollout ended. rollout/limits.py maps each status to a Treatment."""

    COMPLETED = "completed"
    """The agent or the environment ended it."""
    TRUNCATED_LENGTH = "truncated_length"
    """Token budget used up: the last turn was cut, or no further turn fits."""
    TRUNCATED_TURNS = "truncated_turns"
    """Turn budget used up."""
    TRUNCATED_CALLS = "truncated_calls"
    """Exceeded its tool calls a second time, after one warning."""
    MALFORMED = "malformed"
    """Too many malformed actions in a row."""
    TIMED_OUT = "timed_out"
    """Wall-clock time used up, which depends on the machine's load too."""
    INFRA_ERROR = "infra_error"
    """The machine failed, not the model: excluded from the group and its baseline, never trained
    on."""


class Treatment(StrEnum):
    """How training uses a rollout."""

    TRAIN = "train"
    """Its reward counts in the group's baseline, its tokens are trained on."""
    MASK = "mask"
    """It counts in the baseline and as a sample of its update; its tokens are not trained on."""
    DROP = "drop"
    """As if it had not been played."""
    RETRY = "retry"
    """Played again, up to rollout.max_retries times; dropped if the last attempt fails too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt and what is needed to score its rollouts."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages that start the conversation: `{"role": ..., "content": ...}` and other keys
    that a chat template reads (tool_calls, name)."""
    spec: Mapping[str, Any]
    """Data for the environment and the reward; the agent never sees it."""
    is_text: bool = False
    """The prompt was a string, so reward functions with TRL's signature receive a string too."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens with one origin: sampled by the policy, or given to it.

    Immutable and compared by identity, so that branches share their common segments and each is
    trained once.
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
        """Whether the policy sampled these tokens: the loss mask within a trained rollout.

        Treatment, branches and zero advantages leave out more (learn/minibatches.py, csrc/tree.c).
        """
        return self.logprobs is not None


@dataclass(frozen=True, slots=True)
class SpanReward:
    """A reward for a part of a rollout."""

    start: int
    end: int
    """Tokens [start, end) of the rollout's rows, counted from the start of the prompt."""
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The engine's own report of one request; `verify` compares the record with it."""

    row: int = 0
    """Index of the rollout's row that it belongs to."""
    prompt_tokens: int
    prompt_hash: str
    """token_hash() of the prompt's ids, as the engine reports them."""
    sampled_tokens: int
    sampled_hash: str
    """token_hash() of the sampled ids."""
    finish_reason: str
    replaced: list[int] = field(default_factory=list)
    """The last sampled ids, if a re-rendered prompt replaced them (REALIGN)."""
    asked_tokens: int | None = None
    """The request's own limit (a program's max_tokens), if it differs from the run's budget."""

    @classmethod
    def of(cls, prompt: Int32, sampled: Int32, finish_reason: str) -> Turn:
        """The report of a request, from the ids that the engine returned."""
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
"""Keys that the stats of every rollout have."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """One attempt at a task: the prompt, then sampled and observed segments in turn."""

    task: Task
    segments: list[Segment]
    status: Status
    closed_rows: list[list[Segment]] = field(default_factory=list)
    """Earlier rows, oldest first. If a template rewrites too much history, a row ends and the next
    starts with the whole new prompt. Each sampled token is in one row; the rollout counts once."""
    turns: list[Turn] = field(default_factory=list)
    """The engine's own reports of its requests, in order."""
    answer: str | None = None
    """The policy's final answer; None if it gave none in the expected form."""
    error: str | None = None
    """The error message; only with Status.INFRA_ERROR."""
    treatment: Treatment = Treatment.TRAIN
    parent: int | None = None
    """Index in the group of the rollout from which this one branched; None for a root."""
    forked_at: int | None = None
    """Number of tokens shared with the parent; it shares the parent's segments up to there."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts; their sum is the reward."""
    weights: dict[str, float] = field(default_factory=dict)
    """By part, the weight that its value contains, if not 1: GDPO normalises a part without its
    weight."""
    stats: dict[str, float] = field(default_factory=dict)
    """Counts of the episode (COUNTS and the environment's own), for the metrics."""
    not_applicable: list[str] = field(default_factory=list)
    """Reward parts that apply to other rollouts of the group but not to this one: they add nothing,
    and GDPO normalises them without this rollout."""
    extra: dict[str, Any] = field(default_factory=dict)
    """JSON values that reward functions logged (TRL's log_extra)."""
    tool_messages: list[tuple[Any, Any]] = field(default_factory=list, metadata={"recorded": False})
    """For reward functions, per turn except the last: (name, arguments) of its calls, and the
    result of Agent.observe. Not recorded, since the tokens contain it."""
    environment: Any = field(default=None, metadata={"recorded": False})
    """The environment instance of env.kind = "factory", until the rollout is scored."""
    span_rewards: list[SpanReward] = field(default_factory=list)
    """Rewards of single turns or lines. Not in `rewards`; `reward` is the sum of both."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds spent in the queue (`queue_s`), in the engine (`generate_s`), in the environment
    (`tools_s`, `finish_s`) and in between (`own_s`). They differ from run to run."""
    feedback: list[str] = field(default_factory=list)
    """Per turn, the environment's error message, or ""; may be shorter than the turns. The policy
    sees it in a later turn, except for the last; a teacher reads it (config.teacher)."""
    learner_logprobs: list[Float32 | None] | None = None
    """One array per segment of all rows, None where not sampled: the learner's log-probabilities at
    the rollouts' temperature, in nats, before the step's first update. None: not trained on."""
    entropies: list[Float32 | None] | None = None
    """In the same form: the entropy in nats, as the learner computes it, of the distribution from
    which each token was sampled."""
    teacher_logprobs: list[Float32 | None] | None = None
    """In the same form: the teacher's log-probabilities, given its own prompt."""
    topk_ids: list[Int32 | None] | None = None
    teacher_topk_logprobs: list[Float32 | None] | None = None
    learner_topk_logprobs: list[Float32 | None] | None = None
    """With teacher.topk, for each token that the teacher scored: its most likely tokens in
    descending order, its log-probabilities of them, and the learner's before the first update."""
    token_advantages: list[Float32 | None] | None = None
    """In the same form, with a teacher: the advantage that each token was trained with, combined
    from `advantage` and the teacher's (learn/teacher.py)."""
    advantage: float = 0.0
    segment_advantages: list[float] | None = None
    """One per segment of all rows instead of `advantage`, if span rewards are credited to earlier
    tokens, or if branches share segments. Read for sampled segments only."""

    def weighted(self, part: str, weight: float, value: float) -> float:
        """Return weight * value and record the weight of the part."""
        self.weights[part] = weight
        return weight * value

    @property
    def in_baseline(self) -> bool:
        """Whether its reward counts in its group's baseline."""
        counts = self.treatment in (Treatment.TRAIN, Treatment.MASK)
        return counts and self.status is not Status.INFRA_ERROR

    @property
    def trained(self) -> bool:
        """Whether its tokens are trained on."""
        return self.in_baseline and self.treatment is Treatment.TRAIN

    @property
    def reward(self) -> float:
        return sum(self.rewards.values()) + sum(span.value for span in self.span_rewards)

    @property
    def solved(self) -> bool | None:
        """Whether the task was solved. None if nothing defines that.

        Above 0: the stat `solved` (from reward.solved_at, see rewards/scoring.py), else the reward
        part `solved`, else the part `answer`.
        """
        values = (self.stats.get("solved"), self.rewards.get("solved"), self.rewards.get("answer"))
        return next((value > 0 for value in values if value is not None), None)

    @property
    def num_calls(self) -> float:
        """Tool calls and code steps, and calls of sandbox.host_tools by that code."""
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
        """The token sequences that are trained on: closed_rows, then `segments`."""
        return [*self.closed_rows, self.segments]


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one task in index order. Advantages are relative to their group."""

    task: Task
    rollouts: list[Rollout]


Metrics = dict[str, float]
"""By name; metrics.jsonl names them `area/name`."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the policy sampled for one request."""

    request_id: str
    token_ids: Int32
    """The sampled ids, including the stop token (or the whole token that completed a stop string).
    """
    logprobs: Float32
    """Log-probability of each sampled token under the tempered distribution, in nats."""
    finish_reason: str
    """"stop": the turn is complete. "length": max_tokens cut it. Anything else ("error", "abort",
    "repetition"): the engine failed, and the tokens are useless."""
    stop_reason: int | str | None
    """The stop string or stop token id; None for the end-of-sequence token and for "length"."""
    num_cached_tokens: int
    """Prompt tokens served by the prefix cache."""
    account: Turn
    """The engine's report: hashes of the prompt that it used and of the sampled ids."""
    entropies: Float32 = field(default_factory=lambda: np.zeros(0, np.float32))
    """Entropy in nats of the distribution of each of the first tokens (rollout/branch.py). Empty
    unless the request set top_logprobs."""
