"""float32 matrix products on a CPU for which MKL has none of its own.

PyTorch multiplies float32 matrices by MKL, which takes AVX2 kernels on CPUs that are not Intel's,
whatever they can do. oneDNN, which comes with PyTorch too, takes AVX-512 wherever it is there: on a
core of an EPYC 9005 190 to 210 GFLOP/s instead of 80 to 95 (bench/LOG.md). Both sum in float32.

What is chosen depends on the CPU and on shapes only, never on a measurement: the same products in
the same order give the same bits in every run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .checks import once_differentiable

_WORTH = 1 << 22
"""Multiply-adds; below that finding oneDNN's kernel for a shape costs what it saves."""


@functools.cache
def by_onednn() -> bool:
    """Whether this CPU has AVX-512 that MKL does not use, and PyTorch what it takes to use it."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:  # not Linux
        return False
    return (
        "avx512f" in first.split()
        and "GenuineIntel" not in first
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _better(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN should have a @ b."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.device.type == "cpu"
        and a.ndim > 1
        and b.ndim == 2
        and type(a) in _PLAIN
        and type(b) in _PLAIN
        and a.numel() * b.shape[1] >= _WORTH
        and by_onednn()
    )


_PLAIN = (Tensor, torch.nn.Parameter)
"""Others (sharded tensors) have products of their own."""


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [..., K] by b [K, N], of any strides, without a gradient."""
    if not _better(a, b):
        return a @ b
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        return _linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (
            None if weight is None else matmul(grad, weight),
            None if x is None else matmul(rows.T, x.flatten(0, -2)),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = matmul(x, weight.T)
    return y if bias is None else y.add_(bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear, once differentiable."""
    if not _better(x, weight.T):
        return torch.nn.functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def multiply_by_onednn(model: nn.Module) -> str:
    """Have a model's linear layers multiply by linear(), where that is better on this CPU; says
    whose products they are, for the record.
    """
    linear_ones = (
        m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.float32
    )
    layers = list(linear_ones) if by_onednn() else []
    if not layers:
        return "PyTorch's"
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return f"oneDNN's, of {len(layers)} layers in float32"


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
