"""Log-probability and entropy of given logits: values, gradients, masks, layouts, extremes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentgrpo.kernels.checks import Backend, backend_for
from agentgrpo.kernels.logp import logp
from tests.kernels.oracles import assert_close, dense_logp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("backend", ["torch", "triton"])
# the interpreter truncates bf16 and fp16 stores where a GPU rounds them
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Logits rise along the vocabulary, so every block of the online sum moves its peak."""
    gen = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, vocab, generator=gen) * 2
    return (noise + torch.linspace(0, 9, vocab)).to(dtype).to(DEVICE)


def make_targets(rows: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def gradients(fn: Any, logits: Tensor, targets: Tensor, *args: Any, **options: Any) -> list[Tensor]:
    """(logp, entropy, gradient of both mixed, gradient of logp alone)."""
    leaf = logits.detach().clone().requires_grad_()
    value, entropy = fn(leaf, targets, *args, **options)
    upstream = torch.linspace(-1, 2, value.numel(), device=value.device, dtype=value.dtype).view(
        value.shape
    )
    mixed = (value * upstream).sum() + (entropy * upstream.flip(0) * 0.5).sum()
    (both,) = torch.autograd.grad(mixed, leaf, retain_graph=True)
    (alone,) = torch.autograd.grad((value * upstream).sum(), leaf)
    return [value.detach(), entropy.detach(), both, alone]


@BOTH
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 1), (3, 7), (4, 1000), (2, 2048), (2, 4096), (3, 9001)]
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients(rows: int, vocab: int, dtype: torch.dtype, backend: Backend) -> None:
    logits, targets = make_logits(rows, vocab, dtype), make_targets(rows, vocab)
    ours = gradients(logp, logits, targets, temperature=0.7, backend=backend)
    expected = gradients(dense_logp, logits.double(), targets, temperature=0.7)
    assert ours[0].dtype == ours[1].dtype == torch.float32
    assert ours[2].dtype == dtype
    # fp32 sums of exponents reach 1e-6 of the largest value
    assert_close(ours[:2], expected[:2], 2e-6)
    assert_close(ours[2:], expected[2:], TOLERANCE[dtype])


@BOTH
def test_softcap(backend: Backend) -> None:
    logits, targets = make_logits(4, 5001), make_targets(4, 5001)
    ours = gradients(logp, logits, targets, temperature=1.3, softcap=3.0, backend=backend)
    expected = gradients(dense_logp, logits.double(), targets, temperature=1.3, softcap=3.0)
    assert_close(ours, expected, 3e-6)


@BOTH
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_masked_rows_may_hold_anything(share: float, backend: Backend) -> None:
    vocab = 5000
    logits, targets = make_logits(7, vocab), make_targets(7, vocab)
    mask = torch.rand(7, generator=torch.Generator().manual_seed(3)).to(DEVICE) < share
    for i, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        logits[~mask, i::3] = bad
    targets[~mask] = -100
    leaf = logits.clone().requires_grad_()
    value, entropy = logp(leaf, targets, mask, backend=backend)
    upstream = torch.where(
        mask, 1.0, float("nan")
    )  # a masked slot's upstream gradient is no better
    (grad,) = torch.autograd.grad((value, entropy), leaf, (upstream, upstream))
    expected = gradients(dense_logp, logits[mask].double(), targets[mask])
    assert_close([value[mask].detach(), entropy[mask].detach()], expected[:2], 2e-6)
    dense = logits[mask].double().requires_grad_()
    want_value, want_entropy = dense_logp(dense, targets[mask])
    (want_grad,) = torch.autograd.grad(want_value.sum() + want_entropy.sum(), dense)
    torch.testing.assert_close(grad[mask].double(), want_grad, rtol=1e-5, atol=2e-6)
    for masked in (value[~mask], entropy[~mask], grad[~mask]):
        assert (masked == 0).all()


