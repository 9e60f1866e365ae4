"""The LM head for selected rows only: log-probabilities and entropies from hidden states.

    logits  = hidden[rows] @ weight.T + bias        (then soft cap and temperature: see rows.py)
    logp[n] = log softmax(logits of rows[n])[targets[n]]

A term n is one sampled token: the row whose hidden state predicts it, and its id. Prompts, tool
results and padding have no terms and cost nothing here. Terms may share a row (a packed tree
branches after it): each distinct row is projected once.

If the logits of all distinct rows fit in max_logits_bytes, they are kept, and the backward turns
them into their own gradient in place: three matrix products in all, four with recomputation.
Otherwise rows are processed in chunks, the backward recomputes the logits, and the gradient of the
weight accumulates in fp32. A frozen weight skips its product.

Shape suffixes: T packed tokens, H hidden, V vocabulary, N terms, S the terms sorted, U distinct
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    Backend,
    backend_for,
    check_options,
    check_range,
    check_tensor,
    once_differentiable,
    upload,
)
from .products import by_onednn, matmul
from .rows import (
    RowStats,
    cap_,
    target_grad,
    torch_grad_,
    torch_stats_,
    triton_grad,
    triton_logp,
    triton_stats,
    working_dtype,
)

LOGITS_BYTES_CUDA = 6 << 30  # 20k rows of a 152k vocabulary in bf16
LOGITS_BYTES_CPU = 1 << 30  # 5k rows of a 49k vocabulary in fp32
_PART = 128  # rows
_ROW_ALIGNMENT = 16  # elements; rows of 151 643 would otherwise be loaded 2 bytes at a time


class _Terms(NamedTuple):
    """The terms sorted by row and target, the distinct rows, and each term's index into them."""

    rows_U: Tensor
    """Ascending."""
    row_S: Tensor
    """[N] of the sorted terms: index into rows_U, ascending."""
    target_S: Tensor
    fresh_S: Tensor
    """[N] False if the term equals the one before."""
    order_S: Tensor
    """[N] the original index of each sorted term."""

    @classmethod
    def of(cls, rows_N: Tensor, targets_N: Tensor, vocab: int, num_rows: int) -> _Terms:
        """Sort the terms. Never waits for the device, because all sizes are known."""
        keys, order_S = torch.sort(rows_N * vocab + targets_N)
        row_S = keys // vocab
        index_S = _rank(_fresh(row_S))
        rows_U = row_S.new_empty(num_rows).scatter_(0, index_S, row_S)  # equal ones write the same
        return cls(rows_U, index_S, keys % vocab, _fresh(keys), order_S)

    def unsorted(self, x_S: Tensor) -> Tensor:
        x_N = torch.empty_like(x_S)
        x_N[self.order_S] = x_S
        return x_N

    def per_pair(self, of_sorted: Tensor) -> Tensor:
        """For each sorted term the sum over the terms that are equal to it."""
        pair_S = _rank(self.fresh_S)
        return torch.zeros_like(of_sorted).index_add_(0, pair_S, of_sorted)[pair_S]

    def per_row(self, of_sorted: Tensor) -> Tensor:
        return of_sorted.new_zeros(len(self.rows_U)).index_add_(0, self.row_S, of_sorted)


def _fresh(ascending: Tensor) -> Tensor:
    fresh = torch.ones_like(ascending, dtype=torch.bool)
    torch.ne(ascending[1:], ascending[:-1], out=fresh[1:])
    return fresh


def _rank(fresh: Tensor) -> Tensor:
    """Dense rank: 0 for the first value, 1 for the next distinct value, and so on."""
    return fresh.cumsum(0) - 1


class _Chunk(NamedTuple):
    """A range of distinct rows and the range of sorted terms that read them."""

    rows: slice
    terms: slice

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def _chunks(uses_U: Tensor, rows_per_chunk: int) -> list[_Chunk]:
    rows = [*range(0, max(1, len(uses_U)), rows_per_chunk), len(uses_U)]
    before = torch.cat([uses_U.new_zeros(1), uses_U.cumsum(0)])
    edges = pairwise(zip(rows, before[rows].tolist(), strict=True))
    return [_Chunk(slice(a, b), slice(c, d)) for (a, c), (b, d) in edges]


