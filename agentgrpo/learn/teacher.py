"""Distillation on the policy's own rollouts: a teacher scores each sampled token.

log pi_teacher - log pi_old of a token is its advantage, or with teacher.topk a divergence is its
loss (docs/losses.md; arXiv:2306.13649, arXiv:2601.20802, arXiv:2601.19897). pi_old is the policy in
the loss's ratio. The teacher is another model, or the policy itself with feedback added to its
prompt. Feedback that the policy saw in a turn is not repeated to the teacher for later turns.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentgrpo.config import TeacherConfig
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.minibatches import Update
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.policy import Policy
from agentgrpo.learn.reference import Reference, ServerScorer
from agentgrpo.support import parallel
from agentgrpo.types import Group, Int32, Metrics, Rollout, Segment, Task

Prompt = Callable[[Task, str], Int32]
"""Token ids of a task's prompt with a text appended to the user message."""
Feedback = Callable[[Rollout, Sequence[Rollout]], str]
"""The text for the teacher's prompt, from a rollout and the rollouts of its task; "" for none."""
FIELDS = ("teacher_logprobs", "teacher_topk_logprobs", "topk_ids")
"""Fields of Rollout that hold the teacher's scores."""


class TeacherScores(NamedTuple):
    """A teacher's scores of a batch's terms; logp_N is NaN where it scored none."""

    config: TeacherConfig
    logp_N: Tensor
    logp_NK: Tensor
    ids_NK: Tensor

    @property
    def is_scored_N1(self) -> Tensor:
        return self.logp_N.isfinite()[:, None]

    def combined_advantage(self, group_N: Tensor, old_N: Tensor) -> Tensor:
        limit, weight = self.config.clip, 0.0 if self.config.topk else self.config.weight
        teacher_N = (self.logp_N.to(old_N) - old_N).nan_to_num(0.0).clamp(-limit, limit)
        return weight * teacher_N + (1 - self.config.weight) * group_N

    def reverse_kl(self, policy_NK: Tensor) -> Tensor:
        """KL(policy || teacher) [N], from the policy's log-probabilities of the top-k tokens.

        The mass of all other tokens is compared as that of a single token: TRL's topk_logits with
        distillation_add_tail, at distillation_alpha 1.
        """
        # unscored terms hold zeros instead of NaN: a NaN times 0 below would still be NaN
        policy, teacher = (
            torch.cat([x, torch.log(-torch.expm1(x.logsumexp(1, True).clamp(max=-1e-7)))], 1)
            for x in (
                torch.where(self.is_scored_N1, x.to(policy_NK), 0.0)
                for x in (policy_NK, self.logp_NK)
            )
        )
        return (policy.exp() * (policy - teacher) * self.is_scored_N1).sum(1)


