"""FlexAttention compiled with few kernels for all lengths, and an error instead of eager fallback.

bench/gpu/probe.py compares it with the CPU's result on a GPU; how often Dynamo compiles can be
tested on a CPU.

transformers' own torch.compile makes a kernel for the first length, then one for any length, then
one for any number of blocks, and all of them again for layers with and without a gradient and for
windows. After 8 Dynamo gives up: FlexAttention then runs eagerly and writes the scores [heads, T,
T] to memory, 17 GB at 16k tokens, which looks like a batch that is too large. So here lengths are
dynamic from the start, pad_to_blocks() rounds them up, and exceeding the limit is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from agentgrpo.learn.batch import PackedBatch

BLOCK = 128
"""Tokens per side of a mask block."""

MAX_TUNED_HEAD_DIM = 256
"""Head width above which torch chooses the same blocks on every GPU."""

A100_SHARED_MEMORY = 160 << 10
"""Shared memory per SM that torch's own blocks assume (an A100's); an RTX 4090 has 99 KiB."""

RECOMPILE_LIMIT = 64
"""A model needs its kinds of layers times two (with and without a gradient)."""


def pad_to_blocks(batch: PackedBatch) -> PackedBatch:
    """Pad the batch to a multiple of BLOCK tokens, at least two blocks.

    At least two, because Dynamo specialises a dimension of size one.
    """
    missing = max(2, -(-batch.num_tokens // BLOCK)) * BLOCK - batch.num_tokens
    return batch.padded(missing) if missing else batch


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """[1, Hq, T, D] from query [1, Hq, T, D] and key and value [1, Hkv, T, D]."""
    # Dynamo uses one symbol for all sizes that are equal at first. If a head's 128 columns (or
    # those of the tensor that it is a view of) shared one with 128 blocks, the kernel would be
    # valid for 128 blocks only. Hence contiguous copies with static columns.
    query, key, value = (
        x.clone(memory_format=torch.contiguous_format) if x._is_view() else x
        for x in (query, key, value)
    )
    for x in (query, key, value):
        torch._dynamo.mark_static(x, [1, 3])
    # scoring and frozen layers share a kernel
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    with torch.set_grad_enabled(needs_grad), torch._dynamo.config.patch(
        recompile_limit=RECOMPILE_LIMIT,
        fail_on_recompile_limit_hit=True,
        specialize_float=True,  # scale and soft cap belong to the model
    ):  # fmt: skip
        return compiled_attend()(
            query, key, value, mask, scaling, softcap, shared_memory(query.device)
        )


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per block that a kernel may use; without a GPU an A100's."""
    if device.type != "cuda":
        return A100_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def compiled_attend() -> Callable[..., Tensor]:
    """_attend(), compiled at its first call and shared by all layers."""
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None,
    softcap: float | None, memory: int,
) -> Tensor:  # fmt: skip
    heads = query.shape[1]
    grouped = heads & (heads - 1) == 0  # as transformers does: other counts repeat the key heads
    if not grouped:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    out = flex_attention(
        query, key, value, score_mod=None if softcap is None else _capped(softcap), block_mask=mask,
        scale=scaling, enable_gqa=grouped, kernel_options=_options(query, value, memory),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _options(query: Tensor, value: Tensor, memory: int) -> FlexKernelOptions | None:
    """Block sizes that fit an SM's shared memory where torch's own do not: 263 kB of an H100's 232.

    A block of queries, one of keys and one of values, and in the backward pass one of the gradient:
    96 and 128 KiB of 32 KiB each (half as much on a smaller GPU), with columns that torch pads to a
    power of two. More than 512 columns in float32 do not fit: Triton's products need 16 rows.
    """
    width = max(query.shape[-1], value.shape[-1])
    if width <= MAX_TUNED_HEAD_DIM and memory >= A100_SHARED_MEMORY:
        return None
    padded = 1 << (width - 1).bit_length()
    largest = (32 if memory >= A100_SHARED_MEMORY else 16) << 10
    block = min(128, max(16, largest // (padded * query.dtype.itemsize)))
    return {
        "num_stages": 1, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_M1": block, "BLOCK_N1": block,
        "BLOCK_M2": block, "BLOCK_N2": block,
    }  # fmt: skip


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *_: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
