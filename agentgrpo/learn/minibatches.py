"""Groups of a step -> what each optimizer update trains on: mini-batches, packed and weighted."""

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
    """One optimizer update. Its batches' weights are the normaliser of all of them together."""

    batches: Sequence[PackedBatch]
    num_samples: int
    """Rollouts that sample_N of the batches counts."""
    rollouts: Sequence[Rollout] = ()
    """These as they were packed, where what the learner makes of them is to be recorded."""
    played: Sequence[Rollout] = ()
    """The same as they were played: what is told and recorded."""

    def take(self, sample_N: Int32, turn_N: Int32, **fields: NDArray[Any]) -> None:
        """Write what was made of a batch's terms to these fields of the rollouts they belong to;
        where it is all nan, or of no tokens, there is nothing.
        """
        for rollout, segment, own in self.by_segment(sample_N, turn_N):
            for name, values_N in fields.items():
                if np.isnan(values_N[own]).all():
                    continue
                if getattr(rollout, name) is None:
                    setattr(rollout, name, [None] * len(rollout.all_segments))
                getattr(rollout, name)[segment] = values_N[own].ravel()

    def by_segment(
        self, sample_N: Int32, turn_N: Int32
    ) -> Iterator[tuple[Rollout, int, NDArray[np.int64]]]:
        """As they were played: rollout, segment, and which of the terms are its tokens, in order.

        The order of terms is the tree's, in which a later row may come first or be elsewhere.
        """
        if not self.rollouts:
            return
        order = np.lexsort((turn_N, sample_N))
        labels = np.stack([sample_N[order], turn_N[order]])
        cuts = np.flatnonzero((labels[:, 1:] != labels[:, :-1]).any(0)) + 1
        for own in np.split(order, cuts) if len(order) else ():
            sample, turn = sample_N[own[0]], turn_N[own[0]]
            segments = self.rollouts[sample].all_segments
            segment = [i for i, s in enumerate(segments) if s.sampled][turn]
            yield self.played[sample], segment, own


def plan_updates(
    groups: Sequence[Group], config: TrainConfig, *, step: int, share_prefixes: bool = True
) -> list[Update]:
    """Divide a step's groups among config.loss.num_mini_batches updates and pack each.

    Whole groups stay together, so that their prompt is computed once. Which go together is a
    function of config.seed and step (from 0). Rollouts without an advantage are left out where
    nothing of theirs moves the loss: always, unless there is a KL or an entropy term, a quantile
    of all entropies, or a teacher.
    """
    parts = mini_batches(groups, config, step=step)
    trained = [as_packed(part, config) for part in parts]
    tokens = sum(r.num_sampled for part in trained for group in part for r in group.rollouts)
    return [
        _update(samples, packed, tokens / len(parts), config, share_prefixes)
        for samples, packed in zip(parts, trained, strict=True)
    ]


def mini_batches(groups: Sequence[Group], config: TrainConfig, *, step: int) -> list[list[Group]]:
    """The samples of each update of a step: all that are scored, masked ones too."""
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


def as_packed(groups: Sequence[Group], config: TrainConfig) -> list[Group]:
    """What is trained on of an update's samples: with hard credit, each of its turns once."""
    trained = [Group(task=g.task, rollouts=list(filter(is_trained, g.rollouts))) for g in groups]
    if config.loss.branch_credit != "hard":
        return trained
    return [Group(task=group.task, rollouts=shared_once(group.rollouts)) for group in trained]


def shared_once(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The rollouts, a turn that branches share being the policy's in the first of them only.

    With hard credit such a turn has one advantage, the branches' mean: so each of its tokens enters
    the loss, and the normaliser, once. Where it is not sampled it is context, computed once anyway.
    """
    seen: set[int] = set()
    out = []
    for rollout in rollouts:
        segments = [Segment(s.token_ids) if id(s) in seen else s for s in rollout.segments]
        seen |= {id(segment) for segment in rollout.segments if segment.sampled}
        out.append(replace(rollout, segments=segments))
    return out


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
