"""Split the groups of a step into optimizer updates, each packed and weighted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.config import TrainConfig
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.token_weights import (
    is_trained,
    reads_all_tokens,
    reads_whole_rollouts,
    token_weights,
)
from agentgrpo.types import Group, Int32, Rollout, Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One optimizer update. The loss weights are normalised over all of its batches together."""

    batches: Sequence[PackedBatch]
    num_samples: int
    """Number of rollouts that sample_N of the batches indexes."""
    rollouts: Sequence[Rollout] = ()
    """The packed rollouts, where the learner's per-token results are to be recorded."""
    played: Sequence[Rollout] = ()
    """The same rollouts as they were sampled; the results are stored in these."""

    def store_fields(self, sample_N: Int32, turn_N: Int32, **fields: NDArray[Any]) -> None:
        """Store per-term arrays as per-segment fields of the rollouts.

        A segment without terms, or whose values are all NaN, keeps None.
        """
        for rollout, segment, terms in self.terms_by_segment(sample_N, turn_N):
            for name, values_N in fields.items():
                if np.isnan(values_N[terms]).all():
                    continue
                if getattr(rollout, name) is None:
                    setattr(rollout, name, [None] * len(rollout.all_segments))
                getattr(rollout, name)[segment] = values_N[terms].ravel()

    def terms_by_segment(
        self, sample_N: Int32, turn_N: Int32
    ) -> Iterator[tuple[Rollout, int, NDArray[np.int64]]]:
        """Yield (sampled rollout, segment index, indices of the segment's terms in token order).

        The tree orders the terms: a later row may come first or be in another batch, hence the
        sort.
        """
        if not self.rollouts:
            return
        order = np.lexsort((turn_N, sample_N))
        labels = np.stack([sample_N[order], turn_N[order]])
        cuts = np.flatnonzero((labels[:, 1:] != labels[:, :-1]).any(0)) + 1
        for terms in np.split(order, cuts) if len(order) else ():
            sample, turn = sample_N[terms[0]], turn_N[terms[0]]
            segments = self.rollouts[sample].all_segments
            segment = [i for i, s in enumerate(segments) if s.sampled][turn]
            yield self.played[sample], segment, terms


def plan_updates(
    groups: Sequence[Group], config: TrainConfig, *, step: int, share_prefixes: bool = True
) -> list[Update]:
    """Divide the groups of a step among config.loss.num_mini_batches updates and pack each.

    Groups are never split, so that each prompt is computed once. The assignment depends only on
    config.seed and step (from 0). Rollouts without an advantage are left out where they cannot
    change the loss: always, unless there is a KL or entropy term, an entropy quantile, or a
    teacher.
    """
    parts = mini_batches(groups, config, step=step)
    trained_parts = [trained_groups(part, config) for part in parts]
    tokens = sum(r.num_sampled for part in trained_parts for group in part for r in group.rollouts)
    return [
        _update(samples, packed, tokens / len(parts), config, share_prefixes)
        for samples, packed in zip(parts, trained_parts, strict=True)
    ]


def mini_batches(groups: Sequence[Group], config: TrainConfig, *, step: int) -> list[list[Group]]:
    """The rollouts of each update of a step: all scored ones, including masked ones."""
    order = np.arange(len(groups))
    if config.loss.num_mini_batches > 1:
        np.random.default_rng((config.seed, step)).shuffle(order)
    return [
        [
            Group(task=groups[i].task, rollouts=[r for r in groups[i].rollouts if r.in_baseline])
            for i in sorted(part.tolist())
        ]
        for part in np.array_split(order, config.loss.num_mini_batches)
    ]


def trained_groups(groups: Sequence[Group], config: TrainConfig) -> list[Group]:
    """The rollouts to pack; with hard branch credit a shared turn is trained on once."""
    trained = [Group(task=g.task, rollouts=list(filter(is_trained, g.rollouts))) for g in groups]
    if config.loss.branch_credit != "hard":
        return trained
    return [
        Group(task=group.task, rollouts=train_shared_turns_once(group.rollouts))
        for group in trained
    ]


def train_shared_turns_once(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Keep a turn that branches share as sampled in the first branch only.

    With hard credit such a turn has one advantage, the mean of the branches, so each of its tokens
    enters the loss and the normaliser once. In the other branches it is context, which the tree
    computes once anyway.
    """
    trained: set[int] = set()
    result = []
    for rollout in rollouts:
        segments = [Segment(s.token_ids) if id(s) in trained else s for s in rollout.segments]
        trained |= {id(segment) for segment in rollout.segments if segment.sampled}
        result.append(replace(rollout, segments=segments))
    return result


def _update(
    samples: list[Group],
    trained: list[Group],
    share_of_tokens: float,
    config: TrainConfig,
    share_prefixes: bool,
) -> Update:
    loss = config.loss
    weights = token_weights(
        trained,
        loss.row,
        config.rollout.max_sampled_tokens,
        num_samples=sum(len(group.rollouts) for group in samples),
        share_of_tokens=share_of_tokens,
    )
    batches = pack_tree(
        trained,
        max_tokens=config.learner.max_tokens,
        weights=weights,
        drop_zero_advantage=not reads_all_tokens(config),
        share_prefixes=share_prefixes,
        whole_rollouts=reads_whole_rollouts(loss),
    )
    rollouts = [rollout for group in trained for rollout in group.rollouts]
    return Update(
        batches=batches,
        num_samples=len(rollouts),
        rollouts=rollouts,
        played=[rollout for group in samples for rollout in group.rollouts if is_trained(rollout)],
    )
