"""Log-probability of one token and entropy of its distribution, per row of given logits.

With x = logits[row] (capped: softcap * tanh(x / softcap) if a softcap is given):

    p       = softmax(x / temperature)
    logp    = log p[target]                       entropy = -sum_v p[v] log p[v]
    d logp / d x[v]    = ([v == target] - p[v]) / temperature
    d entropy / d x[v] = -p[v] (log p[v] + entropy) / temperature

Rows outside the mask are never read, and their gradient is exactly zero. With hidden states it is
better never to compute the logits of such rows: linear_logp.py. The arithmetic is in rows.py.

Shape suffixes: T rows (all of B and L), V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import (
    Backend,
    backend_for,
    check_options,
    check_range,
    check_tensor,
    once_differentiable,
)
from .rows import (
    RowStats,
    cap_,
    target_grad,
    tiles,
    torch_grad_,
    torch_stats_,
    triton_grad,
    triton_logp,
    triton_stats,
    working_dtype,
)


def _at(logits: Tensor, rows: Tensor, *column: Tensor) -> tuple[Tensor, ...]:
    """The index of rows (numbered as in Layout), or of one column in each."""
    if logits.ndim == 2:
        return (rows, *column)
    return (rows // logits.shape[1], rows % logits.shape[1], *column)


def _torch_forward(
    logits: Tensor, target_T: Tensor, rows: Tensor, inv_temperature: float, softcap: float | None
) -> tuple[Tensor, RowStats]:
    dtype = working_dtype(logits.dtype)
    logp = torch.zeros_like(target_T, dtype=dtype)
    stats = RowStats(*(torch.zeros_like(logp) for _ in RowStats._fields))
    for tile in tiles(len(rows), logits.shape[-1]):
        indices = rows[tile]
        x = cap_(logits[_at(logits, indices)].to(dtype), softcap)
        local_rows = torch.arange(len(indices), device=indices.device)
        logp[indices], tile_stats = torch_stats_(x, local_rows, target_T[indices], inv_temperature)
        for values, part in zip(stats, tile_stats, strict=True):
            values[indices] = part
    return logp, stats


def _torch_backward(
    out: Tensor, logits: Tensor, rows: Tensor, stats: RowStats, grad_T: Tensor,
    grad_entropy_T: Tensor | None, inv_temperature: float, softcap: float | None,
) -> None:  # fmt: skip
    for tile in tiles(len(rows), logits.shape[-1]):
        indices = rows[tile]
        tile_stats = RowStats(*(x[indices] for x in stats))
        x = cap_(logits[_at(logits, indices)].to(grad_T.dtype), softcap)
        e = x.sub_(tile_stats.peak[:, None]).mul_(inv_temperature).exp_()
        grad_entropy = None if grad_entropy_T is None else grad_entropy_T[indices]
        torch_grad_(e, tile_stats, grad_T[indices], grad_entropy, inv_temperature, softcap)
        out[_at(out, indices)] = e.to(out.dtype)


class _Logp(torch.autograd.Function):
    """rows: indices of the unmasked rows; mask_T: the same as a mask, None if all are unmasked."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target_T: Tensor, mask_T: Tensor | None, rows: Tensor,
        inv_temperature: float, softcap: float | None, use_triton: bool, inplace: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if use_triton:
            stats = triton_stats(logits, mask_T, inv_temperature, softcap)
            logp = torch.zeros_like(stats.peak)
            logp[rows] = triton_logp(logits, rows, target_T[rows], stats, inv_temperature, softcap)
        else:
            logp, stats = _torch_forward(logits, target_T, rows, inv_temperature, softcap)
        ctx.save_for_backward(logits, target_T, mask_T, rows, logp, *stats)
        ctx.options = (inv_temperature, softcap)
        ctx.use_triton, ctx.inplace = use_triton, inplace
        ctx.set_materialize_grads(False)
        return logp, stats.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, target_T, mask_T, rows, logp, *saved = ctx.saved_tensors
        stats = RowStats(*saved)
        grad = torch.zeros_like(logp) if grad is None else grad.to(logp.dtype).contiguous()
        if grad_entropy is not None:
            grad_entropy = grad_entropy.to(logp.dtype).contiguous()
        out = logits if ctx.inplace else torch.empty_like(logits)
        if ctx.use_triton:
            triton_grad(out, logits, mask_T, stats, grad, grad_entropy, *ctx.options)
        else:
            _torch_backward(out, logits, rows, stats, grad, grad_entropy, *ctx.options)
            if mask_T is not None:
                out[_at(out, (~mask_T).nonzero().squeeze(1))] = 0
        row_stats = RowStats(*(x[rows] for x in stats))
        at_target = target_grad(
            logp[rows], row_stats, grad[rows], grad[rows],
            None if grad_entropy is None else grad_entropy[rows], *ctx.options,
        )  # fmt: skip
        out[_at(out, rows, target_T[rows])] = at_target.to(out.dtype)
        return (out,) + (None,) * 7


def logp(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    backend: Backend = "auto",
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the targets and entropy of their distributions.

    Args:
        logits: [T, V] or [B, L, V], any strides (a dense last dimension is the fast case),
            fp32/bf16/fp16; the torch backend supports fp64 too. The gradient has this dtype.
        targets: int64, logits' shape without V; row t predicts targets[t], in [0, V).
        mask: bool, like targets: the rows to compute. Logits, targets and upstream gradients of
            other rows may hold anything, NaN included; these rows return 0 and get zero gradients.
        temperature: > 0, by which the sampler divided its logits.
        softcap: x becomes softcap * tanh(x / softcap) first (Gemma 2's final_logit_softcapping).
        backend: See checks.backend_for.
        inplace_backward: Write the gradient over logits, which saves their size. Only if nothing
            else reads them afterwards, and backward runs once.

    Returns:
        logp: Like targets, nats, fp32 (fp64 for fp64 logits), differentiable.
        entropy: The same.

    Raises:
        ValueError: Shapes, dtypes, devices or values are not as above; the message names the
            argument.
    """
    if logits.ndim not in (2, 3) or not logits.is_floating_point():
        raise ValueError(f"logits: expected floats, 2-d or 3-d, got {logits.dtype} {logits.ndim}-d")
    shape = tuple(logits.shape[:-1])
    check_options(temperature, softcap)
    check_tensor("targets", targets, shape, (torch.int64,), logits)
    use_triton = backend_for(logits.device, backend) == "triton"
    if use_triton and logits.dtype == torch.float64:
        raise ValueError("logits: the triton backend computes in fp32, got float64")
    target_T, mask_T = targets.reshape(-1), None
    rows = torch.arange(len(target_T), device=logits.device)
    if mask is not None:
        check_tensor("mask", mask, shape, (torch.bool,), logits)
        mask_T = mask.reshape(-1).contiguous()
        rows = mask_T.nonzero().squeeze(1)
    check_range("targets", target_T[rows], logits.shape[-1])
    logp_T, entropy_T = _Logp.apply(  # type: ignore[no-untyped-call]
        logits, target_T, mask_T, rows, 1 / temperature, softcap, use_triton, inplace_backward
    )
    return logp_T.view(shape), entropy_T.view(shape)
