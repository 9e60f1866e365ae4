"""AdamW with float32 master copies of 16-bit parameters, which it updates in place.

In bfloat16 an update of 1e-6 is lost to rounding. The parameters are views of the sampler's
weights, so they may be written to but never replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from agentgrpo.support import parallel

_EXACT = (torch.float32, torch.float64)
_MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of each number of a parameter, 4 bytes each."""


class MasterAdamW:
    """torch.optim.AdamW over float32 copies; a float32 parameter is its own master.

    Parameters, full or sharded, are updated in place. `offload`: for parameters on CUDA, keep
    moments and masters in page-locked host memory, except for the parameter that is being updated.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        offload: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        """Gradient sums of 16-bit parameters, in float32."""
        self._masters: list[Tensor] = []
        self._adamw: Any = None
        cuda = bool(self._parameters) and self._parameters[0].is_cuda
        self._offloads = offload and cuda
        self._host: dict[tuple[int, str], Tensor] = {}
        """Page-locked copies of the offloaded state."""
        for index, p in enumerate(self._parameters):
            exact = p.dtype in _EXACT
            self._masters.append(p if exact else p.detach().float().requires_grad_())
            if self._offloads:
                self._move_to_host(index)
            if not exact and parallel.world_size() == 1:
                # a hook frees each gradient at once instead of keeping 2 bytes per number until
                # collect(); not with FSDP, which reduces gradients later on streams of its own
                p.register_post_accumulate_grad_hook(
                    partial(_accumulate_hook, weakref.ref(self), index)
                )
        fused = True if cuda else None
        self._adamw = torch.optim.AdamW(
            self._masters, lr=lr, weight_decay=weight_decay, fused=fused
        )
        sizes = [
            (8 + 4 * (master is not p)) * parallel.local_part(p).numel()
            for p, master in zip(self._parameters, self._masters, strict=True)
        ]
        self.offload_peak_bytes = max(sizes) if self._offloads else 0
        """Largest part of the offloaded state that is on the GPU during an update."""

    @property
    def lr(self) -> float:
        return float(self._adamw.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr

    @property
    def bytes_to_allocate(self) -> int:
        """Bytes that the first step will allocate for the moments and keep; 0 once allocated."""
        if self._adamw.state or self._offloads:
            return 0
        return 8 * sum(parallel.local_part(p).numel() for p in self._parameters)

    @torch.no_grad()
    def allocate_sums(self) -> None:
        for index, p in self._low_precision():
            self._sums[index] = torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of a backward pass to float32 sums; to be called after each one.

        On one process the hooks have done it: each gradient is added and freed as soon as it
        exists. The gradients of float32 parameters accumulate in place.
        """
        for index, p in self._low_precision():
            self._accumulate(index, p)

    @torch.no_grad()
    def _accumulate(self, index: int, p: Tensor) -> None:
        if p.grad is None:
            return
        # in bfloat16 an addend 256 times smaller than the sum would be lost
        total = self._sums[index]
        if total is None:
            self._sums[index] = p.grad.float()
        else:
            total.add_(p.grad)
        p.grad = None

    def zero_grad(self) -> None:
        for index, p in enumerate(self._parameters):
            p.grad = self._sums[index] = None

    @torch.no_grad()
    def step(self, *, max_grad_norm: float) -> float:
        """Clip the global gradient norm and update; returns the norm before clipping.

        FloatingPointError: the norm is not finite; nothing was changed.
        """
        self.collect()
        lower = dict(self._low_precision())
        sums = [self._sums[i] if i in lower else p.grad for i, p in enumerate(self._parameters)]
        norm = parallel.full_tensor(_clip([x for x in sums if x is not None], max_grad_norm)).item()
        if not norm < float("inf"):  # also catches NaN
            raise FloatingPointError(f"the gradient norm is {norm}; the weights are unchanged")
        self.zero_grad()
        for indices in self._update_groups():
            for index in indices:  # AdamW skips parameters without a gradient: all others
                self._masters[index].grad, sums[index] = sums[index], None
            self._adamw.step()
            for index in indices:
                self._masters[index].grad = None
                if index in lower:  # rounds to nearest; the master keeps the dropped bits
                    lower[index].copy_(self._masters[index])
        return float(norm)

    def _update_groups(self) -> Iterator[Sequence[int]]:
        """Yield all parameters together; with offloading one at a time, its state on the GPU."""
        indices = range(len(self._parameters))
        if not self._offloads:
            yield indices
            return
        for index in indices:
            for tensor in self._local_state(index).values():
                tensor.data = tensor.detach().to(self._parameters[0].device, non_blocking=True)
            yield [index]
            self._move_to_host(index)
        torch.cuda.synchronize()  # the copies to the host are only queued until here

    def _move_to_host(self, index: int) -> None:
        for name, tensor in self._local_state(index).items():
            if (index, name) not in self._host:
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
                self._host[index, name] = pinned
            host = self._host[index, name]
            if tensor.data_ptr() != host.data_ptr():
                tensor.data = host.copy_(tensor.detach(), non_blocking=True)

    def _local_state(self, index: int) -> Mapping[str, Tensor]:
        master = self._masters[index]
        state = {} if master is self._parameters[index] else {"master": master}
        moments = self._adamw.state.get(master, {}) if self._adamw is not None else {}
        state |= {name: moments[name] for name in _MOMENTS if name in moments}
        with torch.no_grad():  # with autograd, to_local() of a DTensor returns another tensor
            return {name: parallel.local_part(x) for name, x in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Moments and the masters of 16-bit parameters: full tensors in host memory.

        On several ranks all must call it; the first one gets the tensors, the others None.
        """
        return {
            "adamw": tree_map_only(Tensor, parallel.on_first_host, self._adamw.state_dict()),
            # not recomputed from the rounded parameters: a resumed run must get the same bits
            "masters": [parallel.on_first_host(self._masters[i]) for i, _ in self._low_precision()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        adamw, lower = dict(state["adamw"]), self._low_precision()
        if len(state["masters"]) != len(lower):
            raise ValueError(f"masters: expected {len(lower)}, got {len(state['masters'])}")
        adamw["state"] = {
            index: {name: self._local_part(index, name, value) for name, value in moments.items()}
            for index, moments in adamw["state"].items()
        }
        self._adamw.load_state_dict(adamw)
        for (index, _), saved in zip(lower, state["masters"], strict=True):
            master = self._masters[index]
            master.copy_(parallel.sharded_like(saved, master))
        if self._offloads:
            self._place_loaded_state()

    def _place_loaded_state(self) -> None:
        """Move a loaded state, which torch has put next to the masters, to its devices."""
        if self._adamw.param_groups[0].get("fused"):  # fused AdamW needs the count on the GPU
            for moments in self._adamw.state.values():
                moments["step"] = moments["step"].to(self._parameters[0].device)
        for index in range(len(self._parameters)):
            self._move_to_host(index)
        torch.cuda.synchronize()

    def _low_precision(self) -> list[tuple[int, Tensor]]:
        """(index, parameter) of all parameters that are not float32."""
        pairs = enumerate(zip(self._parameters, self._masters, strict=True))
        return [(index, p) for index, (p, master) in pairs if master is not p]

    def _local_part(self, index: int, name: str, value: Any) -> Any:
        if name not in _MOMENTS:  # the step count
            return value
        if index >= len(self._masters) or value.shape != self._masters[index].shape:
            shape = tuple(self._masters[index].shape) if index < len(self._masters) else "none"
            raise ValueError(
                f"{name} of parameter {index}: expected shape {shape}, got {tuple(value.shape)}"
            )
        return parallel.sharded_like(value, self._masters[index])


def _accumulate_hook(reference: weakref.ref[MasterAdamW], index: int, p: Tensor) -> None:
    """The hook of a parameter, which must not keep the optimizer alive."""
    if (optimizer := reference()) is not None:
        optimizer._accumulate(index, p)


def _clip(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip the global norm of the gradients in place; returns the norm before."""
    norm: Tensor = torch.nn.utils.get_total_norm(gradients)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_()
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
