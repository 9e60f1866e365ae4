"""The LM head over selected rows: values, gradients, shared rows, chunks, and skipped work."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from agentgrpo.kernels.checks import Backend
from agentgrpo.kernels.linear_logp import _Head, linear_logp
from tests.kernels.oracles import assert_close, dense_logp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("backend", ["torch", "triton"])
T, H = 11, 16


def make_head(vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = ((T, H), (vocab, H), (vocab,))
    hidden, weight, bias = (
        torch.randn(shape, generator=gen).to(dtype).to(DEVICE) for shape in shapes
    )
    return hidden, weight, bias


def test_columns_past_the_vocabulary_are_zero() -> None:
    """Fresh memory is nan here; oneDNN's bfloat16 product reads one past an odd last column."""
    _, weight, _ = make_head(21, torch.bfloat16)
    head = _Head(weight, None, 1.0, None, torch.bfloat16, use_triton=True)
    assert (head.buffer(3)[:, 21:] == 0).all()


TERMS = {
    "flat": ([1, 2, 5, 9, 10], [3, 0, 4, 1, 2]),
    "shuffled": ([9, 1, 10, 2, 5], [1, 3, 2, 0, 4]),
    "shared rows": ([2, 2, 5, 2, 9, 5, 0], [0, 1, 2, 3, 4, 2, 0]),
    "shared rows, apart": ([2, 5, 2, 9], [0, 1, 3, 2]),
    "one row, one token": ([4, 4, 4], [1, 1, 1]),
}


