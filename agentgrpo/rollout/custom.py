"""A user's own sampler: `rollout.sampler = "module:Class"`.

    class MySampler:
        def __init__(self, chat, config): ...              # ChatTemplate, RolloutConfig
        def rollout(self, engine, tasks, n, params): ...   # -> one list of n Rollouts per task

It may drive `engine.add_request / step` on token ids, call `engine.llm.chat(messages, tools=...)`,
or use anything else. Its rollouts are trained on as they are: a segment with log-probabilities was
sampled and is trained on, one without was not; span rewards count like an environment's. They are
checked here before the step uses them. Of types.COUNTS, missing stats become 0; the turns are
counted here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from agentgrpo.config import RolloutConfig
from agentgrpo.envs.validate import checked_answer, checked_counts
from agentgrpo.rollout.engine_protocol import Ended, SamplerStats
from agentgrpo.rollout.limits import treatment_of
from agentgrpo.rollout.sampler import AnySampler
from agentgrpo.support.user_calls import WrongResult, as_number, named_numbers, user_call
from agentgrpo.types import COUNTS, Float32, Group, Int32, Rollout, Segment, Status, Task

if TYPE_CHECKING:  # it imports vLLM
    from agentgrpo.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParams:
    """The run's sampling settings."""

    temperature: float
    max_turns: int
    max_turn_tokens: int
    max_response_tokens: int
    """Limit after the prompt. Prompt and response must not exceed engine.max_model_len."""
    stop_token_ids: tuple[int, ...]
    seed: int
    """Of this call; derive one per request from it (engine_protocol.request_seed)."""
    filters: Mapping[str, float]
    """vLLM's top_p and similar; empty in training."""


class RolloutSampler(Protocol):
    """A user's sampler; its constructor takes a ChatTemplate and a RolloutConfig."""

    def rollout(
        self, engine: Engine, tasks: Sequence[Task], n: int, params: RolloutParams
    ) -> Sequence[Sequence[Rollout]]:
        """Play each task n times. Returns one list per task, in order."""


