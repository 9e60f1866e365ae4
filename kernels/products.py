"""float32 matrix products by oneDNN on CPUs where MKL does not use AVX-512.

PyTorch multiplies float32 matrices with MKL, which uses AVX2 kernels on all CPUs not made by Intel.
oneDNN, which PyTorch also contains, uses AVX-512 wherever it exists: on a core of an EPYC 9005 190
to 210 GFLOP/s instead of 80 to 95 (bench/LOG.md). Both sum in float32.

The choice depends on the CPU and on shapes only, never on a measurement: the same products in the
same order give the same bits in every run.
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
"""Multiply-adds, below which finding oneDNN's kernel for a shape costs as much as it saves."""


@functools.cache
def by_onednn() -> bool:
    """Whether this CPU has AVX-512 that MKL does not use, and PyTorch supports oneDNN."""
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
    """Whether oneDNN should compute a @ b."""
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
"""Other tensor types (sharded tensors) have their own products."""


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
    """Let the model's float32 linear layers use linear() where it is faster on this CPU.

    Returns whose products they are, for the record.
    """
    linears = (
        m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.float32
    )
    layers = list(linears) if by_onednn() else []
    if not layers:
        return "PyTorch's"
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return f"oneDNN's, of {len(layers)} layers in float32"


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
