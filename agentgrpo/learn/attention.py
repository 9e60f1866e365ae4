"""Attention over packed trees, registered with transformers, so that models need no changes.

A batch is one row of tokens in depth-first order; token q attends to token k if and only if k <= q
< tout[k]. Implementations:

* CPU: the kernels of scaled_dot_product_attention, per unbranched run of keys, for the queries
  that attend to it: no T x T mask, and no work for masked pairs. Layers with a sliding window or a
  soft cap: per run of queries, over the keys on its path from the root.
* CUDA: FlexAttention (flex.py) with a BlockMask made from the intervals (flex_blocks of
  packing.py). Without shared tokens, FlashAttention's variable-length kernel, which supports 16-bit
  dtypes, and head widths of at most 256 that are equal for keys and values.

Sliding windows, soft caps and grouped queries come from the layer's own arguments. Recurrent layers
are in recurrent.py; forward_check.py decides which models cannot share prefixes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from agentgrpo.kernels.checks import once_differentiable, upload
from agentgrpo.learn import flex
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.packing import flex_blocks
from agentgrpo.types import Int32

TREE = "agentgrpo_tree"
"""The name under which transformers finds tree_attention()."""

FLASH = (torch.bfloat16, torch.float16)
"""Dtypes that FlashAttention supports."""


class Run(NamedTuple):
    """Tokens [start, end) without a branch, and the token ranges before them on the path."""

    start: int
    end: int
    path: tuple[tuple[int, int], ...]
    """Ascending, disjoint, not adjacent; the last one may end at start."""

    @property
    def depth(self) -> int:
        return sum(end - start for start, end in self.path)


def runs_of(tout_T: Int32) -> list[Run]:
    """The runs of the tree, in packed order."""
    starts = np.flatnonzero(np.diff(tout_T, prepend=-1)).tolist()
    runs: list[Run] = []
    above: list[tuple[int, int]] = []
    """(start, end) of the runs whose subtrees are not finished."""
    for start, end in zip(starts, [*starts[1:], len(tout_T)], strict=True):
        while above and tout_T[above[-1][0]] <= start:
            above.pop()
        path: list[tuple[int, int]] = []
        for first, last in above:
            if path and path[-1][1] == first:
                path[-1] = (path[-1][0], last)
            else:
                path.append((first, last))
        runs.append(Run(start, end, tuple(path)))
        above.append((start, end))
    return runs


class _Block(NamedTuple):
    """The keys of one run, and queries that attend to them."""

    queries: slice
    keys: slice
    causal: bool
    """The queries are the run itself; otherwise its descendants, which attend to all of it."""
    first: bool
    """These queries have attended to nothing before."""


class Tree:
    """A batch's tree, for the attention layers of one forward pass (see PackedBatch)."""

    def __init__(self, batch: PackedBatch, device: torch.device | str) -> None:
        self._batch, self.device = batch, torch.device(device)
        self.tout_T, self.positions_T = batch.tout_T, batch.positions_T
        self.runs = runs_of(self.tout_T)
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    @functools.cached_property
    def blocks(self) -> list[_Block]:
        """Products of queries and keys that need no mask, ancestors first."""
        blocks = []
        for run in self.runs:
            keys, end = slice(run.start, run.end), int(self.tout_T[run.start])
            blocks.append(_Block(keys, keys, causal=True, first=not run.path))
            if end > run.end:
                blocks.append(_Block(slice(run.end, end), keys, causal=False, first=not run.path))
        return blocks

    @property
    def shared(self) -> bool:
        """Whether any token is on the path of two runs; otherwise each run is a whole sequence."""
        return any(run.path for run in self.runs)

    def run_mask(self, run: Run, window: int | None) -> Tensor | None:
        """[tokens of the run, tokens on its path and in it], True where visible; None: plain
        causal.

        The index along the path is the position, so a window is a band.
        """
        length, total = run.end - run.start, run.depth + run.end - run.start
        if window is not None and window >= total:
            window = None
        if not run.path and window is None:
            return None
        key = (length, total, window)
        if key not in self._masks:
            query = torch.arange(run.depth, total, device=self.device)[:, None]
            key_positions = torch.arange(total, device=self.device)[None, :]
            visible = key_positions <= query
            self._masks[key] = (
                visible if window is None else visible & (query - key_positions < window)
            )
        return self._masks[key]

    def effective_window(self, window: int | None) -> int | None:
        """The window of a layer; None if it masks nothing in this batch."""
        if window is not None and window > int(self.positions_T.max()):
            return None
        return window

    def block_mask(self, window: int | None) -> BlockMask:
        window = self.effective_window(window)
        if window not in self._block_masks:
            blocks = flex_blocks(self.tout_T, self.positions_T, flex.BLOCK, window)
            tensors: dict[str, Any] = {
                name: self._upload(array)[None, None] for name, array in blocks.items()
            }
            self._block_masks[window] = BlockMask(
                seq_lengths=(len(self.tout_T), len(self.tout_T)),
                **tensors,
                BLOCK_SIZE=(flex.BLOCK, flex.BLOCK),
                mask_mod=self._mask_mod(window),
            )
        return self._block_masks[window]

    @functools.cached_property
    def bounds(self) -> Tensor:
        """[runs + 1] int32: starts of the unshared rows and the end of the last, for all layers."""
        return self._upload(np.array([0, *(run.end for run in self.runs)], np.int32))

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        return upload(torch.from_numpy(array.copy()), self.device)

    def _mask_mod(self, window: int | None) -> Callable[..., Tensor]:
        _, position, tout = self._batch.tokens(self.device)

        def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < tout[key])

        if window is None:
            return is_visible
        # a tensor, because Dynamo compiles a kernel for each number
        threshold = position - window

        def is_visible_and_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return is_visible(batch, head, query, key) & (position[key] > threshold[query])

        return is_visible_and_near


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree: Tree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, T, Hq, D], as transformers calls it: query [1, Hq, T, D]; key, value [1, Hkv, T, D]."""
    if tree is None:
        raise ValueError(f"{type(module).__name__} does not pass keyword arguments to attention")
    for name in ("s_aux", "position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: attention argument {name} is not supported")
    if dropout:
        raise ValueError(f"attention dropout: expected 0, got {dropout}")
    if query.is_cuda:
        return _attend_cuda(query, key, value, scaling, sliding_window, softcap, tree), None
    unmasked = tree.effective_window(sliding_window) is None and softcap is None
    if unmasked and key.shape[-1] == value.shape[-1]:
        attended = _TreeAttention.apply(query, key, value, tree.blocks, scaling)  # type: ignore[no-untyped-call]
        return attended, None
    key, value = _repeat_kv(query, key, value)
    outputs = []
    # one run at a time: a T x T mask of a packed step would outgrow the activations
    for run in tree.runs:
        ranges = [*run.path, (run.start, run.end)]
        keys, values = (torch.cat([x[:, :, a:b] for a, b in ranges], dim=2) for x in (key, value))
        mask = tree.run_mask(run, sliding_window)
        part = query[:, :, run.start : run.end]
        outputs.append(_attend(part, keys, values, mask, scaling, softcap))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


class _TreeAttention(torch.autograd.Function):
    """Attention without windows and soft caps on CPU, by runs of keys instead of queries.

    The descendants of a run follow it directly, so a run needs two products of slices, one causal
    and one full, without masks, copies or concatenated paths. The partial softmaxes of a token are
    merged by their log-sum-exp. The backward pass uses the log-sum-exp of the full softmax in each
    product (as ring attention does, arXiv:2310.01889) and writes each gradient in place: autograd
    would fill a full tensor with zeros for each slice.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[_Block],
        scaling: float | None,
    ) -> Tensor:  # fmt: skip
        query, key, value = map(_last_stride_1, (query, key, value))
        q, k, v = _by_group(query, key, value)
        # the result [1, T, Hq, D] and its view by groups; float32, because merging in 16 bit rounds
        wide = torch.promote_types(q.dtype, torch.float32)
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3], dtype=wide)
        o = out[0].unflatten(1, q.shape[:2]).permute(1, 2, 0, 3)
        lse = o.new_empty(o.shape[:3])
        for queries, keys, causal, first in blocks:
            part, sums = _FORWARD(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, causal, scale=scaling
            )
            if first:
                o[:, :, queries], lse[:, :, queries] = part, sums
                continue
            merged, merged_lse = o[:, :, queries], lse[:, :, queries]
            merged.lerp_(part.to(wide), torch.sigmoid(sums - merged_lse)[..., None])
            torch.logaddexp(merged_lse, sums, out=merged_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.scaling = blocks, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        q, k, v = _by_group(query, key, value)
        pair = (out, _last_stride_1(grad))
        o, g = (x[0].unflatten(1, q.shape[:2]).permute(1, 2, 0, 3) for x in pair)
        dq = torch.empty_like(q)
        dk, dv = (x.new_zeros(x.shape[0], 1, *x.shape[2:]) for x in (k, v))
        for queries, keys, causal, first in ctx.blocks:
            q_part, k_part, v_part = _BACKWARD(
                g[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys],
                o[:, :, queries], lse[:, :, queries], 0.0, causal, scale=ctx.scaling,
            )  # fmt: skip
            if first:
                dq[:, :, queries] = q_part
            else:
                dq[:, :, queries] += q_part
            dk[:, :, keys] += k_part.sum(1, keepdim=True)
            dv[:, :, keys] += v_part.sum(1, keepdim=True)
        return dq.reshape(query.shape), dk.reshape(key.shape), dv.reshape(value.shape), None, None


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _last_stride_1(x: Tensor) -> Tensor:
    """The aten kernels assume a last stride of 1; only the dispatcher, bypassed here, checks it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_group(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [Hkv, groups, T, D]: keys and values are not repeated for the queries of a group."""
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    q = query[0].unflatten(0, (heads, groups))
    k, v = (x[0][:, None].expand(-1, groups, -1, -1) for x in (key, value))
    return q, k, v


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
        )
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    # after the cap, which would turn -inf into a finite score
    scores = scores.masked_fill(~mask, float("-inf"))
    # summed in float32 at least: in 16 bit the sum of a long row stops growing
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype) @ value