class Teacher:
    """Scores the sampled tokens: with another model (`source`, as in Reference), or with the policy
    after other prompts, which contain the text of `feedback`, or without it the rollouts' own
    feedback.
    """

    def __init__(
        self, policy: Policy, temperature: float, max_tokens: int, *, config: TeacherConfig,
        source: str | ServerScorer | None = None, prompt: Prompt | None = None,
        feedback: Feedback | None = None,
    ) -> None:  # fmt: skip
        self._policy, self._config = policy, config
        self._prompt, self._feedback = prompt, feedback
        self._temperature, self._max_tokens = temperature, max_tokens
        self._num_left_out = 0
        """Turns whose feedback did not fit, or whose row does not begin with the prompt."""
        has_weights = source or config.average
        self.reference = Reference(policy, source, config.average) if has_weights else None
        """Its weights, where they are not the policy's."""

    @torch.no_grad()
    def score(self, updates: Sequence[Update]) -> Metrics:
        """Store the teacher's scores in the FIELDS of the rollouts; returns metrics."""
        started, self._num_left_out = time.perf_counter(), 0
        pairs = [pair for update in updates for pair in self._prompted(update)]
        prompted, played = zip(*pairs, strict=True) if pairs else ((), ())
        scored = Update(batches=(), num_samples=len(prompted), rollouts=prompted, played=played)
        scorer = (self.reference and self.reference.scorer) or self._policy.scorer
        batches = pack_tree(
            [Group(task=rollout.task, rollouts=[rollout]) for rollout in prompted],
            max_tokens=self._max_tokens,
            drop_zero_advantage=False,
            share_prefixes=scorer.unpacked_reason is None,
        )
        results, score, num_terms = [], self.reference or scorer, 0
        for _, batch, counts in parallel.share(batches):
            out = score(batch, self._temperature, self._config.topk)
            topk = out.candidate_logp_NK.float(), out.candidate_ids_NK.int()
            values = out.logp_N.float(), *topk
            if counts:
                results.append((*batch.labels, *(x.cpu().numpy() for x in values)))
        gathered = (result for part in parallel.gather(results) for result in part)
        for sample_N, turn_N, *arrays in gathered:
            if np.isnan(arrays[0]).any():
                raise FloatingPointError("the teacher returned a log-probability that is NaN")
            scored.store_fields(sample_N, turn_N, **dict(zip(FIELDS, arrays, strict=True)))
            num_terms += len(sample_N)
        return {
            "teacher_tokens": float(sum(batch.num_tokens for batch in batches)),
            "teacher_terms": float(num_terms),
            "teacher_left_out": float(self._num_left_out),
            "teacher_s": time.perf_counter() - started,
        }

    def scores_of(self, update: Update, batch: PackedBatch, device: str) -> TeacherScores:
        """The stored scores as tensors over the terms of a batch."""
        size = batch.num_terms, self._config.topk
        logp_N, logp_NK = np.full(size[0], np.nan, np.float32), np.zeros(size, np.float32)
        arrays: tuple[Any, ...] = logp_N, logp_NK, np.zeros(size, np.int64)
        for rollout, segment, terms in update.terms_by_segment(*batch.labels):
            for name, array in zip(FIELDS, arrays, strict=True):
                values = getattr(rollout, name)
                if values is not None and values[segment] is not None:
                    array[terms] = values[segment].reshape(array[terms].shape)
        tensors = (torch.from_numpy(array).to(device) for array in arrays)
        return TeacherScores(self._config, *tensors)

    def _prompted(self, update: Update) -> Iterator[tuple[Rollout, Rollout]]:
        """(rollout with the teacher's prompt, sampled rollout): one per distinct feedback text."""
        for packed, played in zip(update.rollouts, update.played, strict=True):
            if self._prompt is None:
                yield packed, played
                continue
            group = [other for other in update.played if other.task is played.task]
            for text, targets in self._feedback_texts(played, group).items():
                rollout = _with_prompt(self._prompt(played.task, text), packed, targets)
                longest = max(sum(len(s.token_ids) for s in row) for row in rollout.rows)
                fits = longest <= self._max_tokens
                num_scored = fits * sum(s.sampled for s in rollout.all_segments)
                self._num_left_out += len(targets) - num_scored
                if fits:
                    yield rollout, played

    def _feedback_texts(self, rollout: Rollout, group: Sequence[Rollout]) -> Mapping[str, set[int]]:
        """Each feedback text with the indices of the segments to score given that text.

        A turn's text leaves out the feedback that the policy had already read before that turn.
        """
        turns = [i for i, segment in enumerate(rollout.all_segments) if segment.sampled]
        if self._feedback is not None:
            text = self._feedback(rollout, group)
            return {text: {*turns}} if text.strip() else {}
        texts: dict[str, set[int]] = {}
        for number, segment in enumerate(turns):
            if text := "\n".join(filter(None, rollout.feedback[number:])):
                texts.setdefault(text, set()).add(segment)
        return texts


def _with_prompt(prompt: Int32, rollout: Rollout, targets: set[int]) -> Rollout:
    """The rollout with another prompt, in which only the `targets` segments count as sampled.

    A later row begins with the conversation so far, whose beginning is replaced in the same way.
    """
    first = rollout.rows[0][0].token_ids
    # the prompts differ before a common suffix: [:cut] of the old one is replaced
    suffix = sum(itertools.takewhile(bool, map(operator.eq, first[::-1], prompt[::-1])))
    cut, number, rows = len(first) - suffix, 0, []
    for row in rollout.rows:
        start, replaced = row[0].token_ids, np.array_equal(row[0].token_ids[:cut], first[:cut])
        ids = np.concatenate([prompt[: len(prompt) - suffix], start[cut:]]) if replaced else start
        segments = [Segment(ids.astype(np.int32))]
        for index, segment in enumerate(row[1:], number + 1):
            is_target = index in targets and replaced
            segments.append(segment if is_target else Segment(segment.token_ids))
        rows.append(segments)
        number += len(row)
    return replace(rollout, segments=rows[-1], closed_rows=rows[:-1])
