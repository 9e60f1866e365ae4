"""A step's largest forward and backward pass on made-up tokens, and the batches for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from agentgrpo.learn.batch import Deltas, PackedBatch
from agentgrpo.learn.optimizer import MasterAdamW
from agentgrpo.learn.policy import NEAR, Policy
from agentgrpo.types import Int32, Segment

Places = Sequence[tuple[int, ...]]


def rehearse(policy: Policy, optimizer: MasterAdamW, num_tokens: int, temperature: float) -> None:
    """Forward and backward over num_tokens tokens, all of them loss terms.

    In each of batches_of(). Changes nothing. What the optimizer has yet to allocate on this rank
    is held meanwhile, as is what earlier batches of an update would have left.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    # a run's first batch is not its worst: a later one finds moments and float32 sums there
    to_come = optimizer.bytes_to_come
    held: list[Tensor] = []
    trees, cuda = policy.scorer.rows is None, policy.device == "cuda"
    try:
        held.append(torch.empty(to_come, dtype=torch.uint8, device=policy.device))
        optimizer.start_sums()
        for batch in batches_of(num_tokens, trees=trees, cuda=cuda):
            scored = policy.scorer(batch, temperature)
            loss = scored.logp_N.sum() + scored.entropy_N.sum()
            (loss if scored.balance is None else loss + scored.balance).backward()
            del scored
            optimizer.collect()
        held.append(torch.empty(optimizer.bytes_passing, dtype=torch.uint8, device=policy.device))
    finally:
        held.clear()
        optimizer.zero_grad()


def batches_of(num_tokens: int, *, trees: bool, cuda: bool) -> Iterator[PackedBatch]:
    """A forked tree where batches may be trees; else one row, and rows that are padded most.

    On CUDA, where another kernel computes unshared rows, a tree and one row.
    """
    if trees:
        yield _forked(num_tokens)
    if cuda or not trees:
        yield one_row(np.zeros(num_tokens, np.int32))
    if not trees:
        yield _padded(num_tokens)


def one_row(token_ids: Int32) -> PackedBatch:
    """One sequence, every token but the first a term."""
    terms = [(0, 1, 0)] if len(token_ids) > 1 else []
    return _batch(token_ids, [(0, 0, 0, len(token_ids))], terms)


def _forked(num_tokens: int) -> PackedBatch:
    """A prompt of half the tokens and two rollouts behind it; every token but the first a term."""
    fork, second = num_tokens // 2, num_tokens * 3 // 4
    return _batch(
        np.zeros(num_tokens, np.int32),
        [(0, 0, 0, num_tokens), (fork, fork, fork, second), (second, second, fork, num_tokens)],
        [(0, 1, 0), (second - 1, second, fork - 1), (second, second + 1, second)],
    )


def _padded(num_tokens: int) -> PackedBatch:
    """Rows that go through together, all but the first as short as such may be."""
    longest = max(4, num_tokens // 40)
    ends = range(longest, max(longest, num_tokens) + 1, math.ceil(NEAR * longest))
    starts = [0, *ends[:-1]]
    return _batch(
        np.zeros(ends[-1], np.int32),
        [(start, start, 0, end) for start, end in zip(starts, ends, strict=True)],
        [(start - row, start + 1, start) for row, start in enumerate(starts)],
    )


def _batch(token_ids: Int32, runs: Places, terms: Places) -> PackedBatch:
    """Of runs (start, source, position, tout) and of terms at (start, source, row)."""
    count = len(token_ids)
    runs_8Q = np.zeros((8, len(terms)), np.int32)
    if terms:
        runs_8Q[[0, 1, 3]] = np.transpose(terms)
    deltas = Deltas([Segment(token_ids, np.zeros(count, np.float32))])
    roots = sum(position == 0 for _, _, position, _ in runs)  # which nothing predicts
    return PackedBatch(deltas, np.array(runs, np.int32).T.copy(), runs_8Q, count, count - roots)