def _attend_cuda(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
    window: int | None, softcap: float | None, tree: Tree,
) -> Tensor:  # fmt: skip
    if tree.shared or softcap is not None or not _supports_flash(query, value):
        mask = tree.block_mask(window)
        return flex.attend(query, key, value, mask, scaling, softcap).transpose(1, 2).contiguous()
    from torch.nn.attention.varlen import varlen_attn

    bounds = tree.bounds
    longest = max(run.end - run.start for run in tree.runs)
    groups: dict[str, Any] = {"enable_gqa": True} if _supports_gqa(varlen_attn) else {}
    if not groups:
        key, value = _repeat_kv(query, key, value)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    packed = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scaling, **groups,
        window_size=(-1 if window is None else window - 1, 0),
    )  # fmt: skip
    assert isinstance(packed, Tensor)
    return packed[None]


def _supports_flash(query: Tensor, value: Tensor) -> bool:
    """Whether torch's FlashAttention (flash_api.cpp) supports this dtype and head width."""
    width = query.shape[-1]
    return query.dtype in FLASH and width == value.shape[-1] <= 256 and width % 8 == 0


def _supports_gqa(kernel: Callable[..., Any]) -> bool:
    """Whether the kernel supports grouped queries: torch 2.13's does, 2.11's does not."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _repeat_kv(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


AttentionInterface.register(TREE, tree_attention)
