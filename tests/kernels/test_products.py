"""oneDNN products: equal values and gradients, and used on the intended CPUs only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from agentgrpo.kernels import products
from agentgrpo.kernels.linear_logp import linear_logp
from tests.kernels.oracles import dense_logp

HAS_ONEDNN = torch.backends.mkldnn.is_available()
AMD = "vendor_id : AuthenticAMD\nflags : fpu avx2 {}\n\nvendor_id : GenuineIntel\nflags : avx512f\n"


@pytest.fixture(name="calls")
def _by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """On any CPU, of any size; the shapes that oneDNN was given."""
    if not HAS_ONEDNN:
        pytest.skip("this PyTorch has no oneDNN")
    shapes: list[tuple[int, ...]] = []

    def better(a: Tensor, b: Tensor) -> bool:
        chosen = sound(a, b)
        if chosen:
            shapes.append((*a.shape, b.shape[1]))
        return chosen

    products.by_onednn.cache_clear()
    monkeypatch.setattr(products, "by_onednn", lambda: True)
    monkeypatch.setattr("agentgrpo.kernels.linear_logp.by_onednn", lambda: True)
    monkeypatch.setattr(products, "_WORTH", 0)
    sound = products._better
    monkeypatch.setattr(products, "_better", better)
    return shapes


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trains", ["x", "weight", "x weight"])
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 33, 8, 17)])
def test_layer_matches_float64_values_and_gradients(
    calls: list[tuple[int, ...]], shape: tuple[int, ...], trains: str, *, bias: bool
) -> None:
    torch.manual_seed(0)
    *rows, into, out = shape
    x, layer = torch.randn(*rows, into), nn.Linear(into, out, bias=bias)
    x.requires_grad_("x" in trains.split())
    layer.requires_grad_("weight" in trains)
    summary = products.multiply_by_onednn(layer)
    assert summary.startswith("oneDNN")
    y = layer(x)
    upstream = torch.randn(y.shape)
    leaves = [leaf for leaf in (x, *layer.parameters()) if leaf.requires_grad]
    ours = [y, *torch.autograd.grad(y, leaves, upstream)]
    assert len(calls) == 2 + len(trains.split()), "forward, the layer's choice, one a gradient"
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, *layer.parameters())]
    like = nn.functional.linear(*wide)
    target = [
        w for w, leaf in zip(wide, (x, *layer.parameters()), strict=True) if leaf.requires_grad
    ]
    reference = [like, *torch.autograd.grad(like, target, upstream.double())]
    for got, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("calls")
def test_head_matches_float64_values_and_gradients(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 24, requires_grad=True)
    weight = torch.randn(57, 24, requires_grad=True)
    rows, targets = torch.arange(300), torch.randint(57, (300,))
    logp, _ = linear_logp(hidden, weight, rows, targets, temperature=0.7)
    ours = [logp, *torch.autograd.grad(logp.sum(), (hidden, weight))]
    assert len(calls) == 3 + 2, "three parts of the rows, and a product a gradient"
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected, _ = dense_logp(wide[0] @ wide[1].T, targets, temperature=0.7)
    reference = [expected, *torch.autograd.grad(expected.sum(), wide)]
    for got, right in zip(ours, reference, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


def test_other_dtypes_and_small_products_use_pytorch(calls: list[tuple[int, ...]]) -> None:
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    for dtype in (torch.float64, torch.bfloat16):
        assert products.matmul(a.to(dtype), b.to(dtype)).dtype == dtype
    assert not calls
    products.matmul(a, b)
    assert calls == [(4, 5, 6)]
    vars(products)["_WORTH"] = 121
    products.matmul(a, b)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("cpu", "chosen"),
    [
        (AMD.format("avx512f"), HAS_ONEDNN),
        (AMD.format("avx512_bf16"), False),
        (AMD.format("avx512f").replace("AuthenticAMD", "GenuineIntel"), False),
    ],
)
def test_onednn_is_chosen_where_mkl_leaves_avx512_unused(
    cpu: str, monkeypatch: pytest.MonkeyPatch, *, chosen: bool
) -> None:
    products.by_onednn.cache_clear()
    monkeypatch.setattr(Path, "read_text", lambda _: cpu)
    assert products.by_onednn() is chosen
    monkeypatch.undo()
    products.by_onednn.cache_clear()


@pytest.mark.usefixtures("calls")
def test_second_derivative_is_refused() -> None:
    x, weight = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
    y = products.linear(x, weight).sum()
    with pytest.raises(RuntimeError, match="create_graph: expected False, since _Linear"):
        torch.autograd.grad(y, x, create_graph=True)
