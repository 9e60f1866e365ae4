"""Passes over the vocabulary: statistics of a row of logits, and its gradient.

Shared by logp.py (given logits) and linear_logp.py (logits from hidden states). With x a row of
logits (capped: softcap * tanh(x / softcap) if a softcap is given) and T the temperature:

    peak = max x     log_mass = log sum exp((x - peak) / T)     mean_gap = sum p (peak - x) / T
    log p[v] = (x[v] - peak) / T - log_mass                     entropy  = log_mass + mean_gap

A row is read once forward, and read and written once backward, all in fp32 for any storage dtype of
the logits. The peak's own term exp(0) = 1 is left out of the sum: log_mass = log1p(the others). For
a token of near certainty the others are 1e-9, which 1 + 1e-9 would lose in fp32, and with it log p
and the gradient 1 - p. (Liger 0.8.5, TRL 1.16 and verl 0.9.1 lose it.)

The backward pass writes -p (g + h (log p + entropy)) / T, with g and h the gradients of the row's
log-probabilities (summed) and of its entropy; target_grad then computes the target elements.

Shape suffixes: R rows, V vocabulary, N requested (row, target) pairs, T rows of the caller's
tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# sm_90, triton 3.9, bf16: 11 instructions an element, 32 elements of a thread to a search for the
# peak; 80 registers, so 6 programs and their 144 KB of loads in flight share an SM. Chosen from the
# machine code, not timed on a GPU yet.
FORWARD_BLOCK_V, FORWARD_WARPS, FORWARD_STAGES = 4096, 4, 4
LANES_A_WARP = 256  # bf16: 32 threads of one 128-bit load
BACKWARD_BLOCK_V, BACKWARD_WARPS = 4096, 8  # 30 registers: 8 programs an SM, no pipelining needed
TILE_ELEMENTS = 1 << 21  # 8 MB of fp32: the torch passes over a tile stay in a CPU's last cache


class RowStats(NamedTuple):
    """Per-row results of the forward pass, [R] fp32 each (fp64 for fp64 logits)."""

    peak: Tensor
    """Largest logit, after the cap and before the temperature."""
    log_mass: Tensor
    """log sum exp((x - peak) / temperature), >= 0."""
    mean_gap: Tensor
    """Mean distance to the peak, sum p (peak - x) / temperature, >= 0."""

    @property
    def entropy(self) -> Tensor:
        return self.log_mass + self.mean_gap


# --------------------------------------------------------------------------- PyTorch


def cap_(x: Tensor, softcap: float | None) -> Tensor:
    """In place: softcap * tanh(x / softcap)."""
    return x if softcap is None else x.div_(softcap).tanh_().mul_(softcap)


def torch_stats_(
    x_RV: Tensor,
    row_N: Tensor,
    target_N: Tensor,
    inv_temperature: float,
    fresh_N: Tensor | bool = True,
) -> tuple[Tensor, RowStats]:
    """Log-probabilities of (row, target) pairs of capped logits, and the rows' statistics.

    fresh_N is True for exactly one of several equal pairs. Leaves exp((x - peak) / temperature) in
    x_RV, and 0 at requested peaks.
    """
    peak = x_RV.amax(-1)
    logit_N = x_RV[row_N, target_N]
    # a requested peak is left out of the sum: 1 + 1e-9 is 1 in fp32
    is_peak_N = logit_N == peak[row_N]
    x_RV[row_N, target_N] = torch.where(is_peak_N, float("-inf"), logit_N)
    rest, weighted = torch.empty_like(peak), torch.empty_like(peak)
    scratch = torch.empty_like(x_RV[tiles(*x_RV.shape)[0]])
    for tile in tiles(*x_RV.shape):
        y = torch.sub(x_RV[tile], peak[tile, None], out=scratch[: tile.stop - tile.start])
        if inv_temperature != 1.0:
            y.mul_(inv_temperature)
        e = torch.exp(y, out=x_RV[tile])
        torch.sum(e, -1, out=rest[tile])
        # -inf logits: their share of the mean gap is 0, not 0 * inf
        torch.sum(y.clamp_(min=-750.0).mul_(e), -1, out=weighted[tile])
    rest += torch.zeros_like(rest).index_add_(0, row_N, (is_peak_N & fresh_N).to(rest.dtype)) - 1
    stats = RowStats(peak, rest.log1p(), -weighted / (1 + rest))
    return token_logp(logit_N, stats, row_N, inv_temperature), stats


def torch_grad_(
    e_RV: Tensor, stats: RowStats, grad_R: Tensor, grad_entropy_R: Tensor | None,
    inv_temperature: float, softcap: float | None,
) -> None:  # fmt: skip
    """Turn torch_stats_'s result into d loss / d logits in place, without the targets' share."""
    scale_R = -inv_temperature * torch.exp(-stats.log_mass)
    if grad_entropy_R is None and softcap is None:
        e_RV.mul_((scale_R * grad_R)[:, None])
        return
    for tile in tiles(*e_RV.shape):
        e = e_RV[tile]
        gap = e.log().clamp_(min=-750.0)
        factor = grad_R[tile, None].expand_as(e).clone()
        if grad_entropy_R is not None:
            factor.addcmul_(gap + stats.mean_gap[tile, None], grad_entropy_R[tile, None])
        if softcap is not None:
            x = gap.div_(inv_temperature).add_(stats.peak[tile, None])
            factor.mul_(1 - (x / softcap).square_())
        e.mul_(factor).mul_(scale_R[tile, None])


# --------------------------------------------------------------------------- Triton


@triton.jit
def _capped(x, softcap, HAS_SOFTCAP: tl.constexpr):
    x = x.to(tl.float32)
    if HAS_SOFTCAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return x


@triton.jit
def _absorb(x, lanes, peak, num_peaks, others, weighted, scale):
    """Add a tile of logits to a row's sums; each lane has its own sums, which are joined at the
    end.

    Of e = exp2(y), y = (x - peak) * scale: weighted = sum e * y, others = sum e without the first
    num_peaks elements at the peak, all in one tile. x is [D, L], and the D elements of a lane
    belong to one thread: a sum over axis 0 needs no other thread, and D elements share one search.
    """
    top = tl.max(x)
    if top > peak:  # rare after the first tiles; the old peak is now below the new one
        shift = (peak - top) * scale
        decay = tl.exp2(shift)
        others += tl.where(lanes == 0, num_peaks, 0.0)
        weighted = (weighted + others * shift) * decay
        others *= decay
        peak = top
        num_peaks = tl.sum(tl.where(x == peak, 1.0, 0.0))
        # the sums are written twice: y and e alive across the branch cost 168 registers, not 80
        y = _gap(x, peak, scale)
        e = tl.where(x == peak, 0.0, tl.exp2(y))
        others += tl.sum(e, 0)
        weighted += tl.sum(e * y, 0)
    else:
        y = _gap(x, peak, scale)
        e = tl.exp2(y)
        others += tl.sum(e, 0)
        weighted += tl.sum(e * y, 0)
    return peak, num_peaks, others, weighted


@triton.jit
def _gap(x, peak, scale):
    # -inf logits (banned tokens, the tail of the last tile): e * y must be 0, not 0 * inf
    return tl.maximum((x - peak) * scale, -150.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["num_cols"])
def stats_kernel(
    logits, mask, peak_out, rest_out, gap_out,
    V, num_cols, stride_b, stride_l, stride_v, inv_temperature, softcap,
    HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STAGES: tl.constexpr, BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One program per row: its peak, the mass without the peak, and the mean gap times the mass."""
    # int64: rows * V passes 2**31 at 14k rows of a 152k vocabulary
    t = tl.program_id(0).to(tl.int64)
    if HAS_MASK:  # noqa: SIM102 - Triton loads before it looks at an `and`
        if tl.load(mask + t) == 0:
            return
    row = logits + (t // num_cols) * stride_b + (t % num_cols) * stride_l
    scale = inv_temperature * 1.4426950408889634
    lanes = tl.arange(0, LANES)
    tile = tl.arange(0, BLOCK_V // LANES)[:, None] * LANES + lanes[None, :]
    peak = -1e30  # finite, so that a first tile of only -inf produces no NaN
    num_peaks = 0.0
    others = tl.zeros((LANES,), tl.float32)
    weighted = others
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V, num_stages=STAGES):
        v = (start + tile).to(tl.int64)
        x = _capped(tl.load(row + v * stride_v), softcap, HAS_SOFTCAP)
        peak, num_peaks, others, weighted = _absorb(
            x, lanes, peak, num_peaks, others, weighted, scale
        )
    if whole < V:
        v = (whole + tile).to(tl.int64)
        x = _capped(tl.load(row + v * stride_v, mask=v < V, other=0.0), softcap, HAS_SOFTCAP)
        x = tl.where(v < V, x, float("-inf"))
        peak, num_peaks, others, weighted = _absorb(
            x, lanes, peak, num_peaks, others, weighted, scale
        )
    tl.store(peak_out + t, peak)
    tl.store(rest_out + t, tl.sum(others) + (num_peaks - 1.0))
    tl.store(gap_out + t, -0.6931471805599453 * tl.sum(weighted))


@triton.jit(do_not_specialize=["num_cols"])
def pick_kernel(
    out, logits, rows, targets, num_cols, stride_b, stride_l, stride_v, softcap,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program per requested token: its capped logit, bit for bit as in stats_kernel."""
    n = tl.program_id(0)
    t = tl.load(rows + n)
    at = (t // num_cols) * stride_b + (t % num_cols) * stride_l + tl.load(targets + n) * stride_v
    tl.store(out + n, _capped(tl.load(logits + at), softcap, HAS_SOFTCAP))


@triton.jit
def _row_grad(
    x, peak, log_mass, mean_gap, grad, grad_entropy, inv_temperature, softcap,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    gap = tl.maximum((x - peak) * inv_temperature, -1e4, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp(gap - log_mass)
    if HAS_ENTROPY:
        grad += grad_entropy * (gap + mean_gap)
    out = -inv_temperature * p * grad
    if HAS_SOFTCAP:
        out *= 1.0 - (x / softcap) * (x / softcap)
    return out


@triton.jit(do_not_specialize=["num_cols"])
def grad_kernel(
    out, logits, mask, peak_in, log_mass_in, mean_gap_in, grad_in, grad_entropy_in,
    V, num_cols, stride_b, stride_l, stride_v, out_b, out_l, out_v, inv_temperature, softcap,
    HAS_MASK: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    NARROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program per row: d loss / d logits without the target's share; out may be logits itself.

    NARROWS: out overlays logits with a smaller element type, so all threads must read a block
    before any of them writes: its bytes are other threads' logits.
    """
    t = tl.program_id(0).to(tl.int64)
    row = logits + (t // num_cols) * stride_b + (t % num_cols) * stride_l
    out += (t // num_cols) * out_b + (t % num_cols) * out_l
    lanes = tl.arange(0, BLOCK_V)
    whole = V // BLOCK_V * BLOCK_V
    if HAS_MASK:  # noqa: SIM102 - Triton loads before it looks at an `and`
        if tl.load(mask + t) == 0:
            for start in range(0, V, BLOCK_V):
                v = (start + lanes).to(tl.int64)
                tl.store(out + v * out_v, tl.zeros((BLOCK_V,), out.dtype.element_ty), mask=v < V)
            return
    peak, log_mass = tl.load(peak_in + t), tl.load(log_mass_in + t)
    mean_gap, grad = tl.load(mean_gap_in + t), tl.load(grad_in + t)
    grad_entropy = 0.0
    if HAS_ENTROPY:
        grad_entropy = tl.load(grad_entropy_in + t)
    for start in range(0, whole, BLOCK_V):
        v = (start + lanes).to(tl.int64)
        x = _capped(tl.load(row + v * stride_v), softcap, HAS_SOFTCAP)
        if NARROWS:
            tl.debug_barrier()
        d = _row_grad(
            x, peak, log_mass, mean_gap, grad, grad_entropy, inv_temperature, softcap,
            HAS_ENTROPY, HAS_SOFTCAP,
        )  # fmt: skip
        tl.store(out + v * out_v, d.to(out.dtype.element_ty))
    if whole < V:
        v = (whole + lanes).to(tl.int64)
        x = _capped(tl.load(row + v * stride_v, mask=v < V, other=0.0), softcap, HAS_SOFTCAP)
        if NARROWS:
            tl.debug_barrier()
        d = _row_grad(
            x, peak, log_mass, mean_gap, grad, grad_entropy, inv_temperature, softcap,
            HAS_ENTROPY, HAS_SOFTCAP,
        )  # fmt: skip
        tl.store(out + v * out_v, d.to(out.dtype.element_ty), mask=v < V)


class Layout(NamedTuple):
    """Rows of [T, V] or [B, L, V] logits: row t is at (t // num_cols, t % num_cols)."""

    num_rows: int
    num_cols: int
    strides: tuple[int, int, int]

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        if x.ndim == 2:
            return cls(x.shape[0], x.shape[0], (0, x.stride(0), x.stride(1)))
        return cls(x.shape[0] * x.shape[1], x.shape[1], (x.stride(0), x.stride(1), x.stride(2)))


def _block(vocab: int, largest: int) -> int:
    return min(largest, int(triton.next_power_of_2(vocab)))


def triton_stats(
    logits: Tensor, mask_T: Tensor | None, inv_temperature: float, softcap: float | None
) -> RowStats:
    """RowStats of every unmasked row, in one read; entries of other rows are 0."""
    layout = Layout.of(logits)
    # separate tensors, equally aligned: rows of one tensor would compile three kernels
    peak, rest, gap = (torch.zeros(layout.num_rows, device=logits.device) for _ in range(3))
    if layout.num_rows:
        vocab = logits.shape[-1]
        with torch.cuda.device_of(logits):
            stats_kernel[(layout.num_rows,)](
                logits, peak if mask_T is None else mask_T, peak, rest, gap,
                vocab, layout.num_cols, *layout.strides, inv_temperature, softcap or 0.0,
                HAS_MASK=mask_T is not None, HAS_SOFTCAP=softcap is not None,
                STAGES=FORWARD_STAGES, BLOCK_V=_block(vocab, FORWARD_BLOCK_V),
                LANES=_block(vocab, min(FORWARD_WARPS * LANES_A_WARP, FORWARD_BLOCK_V)),
                num_warps=FORWARD_WARPS,
            )  # fmt: skip
    return RowStats(peak, rest.log1p(), gap / (1 + rest))


def triton_logp(
    logits: Tensor, rows: Tensor, targets: Tensor, stats: RowStats,
    inv_temperature: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Log-probabilities of (row, target) pairs, given their rows' statistics."""
    layout = Layout.of(logits)
    logits_N = torch.empty(len(rows), device=logits.device)
    if len(rows):
        with torch.cuda.device_of(logits):
            pick_kernel[(len(rows),)](
                logits_N, logits, rows, targets, layout.num_cols, *layout.strides, softcap or 0.0,
                HAS_SOFTCAP=softcap is not None, num_warps=1,
            )  # fmt: skip
    return token_logp(logits_N, stats, rows, inv_temperature)


def triton_grad(
    out: Tensor, logits: Tensor, mask_T: Tensor | None, stats: RowStats, grad_T: Tensor,
    grad_entropy_T: Tensor | None, inv_temperature: float, softcap: float | None,
) -> None:  # fmt: skip
    """Write d loss / d logits into out (which may share memory with logits), without targets."""
    layout, out_layout = Layout.of(logits), Layout.of(out)
    if not layout.num_rows:
        return
    vocab = logits.shape[-1]
    with torch.cuda.device_of(logits):  # Triton uses the current device otherwise
        grad_kernel[(layout.num_rows,)](
            out, logits, grad_T if mask_T is None else mask_T, *stats, grad_T,
            grad_T if grad_entropy_T is None else grad_entropy_T,
            vocab, layout.num_cols, *layout.strides, *out_layout.strides,
            inv_temperature, softcap or 0.0,
            HAS_MASK=mask_T is not None, HAS_ENTROPY=grad_entropy_T is not None,
            HAS_SOFTCAP=softcap is not None, NARROWS=out.itemsize < logits.itemsize,
            BLOCK_V=_block(vocab, BACKWARD_BLOCK_V), num_warps=BACKWARD_WARPS,
        )  # fmt: skip


# --------------------------------------------------------------------------- both


def token_logp(x_N: Tensor, stats: RowStats, row_N: Tensor, inv_temperature: float) -> Tensor:
    """Log-probability of capped logits x_N taken from rows row_N; exact near log p = 0."""
    return (x_N.to(stats.peak.dtype) - stats.peak[row_N]) * inv_temperature - stats.log_mass[row_N]


def target_grad(
    logp: Tensor, stats: RowStats, grad: Tensor, row_grad: Tensor, grad_entropy: Tensor | None,
    inv_temperature: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The gradient d loss / d logits at targets, the elements that the row pass leaves wrong.

    One entry per (row, target): the row's stats, grad = d loss / d logp summed over the terms with
    this target, row_grad = the same summed over all terms of the row.
    """
    p = logp.exp()
    gap = logp + stats.log_mass
    out = grad * -torch.expm1(logp) - (row_grad - grad) * p
    if grad_entropy is not None:
        # a logit of -inf must have no share: 0 * inf is NaN
        out = out - grad_entropy * p * (gap.clamp(min=-750.0) + stats.mean_gap)
    if softcap is not None:
        out = out * (1 - ((stats.peak + gap / inv_temperature) / softcap).square())
    return out * inv_temperature


def tiles(num_rows: int, vocab: int) -> list[slice]:
    """Row ranges that the torch passes process one after another; at least one."""
    step = max(1, TILE_ELEMENTS // max(vocab, 1))
    return [slice(start, min(start + step, num_rows)) for start in range(0, max(num_rows, 1), step)]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype, at least fp32."""
    return torch.promote_types(dtype, torch.float32)
