"""flex_blocks against create_block_mask: equal bit for bit; with a window a superset."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from agentgrpo.learn.packing import flex_blocks
from agentgrpo.types import Int32


def tree_tout(lengths: list[int], depths: list[int]) -> Int32:
    """Runs of tokens in depth-first order, each a child of the nearest run before it that is
    shallower.
    """
    ends = np.cumsum(lengths)
    tout = np.empty(int(ends[-1]), np.int32)
    for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        last = i
        while last + 1 < len(depths) and depths[last + 1] > depths[i]:
            last += 1
        tout[end - length : end] = ends[last]
    return tout


def torch_block_mask(tout_T: Int32, block_size: int, window: int | None = None) -> BlockMask:
    tout, depth = torch.from_numpy(tout_T), torch.from_numpy(depths_of(tout_T))
    near = len(tout_T) if window is None else window
    return create_block_mask(
        lambda b, h, q, k: (k <= q) & (q < tout[k]) & (depth[q] - depth[k] < near),
        None, None, len(tout_T), len(tout_T), device="cpu", BLOCK_SIZE=block_size,
    )  # fmt: skip


def depths_of(tout_T: Int32) -> Int32:
    """Of each token, one ancestor at a time."""
    depths = np.zeros(len(tout_T), np.int32)
    above: list[int] = []
    for token in range(len(tout_T)):
        while above and tout_T[above[-1]] <= token:
            above.pop()
        depths[token] = len(above)
        above.append(token)
    return depths


def visible(num_blocks: Any, indices: Any) -> Any:
    """[n, n], whether a block of queries has one of keys among its."""
    count, listed = np.asarray(num_blocks).squeeze(), np.asarray(indices)
    n = listed.shape[-1]
    actual = np.zeros((n, n), bool)
    for row, (much, blocks) in enumerate(zip(count.reshape(-1), listed.reshape(n, n), strict=True)):
        actual[row, blocks[:much]] = True
    return actual


def check(tout_T: Int32, block_size: int, window: int | None = None) -> None:
    depths = depths_of(tout_T)
    ours = flex_blocks(tout_T, depths, block_size, window)
    expected = torch_block_mask(tout_T, block_size, window)
    if window is not None:
        listed = visible(ours["kv_num_blocks"], ours["kv_indices"])
        assert not (visible(expected.kv_num_blocks, expected.kv_indices) & ~listed).any()
    for name, mine in ours.items():
        theirs = getattr(expected, name)[0, 0].numpy()
        assert theirs.dtype == mine.dtype == np.int32
        if window is None or (name.startswith("full") and name.endswith("num_blocks")):
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


RUNS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(RUNS, st.sampled_from([2, 4, 7, 16]), st.none() | st.integers(1, 40))
def test_equals_create_block_mask(
    runs: list[tuple[int, int]], block_size: int, window: int | None
) -> None:
    check(tree_tout([n for n, _ in runs], [d for _, d in runs]), block_size, window)


@pytest.mark.parametrize("window", [None, 1, 100, 128, 200])
@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 1000, 1024])
def test_equals_create_block_mask_at_the_default_size(num_tokens: int, window: int | None) -> None:
    rng = np.random.default_rng(num_tokens)
    cuts = np.unique(np.append(rng.integers(1, num_tokens + 1, 12), num_tokens))
    depths = rng.integers(0, 4, len(cuts)).tolist()
    check(tree_tout(np.diff(cuts, prepend=0).tolist(), depths), 128, window)


def test_windowed_blocks_need_no_quadratic_memory() -> None:
    """65,536 tokens: all pairs would be 4 GiB of booleans."""
    rng = np.random.default_rng(0)
    cuts = np.unique(np.append(rng.integers(1, 2**16, 2000), 2**16))
    tout = tree_tout(np.diff(cuts, prepend=0).tolist(), rng.integers(0, 4, len(cuts)).tolist())
    depths = depths_of(tout)
    tracemalloc.start()
    try:
        flex_blocks(tout, depths, 128, 1024)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("window", [None, 4])
def test_no_tokens(window: int | None) -> None:
    nothing = np.empty(0, np.int32)
    blocks = flex_blocks(nothing, nothing, 128, window)
    assert blocks["kv_num_blocks"].shape == (0,)
    assert blocks["q_indices"].shape == (0, 0)


def test_keys_are_block_mask_arguments() -> None:
    tout_T = tree_tout([5, 3, 4, 6], [0, 1, 2, 1])
    blocks = flex_blocks(tout_T, depths_of(tout_T), 4)
    tensors: dict[str, Any] = {n: torch.from_numpy(x)[None, None] for n, x in blocks.items()}
    mask = BlockMask(
        seq_lengths=(18, 18), **tensors, BLOCK_SIZE=(4, 4), mask_mod=lambda b, h, q, k: q >= k
    )
    assert torch.equal(mask.to_dense(), torch_block_mask(tout_T, 4).to_dense())
