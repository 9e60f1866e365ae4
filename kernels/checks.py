"""What every entry of kernels/ checks before it computes: ValueErrors that name the argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import triton
from torch import Tensor

Backend = Literal["auto", "torch", "triton"]


def backend_for(device: torch.device, backend: Backend = "auto") -> Literal["torch", "triton"]:
    """The backend that will run: Triton on CUDA, PyTorch elsewhere, unless named.

    Raises:
        ValueError: an unknown name, or "triton" where it cannot run.
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
    """Shared by every entry that makes or takes logits."""
    if not temperature > 0:
        raise ValueError(f"temperature: expected > 0, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected > 0 or None, got {softcap}")


def check_tensor(
    name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor
) -> None:
    """ValueError naming the argument, unless x has this shape, such a dtype and like's device."""
    if tuple(x.shape) != shape or x.dtype not in dtypes or x.device != like.device:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name}: expected {wanted} of shape {shape} on {like.device}, "
            f"got {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd.Function: in the dtypes it names itself, autocast or not.

    RuntimeError if a graph of the gradient is asked for: torch's own of this name leaves gaps,
    through which a second derivative comes out as zeros.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            what = backward.__qualname__
            raise RuntimeError(f"create_graph: expected False, since {what} has no derivative")
        device = next((x.device.type for x in grads if x is not None), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return run


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host in a device's memory, queued: nobody waits for the device's work."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def check_range(name: str, x: Tensor, below: int) -> None:
    """ValueError unless all ids are in [0, below). Of a tensor on CUDA the host waits for it."""
    if x.numel():
        low, high = torch.stack(x.aminmax()).tolist()
        if low < 0 or high >= below:
            raise ValueError(f"{name}: expected ids in [0, {below}), got {low} .. {high}")


def check_sequences(name: str, x: Tensor, num_sequences: int) -> None:
    """check_range, where the host need not wait for it: of a tensor of its own."""
    if x.device.type == "cpu":
        check_range(name, x, num_sequences)
