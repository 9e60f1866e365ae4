"""FlexAttention as we compile it: few kernels for all lengths, and never silently uncompiled.

bench/gpu/probe.py compares it with the CPU's on a card; a CPU can show how often Dynamo compiles.

transformers' own torch.compile makes a kernel for the first length, then one for any length, then
one for any number of blocks, and all of them again for layers with and without a gradient and for
windows. Past 8 Dynamo gives up: FlexAttention then runs eagerly and writes the scores
[heads, T, T] to memory, 17 GB at 16k tokens, which looks like a batch that is too large. So here
lengths are unknown from the first, whole_blocks() leaves no odd ones, and passing the limit is an
error.
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
"""Tokens a side of a block of the mask."""

WIDE = 256
"""Columns of a head, above which torch chooses the same blocks on every card."""

ROOMY = 160 << 10
"""Shared memory of an SM for which torch's own blocks are made (an A100's); a 4090 has 99 KiB."""

COMPILES = 64
"""Before it is an error. Kinds of layers times two (with and without a gradient) are needed."""


def whole_blocks(batch: PackedBatch) -> PackedBatch:
    """The batch with a run of padding behind it, to a multiple of BLOCK tokens, at least two.

    At least two, because Dynamo compiles whatever has length one for that alone.
    """
    missing = max(2, -(-batch.num_tokens // BLOCK)) * BLOCK - batch.num_tokens
    return batch.padded(missing) if missing else batch


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """[1, Hq, T, D] from query [1, Hq, T, D] and key and value [1, Hkv, T, D]."""
    # Dynamo has one symbol for all lengths that are equal at first. Were a head's 128 columns, or
    # those of what it is a view of, and 128 blocks one, the kernel would be for 128 blocks alone.
    whole = torch.contiguous_format
    query, key, value = (
        x.clone(memory_format=whole) if x._is_view() else x for x in (query, key, value)
    )
    for x in (query, key, value):
        torch._dynamo.mark_static(x, [1, 3])
    # scoring and frozen layers are one kind
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    with torch.set_grad_enabled(wanted), torch._dynamo.config.patch(
        recompile_limit=COMPILES,
        fail_on_recompile_limit_hit=True,
        specialize_float=True,  # scale and soft cap belong to the model
    ):  # fmt: skip
        return compiled()(query, key, value, mask, scaling, softcap, shared_memory(query.device))


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a kernel may have on one SM; without a card as many as an A100 has."""
    if device.type != "cuda":
        return ROOMY
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def compiled() -> Callable[..., Tensor]:
    """_attend(), compiled at its first call; all layers share it."""
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None,
    softcap: float | None, memory: int,
) -> Tensor:  # fmt: skip
    heads = query.shape[1]
    grouped = heads & (heads - 1) == 0  # as transformers does: others get a head of keys each
    if not grouped:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    out = flex_attention(
        query, key, value, score_mod=None if softcap is None else _capped(softcap), block_mask=mask,
        scale=scaling, enable_gqa=grouped, kernel_options=_options(query, value, memory),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _options(query: Tensor, value: Tensor, memory: int) -> FlexKernelOptions | None:
    """Blocks that fit an SM's shared memory, where torch's own do not: 263 kB of an H100's 232.

    A block of queries, one of keys and one of values, and of the gradient in the backward pass: 96
    and 128 KiB of 32 KiB each (half as much on a smaller card), of columns that torch pads to a
    power of two. More than 512 columns in float32 do not fit: Triton's products need 16 rows.
    """
    width = max(query.shape[-1], value.shape[-1])
    if width <= WIDE and memory >= ROOMY:
        return None
    padded = 1 << (width - 1).bit_length()
    largest = (32 if memory >= ROOMY else 16) << 10
    block = min(128, max(16, largest // (padded * query.dtype.itemsize)))
    return {
        "num_stages": 1, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_M1": block, "BLOCK_N1": block,
        "BLOCK_M2": block, "BLOCK_N2": block,
    }  # fmt: skip


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *_: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