class CustomSampler(AnySampler):
    """Plays tasks with a user's sampler and checks its rollouts."""

    def __init__(
        self,
        user: RolloutSampler,
        engine: Engine,
        config: RolloutConfig,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        super().__init__(config)
        self._user, self._engine = user, engine
        self._stop_token_ids = stop_token_ids

    def _play(
        self, tasks: Sequence[Task], group_size: int, config: RolloutConfig, seed: int,
        filters: Mapping[str, float], ended: Ended,
    ) -> tuple[list[Group], SamplerStats]:  # fmt: skip
        limit = self._engine.max_model_len
        response = config.max_response_tokens
        params = RolloutParams(
            temperature=config.temperature,
            max_turns=config.max_turns,
            max_turn_tokens=config.max_turn_tokens,
            max_response_tokens=limit if response is None else response,
            stop_token_ids=self._stop_token_ids,
            seed=seed,
            filters=filters,
        )
        try:
            with user_call(self._user.rollout):
                played = self._user.rollout(self._engine, tasks, group_size, params)
                groups = self._groups(played, tasks, group_size)
        except BaseException:  # an interrupt too: the engine cannot sleep with requests in flight
            self._engine.abort_all()
            raise
        num_sampled = sum(r.num_sampled for group in groups for r in group.rollouts)
        return groups, SamplerStats(total_sampled_tokens=num_sampled)

    def _groups(
        self, played: Sequence[Sequence[Rollout]], tasks: Sequence[Task], group_size: int
    ) -> list[Group]:
        if self._engine.num_in_flight:
            raise WrongResult(f"{self._engine.num_in_flight} requests are still in flight")
        if not isinstance(played, Sequence) or not all(isinstance(r, Sequence) for r in played):
            raise WrongResult(f"expected lists of rollouts, got {played!r:.80}")
        sizes = [len(rollouts) for rollouts in played]
        if sizes != [group_size] * len(tasks):
            raise WrongResult(
                f"expected {len(tasks)} lists of {group_size} rollouts, got lists of {sizes}"
            )
        ids: set[int] = set()
        for task, rollouts in zip(tasks, played, strict=True):
            for index, rollout in enumerate(rollouts):
                try:
                    self._check(rollout, task, ids)
                except WrongResult as error:
                    raise WrongResult(f"task {task.id!r}, rollout {index}: {error}") from None
                ids.add(id(rollout))
        return [
            Group(task=task, rollouts=list(rollouts))
            for task, rollouts in zip(tasks, played, strict=True)
        ]

    def _check(self, rollout: Any, task: Task, ids: Collection[int]) -> None:
        """Check a rollout, convert its numbers to floats, and fill in its stats and treatment."""
        if not isinstance(rollout, Rollout):
            raise WrongResult(f"expected a Rollout, got {rollout!r:.80}")
        if id(rollout) in ids:
            raise WrongResult("the same object is returned twice")
        if rollout.task is not task:
            raise WrongResult(f"its task is {rollout.task.id!r}")
        total, limit = 0, self._engine.max_model_len
        for row in rollout.rows:
            if not row or row[0].sampled:
                raise WrongResult("a row must begin with a prompt, a segment without logprobs")
            length = sum(len(segment.token_ids) for segment in row)
            if length > limit:
                raise WrongResult(f"{length} tokens exceed engine.max_model_len {limit}")
            for segment in row:
                if segment.logprobs is not None and not np.isfinite(segment.logprobs).all():
                    raise WrongResult("a sampled token's log-probability is nan or infinite")
            total += length
        for i, span in enumerate(rollout.span_rewards):
            if not 0 <= span.start < span.end <= total:
                raise WrongResult(f"{span} is not within its {total} tokens")
            number = as_number(span.value)
            if number is None:
                raise WrongResult(f"{span} is not finite")
            rollout.span_rewards[i] = replace(span, value=number)
        checked_answer(rollout.answer)
        rollout.rewards = named_numbers(rollout.rewards)
        turns = sum(segment.sampled for segment in rollout.all_segments)
        defaults = {**dict.fromkeys(COUNTS, 0.0), "turns": float(turns)}
        rollout.stats = defaults | checked_counts(rollout.stats)
        rollout.treatment = treatment_of(rollout.status, self._config)


def rollout_from_tokens(
    task: Task,
    prompt_ids: Sequence[int] | Int32,
    completion_ids: Sequence[int] | Int32,
    logprobs: Sequence[float] | Float32,
    mask: Sequence[Any] | None = None,
    *,
    status: Status = Status.COMPLETED,
    answer: str | None = None,
) -> Rollout:
    """Make a rollout from flat lists, as other trainers store it.

    Args:
        task: the rollout's task.
        prompt_ids: at least one token.
        completion_ids: everything after the prompt.
        logprobs: one per completion token; read only where the mask is true.
        mask: one per completion token, true where the policy sampled it; None: all were sampled.
        status: how it ended.
        answer: the policy's answer.

    Raises:
        ValueError: the lengths differ.
    """
    ids = np.asarray(completion_ids, np.int32)
    sampled = np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool)
    values = np.asarray(logprobs, np.float32)
    if not len(ids) == len(values) == len(sampled):
        raise ValueError(
            f"task {task.id!r}: {len(ids)} completion tokens need as many logprobs and mask "
            f"values, got {len(values)} and {len(sampled)}"
        )
    cuts = np.flatnonzero(np.diff(sampled)) + 1
    bounds = [0, *cuts.tolist(), len(ids)] if len(ids) else []
    segments = [Segment(np.asarray(prompt_ids, np.int32))]
    for start, end in pairwise(bounds):
        segments.append(Segment(ids[start:end], values[start:end] if sampled[start] else None))
    return Rollout(task=task, segments=segments, status=status, answer=answer)
