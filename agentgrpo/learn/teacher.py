"""A teacher's opinion on each sampled token: distillation on the policy's own rollouts.

The policy samples, the teacher scores the same tokens, and log pi_teacher - log pi_old at each is
its advantage, or with teacher.topk a divergence its loss (docs/losses.md; arXiv:2306.13649,
arXiv:2601.20802, arXiv:2601.19897). pi_old is what the loss takes its ratio to. The teacher is
another model, or the policy itself, which has read more of the task; what the policy was shown in a
turn is not told of its later turns again.
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
from agentgrpo.learn.reference import Ask, Reference
from agentgrpo.support import parallel
from agentgrpo.types import Group, Int32, Metrics, Rollout, Segment, Task

Prompt = Callable[[Task, str], Int32]
"""The ids of a task's prompt in which the user also says a text."""
Tell = Callable[[Rollout, Sequence[Rollout]], str]
"""What a teacher is told of a rollout, beside others of its task; "" for nothing."""
FIELDS = ("teacher_logprobs", "teacher_topk_logprobs", "topk_ids")
"""Of a rollout, where it is written down."""


class Said(NamedTuple):
    """What a teacher said of a batch's terms; nan where it was told nothing."""

    config: TeacherConfig
    logp_N: Tensor
    logp_NK: Tensor
    ids_NK: Tensor

    @property
    def told_N1(self) -> Tensor:
        return self.logp_N.isfinite()[:, None]

    def advantage(self, group_N: Tensor, old_N: Tensor) -> Tensor:
        """Of each term, where its groups alone have group_N, [N]."""
        limit, weight = self.config.clip, 0.0 if self.config.topk else self.config.weight
        own_N = (self.logp_N.to(old_N) - old_N).nan_to_num(0.0).clamp(-limit, limit)
        return weight * own_N + (1 - self.config.weight) * group_N

    def divergence(self, beside_NK: Tensor) -> Tensor:
        """The reverse KL at each term, [N], of a policy that gives the tokens these nats.

        What the two give to all other tokens is compared as that of one: TRL's topk_logits with
        distillation_add_tail, at distillation_alpha 1.
        """
        both = beside_NK, self.logp_NK
        ours, theirs = (
            torch.cat([x, torch.log(-torch.expm1(x.logsumexp(1, True).clamp(max=-1e-7)))], 1)
            for x in (torch.where(self.told_N1, x.to(beside_NK), 0.0) for x in both)
        )
        return (ours.exp() * (ours - theirs) * self.told_N1).sum(1)


