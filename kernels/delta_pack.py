"""The device batch of flat token deltas: each delta travels to the device once, unexpanded.

A rollout is a list of segments: runs of tokens that the policy sampled or was given. The deltas of
a step lie one behind the other in ids_D and logp_D, in any order; a segment says where its tokens
are, so a prompt that several rollouts share is there once. Packed token t = bounds[s] + i is token
i of segment s, and its row predicts the token after it:

    target[t] = input_ids[t + 1]          where t and t + 1 belong to the same rollout
    mask[t]   = t + 1 lies in a sampled segment of the same rollout

so the outputs are what grpo_loss() takes row by row. Slots where mask is False are 0.

Shape suffixes: D delta tokens, S segments, R rollouts, T packed tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_T = 256


class DeltaBatch(NamedTuple):
    """Rollouts side by side without padding; all [T]."""

    input_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, from 0 in each rollout: where it is 0, another rollout begins."""
    target_T: Tensor
    """int64; the next token, 0 where it is not to be learned."""
    mask_T: Tensor
    """bool."""
    old_logp_T: Tensor
    """fp32, of the target."""
    advantage_T: Tensor
    """fp32, of the rollout."""
    weight_T: Tensor
    """fp32, of the rollout."""


def delta_pack_reference(
    ids_D: Tensor,
    logp_D: Tensor,
    start_S: Tensor,
    size_S: Tensor,
    sampled_S: Tensor,
    rollout_S: Tensor,
    advantage_R: Tensor,
    weight_R: Tensor,
) -> DeltaBatch:
    """The same in plain PyTorch: what the kernel is tested against, and the CPU path."""
    segment_T = torch.repeat_interleave(size_S)
    t = torch.arange(len(segment_T), device=ids_D.device)
    bounds_S = size_S.cumsum(0) - size_S
    source_T = start_S[segment_T] + t - bounds_S[segment_T]
    rollout_T = rollout_S[segment_T]
    first_R = torch.searchsorted(rollout_T, torch.arange(len(advantage_R), device=ids_D.device))
    next_T = (t + 1).clamp(max=max(len(t) - 1, 0))
    mask_T = (next_T > t) & (rollout_T[next_T] == rollout_T) & sampled_S[segment_T[next_T]]
    next_source_T = source_T[next_T]
    return DeltaBatch(
        input_ids_T=ids_D[source_T].long(),
        positions_T=t - first_R[rollout_T],
        target_T=torch.where(mask_T, ids_D[next_source_T], 0).long(),
        mask_T=mask_T,
        old_logp_T=torch.where(mask_T, logp_D[next_source_T], 0.0),
        advantage_T=torch.where(mask_T, advantage_R[rollout_T], 0.0),
        weight_T=torch.where(mask_T, weight_R[rollout_T], 0.0),
    )