@BOTH
@pytest.mark.parametrize(
    "layout", ["sliced batch", "padded vocabulary", "transposed", "every other"]
)
def test_any_layout(layout: str, backend: Backend) -> None:
    """None of these is dense; the gradient has the shape of what was passed."""
    vocab = 4100
    layouts: dict[str, Callable[[], Tensor]] = {
        "sliced batch": lambda: make_logits(8, vocab).view(2, 4, vocab)[:, :-1],
        "padded vocabulary": lambda: make_logits(6, vocab + 12).view(2, 3, -1)[..., :vocab],
        "transposed": lambda: make_logits(6, vocab).T.contiguous().T.view(2, 3, vocab),
        "every other": lambda: make_logits(6, 2 * vocab).view(2, 3, -1)[..., ::2],
    }
    whole = layouts[layout]()
    targets = make_targets(6, vocab).view(2, 3)
    leaf = whole.detach().requires_grad_()
    value, entropy = logp(leaf, targets, backend=backend)
    (grad,) = torch.autograd.grad((value * 2 - entropy).sum(), leaf)
    dense = whole.reshape(6, vocab).double().requires_grad_()
    expected, want_entropy = dense_logp(dense, targets.view(-1))
    (want_grad,) = torch.autograd.grad((expected * 2 - want_entropy).sum(), dense)
    assert value.shape == entropy.shape == (2, 3)
    torch.testing.assert_close(
        value.detach().double().view(-1), expected.detach(), rtol=1e-6, atol=2e-6
    )
    torch.testing.assert_close(
        entropy.detach().double().view(-1), want_entropy.detach(), rtol=1e-6, atol=2e-6
    )
    torch.testing.assert_close(grad.double().reshape(6, vocab), want_grad, rtol=1e-5, atol=2e-6)


@BOTH
@pytest.mark.parametrize("margin", [5.0, 12.0, 17.0, 25.0, 40.0])
@pytest.mark.parametrize("peak_at", [0, 4500])
def test_saturated_row_keeps_its_precision(margin: float, peak_at: int, backend: Backend) -> None:
    """From 17 nats on, 1 - p is lost to rounding unless it is never formed as a difference."""
    logits = make_logits(1, 5000).fill_(-3.0)
    logits[0, peak_at] = margin - 3.0
    logits[0, 7] = margin - 5.0
    targets = torch.tensor([peak_at], device=DEVICE)
    ours = gradients(logp, logits, targets, backend=backend)
    exact = logits.double().clone()
    others = torch.cat([exact[0, :peak_at], exact[0, peak_at + 1 :]])
    odds = (others - exact[0, peak_at]).exp().sum()
    torch.testing.assert_close(ours[0].double()[0], -torch.log1p(odds), rtol=2e-6, atol=0.0)
    miss = odds / (1 + odds)
    torch.testing.assert_close(ours[3].double()[0, peak_at], -miss, rtol=3e-6, atol=0.0)
    expected = gradients(dense_logp, logits.double(), targets)
    torch.testing.assert_close(ours[1].double(), expected[1], rtol=3e-6, atol=0.0)


@BOTH
@pytest.mark.parametrize("banned", ["the first block", "the tail", "all but one"])
def test_banned_tokens(banned: str, backend: Backend) -> None:
    """Logits of -inf have probability 0, and add nothing to entropy or gradient."""
    logits, targets = make_logits(2, 5000), torch.tensor([4500, 4500], device=DEVICE)
    columns = {
        "the first block": slice(0, 4400),
        "the tail": slice(4600, 5000),
        "all but one": slice(0, 4999),
    }
    logits[:, columns[banned]] = -float("inf")
    if banned == "all but one":
        targets[:] = 4999
    ours = gradients(logp, logits, targets, backend=backend)
    allowed = logits.isfinite()[0]
    kept = logits[:, allowed]
    place = torch.tensor([int(allowed[: t.item()].sum()) for t in targets], device=DEVICE)
    expected = gradients(dense_logp, kept.double(), place)
    assert_close([ours[0], ours[1], ours[2][:, allowed], ours[3][:, allowed]], expected, 2e-6)
    assert (ours[2][:, ~allowed] == 0).all()


@BOTH
def test_banned_target_adds_nothing_to_the_entropy(backend: Backend) -> None:
    """Whose gradient does not depend on the target; 0 * inf would be nan."""
    logits = make_logits(2, 5000)
    logits[0, 4321] = -float("inf")
    actual: list[Tensor] = []
    for target in (4321, 7):
        leaf = logits.clone().requires_grad_()
        _, entropy = logp(leaf, torch.tensor([target, target], device=DEVICE), backend=backend)
        actual += torch.autograd.grad(entropy.sum(), leaf)
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-4, atol=1e-8)


