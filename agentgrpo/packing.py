"""Rollouts become prefix trees under a token budget: what one forward pass computes once.

The tree spans the whole step: a system prompt that all groups share is laid out once per batch, a
group's prompt once, a forked rollout's common turns once. The work is in csrc/tree.c and runs
without the GIL, so it can overlap generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentgrpo import _C
from agentgrpo.types import Float32, Group, Int32, PackedBatch, Rollout


def ids_from_list(ids: list[int]) -> Int32:
    """The token ids an engine returned, as an int32 array.

    Raises:
        TypeError: not a list of ints.
        ValueError: an id is negative or 2**31 or more.
    """
    return np.frombuffer(_C.ids_from_list(ids), np.int32)


def logprobs_from_list(logprobs: list[float]) -> Float32:
    """The log-probabilities an engine returned, as a float32 array.

    Raises:
        TypeError: not a list of floats.
        ValueError: one is nan, infinite, or beyond float32.
    """
    return np.frombuffer(_C.logprobs_from_list(logprobs), np.float32)


def pack_tree(
    groups: Sequence[Group],
    *,
    max_tokens: int,
    weights: Sequence[float] | None = None,
    drop_zero_advantage: bool = True,
    share_prefixes: bool = True,
) -> list[PackedBatch]:
    """Lay the rollouts of a step out as prefix trees of at most `max_tokens` tokens.

    Subtrees stay whole where they fit (first fit decreasing) and are otherwise cut at branch
    points, the path above repeated. A rollout lies in one batch, so each of its sampled tokens is
    one loss term of one batch. Tokens that no term needs (what follows the last sampled token, and
    that token itself) are not laid out.

    Args:
        groups: all groups of the step; advantages are read from the rollouts, per segment where
            they are given so.
        max_tokens: budget of one batch in tokens, at least the longest rollout's.
        weights: one finite number per rollout, in group and rollout order, copied to its terms;
            1.0 if None. The caller thereby chooses the loss normaliser, over all rollouts of the
            step, dropped ones included.
        drop_zero_advantage: leave out rollouts whose advantages are all exactly 0 and whatever
            tokens only they need. Exact for losses without a KL or entropy term.
        share_prefixes: False lays every rollout out alone, one behind the other, for models whose
            layers take no attention mask.

    Returns:
        The batches; none if nothing is to be learned. Deterministic.

    Raises:
        ValueError: a rollout has a negative id, a nan or infinite logprob, advantage or weight,
            starts with a sampled token or exceeds `max_tokens`; the message says which rollout
            and field. Or `weights` has another length.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rows = [row for rollout in rollouts for row in rollout.rows]
    segments = [segment for row in rows for segment in row]
    rows_of = [len(rollout.rows) for rollout in rollouts]
    if weights is None:
        weights = [1.0] * len(rollouts)
    if len(weights) != len(rollouts):
        raise ValueError(f"{len(rollouts)} rollouts, but {len(weights)} weights")
    numbers, sizes = _C.pack_tree(
        [segment.token_ids for segment in segments],
        [segment.logprobs for segment in segments],
        np.array([len(row) for row in rows], np.int32),
        np.repeat(np.array([_largest_advantage(r) for r in rollouts], np.float32), rows_of),
        np.repeat(np.array(weights, np.float32), rows_of),
        max_tokens,
        drop_zero_advantage,
        share_prefixes,
        lambda size: np.empty(size, np.int32),
    )
    bounds = np.cumsum([0] + [3 * tokens + 6 * terms for tokens, terms in sizes])
    labels = _TokenLabels(rollouts)
    return [
        _packed_batch(numbers[start:end], tokens, labels)
        for start, end, (tokens, _) in zip(bounds, bounds[1:], sizes, strict=False)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class FlexBlocks:
    """What `torch.nn.attention.flex_attention.BlockMask` is made of, n blocks a side, int32.

    Its arguments are these fields with two leading dimensions of 1 (batch, head) added. Each row
    of `*_indices` lists the blocks of its kind in order, `*_num_blocks` of them, then the others.
    """

    kv_num_blocks: Int32
    """[n] partly visible blocks per block of queries; `kv_indices` is [n, n]."""
    kv_indices: Int32
    full_kv_num_blocks: Int32
    full_kv_indices: Int32
    q_num_blocks: Int32
    """[n] the same by block of keys, for the backward pass."""
    q_indices: Int32
    full_q_num_blocks: Int32
    full_q_indices: Int32


def flex_blocks(tout_T: Int32, block_size: int = 128) -> FlexBlocks:
    """The block mask of `k <= q < tout_T[k]`, from the intervals instead of from T * T values.

    Equal, bit for bit, to what `create_block_mask` of torch 2.13 computes.

    Raises:
        ValueError: `tout_T` is not 1-d int32 with t < tout_T[t] <= T, or `block_size` < 1.
    """
    numbers = np.frombuffer(_C.block_mask(tout_T, block_size), np.int32)
    num_blocks = -(-len(tout_T) // block_size)
    fields: list[Int32] = []
    for kind in numbers.reshape(4, num_blocks * (num_blocks + 1)):
        fields += [kind[:num_blocks], kind[num_blocks:].reshape(num_blocks, num_blocks)]
    return FlexBlocks(*fields)


def _largest_advantage(rollout: Rollout) -> float:
    """What tells the packer whether to lay the rollout out; nan and infinity win, to be refused.

    Raises:
        ValueError: segment_advantages has another length than segments.
    """
    if rollout.segment_advantages is None:
        return rollout.advantage
    segments = [segment for row in rollout.rows for segment in row]
    if len(rollout.segment_advantages) != len(segments):
        raise ValueError(
            f"task {rollout.task.id}: {len(segments)} segments need as many "
            f"segment_advantages, got {len(rollout.segment_advantages)}"
        )
    pairs = zip(segments, rollout.segment_advantages, strict=True)
    sampled = [advantage for segment, advantage in pairs if segment.sampled]
    if not np.isfinite(sampled).all():
        return float("nan")
    return max(sampled, key=abs, default=0.0)


class _TokenLabels:
    """Rollout, turn and advantage of every token of the step, found by row and position."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        lengths, turn, advantage, sizes = [], [], [], []
        for rollout in rollouts:
            segments = [segment for row in rollout.rows for segment in row]
            lengths += [len(segment.token_ids) for segment in segments]
            turn += (np.cumsum([segment.sampled for segment in segments]) - 1).tolist()
            advantage += rollout.segment_advantages or [rollout.advantage] * len(segments)
            sizes += [len(row) for row in rollout.rows]
        ends = np.cumsum([0, *sizes])
        self._first = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[ends]
        self._turn = np.repeat(np.array(turn, np.int32), lengths)
        self._advantage = np.repeat(np.array(advantage, np.float32), lengths)
        rows_of = [len(rollout.rows) for rollout in rollouts]
        self._rollout = np.repeat(np.arange(len(rollouts), dtype=np.int32), rows_of)

    def of(self, row_N: Int32, position_N: Int32) -> tuple[Int32, Int32, Float32]:
        """(rollout, turn, advantage) of the tokens at these positions of these rows."""
        at = self._first[row_N] + position_N
        return self._rollout[row_N], self._turn[at], self._advantage[at]


def _packed_batch(numbers: Int32, num_tokens: int, labels: _TokenLabels) -> PackedBatch:
    """The fields of one tree, views of the memory that _C.pack_tree filled but for the labels."""
    per_token = numbers[: 3 * num_tokens].reshape(3, -1)
    per_term = numbers[3 * num_tokens :].reshape(6, -1)
    floats = per_term[3:].view(np.float32)
    sample_N, turn_N, advantage_N = labels.of(per_term[2], per_token[1][per_term[0]] + 1)
    return PackedBatch(
        input_ids_T=per_token[0],
        positions_T=per_token[1],
        tout_T=per_token[2],
        row_N=per_term[0],
        target_N=per_term[1],
        sample_N=sample_N,
        old_logp_N=floats[0],
        turn_N=turn_N,
        advantage_N=advantage_N,
        weight_N=floats[2],
    )
