"""MasterAdamW against torch's AdamW in float32, with the same gradients."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentgrpo.learn.optimizer import MasterAdamW

SHAPES = ((5, 7), (11,))
STEPS = 8
ADAMW = torch.optim.AdamW
FUSED = partial(ADAMW, fused=True)
"""What runs on CUDA; torch has it on CPU too."""


def parameters(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype).requires_grad_()
        for shape in SHAPES
    ]


def gradients(step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [
        (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16) for shape in SHAPES
    ]


def partial_of(adamw: Any) -> Any:
    """The class, whatever fused= it is given."""
    return lambda *given, fused, **options: adamw(*given, **options)


def feed(tensors: list[Tensor], grads: list[Tensor]) -> None:
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad.to(tensor.dtype)


def oracle(lr: float, *, max_grad_norm: float, weight_decay: float) -> tuple[list[Tensor], float]:
    """Float32 AdamW after STEPS steps, and the last norm before clipping."""
    params = parameters(torch.float32)
    adamw = ADAMW(params, lr=lr, weight_decay=weight_decay)
    norm = 0.0
    for step in range(STEPS):
        grads = gradients(step)
        norm = torch.cat([g.float().flatten() for g in grads]).norm().item()
        factor = min(1.0, max_grad_norm / norm)
        feed(params, [g.float() * factor for g in grads])
        adamw.step()
    return params, norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [0.1, 1e9])
@pytest.mark.parametrize("lr", [1e-5, 1e-2])
@pytest.mark.parametrize("adamw", [ADAMW, FUSED], ids=["plain", "fused"])
def test_many_small_updates_match_float32(
    dtype: torch.dtype, max_grad_norm: float, lr: float, adamw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", partial_of(adamw))
    params = parameters(dtype)
    optimizer = MasterAdamW(params, lr=lr, weight_decay=0.1)
    norm = 0.0
    for step in range(STEPS):
        feed(params, gradients(step))
        norm = optimizer.step(max_grad_norm=max_grad_norm)
        optimizer.zero_grad()
    reference, want_norm = oracle(lr, max_grad_norm=max_grad_norm, weight_decay=0.1)
    assert norm == pytest.approx(want_norm, rel=1e-5)
    for got, expected in zip(params, reference, strict=True):
        # the masters follow float32; the parameter is their nearest representable number
        torch.testing.assert_close(
            got, expected.to(dtype), rtol=8e-3 if dtype != torch.float32 else 1e-5, atol=1e-7
        )
    if dtype == torch.bfloat16:
        for master, expected in zip(optimizer.state_dict()["masters"], reference, strict=True):
            torch.testing.assert_close(master, expected.detach(), rtol=1e-5, atol=1e-7)


def test_gradients_accumulate_in_float32() -> None:
    """In bfloat16 1 + 1/512 is 1, even a thousand times."""
    param = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    optimizer = MasterAdamW([param], lr=1.0, weight_decay=0.0)
    for number in range(1025):
        param.grad = torch.full((3,), 1 / 512 if number else 1.0, dtype=torch.bfloat16)
        optimizer.collect()
        assert param.grad is None
    assert optimizer.step(max_grad_norm=1e9) == pytest.approx(3.0 * 3**0.5)
    optimizer.zero_grad()
    param.grad = torch.ones_like(param)
    assert optimizer.step(max_grad_norm=1e9) == pytest.approx(3**0.5), "the others are forgotten"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_only_one_gradient_exists_at_a_time(checkpointed: bool) -> None:
    """In addition to its sum; the sums equal those of full backward passes to the bit."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6).bfloat16() for _ in range(5)]
    layers[4].weight = layers[0].weight  # a tied head
    params = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    inputs = [torch.randn(3, 6).bfloat16().requires_grad_() for _ in range(3)]

    def loss(x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return x.float().square().sum()

    expected = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    for x in inputs:
        for total, grad in zip(expected, torch.autograd.grad(loss(x), params), strict=True):
            total += grad
    optimizer, peak = MasterAdamW(params, lr=1.0, weight_decay=0.0), list[int]()
    for p in params:
        p.register_hook(lambda _: peak.append(sum(q.grad is not None for q in params)))
    for x in inputs:
        loss(x).backward()
    assert peak == [0] * len(params) * len(inputs), "before a gradient comes all others are freed"
    assert all(p.grad is None for p in params)
    for total, got in zip(expected, optimizer._sums, strict=True):
        assert got is not None
        assert torch.equal(got, total)


def test_parameters_do_not_keep_the_optimizer_alive() -> None:
    param = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    gone = weakref.ref(MasterAdamW([param], lr=1.0, weight_decay=0.0))
    assert gone() is None
    param.sum().backward()
    assert param.grad is not None


def test_parameters_are_updated_in_place() -> None:
    base = torch.zeros(4, 4, dtype=torch.bfloat16)
    view = base[1:3].requires_grad_()
    optimizer = MasterAdamW([view], lr=0.5, weight_decay=0.0)
    view.grad = torch.ones_like(view)
    optimizer.step(max_grad_norm=1e9)
    assert base[1:3].tolist() == [[-0.5] * 4] * 2
    assert base[[0, 3]].abs().sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_gradient_changes_nothing(bad: float, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = MasterAdamW(params, lr=1e-2, weight_decay=0.1)
    feed(params, gradients(0))
    optimizer.step(max_grad_norm=1.0)
    before = [p.detach().clone() for p in params], repr(optimizer.state_dict())
    feed(params, gradients(1))
    assert params[1].grad is not None
    params[1].grad[3] = bad
    with pytest.raises(FloatingPointError, match="the weights are unchanged"):
        optimizer.step(max_grad_norm=1.0)
    assert all(torch.equal(p, q) for p, q in zip(params, before[0], strict=True))
    assert repr(optimizer.state_dict()) == before[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adamw", [ADAMW, FUSED], ids=["plain", "fused"])
def test_resuming_repeats_the_bits(
    dtype: torch.dtype, adamw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", partial_of(adamw))

    def run(params: list[Tensor], optimizer: MasterAdamW, steps: range) -> None:
        for step in steps:
            feed(params, gradients(step))
            optimizer.step(max_grad_norm=1.0)

    whole = parameters(dtype)
    run(whole, MasterAdamW(whole, lr=1e-3, weight_decay=0.1), range(STEPS))
    first = parameters(dtype)
    saved = MasterAdamW(first, lr=1e-3, weight_decay=0.1)
    run(first, saved, range(3))
    second = [p.detach().clone().requires_grad_() for p in first]
    resumed = MasterAdamW(second, lr=7.0, weight_decay=0.1)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.lr == 1e-3
    run(second, resumed, range(3, STEPS))
    assert all(torch.equal(p, q) for p, q in zip(whole, second, strict=True))