class Teacher:
    """Scores what the policy sampled: another model (`source`, a Reference's), or the policy behind
    other prompts, which say what `tell` does, or without it the rollouts' own feedback.
    """

    def __init__(
        self, policy: Policy, temperature: float, max_tokens: int, *, config: TeacherConfig,
        source: str | Ask | None = None, prompt: Prompt | None = None, tell: Tell | None = None,
    ) -> None:  # fmt: skip
        self._policy, self._config, self._prompt, self._tell = policy, config, prompt, tell
        self._temperature, self._max_tokens = temperature, max_tokens
        self._left_out = 0
        """Turns that it had something to read for, and was not given: too long with it, or in a row
        that does not begin with the prompt."""
        own = source or config.average
        self.beside = Reference(policy, source, config.average) if own else None
        """Its weights, where they are not the policy's."""

    @torch.no_grad()
    def score(self, updates: Sequence[Update]) -> Metrics:
        """Write what is said of the rollouts' tokens to their FIELDS; what that cost."""
        started, self._left_out = time.perf_counter(), 0
        pairs = [pair for update in updates for pair in self._read(update)]
        read, played = zip(*pairs, strict=True) if pairs else ((), ())
        reading = Update(batches=(), num_samples=len(read), rollouts=read, played=played)
        scorer = (self.beside and self.beside.scorer) or self._policy.scorer
        batches = pack_tree(
            [Group(task=rollout.task, rollouts=[rollout]) for rollout in read],
            max_tokens=self._max_tokens,
            drop_zero_advantage=False,
            share_prefixes=scorer.unpacked_reason is None,
        )
        found, score, terms = [], self.beside or scorer, 0
        for _, batch, counts in parallel.share(batches):
            said = score(batch, self._temperature, self._config.topk)
            values = said.logp_N.float(), said.beside_NK.float(), said.ids_NK.int()
            if counts:
                found.append((*batch.labels, *(x.cpu().numpy() for x in values)))
        for sample_N, turn_N, *arrays in (one for part in parallel.gather(found) for one in part):
            if np.isnan(arrays[0]).any():
                raise FloatingPointError("the teacher gave a token a probability that is nan")
            reading.take(sample_N, turn_N, **dict(zip(FIELDS, arrays, strict=True)))
            terms += len(sample_N)
        return {
            "teacher_tokens": float(sum(batch.num_tokens for batch in batches)),
            "teacher_terms": float(terms),
            "teacher_left_out": float(self._left_out),
            "teacher_s": time.perf_counter() - started,
        }

    def said(self, update: Update, batch: PackedBatch, device: str) -> Said:
        """Of the terms of a batch of the update."""
        size = batch.num_terms, self._config.topk
        logp_N, logp_NK = np.full(size[0], np.nan, np.float32), np.zeros(size, np.float32)
        arrays: tuple[Any, ...] = logp_N, logp_NK, np.zeros(size, np.int64)
        for rollout, segment, own in update.by_segment(*batch.labels):
            for name, array in zip(FIELDS, arrays, strict=True):
                values = getattr(rollout, name)
                if values is not None and values[segment] is not None:
                    array[own] = values[segment].reshape(array[own].shape)
        return Said(self._config, *(torch.from_numpy(array).to(device) for array in arrays))

    def _read(self, update: Update) -> Iterator[tuple[Rollout, Rollout]]:
        """Rollouts of an update as the teacher reads them, each with what was played."""
        for rollout, own in zip(update.rollouts, update.played, strict=True):
            if self._prompt is None:
                yield rollout, own
                continue
            group = [other for other in update.played if other.task is own.task]
            for text, wanted in self._texts(own, group).items():
                read = _behind(self._prompt(own.task, text), rollout, wanted)
                longest = max(sum(len(s.token_ids) for s in row) for row in read.rows)
                fits = longest <= self._max_tokens
                self._left_out += len(wanted) - fits * sum(s.sampled for s in read.all_segments)
                if fits:
                    yield read, own

    def _texts(self, rollout: Rollout, group: Sequence[Rollout]) -> Mapping[str, set[int]]:
        """What it is told, and of which segments' tokens: not what was read before them."""
        turns = [i for i, segment in enumerate(rollout.all_segments) if segment.sampled]
        if self._tell is not None:
            told = self._tell(rollout, group)
            return {told: {*turns}} if told.strip() else {}
        texts: dict[str, set[int]] = {}
        for number, segment in enumerate(turns):
            if told := "\n".join(filter(None, rollout.feedback[number:])):
                texts.setdefault(told, set()).add(segment)
        return texts


def _behind(prompt: Int32, rollout: Rollout, wanted: set[int]) -> Rollout:
    """The rollout behind another prompt, sampled where it is wanted; other segments are given.

    A later row begins with the conversation so far: what the prompts differ in is replaced there.
    """
    first = rollout.rows[0][0].token_ids
    same = sum(itertools.takewhile(bool, map(operator.eq, first[::-1], prompt[::-1])))
    cut, number, rows = len(first) - same, 0, []
    for row in rollout.rows:
        begin, begins = row[0].token_ids, np.array_equal(row[0].token_ids[:cut], first[:cut])
        ids = np.concatenate([prompt[: len(prompt) - same], begin[cut:]]) if begins else begin
        made = [Segment(ids.astype(np.int32))]
        for at, segment in enumerate(row[1:], number + 1):
            made.append(segment if at in wanted and begins else Segment(segment.token_ids))
        rows.append(made)
        number += len(row)
    return replace(rollout, segments=rows[-1], closed_rows=rows[:-1])