@triton.jit
def _segment_of(bounds, t, S, STEPS: tl.constexpr):
    """The last s with bounds[s] <= t, which is the one that holds t; empty ones are passed over."""
    low = tl.zeros_like(t)
    high = low + S
    for _ in range(STEPS):
        middle = (low + high) // 2
        right = tl.load(bounds + middle) <= t
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def _delta_pack_kernel(
    ids, logp, start, bounds, sampled, rollout, first, advantage, weight,  # inputs
    input_ids, positions, target, mask, old_logp, advantage_out, weight_out,  # outputs, [T]
    T, S,
    STEPS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_T packed tokens, whatever the segments' lengths."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    keep = t < T
    t = tl.where(keep, t, T - 1)
    s = _segment_of(bounds, t, S, STEPS)
    r = tl.load(rollout + s)
    source = tl.load(start + s) + t - tl.load(bounds + s)
    tl.store(input_ids + t, tl.load(ids + source).to(tl.int64), mask=keep)
    tl.store(positions + t, (t - tl.load(first + r)).to(tl.int64), mask=keep)

    u = tl.where(t + 1 < T, t + 1, t)
    s = _segment_of(bounds, u, S, STEPS)
    learned = (u > t) & (tl.load(rollout + s) == r) & (tl.load(sampled + s) != 0)
    source = tl.load(start + s) + u - tl.load(bounds + s)
    tl.store(mask + t, learned, mask=keep)
    tl.store(target + t, tl.load(ids + source, mask=learned, other=0).to(tl.int64), mask=keep)
    tl.store(old_logp + t, tl.load(logp + source, mask=learned, other=0.0), mask=keep)
    tl.store(advantage_out + t, tl.load(advantage + r, mask=learned, other=0.0), mask=keep)
    tl.store(weight_out + t, tl.load(weight + r, mask=learned, other=0.0), mask=keep)


def _launch(
    ids_D: Tensor, logp_D: Tensor, start_S: Tensor, size_S: Tensor, sampled_S: Tensor,
    rollout_S: Tensor, advantage_R: Tensor, weight_R: Tensor, num_tokens: int,
) -> DeltaBatch:  # fmt: skip
    device, S = ids_D.device, len(size_S)
    bounds_S1 = torch.zeros(S + 1, dtype=torch.int64, device=device)
    torch.cumsum(size_S, 0, out=bounds_S1[1:])
    rollouts = torch.arange(len(advantage_R), device=device)
    first_R = bounds_S1[torch.searchsorted(rollout_S, rollouts)]

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(num_tokens, dtype=dtype, device=device)

    batch = DeltaBatch(
        input_ids_T=empty(torch.int64),
        positions_T=empty(torch.int64),
        target_T=empty(torch.int64),
        mask_T=empty(torch.bool),
        old_logp_T=empty(torch.float32),
        advantage_T=empty(torch.float32),
        weight_T=empty(torch.float32),
    )
    grid: Any = (triton.cdiv(num_tokens, _BLOCK_T),)
    if num_tokens:
        with torch.cuda.device_of(ids_D):
            _delta_pack_kernel[grid](
                ids_D, logp_D, start_S, bounds_S1, sampled_S, rollout_S, first_R, advantage_R,
                weight_R, *batch, num_tokens, S, STEPS=S.bit_length(), BLOCK_T=_BLOCK_T,
            )  # fmt: skip
    return batch


def delta_pack(
    ids_D: Tensor,
    logp_D: Tensor,
    start_S: Tensor,
    size_S: Tensor,
    sampled_S: Tensor,
    rollout_S: Tensor,
    advantage_R: Tensor,
    weight_R: Tensor,
    *,
    num_tokens: int | None = None,
) -> DeltaBatch:
    """Build the batch on the device from flat deltas and their descriptors.

    Args:
        ids_D: int32 token ids of all deltas.
        logp_D: fp32 log-probabilities in nats; may be anything, nan included, where not sampled.
        start_S: int64 index in ids_D of the segment's first token. Segments may overlap.
        size_S: int64 its tokens, 0 allowed.
        sampled_S: bool, whether the policy sampled it.
        rollout_S: int64 its rollout, ascending; a rollout's segments are in order.
        advantage_R: fp32.
        weight_R: fp32 loss-normaliser weight.
        num_tokens: the sum of size_S, if the caller knows it; else it is read from the device,
            which waits for the device.

    Raises:
        ValueError: dtypes, shapes or devices disagree with the above. Values are not checked: that
            would wait for the device.
    """
    D, S, R = len(ids_D), len(size_S), len(advantage_R)
    for name, x, dtype, size in [
        ("ids_D", ids_D, torch.int32, D), ("logp_D", logp_D, torch.float32, D),
        ("start_S", start_S, torch.int64, S), ("size_S", size_S, torch.int64, S),
        ("sampled_S", sampled_S, torch.bool, S), ("rollout_S", rollout_S, torch.int64, S),
        ("advantage_R", advantage_R, torch.float32, R), ("weight_R", weight_R, torch.float32, R),
    ]:  # fmt: skip
        if x.shape != (size,) or x.dtype != dtype or x.device != ids_D.device:
            raise ValueError(
                f"{name}: expected {dtype} of shape ({size},) on {ids_D.device}, "
                f"got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got stride {x.stride()}")
    arguments = (ids_D, logp_D, start_S, size_S, sampled_S, rollout_S, advantage_R, weight_R)
    if not ids_D.is_cuda and not triton.knobs.runtime.interpret:
        return delta_pack_reference(*arguments)
    return _launch(*arguments, int(size_S.sum()) if num_tokens is None else num_tokens)