def oracle(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    targets: Tensor,
    bias_V: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    return dense_logp((logits if bias_V is None else logits + bias_V)[rows], targets, **options)


def results(
    fn: Any, tensors: tuple[Tensor | None, ...], *terms: Tensor, **options: Any
) -> list[Tensor]:
    """(logp, entropy, gradients of hidden, weight, bias)."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    value, entropy = fn(*leaves[:2], *terms, bias_V=leaves[2], **options)
    upstream = torch.linspace(-1, 2, len(value), device=value.device, dtype=value.dtype)
    loss = (value * upstream).sum() + (entropy * upstream.flip(0)).sum()
    grads = torch.autograd.grad(loss, [x for x in leaves if x is not None])
    return [value.detach(), entropy.detach(), *grads]


@BOTH
@pytest.mark.parametrize(
    ("vocab", "max_rows", "kind"),
    [
        *[(vocab, rows, kind) for vocab in (5, 33) for rows in (None, 1, 2) for kind in TERMS],
        (4200, None, "shared rows"),
        (4200, 2, "shared rows"),
    ],
)
def test_values_and_gradients(
    vocab: int, max_rows: int | None, kind: str, backend: Backend
) -> None:
    tensors = make_head(vocab)
    terms = [torch.tensor(x, device=DEVICE) for x in TERMS[kind]]
    padded = -(-vocab // 16) * 16
    budget = None if max_rows is None else max_rows * padded * 4
    options = {"temperature": 0.8, "softcap": 6.0 if vocab == 33 else None}
    ours = results(
        linear_logp, tensors, *terms, max_logits_bytes=budget, backend=backend, **options
    )
    doubles = tuple(x.double() for x in tensors)
    assert_close(ours, results(oracle, doubles, *terms, **options), 5e-6)


@pytest.mark.parametrize("kind", TERMS)
def test_float64_equals_the_oracle(kind: str) -> None:
    hidden, weight, _ = (x.double() for x in make_head(33))
    terms = [torch.tensor(x, device=DEVICE) for x in TERMS[kind]]
    for budget in (None, 1):
        ours = results(
            linear_logp, (hidden, weight, None), *terms, max_logits_bytes=budget, backend="torch"
        )
        assert_close(ours, results(oracle, (hidden, weight, None), *terms), 1e-13)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("max_bytes", [None, 1])
def test_half_precision(
    dtype: torch.dtype, logits_dtype: torch.dtype | None, max_bytes: int | None, backend: Backend
) -> None:
    """fp32 logits leave only the rounding of inputs (none here) and of stored gradients."""
    tensors = make_head(4200, dtype)
    terms = [torch.tensor(x, device=DEVICE) for x in TERMS["shared rows"]]
    ours = results(
        linear_logp,
        tensors,
        *terms,
        logits_dtype=logits_dtype,
        max_logits_bytes=max_bytes,
        backend=backend,
    )
    expected = results(oracle, tuple(x.double() for x in tensors), *terms)
    assert [x.dtype for x in ours] == [torch.float32] * 2 + [dtype] * 3
    if logits_dtype == torch.float32:
        assert_close(ours[:2], expected[:2], 5e-6)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert_close(ours[:2], expected[:2], 8 * unit)
    assert_close(ours[2:], expected[2:], 16 * unit)


@BOTH
def test_unused_rows_may_hold_anything(backend: Backend) -> None:
    hidden, weight, bias = make_head(33)
    terms = [torch.tensor(x, device=DEVICE) for x in TERMS["shared rows"]]
    clean = results(linear_logp, (hidden, weight, bias), *terms, backend=backend)
    unused = torch.ones(T, dtype=torch.bool)
    unused[terms[0].cpu()] = False
    hidden[unused] = float("nan")
    poisoned = results(linear_logp, (hidden, weight, bias), *terms, backend=backend)
    for a, b in zip(clean, poisoned, strict=True):
        if DEVICE == "cpu":
            assert torch.equal(a, b)
        torch.testing.assert_close(a, b)  # CUDA adds the terms of a row in any order
    assert (poisoned[2][unused] == 0).all()


@BOTH
@pytest.mark.parametrize(
    ("frozen", "max_rows", "products"),
    [(False, None, 3), (True, None, 2), (False, 2, 4), (True, 2, 3)],
)
def test_number_of_products_per_distinct_row(
    frozen: bool, max_rows: int | None, products: int, backend: Backend
) -> None:
    vocab = 48
    hidden, weight, _ = make_head(vocab)
    rows, targets = (torch.tensor(x, device=DEVICE) for x in TERMS["shared rows"])
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    with FlopCounterMode(display=False) as counter:
        value, _ = linear_logp(
            hidden, weight, rows, targets, backend=backend,
            max_logits_bytes=None if max_rows is None else max_rows * vocab * 4,
        )  # fmt: skip
        torch.autograd.backward(value.sum())
    distinct = len(set(rows.tolist()))
    assert counter.get_total_flops() == products * 2 * distinct * vocab * H
    assert (weight.grad is None) == frozen


@BOTH
@pytest.mark.parametrize("which", ["logp", "entropy"])
def test_one_output_alone(which: str, backend: Backend) -> None:
    tensors = make_head(33)
    rows, targets = (torch.tensor(x, device=DEVICE) for x in TERMS["shared rows"])
    index = ["logp", "entropy"].index(which)
    runs: list[tuple[Any, Any, Any]] = [
        (linear_logp, Tensor.float, {"backend": backend}),
        (oracle, Tensor.double, {}),
    ]
    grads = []
    for fn, cast, more in runs:
        leaves = [cast(x).detach().clone().requires_grad_() for x in tensors]
        out = fn(leaves[0], leaves[1], rows, targets, bias_V=leaves[2], **more)[index]
        grads.append(list(torch.autograd.grad(out.sum(), leaves)))
    assert_close(grads[0], grads[1], 5e-6)


@BOTH
@pytest.mark.parametrize("kind", ["flat", "shared rows"])
def test_every_input_may_be_a_view_with_gaps(kind: str, backend: Backend) -> None:
    tensors = make_head(5)
    terms = [torch.tensor(ids, device=DEVICE) for ids in TERMS[kind]]

    def with_gaps(x: Tensor) -> Tensor:
        return torch.stack([x, x.flip(0)], -1)[..., 0]

    expected = results(linear_logp, tensors, *terms, backend=backend)
    hidden, weight, bias = map(with_gaps, tensors)
    rows, targets = map(with_gaps, terms)
    assert not any(x.is_contiguous() for x in (hidden, weight, bias, rows, targets))
    value, entropy = linear_logp(hidden, weight, rows, targets, bias_V=bias, backend=backend)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(entropy, expected[1])


@BOTH
def test_backward_twice(backend: Backend) -> None:
    """The first turns the kept logits into their gradient; the second computes them again."""
    hidden, weight, _ = make_head(33)
    hidden.requires_grad_()
    rows, targets = (torch.tensor(x, device=DEVICE) for x in TERMS["shared rows"])
    value, entropy = linear_logp(hidden, weight, rows, targets, backend=backend)
    loss = (value - entropy).sum()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@BOTH
def test_checkpointing_keeps_no_logits(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are the same, as often as they are asked for."""
    buffers, make = [], _Head.buffer

    def noted(head: _Head, num_rows: int) -> Tensor:
        out = make(head, num_rows)
        buffers.append(weakref.ref(out))
        return out

    monkeypatch.setattr(_Head, "buffer", noted)
    hidden, weight, _ = (x.requires_grad_() for x in make_head(33))
    rows, targets = (torch.tensor(x, device=DEVICE) for x in TERMS["shared rows"])

    def loss(hidden: Tensor) -> Tensor:
        value, entropy = linear_logp(hidden, weight, rows, targets, backend=backend)
        return (value - entropy).sum()

    plain, again = loss(hidden), checkpoint(loss, hidden, use_reentrant=False)
    assert [buffer() is not None for buffer in buffers] == [True, False]
    expected = torch.autograd.grad(plain, (hidden, weight))
    for more in (True, True, False):
        got = torch.autograd.grad(again, (hidden, weight), retain_graph=more)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@BOTH
@pytest.mark.parametrize("max_bytes", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(
    dtype: torch.dtype, max_bytes: int | None, backend: Backend
) -> None:
    """Neither around the forward alone nor around both."""
    hidden, weight, bias = (x.requires_grad_() for x in make_head(33, dtype))
    rows, targets = (torch.tensor(x, device=DEVICE) for x in TERMS["shared rows"])
    actual = []
    for forward, backward in ((False, False), (True, False), (True, True)):
        with torch.autocast(DEVICE, torch.float16, enabled=forward):
            value, entropy = linear_logp(
                hidden, weight, rows, targets, bias_V=bias, max_logits_bytes=max_bytes,
                backend=backend,
            )  # fmt: skip
        loss = (value - entropy).sum()
        with torch.autocast(DEVICE, torch.float16, enabled=backward):
            actual.append([value, *torch.autograd.grad(loss, (hidden, weight, bias))])
    for other in actual[1:]:
        torch.testing.assert_close(other, actual[0])


@BOTH
def test_saturated_tokens_that_share_a_row(backend: Backend) -> None:
    """The peak's term keeps its digits beside a term that wants another token of the row."""
    weight = torch.zeros(5000, 1, device=DEVICE)
    weight[4321] = 25.0
    rows = torch.tensor([0, 0, 0], device=DEVICE)
    targets = torch.tensor([4321, 17, 4321], device=DEVICE)
    hidden = torch.ones(1, 1, device=DEVICE).requires_grad_()
    value, _ = linear_logp(hidden, weight, rows, targets, backend=backend)
    odds = 4999 * torch.tensor(-25.0).double().exp()
    torch.testing.assert_close(value[0].double().cpu(), -torch.log1p(odds), rtol=2e-6, atol=0.0)
    torch.testing.assert_close(
        value[1].double().cpu(), -25 - torch.log1p(odds), rtol=1e-6, atol=0.0
    )
    (grad,) = torch.autograd.grad(value[0], hidden)
    torch.testing.assert_close(
        grad[0, 0].double().cpu(), 25 * odds / (1 + odds), rtol=3e-6, atol=0.0
    )


@BOTH
def test_no_terms(backend: Backend) -> None:
    hidden, weight, bias = (x.requires_grad_() for x in make_head(33))
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    value, entropy = linear_logp(hidden, weight, none, none, bias_V=bias, backend=backend)
    assert value.shape == entropy.shape == (0,)
    torch.autograd.backward(value.sum() + entropy.sum())
    for x in (hidden, weight, bias):
        assert x.grad is not None
        assert (x.grad == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_TH": torch.zeros(T)}, "hidden_TH: expected"),
        ({"hidden_TH": torch.zeros(T, H, dtype=torch.int64)}, "hidden_TH: expected"),
        (
            {"hidden_TH": torch.zeros(T, H, device=DEVICE).double(), "backend": "triton"},
            "hidden_TH: expected",
        ),
        ({"weight_VH": torch.zeros(33, H - 1)}, r"weight_VH: expected float32 of shape \(33, 16\)"),
        ({"weight_VH": torch.zeros(33, H).half()}, "weight_VH: expected float32"),
        ({"rows_N": torch.tensor([0, T])}, r"rows_N: expected ids in \[0, 11\), got 0 .. 11"),
        ({"rows_N": torch.tensor([0, -1])}, "rows_N: expected ids"),
        ({"rows_N": torch.tensor([0, 1, 2])}, "targets_N: expected int64 of shape"),
        ({"rows_N": torch.tensor([0, 1]).int()}, "rows_N: expected int64"),
        ({"targets_N": torch.tensor([0, 33])}, r"targets_N: expected ids in \[0, 33\)"),
        ({"targets_N": torch.tensor([0, -100])}, "targets_N: expected ids"),
        ({"bias_V": torch.zeros(32)}, "bias_V: expected float32"),
        ({"temperature": -1.0}, "temperature: expected > 0"),
        ({"softcap": 0.0}, "softcap: expected > 0"),
        ({"logits_dtype": torch.bfloat16}, "logits_dtype: expected torch.float32 or float32"),
    ],
)
def test_invalid_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden_TH": torch.zeros(T, H), "weight_VH": torch.zeros(33, H),
        "rows_N": torch.tensor([0, 1]), "targets_N": torch.tensor([0, 1]), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        linear_logp(**arguments)
