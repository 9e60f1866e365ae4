"""Expand a packed batch on the device from token deltas that were uploaded once.

The deltas of a step are concatenated: ids_D of all its segments, and logp_L of the segments that
the policy sampled. A batch is described by runs, each an int32 column of

    tokens, [4, R]   start, source, position, tout
    terms, [8, Q]    start, source, source in logp_L, row, sample, turn, and the bits of the
                     float32 advantage and weight

with runs ascending by start, the first start being 0. Token (or term) t of run r is its i-th, with
i = t - start[r], up to the next run's start:

    input_ids[t] = ids[source[r] + i]     positions[t] = position[r] + i     tout[t] = tout[r]
    target[n] = ids[source[r] + i]        old_logp[n] = logp[source in logp_L[r] + i]
    row[n] = row[r] + i                   sample, advantage and weight are the run's

For the meaning of the fields and how trees become runs see agentgrpo/learn/packing.py.

Shape suffixes: D delta tokens, L sampled delta tokens, R and Q runs, T packed tokens, N loss terms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import Backend, backend_for, check_tensor

TOKEN_COLUMNS, TERM_COLUMNS = 4, 8
_BLOCK = 256


class Tokens(NamedTuple):
    """Tokens of a batch, [T] each."""

    input_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    tout_T: Tensor  # int32


class Terms(NamedTuple):
    """Loss terms of a batch, [N] each."""

    row_N: Tensor  # int64
    target_N: Tensor  # int64
    sample_N: Tensor  # int64
    old_logp_N: Tensor  # fp32, nats
    advantage_N: Tensor  # fp32
    weight_N: Tensor  # fp32


def pack_tokens(
    ids_D: Tensor, runs_4R: Tensor, num_tokens: int, *, backend: Backend = "auto"
) -> Tokens:
    """Expand token runs into the tokens of a batch.

    Args:
        ids_D: [D] int32, the token ids of the step.
        runs_4R: [4, R] int32, contiguous, see the module.
        num_tokens: T, the number of tokens that the runs describe.
        backend: See checks.backend_for.

    Raises:
        ValueError: Dtypes, shapes or devices disagree. Values are not checked, because that would
            wait for the device.
    """
    check_tensor("ids_D", ids_D, (len(ids_D),), (torch.int32,), runs_4R)
    use_triton = _check_runs("runs_4R", runs_4R, TOKEN_COLUMNS, num_tokens, backend)
    if not use_triton:
        run_T, at_T = _places(runs_4R[0], num_tokens)
        _, source_T, position_T, tout_T = runs_4R[:, run_T]
        return Tokens(ids_D[source_T + at_T].long(), position_T + at_T, tout_T)
    out = Tokens(*_empty(num_tokens, runs_4R, torch.int64, torch.int64, torch.int32))
    _launch(_tokens_kernel, num_tokens, runs_4R, ids_D, *out)
    return out


def pack_terms(
    ids_D: Tensor, logp_L: Tensor, runs_8Q: Tensor, num_terms: int, *, backend: Backend = "auto"
) -> Terms:
    """Expand term runs into the loss terms of a batch.

    Args:
        ids_D: [D] int32, the token ids of the step.
        logp_L: [L] fp32, the sampler's log-probabilities in nats.
        runs_8Q: [8, Q] int32, contiguous, see the module.
        num_terms: N, the number of terms that the runs describe.
        backend: See checks.backend_for.

    Raises:
        ValueError: As in pack_tokens().
    """
    check_tensor("ids_D", ids_D, (len(ids_D),), (torch.int32,), runs_8Q)
    check_tensor("logp_L", logp_L, (len(logp_L),), (torch.float32,), runs_8Q)
    use_triton = _check_runs("runs_8Q", runs_8Q, TERM_COLUMNS, num_terms, backend)
    floats_8Q = runs_8Q.view(torch.float32)
    if not use_triton:
        run_N, at_N = _places(runs_8Q[0], num_terms)
        _, source_N, logp_source_N, row_N, sample_N, *_ = runs_8Q[:, run_N]
        return Terms(
            row_N + at_N, ids_D[source_N + at_N].long(), sample_N.long(),
            logp_L[logp_source_N + at_N], *floats_8Q[-2:, run_N],
        )  # fmt: skip
    dtypes = [torch.int64] * 3 + [torch.float32] * 3
    out = Terms(*_empty(num_terms, runs_8Q, *dtypes))
    _launch(_terms_kernel, num_terms, runs_8Q, floats_8Q, ids_D, logp_L, *out)
    return out


def _check_runs(name: str, runs: Tensor, columns: int, count: int, backend: Backend) -> bool:
    num_runs = runs.shape[-1] if runs.ndim else 0
    check_tensor(name, runs, (columns, num_runs), (torch.int32,), runs)
    if not runs.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {runs.stride()}")
    if bool(num_runs) != bool(count):
        raise ValueError(f"{name}: {num_runs} runs for {count} elements")
    return backend_for(runs.device, backend) == "triton"


def _places(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(run, index within the run) of each of `count` elements."""
    sizes = torch.diff(starts, append=starts.new_tensor([count]))
    run = torch.repeat_interleave(sizes, output_size=count)
    return run, torch.arange(count, device=starts.device) - starts[run]


def _empty(count: int, like: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    return [torch.empty(count, dtype=dtype, device=like.device) for dtype in dtypes]


def _launch(kernel: Any, count: int, runs: Tensor, *pointers: Tensor) -> None:
    if not count:
        return
    num_runs = runs.shape[1]
    with torch.cuda.device_of(runs):
        kernel[(triton.cdiv(count, _BLOCK),)](
            runs, *pointers, count, num_runs, num_runs.bit_length(), BLOCK=_BLOCK
        )


@triton.jit
def _run_of(starts, t, num_runs, steps):
    """The last run that starts at or before t, by binary search."""
    low = tl.zeros_like(t)
    high = low + num_runs
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(starts + middle) <= t
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit(do_not_specialize=["T", "R", "steps"])
def _tokens_kernel(
    runs, ids, input_ids, positions, tout, T, R, steps, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per BLOCK packed tokens, for runs of any length."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = t < T
    r = _run_of(runs, t, R, steps)
    i = t - tl.load(runs + r)
    source, position = tl.load(runs + R + r), tl.load(runs + 2 * R + r)
    tl.store(input_ids + t, tl.load(ids + source + i, mask=keep).to(tl.int64), mask=keep)
    tl.store(positions + t, (position + i).to(tl.int64), mask=keep)
    tl.store(tout + t, tl.load(runs + 3 * R + r), mask=keep)


@triton.jit(do_not_specialize=["N", "Q", "steps"])
def _terms_kernel(
    runs, floats, ids, logp, row, target, sample, old_logp, advantage, weight, N, Q, steps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = n < N
    r = _run_of(runs, n, Q, steps)
    i = n - tl.load(runs + r)
    source, logp_source = tl.load(runs + Q + r), tl.load(runs + 2 * Q + r)
    tl.store(row + n, (tl.load(runs + 3 * Q + r) + i).to(tl.int64), mask=keep)
    tl.store(target + n, tl.load(ids + source + i, mask=keep).to(tl.int64), mask=keep)
    tl.store(sample + n, tl.load(runs + 4 * Q + r).to(tl.int64), mask=keep)
    tl.store(old_logp + n, tl.load(logp + logp_source + i, mask=keep), mask=keep)
    tl.store(advantage + n, tl.load(floats + 6 * Q + r), mask=keep)
    tl.store(weight + n, tl.load(floats + 7 * Q + r), mask=keep)
