"""Log-probability of one token and entropy of its distribution, per row of given logits.

With x = logits[row] (capped: softcap * tanh(x / softcap) where a softcap is given):

    p       = softmax(x / temperature)
    logp    = log p[target]                       entropy = -sum_v p[v] log p[v]
    d logp / d x[v]    = ([v == target] - p[v]) / temperature
    d entropy / d x[v] = -p[v] (log p[v] + entropy) / temperature

A row is read once forward, and read and written once backward, all in fp32 whatever the logits are
stored in. Rows outside the mask are never read, and their gradient is exactly zero.

Everything is written relative to the row's largest logit, whose own term exp(0) = 1 is kept out of
the sum: log_mass = log1p(sum of the others). A model that is sure of a token has others of 1e-9,
which 1 + 1e-9 would lose in fp32, and with it log p and the gradient 1 - p. (Liger 0.8.5, TRL 1.16
and verl 0.9.1 lose it.)

Backends: "torch", below in full, the CPU path; "triton", the kernels, for CUDA (on a CPU only under
TRITON_INTERPRET=1). linear_logp.py uses the same row functions on logits that it makes itself.

Shape suffixes: T rows, V vocabulary, R rows of a tile.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

Backend = Literal["auto", "torch", "triton"]

# 8 bf16 a load, 32 elements a thread: sm_90 (triton 3.9) needs no spill; see tests/kernels/test_compile.py
FORWARD_BLOCK_V, FORWARD_WARPS = 4096, 8
BACKWARD_BLOCK_V, BACKWARD_WARPS = 4096, 8
TILE_ELEMENTS = 1 << 21  # 8 MB of fp32: the torch passes over a tile stay in a CPU's last cache


def backend_for(device: torch.device, backend: Backend = "auto") -> Literal["torch", "triton"]:
    """The backend that will run: Triton on CUDA, PyTorch elsewhere, unless named.

    Raises:
        ValueError: an unknown name, or "triton" where it cannot run.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend: expected 'auto', 'torch' or 'triton', got {backend!r}")
    if backend == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if backend == "triton" and device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"backend: 'triton' needs CUDA tensors (or TRITON_INTERPRET=1), got {device}"
        )
    return backend


class RowStats(NamedTuple):
    """What the forward pass remembers of a row, [R] fp32 each (fp64 for fp64 logits)."""

    peak: Tensor
    """Largest logit, capped, before the temperature."""
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
    x_RV: Tensor, row_N: Tensor, target_N: Tensor, inv_temperature: float
) -> tuple[Tensor, RowStats]:
    """Log-probabilities of distinct (row, target) pairs of capped logits, and the rows' statistics.

    x_RV is left holding exp((x - peak) / temperature).
    """
    peak = x_RV.amax(-1)
    wanted_N = x_RV[row_N, target_N]
    # a wanted peak stays out of the sum: 1 + 1e-9 is 1 in fp32
    is_peak_N = wanted_N == peak[row_N]
    x_RV[row_N, target_N] = torch.where(is_peak_N, float("-inf"), wanted_N)
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
    x_RV[row_N, target_N] = torch.where(is_peak_N, 1.0, x_RV[row_N, target_N])
    rest += torch.zeros_like(rest).index_add_(0, row_N, is_peak_N.to(rest.dtype)) - 1
    stats = RowStats(peak, rest.log1p(), -weighted / (1 + rest))
    return token_logp(wanted_N, stats, row_N, inv_temperature), stats


