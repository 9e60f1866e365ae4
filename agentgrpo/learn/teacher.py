"""A teacher's opinion on each sampled token: distillation on the policy's own rollouts.

The policy samples, the teacher scores the same tokens, and at each of them

    A_teacher = clip(log pi_teacher - log pi_old, -teacher.clip, teacher.clip)
    A         = teacher.weight * A_teacher + (1 - teacher.weight) * A_group

is its advantage: the policy gradient of the reverse KL to the teacher (arXiv:2306.13649,
arXiv:2601.20802). pi_old is what the loss takes its ratio to (loss.old_logps). A token that the
teacher was told nothing of has no A_teacher: 0.

It is another model, which reads what the policy read; or the policy itself (arXiv:2601.20802,
arXiv:2601.19897), which has read more of the task: what was wrong with this attempt, or one that
was right. What the policy was shown in a turn is not told of its later turns again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentgrpo import parallel
from agentgrpo.config import TeacherConfig
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.policy import Policy
from agentgrpo.learn.reference import Reference
from agentgrpo.learn.updates import Update
from agentgrpo.types import Group, Int32, Metrics, Rollout, Segment, Task

Prompt = Callable[[Task, str], Int32]
"""The ids of a task's prompt in which the user also says a text."""
Tell = Callable[[Rollout, Sequence[Rollout]], str]
"""What a teacher is told of a rollout, beside others of its task; "" for nothing."""


class Teacher:
    """Scores what the policy sampled: another model, `source`; or the policy behind other prompts,
    which say what `tell` does, or without it the rollouts' own feedback.
    """

    def __init__(
        self, config: TeacherConfig, policy: Policy, *, source: str | None = None,
        prompt: Prompt | None = None, tell: Tell | None = None, temperature: float = 1.0,
        max_tokens: int = 10**7,
    ) -> None:  # fmt: skip
        self._config, self._prompt, self._tell = config, prompt, tell
        self._temperature, self._max_tokens = temperature, max_tokens
        self._policy = policy
        self._left_out = 0
        """Turns that it had something to read for, and was not given: too long with it, or in a row
        that does not begin with the prompt."""
        self.beside = Reference(policy, source) if source or config.decay else None
        """Its weights, where they are not the policy's."""

    @torch.no_grad()
    def score(self, updates: Sequence[Update]) -> Metrics:
        """Write the rollouts' teacher_logprobs, in one packed pass; what that cost."""
        started, self._left_out = time.perf_counter(), 0
        scorer = (self.beside and self.beside.scorer) or self._policy.scorer
        score = self.beside or (lambda batch, temperature: scorer(batch, temperature).logp_N)
        pairs = [pair for update in updates for pair in self._read(update)]
        batches = pack_tree(
            [Group(task=read.task, rollouts=[read]) for read, _ in pairs],
            max_tokens=self._max_tokens,
            drop_zero_advantage=False,
            share_prefixes=scorer.unpacked_reason is None,
        )
        read, played = zip(*pairs, strict=True) if pairs else ((), ())
        reading = Update(batches=batches, num_samples=len(read), rollouts=read, played=played)
        found = []
        for _, batch, counts in parallel.share(reading.batches):
            logp_N = score(batch, self._temperature)
            if counts:
                found.append((*batch.labels, logp_N.float().cpu().numpy()))
        for sample_N, turn_N, said_N in (one for part in parallel.gather(found) for one in part):
            if np.isnan(said_N).any():
                raise FloatingPointError("the teacher gave a token a probability that is nan")
            reading.take(sample_N, turn_N, teacher_logprobs=said_N)
        return {
            "teacher_tokens": float(sum(batch.num_tokens for batch in reading.batches)),
            "teacher_terms": float(sum(batch.num_terms for batch in reading.batches)),
            "teacher_left_out": float(self._left_out),
            "teacher_s": time.perf_counter() - started,
        }

    def advantage(
        self, update: Update, batch: PackedBatch, group_N: Tensor, old_N: Tensor
    ) -> Tensor:
        """Of each term of a batch of the update, where its groups alone have group_N, [N]."""
        said_N = np.full(batch.num_terms, np.nan, np.float32)
        for rollout, segment, own in update.by_segment(*batch.labels):
            said = rollout.teacher_logprobs and rollout.teacher_logprobs[segment]
            if said is not None:
                said_N[own] = said
        limit, weight = self._config.clip, self._config.weight
        own_N = (torch.from_numpy(said_N).to(old_N) - old_N).nan_to_num(0.0).clamp(-limit, limit)
        return weight * own_N + (1 - weight) * group_N

    def follow(self) -> None:
        """The policy was updated."""
        if self.beside is not None and self._config.decay:
            self.beside.move(1 - self._config.decay)

    def _read(self, update: Update) -> Iterator[tuple[Rollout, Rollout]]:
        """Rollouts of an update as the teacher reads them, each with what was played."""
        played: dict[int, list[Rollout]] = {}
        for rollout in update.played:
            played.setdefault(id(rollout.task), []).append(rollout)
        for rollout, own in zip(update.rollouts, update.played, strict=True):
            if not self._config.feedback:
                yield rollout, own
                continue
            for text, segments in self._texts(own, played[id(own.task)]).items():
                assert self._prompt is not None
                read = _behind(self._prompt(own.task, text), rollout, segments)
                if max(sum(len(s.token_ids) for s in row) for row in read.rows) <= self._max_tokens:
                    self._left_out += len(segments) - sum(s.sampled for s in read.all_segments)
                    yield read, own
                else:
                    self._left_out += len(segments)

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
    size = min(len(first), len(prompt))
    differs = np.flatnonzero(first[-size:][::-1] != prompt[-size:][::-1])
    same = int(differs[0]) if len(differs) else size
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
