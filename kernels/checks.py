"""Argument checks of kernels/: each raises a ValueError that names the argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import triton
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]


def backend_for(device: torch.device, backend: Backend = "auto") -> Literal["torch", "triton"]:
    """Resolve the backend: "auto" is Triton on CUDA and PyTorch elsewhere.

    Raises:
        ValueError: An unknown name, or "triton" where it cannot run.
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


def check_options(temperature: float, softcap: float | None) -> None:
    """Check the options of every function that computes or reads logits."""
    if not temperature > 0:
        raise ValueError(f"temperature: expected > 0, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected > 0 or None, got {softcap}")


def check_tensor(
    name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor
) -> None:
    """Raise ValueError unless x has this shape, one of the dtypes and like's device."""
    if tuple(x.shape) != shape or x.dtype not in dtypes or x.device != like.device:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name}: expected {expected} of shape {shape} on {like.device}, "
            f"got {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd.Function: autocast is off, second derivatives are an
    error.

    RuntimeError if a graph of the gradient is requested. torch's own once_differentiable has gaps,
    through which a second derivative becomes zeros.
    """

    @functools.wraps(backward)
    def checked_backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            name = backward.__qualname__
            raise RuntimeError(f"create_graph: expected False, since {name} has no derivative")
        device = next((x.device.type for x in grads if x is not None), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return checked_backward


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting for the device."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def check_range(name: str, x: Tensor, below: int) -> None:
    """Raise ValueError unless all ids are in [0, below). For a CUDA tensor the host waits."""
    if x.numel():
        low, high = torch.stack(x.aminmax()).tolist()
        if low < 0 or high >= below:
            raise ValueError(f"{name}: expected ids in [0, {below}), got {low} .. {high}")


def check_sequences(name: str, x: Tensor, num_sequences: int) -> None:
    """check_range for CPU tensors only, where the host need not wait."""
    if x.device.type == "cpu":
        check_range(name, x, num_sequences)