@BOTH
def test_nan_in_a_trained_row_is_not_hidden(backend: Backend) -> None:
    logits = make_logits(2, 5000)
    logits[1, 3000] = float("nan")
    value, entropy = logp(logits, torch.tensor([1, 1], device=DEVICE), backend=backend)
    assert value[0].isfinite()
    assert value[1].isnan()
    assert entropy[1].isnan()


@BOTH
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_may_overwrite_the_logits(masked: bool, backend: Backend) -> None:
    # the last position of each sample belongs to the batch, but not to the loss
    logits = make_logits(8, 5000).view(2, 4, -1)[:, :-1]
    targets = make_targets(6, 5000).view(2, 3)
    mask = torch.tensor([[True, False, True], [True, True, False]], device=DEVICE)
    options: Any = {"backend": backend, "mask": mask if masked else None}
    leaf = logits.clone().requires_grad_()
    value, entropy = logp(leaf, targets, **options)
    (expected,) = torch.autograd.grad((value * 3 + entropy).sum(), leaf)
    own = logits.detach().requires_grad_()
    value, entropy = logp(own, targets, inplace_backward=True, **options)
    (grad,) = torch.autograd.grad((value * 3 + entropy).sum(), own)
    assert grad.data_ptr() == own.data_ptr()
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


@BOTH
def test_rows_beyond_two_billion_elements(backend: Backend) -> None:
    """Only the touched pages of these 4.3 GB exist."""
    vocab, stride = 1000, (1 << 30) + 16  # fits 32 bits; the last row's offset does not
    memory = torch.empty(2 * stride + vocab, dtype=torch.bfloat16, device=DEVICE)
    logits = memory.as_strided((3, vocab), (stride, 1))
    logits.copy_(make_logits(3, vocab, torch.bfloat16))
    targets = make_targets(3, vocab)
    expected = dense_logp(logits.double(), targets)
    leaf = logits.requires_grad_()
    value, entropy = logp(leaf, targets, inplace_backward=True, backend=backend)
    assert_close([value.detach(), entropy.detach()], list(expected), 2e-6)
    dense = logits.detach().double().clone().requires_grad_()
    (want_grad,) = torch.autograd.grad(dense_logp(dense, targets)[0].sum(), dense)
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(grad.double(), want_grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4)}, "logits: expected floats, 2-d or 3-d"),
        ({"logits": torch.zeros(4, 9, dtype=torch.int64)}, "logits: expected floats"),
        (
            {"targets": torch.zeros(3, dtype=torch.int64)},
            r"targets: expected int64 of shape \(4,\)",
        ),
        ({"targets": torch.zeros(4, dtype=torch.int32)}, "targets: expected int64"),
        ({"targets": torch.tensor([0, 1, 9, 2])}, r"targets: expected ids in \[0, 9\), got 0 .. 9"),
        ({"targets": torch.tensor([0, 1, -1, 2])}, "targets: expected ids"),
        ({"targets": torch.zeros(4, dtype=torch.int64, device="meta")}, "on cpu, got .* on meta"),
        ({"mask": torch.ones(4)}, "mask: expected bool"),
        ({"mask": torch.ones(1, 4, dtype=torch.bool)}, "mask: expected bool of shape"),
        ({"temperature": 0.0}, "temperature: expected > 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature: expected > 0"),
        ({"softcap": -1.0}, "softcap: expected > 0 or None"),
        ({"backend": "numpy"}, "backend: expected"),
        (
            {
                "logits": torch.zeros(4, 9, dtype=torch.float64, device=DEVICE),
                "targets": torch.zeros(4, dtype=torch.int64, device=DEVICE),
                "backend": "triton",
            },
            "computes in fp32",
        ),
    ],
)
def test_invalid_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "logits": torch.zeros(4, 9),
        "targets": torch.zeros(4, dtype=torch.int64),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        logp(**arguments)


def test_backend_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_for(torch.device("cpu")) == "torch"
    assert backend_for(torch.device("cuda")) == "triton"
    assert backend_for(torch.device("cuda"), "torch") == "torch"
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ValueError, match="'triton' needs CUDA tensors"):
        backend_for(torch.device("cpu"), "triton")
