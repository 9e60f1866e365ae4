"""Pack the rollouts of a step into prefix trees under a token budget.

A tree spans the whole step: a system prompt that all groups share is laid out once per batch, a
group's prompt once, the common turns of a forked rollout once. csrc/tree.c does the work without
the GIL, so it can overlap generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from agentgrpo import _C
from agentgrpo.learn.batch import Deltas, PackedBatch
from agentgrpo.types import Group, Int32, Rollout, Segment


def pack_tree(
    groups: Sequence[Group],
    *,
    max_tokens: int,
    weights: Sequence[float] | None = None,
    drop_zero_advantage: bool = True,
    share_prefixes: bool = True,
    whole_rollouts: bool = False,
) -> Batches:
    """Lay out the rollouts of a step as prefix trees of at most `max_tokens` tokens each.

    Subtrees stay whole where they fit (first fit decreasing). Others are cut at branch points, and
    the path above the cut is repeated. A row of a rollout lies in one batch, so each sampled token
    is one loss term of one batch; the rows of a rollout that a template forked may lie in several.
    Tokens that no term needs (the last sampled token of a row and everything after it) are not laid
    out.

    Args:
        groups: The groups of the step.
        max_tokens: Token budget of a batch.
        weights: One per rollout, in group and rollout order, copied to its terms; 1.0 if None. So
            the caller chooses the loss normaliser, over all rollouts including dropped ones.
        drop_zero_advantage: Leave out rows whose advantages are all exactly 0, and tokens that only
            they need. Exact for losses without a KL or entropy term.
        share_prefixes: If false, every rollout is laid out alone, one after the other, for models
            whose layers take no attention mask.
        whole_rollouts: Keep all rows of a rollout in one batch, or drop them all: for losses that
            read the terms of a rollout together, such as sequence-level ratios.

    Returns:
        The batches, each laid out when it is indexed.

    Raises:
        ValueError: A rollout has a negative id; a NaN or infinite logprob, advantage or weight;
            starts with a sampled token; or a row (with whole_rollouts: all of its rows together)
            exceeds `max_tokens`. The message names the rollout and the field.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if weights is None:
        weights = [1.0] * len(rollouts)
    if len(weights) != len(rollouts):
        raise ValueError(f"weights: expected {len(rollouts)}, one per rollout, got {len(weights)}")
    rows = [(index, row) for index, rollout in enumerate(rollouts) for row in rollout.rows]
    segments = [segment for _, row in rows for segment in row]
    samples = [index for index, _ in rows]
    advantages = [value for rollout in rollouts for value in _advantages(rollout)]
    deltas = Deltas(segments)
    if deltas.ids_D.min() < 0 or not np.isfinite(deltas.logp_L).all():
        _raise_invalid(rows)
    starts, sizes, logprob_starts = deltas.places(segments)
    plan = _C.TreePlan(
        deltas.ids_D, deltas.logp_L, starts, sizes, logprob_starts,
        np.array(advantages, np.float32),
        np.array([len(row) for _, row in rows], np.int32),
        np.array(samples, np.int32),
        np.array(weights, np.float32)[samples],
        max_tokens, drop_zero_advantage, share_prefixes, whole_rollouts,
    )  # fmt: skip
    return Batches(plan, deltas)


class Batches(Sequence[PackedBatch]):
    """The batches of a step, in order. Each access lays the batch out again."""

    def __init__(self, plan: _C.TreePlan, deltas: Deltas) -> None:
        self._plan, self._deltas = plan, deltas
        self.sizes = plan.sizes()
        """(T, N) of each batch."""

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> PackedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[PackedBatch]: ...
    def __getitem__(self, index: int | slice) -> PackedBatch | list[PackedBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        tokens, terms = self._plan.lay_out(index)
        runs = _ascending(tokens, 4), _ascending(terms, 8)
        return PackedBatch(self._deltas, *runs, *self.sizes[index])


def _ascending(runs: bytearray, columns: int) -> Int32:
    """The runs that TreePlan.lay_out wrote, sorted by start (the first row)."""
    table: Int32 = np.frombuffer(runs, np.int32).reshape(columns, -1)
    ascending: Int32 = np.take(table, table[0].argsort(), axis=1)
    return ascending


BLOCK_TABLES = ("kv", "full_kv", "q", "full_q")
"""The tables of torch's BlockMask: partially and fully visible key blocks of each query block, and
the transpose for the backward pass."""


def flex_blocks(
    tout_T: Int32, positions_T: Int32, block_size: int, window: int | None = None
) -> dict[str, Int32]:
    """The block mask of `k <= q < tout_T[k]`, from the intervals instead of T * T comparisons.

    The keys are the arguments of `torch.nn.attention.flex_attention.BlockMask`, which takes the
    arrays with two leading dimensions of 1 (batch, head). Of n x n blocks, each row of `*_indices`
    [n, n] lists the blocks of its kind in order, `*_num_blocks` [n] of them, then the others.

    Equal bit for bit to `create_block_mask` of torch 2.13. With a window (`positions_T[q] -
    positions_T[k] < window`, a sliding-window layer) a block without any visible pair may count as
    partially visible.
    """
    token = np.arange(len(tout_T))
    # a key block is visible to the query blocks from its own to the largest tout in it, and fully
    # visible to those between its own and the smallest tout in it
    starts = token[::block_size]
    full_end = np.minimum.reduceat(tout_T, starts) // block_size
    end = -(-np.maximum.reduceat(tout_T, starts) // block_size)
    n = len(starts)
    kind: Any = np.int16 if n < 2**14 else np.int32  # the short one sorts faster
    block: NDArray[Any] = np.arange(n, dtype=kind)
    query, key = block[:, None], block
    full = (query > key) & (query < full_end.astype(kind))
    visible = (query >= key) & (query < end.astype(kind))
    if window is not None:
        lowest = np.minimum.reduceat(positions_T, starts)
        highest = np.maximum.reduceat(positions_T, starts)
        full &= highest[:, None] - lowest < window
        visible &= lowest[:, None] - highest < window  # all pairs of the others are too far apart
    partial = visible ^ full
    kinds = np.stack([partial, full, partial.T, full.T])
    rows = np.where(kinds, block, block + kind(n))  # invisible blocks sort last
    rows.sort(axis=-1)
    rows -= kind(n) * (rows >= n)
    tables = zip(BLOCK_TABLES, kinds.sum(-1, dtype=np.int32), rows.astype(np.int32), strict=True)
    return {
        f"{name}_{part}": array
        for name, counts, indices in tables
        for part, array in (("num_blocks", counts), ("indices", indices))
    }


def _raise_invalid(rows: Sequence[tuple[int, Sequence[Segment]]]) -> NoReturn:
    for rollout, row in rows:
        for number, segment in enumerate(row):
            place = f"rollout {rollout}: segment {number}:"
            for at in np.flatnonzero(segment.token_ids < 0):
                raise ValueError(f"{place} token_ids[{at}] is {segment.token_ids[at]}, not an id")
            logprobs = np.zeros(0) if segment.logprobs is None else segment.logprobs
            for at in np.flatnonzero(~np.isfinite(logprobs)):
                raise ValueError(f"{place} logprobs[{at}] is not finite")
    raise AssertionError("every value is valid")


def _advantages(rollout: Rollout) -> list[float]:
    count = len(rollout.all_segments)
    if rollout.segment_advantages is None:
        return [rollout.advantage] * count
    if len(rollout.segment_advantages) != count:
        raise ValueError(
            f"task {rollout.task.id}: expected {count} segment_advantages, one per segment, got "
            f"{len(rollout.segment_advantages)}"
        )
    return rollout.segment_advantages
