"""Batches from runs of flat deltas: Triton and PyTorch against a Python loop."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentgrpo.kernels import delta_pack
from agentgrpo.kernels.checks import Backend
from agentgrpo.kernels.delta_pack import pack_terms, pack_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS: tuple[Backend, ...] = ("torch", "triton")
SIZES = st.lists(st.integers(1, 300), max_size=12)


def runs_of(sizes: list[int], num_delta: int, seed: int, floats: int) -> Tensor:
    """[4, R] or [8, Q] of these sizes over num_delta deltas; the last `floats` columns are fp32."""
    gen = torch.Generator().manual_seed(seed)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    runs = torch.randint(0, 2**20, (8 if floats else 4, len(sizes)), generator=gen)
    runs[0] = torch.tensor(starts)
    for source in (1, 2) if floats else (1,):
        for r, size in enumerate(sizes):
            runs[source, r] = torch.randint(0, num_delta - size + 1, (), generator=gen)
    runs = runs.int()
    if floats:
        runs.view(torch.float32)[-floats:] = torch.randn(floats, len(sizes), generator=gen)
    return runs.to(DEVICE)


def deltas(num_delta: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 150_000, (num_delta,), generator=gen, dtype=torch.int32)
    return ids.to(DEVICE), -torch.rand(num_delta, generator=gen).to(DEVICE)


def places(runs: Tensor, count: int) -> list[tuple[list[int], list[float], int]]:
    """(run, the run as floats, index within the run) of each element."""
    starts = runs[0].tolist()
    at = [bisect_right(starts, t) - 1 for t in range(count)]
    whole, floats = runs.T.tolist(), runs.view(torch.float32).T.tolist()
    return [(whole[r], floats[r], t - starts[r]) for t, r in enumerate(at)]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 99))
def test_runs_expand_as_in_a_loop(backend: Backend, sizes: list[int], seed: int) -> None:
    ids, logp = deltas(400)
    count = sum(sizes)
    runs = runs_of(sizes, 400, seed, 0)
    tokens = pack_tokens(ids, runs, count, backend=backend)
    got = list(zip(*(x.tolist() for x in tokens), strict=True))
    assert got == [
        (ids[run[1] + i].item(), run[2] + i, run[3]) for run, _, i in places(runs, count)
    ]
    assert [x.dtype for x in tokens] == [torch.int64, torch.int64, torch.int32]
    runs = runs_of(sizes, 400, seed, 2)
    terms = pack_terms(ids, logp, runs, count, backend=backend)
    result = list(zip(*(x.tolist() for x in terms), strict=True))
    assert result == [
        (run[3] + i, ids[run[1] + i].item(), run[4], logp[run[2] + i].item(), *floats[6:])
        for run, floats, i in places(runs, count)
    ]
    assert [x.dtype for x in terms] == [torch.int64] * 3 + [torch.float32] * 3


@pytest.mark.parametrize("num_runs", [1, 2, 3, 4, 1000])
def test_binary_search_finds_every_run(num_runs: int) -> None:
    """For any number of runs; a thousand runs of one token exceed a program's block."""
    ids, _ = deltas(1000)
    runs = runs_of([1] * num_runs, 1000, 0, 0)
    ours, expected = (pack_tokens(ids, runs, num_runs, backend=b) for b in reversed(BACKENDS))
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_read_past_the_deltas(backend: Backend) -> None:
    """The last program has more lanes than remaining tokens."""
    ids, logp = deltas(5)
    runs = runs_of([5], 5, 0, 2)
    assert pack_terms(ids, logp, runs, 5, backend=backend)[1].tolist() == ids.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_triton_backend_launches_the_kernels(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the reference, whose results are equal."""
    launched: list[int] = []
    monkeypatch.setattr(delta_pack, "_launch", lambda kernel, count, *_: launched.append(count))
    ids, logp = deltas(400)
    pack_tokens(ids, runs_of([3, 4], 400, 0, 0), 7, backend=backend)
    pack_terms(ids, logp, runs_of([3, 2], 400, 0, 2), 5, backend=backend)
    assert launched == ([7, 5] if backend == "triton" else [])


def test_invalid_arguments_are_named() -> None:
    ids, logp = deltas(5)
    tokens, terms = runs_of([3, 2], 5, 0, 0), runs_of([3, 2], 5, 0, 2)
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (pack_tokens, (ids.long(), tokens, 5), "ids_D: expected int32"),
        (pack_tokens, (ids, tokens.long(), 5), "runs_4R: expected int32"),
        (pack_tokens, (ids, tokens[:3], 5), r"runs_4R: expected int32 of shape \(4, 2\)"),
        (pack_tokens, (ids, tokens[0], 5), "runs_4R: expected int32"),
        (pack_tokens, (ids, tokens.T.contiguous().T, 5), "runs_4R: .* contiguous"),
        (pack_tokens, (ids, tokens[:, :0].contiguous(), 5), "runs_4R: 0 runs for 5 elements"),
        (pack_terms, (ids, logp.double(), terms, 5), "logp_L: expected float32"),
        (pack_terms, (ids.long(), logp, terms, 5), "ids_D: expected int32"),
        (pack_terms, (ids, logp, tokens, 5), r"runs_8Q: expected int32 of shape \(8, 2\)"),
        (pack_terms, (ids, logp, terms, 0), "runs_8Q: 2 runs for 0 elements"),
    ]
    for function, arguments, message in calls:
        with pytest.raises(ValueError, match=message):
            function(*arguments)