def torch_grad_(
    e_RV: Tensor, stats: RowStats, grad_R: Tensor, grad_entropy_R: Tensor | None,
    inv_temperature: float, softcap: float | None,
) -> None:  # fmt: skip
    """What torch_stats_ left becomes d loss / d logits, in place, the targets' share missing."""
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
def _absorb(x, peak, every, others, weighted, scale):
    """Add a block of logits to a row's sums, which are kept per lane and joined at the end.

    Per lane, of e = exp2(y), y = (x - peak) * scale: every = sum e; others = sum e without the
    elements at the peak; weighted = sum e * y.
    """
    new_peak = tl.maximum(peak, tl.max(x))
    if new_peak > peak:  # rare after the first blocks, so the rescale costs nothing
        shift = (peak - new_peak) * scale
        decay = tl.exp2(shift)
        weighted = (weighted + every * shift) * decay
        every = every * decay
        others = every  # all that came before is now below the peak
    # -inf logits (banned tokens, the tail of the last block): e * y must be 0, not 0 * inf
    y = tl.maximum((x - new_peak) * scale, -150.0, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(y)
    return new_peak, every + e, others + tl.where(x == new_peak, 0.0, e), weighted + e * y


@triton.jit(do_not_specialize=["num_cols"])
def stats_kernel(
    logits, mask, peak_out, rest_out, gap_out,
    V, num_cols, stride_b, stride_l, stride_v, inv_temperature, softcap,
    HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program per row: its peak, the mass beside the peak, and the mean gap times the mass."""
    # int64: rows * V passes 2**31 at 14k rows of a 152k vocabulary
    t = tl.program_id(0).to(tl.int64)
    if HAS_MASK:
        if tl.load(mask + t) == 0:
            return
    row = logits + (t // num_cols) * stride_b + (t % num_cols) * stride_l
    scale = inv_temperature * 1.4426950408889634
    lanes = tl.arange(0, BLOCK_V)
    peak = -1e30  # finite, so that a first block of nothing but -inf leaves no nan behind
    every = tl.zeros((BLOCK_V,), tl.float32)
    others, weighted = every, every
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        v = (start + lanes).to(tl.int64)
        x = _capped(tl.load(row + v * stride_v), softcap, HAS_SOFTCAP)
        peak, every, others, weighted = _absorb(x, peak, every, others, weighted, scale)
    if whole < V:
        v = (whole + lanes).to(tl.int64)
        x = _capped(tl.load(row + v * stride_v, mask=v < V, other=0.0), softcap, HAS_SOFTCAP)
        x = tl.where(v < V, x, float("-inf"))
        peak, every, others, weighted = _absorb(x, peak, every, others, weighted, scale)
    num_peaks = tl.floor(tl.sum(every - others) + 0.5)
    tl.store(peak_out + t, peak)
    tl.store(rest_out + t, tl.sum(others) + (num_peaks - 1.0))
    tl.store(gap_out + t, -0.6931471805599453 * tl.sum(weighted))


@triton.jit(do_not_specialize=["num_cols"])
def pick_kernel(
    out, logits, rows, targets, num_cols, stride_b, stride_l, stride_v, softcap,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program per wanted token: its capped logit, bit for bit what stats_kernel saw."""
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
    """One program per row: d loss / d logits but for the target's share; out may be logits itself.

    NARROWS: out lies over logits with a smaller element, so a block must be read by all threads
    before any of them writes: its bytes are other threads' logits.
    """
    t = tl.program_id(0).to(tl.int64)
    row = logits + (t // num_cols) * stride_b + (t % num_cols) * stride_l
    out += (t // num_cols) * out_b + (t % num_cols) * out_l
    lanes = tl.arange(0, BLOCK_V)
    whole = V // BLOCK_V * BLOCK_V
    if HAS_MASK:
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
    """[T, V] or [B, L, V] logits as rows: row t lies at (t // num_cols, t % num_cols)."""

    num_rows: int
    num_cols: int
    strides: tuple[int, int, int]

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        if x.ndim == 2:
            return cls(x.shape[0], x.shape[0], (0, x.stride(0), x.stride(1)))
        return cls(x.shape[0] * x.shape[1], x.shape[1], (x.stride(0), x.stride(1), x.stride(2)))


def _block(vocab: int, largest: int) -> int:
    return min(largest, triton.next_power_of_2(vocab))


def triton_stats(
    logits: Tensor, mask_T: Tensor | None, inv_temperature: float, softcap: float | None
) -> RowStats:
    """RowStats of every unmasked row, in one read; the other rows' entries are 0."""
    layout = Layout.of(logits)
    peak, rest, gap = torch.zeros(3, layout.num_rows, device=logits.device)
    if layout.num_rows:
        vocab = logits.shape[-1]
        stats_kernel[(layout.num_rows,)](
            logits, peak if mask_T is None else mask_T, peak, rest, gap,
            vocab, layout.num_cols, *layout.strides, inv_temperature, softcap or 0.0,
            HAS_MASK=mask_T is not None, HAS_SOFTCAP=softcap is not None,
            BLOCK_V=_block(vocab, FORWARD_BLOCK_V), num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return RowStats(peak, rest.log1p(), gap / (1 + rest))


def triton_logp(
    logits: Tensor, rows: Tensor, targets: Tensor, stats: RowStats,
    inv_temperature: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Log-probabilities of (row, target) pairs, given their rows' statistics."""
    layout = Layout.of(logits)
    wanted = torch.empty(len(rows), device=logits.device)
    if len(rows):
        pick_kernel[(len(rows),)](
            wanted, logits, rows, targets, layout.num_cols, *layout.strides, softcap or 0.0,
            HAS_SOFTCAP=softcap is not None, num_warps=1,
        )  # fmt: skip
    return token_logp(wanted, stats, rows, inv_temperature)


def triton_grad(
    out: Tensor, logits: Tensor, mask_T: Tensor | None, stats: RowStats, grad_T: Tensor,
    grad_entropy_T: Tensor | None, inv_temperature: float, softcap: float | None,
) -> None:  # fmt: skip
    """Write d loss / d logits into out (which may share memory with logits), targets missing."""
    layout, out_layout = Layout.of(logits), Layout.of(out)
    if not layout.num_rows:
        return
    vocab = logits.shape[-1]
    grad_kernel[(layout.num_rows,)](
        out, logits, grad_T if mask_T is None else mask_T, *stats, grad_T,
        grad_T if grad_entropy_T is None else grad_entropy_T,
        vocab, layout.num_cols, *layout.strides, *out_layout.strides,
        inv_temperature, softcap or 0.0,
        HAS_MASK=mask_T is not None, HAS_ENTROPY=grad_entropy_T is not None,
        HAS_SOFTCAP=softcap is not None, NARROWS=out.itemsize < logits.itemsize,
        BLOCK_V=_block(vocab, BACKWARD_BLOCK_V), num_warps=BACKWARD_WARPS,
    )  # fmt: skip


# --------------------------------------------------------------------------- shared by both


def token_logp(x_N: Tensor, stats: RowStats, row_N: Tensor, inv_temperature: float) -> Tensor:
    """Log-probability of capped logits x_N taken from rows row_N; exact near log p = 0."""
    return (x_N.to(stats.peak.dtype) - stats.peak[row_N]) * inv_temperature - stats.log_mass[row_N]


def target_grad(
    logp: Tensor, stats: RowStats, grad: Tensor, row_grad: Tensor, grad_entropy: Tensor | None,
    inv_temperature: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """d loss / d logits at a target: the element that the row pass leaves wrong.

    All of one entry per (row, target): stats of that row, grad = d loss / d logp summed over the
    terms that want this token, row_grad = the same summed over all terms of the row.
    """
    p = logp.exp()
    gap = logp + stats.log_mass
    out = grad * -torch.expm1(logp) - (row_grad - grad) * p
    if grad_entropy is not None:
        out = out - grad_entropy * p * (gap + stats.mean_gap)
    if softcap is not None:
        out = out * (1 - ((stats.peak + gap / inv_temperature) / softcap).square())
    return out * inv_temperature


def tiles(num_rows: int, vocab: int) -> list[slice]:
    """Row ranges that the torch passes handle one after another; at least one."""
    step = max(1, TILE_ELEMENTS // max(vocab, 1))
    return [slice(start, min(start + step, num_rows)) for start in range(0, max(num_rows, 1), step)]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _at(logits: Tensor, rows: Tensor, *column: Tensor) -> tuple[Tensor, ...]:
    """The index of rows (numbered as by Layout), or of one column in each."""
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
        at = rows[tile]
        x = cap_(logits[_at(logits, at)].to(dtype), softcap)
        own = torch.arange(len(at), device=at.device)
        logp[at], tile_stats = torch_stats_(x, own, target_T[at], inv_temperature)
        for whole, part in zip(stats, tile_stats, strict=True):
            whole[at] = part
    return logp, stats


def _torch_backward(
    out: Tensor, logits: Tensor, rows: Tensor, stats: RowStats, grad_T: Tensor,
    grad_entropy_T: Tensor | None, inv_temperature: float, softcap: float | None,
) -> None:  # fmt: skip
    for tile in tiles(len(rows), logits.shape[-1]):
        at = rows[tile]
        here = RowStats(*(x[at] for x in stats))
        x = cap_(logits[_at(logits, at)].to(grad_T.dtype), softcap)
        e = x.sub_(here.peak[:, None]).mul_(inv_temperature).exp_()
        grad_entropy = None if grad_entropy_T is None else grad_entropy_T[at]
        torch_grad_(e, here, grad_T[at], grad_entropy, inv_temperature, softcap)
        out[_at(out, at)] = e.to(out.dtype)


class _Logp(torch.autograd.Function):
    """rows: numbers of the unmasked rows; mask_T: the same as a mask, None if all are."""

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
    @once_differentiable  # type: ignore[untyped-decorator]
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
        here = RowStats(*(x[rows] for x in stats))
        at_target = target_grad(
            logp[rows], here, grad[rows], grad[rows],
            None if grad_entropy is None else grad_entropy[rows], *ctx.options,
        )  # fmt: skip
        out[_at(out, rows, target_T[rows])] = at_target.to(out.dtype)
        return (out,) + (None,) * 7


def check_options(temperature: float, softcap: float | None) -> None:
    """Shared by every entry that makes or takes logits."""
    if not temperature > 0:
        raise ValueError(f"temperature: expected > 0, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected > 0 or None, got {softcap}")


def check_tensor(
    name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor
) -> None:
    """ValueError naming the argument, unless x has this shape, one of these dtypes, like's device."""
    if tuple(x.shape) != shape or x.dtype not in dtypes or x.device != like.device:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name}: expected {wanted} of shape {shape} on {like.device}, "
            f"got {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
        )


def check_range(name: str, x: Tensor, below: int) -> None:
    """ValueError unless all ids are in [0, below). One host sync on CUDA."""
    if x.numel():
        low, high = torch.stack(x.aminmax()).tolist()
        if low < 0 or high >= below:
            raise ValueError(f"{name}: expected ids in [0, {below}), got {low} .. {high}")


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
            fp32/bf16/fp16; the torch backend takes fp64 too. The gradient comes in this dtype.
        targets: int64, logits' shape without V; row t predicts targets[t], in [0, V).
        mask: bool, like targets: the rows to compute. The others' logits, targets and upstream
            gradients may be anything, nan included; they give 0 and get zero gradients.
        temperature: > 0, what the sampler divided its logits by.
        softcap: x becomes softcap * tanh(x / softcap) first (Gemma 2's final_logit_softcapping).
        inplace_backward: write the gradient over logits, which saves their size. Only where nothing
            else reads them afterwards, and backward runs once.

    Returns:
        (logp, entropy), like targets, nats, fp32 (fp64 for fp64 logits). Both are differentiable.

    Raises:
        ValueError: naming the argument, if shapes, dtypes, devices or values are not as above.
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