class _Head(NamedTuple):
    """The projection: computes the logits of a range of rows, and their gradient in place."""

    weight: Tensor
    bias: Tensor | None
    inv_temperature: float
    softcap: float | None
    logits_dtype: torch.dtype
    """The dtype that the matrix product is rounded to."""
    use_triton: bool

    @property
    def buffer_dtype(self) -> torch.dtype:
        """The dtype that logits are stored in; fp32 for the torch passes, which work in place."""
        return self.logits_dtype if self.use_triton else working_dtype(self.logits_dtype)

    @property
    def padded_vocab(self) -> int:
        return -(-self.weight.shape[0] // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    def buffer(self, num_rows: int) -> Tensor:
        shape = (num_rows, self.padded_vocab)
        out = torch.empty(shape, dtype=self.buffer_dtype, device=self.weight.device)
        # oneDNN's bfloat16 product reads past an odd last element
        out[:, self.weight.shape[0] :] = 0
        return out

    def project_(self, buffer: Tensor, hidden: Tensor) -> Tensor:
        """Write the logits to the buffer: one product, rounded once to logits_dtype."""
        out = buffer[:, : self.weight.shape[0]]
        if out.dtype == hidden.dtype == torch.float32 and not out.is_cuda and by_onednn():
            # matmul allocates its result: done in parts of the rows that fit the CPU's caches
            for rows, part in zip(out.split(_PART), hidden.split(_PART), strict=True):
                rows.copy_(matmul(part, self.weight.T))
        elif out.dtype == hidden.dtype:
            torch.mm(hidden, self.weight.T, out=out)
        elif self.logits_dtype == hidden.dtype:
            out.copy_(hidden @ self.weight.T)
        elif out.is_cuda:
            torch.mm(hidden, self.weight.T, out_dtype=out.dtype, out=out)
        else:
            torch.mm(hidden.to(out.dtype), self.weight.T.to(out.dtype), out=out)
        if self.bias is not None:
            out += self.bias
        return out

    def forward_(
        self, buffer: Tensor, hidden: Tensor, row_S: Tensor, target_S: Tensor, fresh_S: Tensor
    ) -> tuple[Tensor, RowStats]:
        """(logp of the terms, statistics of the rows); leaves backward_ its input in the buffer."""
        x = self.project_(buffer, hidden)
        if not self.use_triton:
            capped = cap_(x, self.softcap)
            return torch_stats_(capped, row_S, target_S, self.inv_temperature, fresh_S)
        options = (self.inv_temperature, self.softcap)
        stats = triton_stats(x, None, *options)
        return triton_logp(x, row_S, target_S, stats, *options), stats

    def backward_(
        self, buffer: Tensor, stats: RowStats, grad_U: Tensor, grad_entropy_U: Tensor | None
    ) -> Tensor:
        """The gradient of the logits, in the buffer, without the share of the targets."""
        vocab = self.weight.shape[0]
        x, options = buffer[:, :vocab], (self.inv_temperature, self.softcap)
        if not self.use_triton:
            torch_grad_(x, stats, grad_U, grad_entropy_U, *options)
            return x
        # fp32 logits of a bf16 model: the gradient is stored in bf16, in the same rows
        out = buffer.view(self.weight.dtype)[:, :vocab]
        triton_grad(out, x, None, stats, grad_U, grad_entropy_U, *options)
        return out


def _logits_grads(
    head: _Head, kept: Tensor | None, hidden_UH: Tensor, terms: _Terms, chunks: list[_Chunk],
    logp_S: Tensor, stats: RowStats, grad_S: Tensor, grad_entropy_U: Tensor | None,
) -> Iterator[tuple[slice, Tensor]]:  # fmt: skip
    """Yield (rows, d loss / d logits of these rows) per chunk; valid until the next one."""
    buffer = kept if kept is not None else head.buffer(max(chunk.num_rows for chunk in chunks))
    grad_U, grad_pair_S = terms.per_row(grad_S), terms.per_pair(grad_S)
    for chunk in chunks:
        rows, span = chunk
        buf = buffer[: chunk.num_rows]
        row_S, target_S = terms.row_S[span], terms.target_S[span]
        if kept is None:
            head.forward_(buf, hidden_UH[rows], row_S - rows.start, target_S, terms.fresh_S[span])
        grad_entropy = None if grad_entropy_U is None else grad_entropy_U[rows]
        d = head.backward_(buf, RowStats(*(x[rows] for x in stats)), grad_U[rows], grad_entropy)
        # equal terms write equal values
        d[row_S - rows.start, target_S] = target_grad(
            logp_S[span], RowStats(*(x[row_S] for x in stats)), grad_pair_S[span], grad_U[row_S],
            None if grad_entropy_U is None else grad_entropy_U[row_S],
            head.inv_temperature, head.softcap,
        ).to(d.dtype)  # fmt: skip
        yield rows, d.to(head.weight.dtype)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """In place total + a @ b in dtype (a's or fp32); None counts as zero."""
    if total is None:
        if dtype == a.dtype:
            return matmul(a, b)
        total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    if dtype == a.dtype:
        return torch.addmm(total, a, b, out=total)
    if total.is_cuda:  # torch >= 2.10 adds in place to a float32 `total`
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    return total.add_(a @ b)


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight: Tensor, bias: Tensor | None, terms: _Terms,
        head: _Head, chunks: list[_Chunk], keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        hidden_UH = hidden_TH[terms.rows_U]
        buffer = head.buffer(chunks[0].num_rows)
        done = [
            head.forward_(
                buffer[: chunk.num_rows], hidden_UH[chunk.rows],
                terms.row_S[chunk.terms] - chunk.rows.start, terms.target_S[chunk.terms],
                terms.fresh_S[chunk.terms],
            )
            for chunk in chunks
        ]  # fmt: skip
        logp_S = torch.cat([logp for logp, _ in done])
        stats = RowStats(*(torch.cat(x) for x in zip(*(stats for _, stats in done), strict=True)))
        # saved via ctx, so that gradient checkpointing around the call keeps no logits
        kept = buffer if keep and len(chunks) == 1 else None
        ctx.save_for_backward(hidden_UH, weight, bias, *terms, logp_S, *stats, kept)
        ctx.options, ctx.chunks, ctx.shape = head[2:], chunks, hidden_TH.shape
        ctx.spent = False
        ctx.set_materialize_grads(False)
        return terms.unsorted(logp_S), terms.unsorted(stats.entropy[terms.row_S])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_UH, weight, bias, *saved, kept = ctx.saved_tensors
        terms, logp_S, stats = _Terms(*saved[:5]), saved[5], RowStats(*saved[6:])
        grad_S, grad_entropy_U = torch.zeros_like(logp_S), None
        if grad is not None:
            grad_S = grad.to(logp_S.dtype)[terms.order_S]
        if grad_entropy is not None:
            grad_entropy_U = terms.per_row(grad_entropy.to(logp_S.dtype)[terms.order_S])
        # overwritten in place (.data: unseen by autograd); a second backward recomputes it
        kept = None if kept is None or ctx.spent else kept.data
        ctx.spent = True

        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_hidden = hidden_UH.new_zeros(ctx.shape) if wants_hidden else None
        grad_weight = grad_bias = None
        sums = weight.dtype if len(ctx.chunks) == 1 else working_dtype(weight.dtype)
        head = _Head(weight, bias, *ctx.options)
        for rows, d in _logits_grads(
            head, kept, hidden_UH, terms, ctx.chunks, logp_S, stats, grad_S, grad_entropy_U
        ):
            if grad_hidden is not None:
                grad_hidden[terms.rows_U[rows]] = matmul(d, weight)
            if wants_weight:
                grad_weight = _add_product(grad_weight, d.T, hidden_UH[rows], sums)
            if wants_bias:
                part = d.sum(0, dtype=working_dtype(d.dtype))
                grad_bias = part if grad_bias is None else grad_bias + part
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def linear_logp(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    rows_N: Tensor,
    targets_N: Tensor,
    *,
    uses_U: Tensor | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    max_logits_bytes: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each term, differentiable in hidden, weight and bias.

    Args:
        hidden_TH: [T, H] fp32/bf16/fp16 (fp64 with the torch backend), after the final norm. Rows
            without a term may hold anything, NaN included; their gradient is exactly zero.
        weight_VH: [V, H], hidden's dtype. requires_grad=False skips its product.
        rows_N: [N] int64 in [0, T), in any order, with repeats: the row that predicts term n (a
            token at position p is predicted by row p - 1).
        targets_N: [N] int64 in [0, V), on the device of rows_N. Both may be on the host.
        uses_U: int64 on the host: the number of terms of each row that has any, rows ascending.
            Avoids waiting for the device; rows_N and targets_N are then not checked. None: counted.
        bias_V: [V], hidden's dtype.
        temperature: > 0, by which the sampler divided its logits.
        softcap: Logits become softcap * tanh(logits / softcap) first (Gemma 2).
        logits_dtype: The dtype that the product is rounded to: hidden's (default) or float32. bf16
            logits add 1e-2 nats of noise (rms, H=1024) to every log-probability.
        max_logits_bytes: Above this size the backward recomputes the logits instead of keeping
            them. None: 6 GiB on CUDA, 1 GiB elsewhere.
        backend: See checks.backend_for.

    Returns:
        logp_N: [N], nats, fp32 (fp64 for fp64 inputs).
        entropy_N: [N], the same.

    Raises:
        ValueError: Shapes, dtypes, devices or values are not as above; the message names the
            argument.
    """
    use_triton = backend_for(hidden_TH.device, backend) == "triton"
    _check(hidden_TH, weight_VH, rows_N, targets_N, bias_V, use_triton)
    check_options(temperature, softcap)
    logits_dtype = logits_dtype or hidden_TH.dtype
    if logits_dtype not in (hidden_TH.dtype, torch.promote_types(hidden_TH.dtype, torch.float32)):
        raise ValueError(f"logits_dtype: expected {hidden_TH.dtype} or float32, got {logits_dtype}")
    if max_logits_bytes is None:
        max_logits_bytes = LOGITS_BYTES_CUDA if hidden_TH.is_cuda else LOGITS_BYTES_CPU
    head = _Head(weight_VH, bias_V, 1 / temperature, softcap, logits_dtype, use_triton)
    row_bytes = head.padded_vocab * head.buffer_dtype.itemsize
    leaves = [x for x in (hidden_TH, weight_VH, bias_V) if x is not None]
    if uses_U is None:
        check_range("rows_N", rows_N, hidden_TH.shape[0])
        check_range("targets_N", targets_N, weight_VH.shape[0])
        uses_T = torch.bincount(rows_N).cpu()
        uses_U = uses_T[uses_T > 0]
    rows, targets = (upload(x, hidden_TH.device) for x in (rows_N, targets_N))
    terms = _Terms.of(rows, targets, weight_VH.shape[0], len(uses_U))
    with torch.autocast(hidden_TH.device.type, enabled=False):
        logp_N, entropy_N = _LinearLogp.apply(  # type: ignore[no-untyped-call]
            hidden_TH, weight_VH, bias_V, terms, head,
            _chunks(uses_U, max(1, max_logits_bytes // row_bytes)),
            torch.is_grad_enabled() and any(x.requires_grad for x in leaves),
        )  # fmt: skip
    return logp_N, entropy_N


def _check(
    hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, bias: Tensor | None,
    use_triton: bool,
) -> None:  # fmt: skip
    allowed = [torch.float32, torch.bfloat16, torch.float16]
    if not use_triton:
        allowed.append(torch.float64)
    if hidden.ndim != 2 or hidden.dtype not in allowed:
        raise ValueError(
            f"hidden_TH: expected [T, H] of {allowed}, got {hidden.dtype} {tuple(hidden.shape)}"
        )
    vocab = weight.shape[0]
    check_tensor("weight_VH", weight, (vocab, hidden.shape[1]), (hidden.dtype,), hidden)
    num_terms = rows.shape[0] if rows.ndim else 0
    place = rows if rows.device.type == "cpu" else hidden
    check_tensor("rows_N", rows, (num_terms,), (torch.int64,), place)
    check_tensor("targets_N", targets, (num_terms,), (torch.int64,), place)
    if bias is not None:
        check_tensor("bias_V", bias, (vocab,), (hidden.dtype,), hidden)
