"""AdamW that keeps float32 masters of parameters stored in less, and writes them back in place.

In bfloat16 an update of 1e-6 is lost to rounding; and the parameters are views of the sampler's
weights, so they may be written to but never replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from agentgrpo.support import parallel

_EXACT = (torch.float32, torch.float64)
_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each number of a parameter: 4 bytes each."""


class MasterAdamW:
    """torch.optim.AdamW over float32 copies; a parameter that is float32 already is its own master.

    Parameters, whole or sharded, are updated in place. `offload`: keep moments and masters in
    page-locked host memory, but for those of the parameter that is being updated; for parameters on
    CUDA.
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
        """float32, of the gradients of parameters stored in less."""
        self._masters: list[Tensor] = []
        self._adamw: Any = None
        cuda = bool(self._parameters) and self._parameters[0].is_cuda
        self._offloads = offload and cuda
        self._host: dict[tuple[int, str], Tensor] = {}
        """Where the state waits, page-locked."""
        for index, p in enumerate(self._parameters):
            exact = p.dtype in _EXACT
            self._masters.append(p if exact else p.detach().float().requires_grad_())
            if self._offloads:
                self._put_back(index)
            if not exact and parallel.world_size() == 1:
                # or a backward pass would leave 2 more bytes of each number beside the sums; FSDP
                # reduces gradients on streams of its own, and collect() comes after it
                p.register_post_accumulate_grad_hook(partial(_hand_over, weakref.ref(self), index))
        fused = True if cuda else None
        self._adamw = torch.optim.AdamW(
            self._masters, lr=lr, weight_decay=weight_decay, fused=fused
        )
        sizes = [
            (8 + 4 * (master is not p)) * parallel.mine_of(p).numel()
            for p, master in zip(self._parameters, self._masters, strict=True)
        ]
        self.bytes_passing = max(sizes) if self._offloads else 0
        """The most of the state that lies on the card during an update and else does not."""

    @property
    def lr(self) -> float:
        return float(self._adamw.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr

    @property
    def bytes_to_come(self) -> int:
        """Memory that the first step will take for the moments and keep; 0 once they are there."""
        if self._adamw.state or self._offloads:
            return 0
        return 8 * sum(parallel.mine_of(p).numel() for p in self._parameters)

    @torch.no_grad()
    def start_sums(self) -> None:
        """Take the memory that gradients are added up in, as if a backward pass had been."""
        for index, p in self._lower():
            self._sums[index] = torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def collect(self) -> None:
        """Add up what a backward pass left, in float32: to be called after each.

        On one process there is nothing left: a gradient is added, and freed, as soon as it is
        there. Parameters that are their own masters add up by themselves.
        """
        for index, p in self._lower():
            self._take(index, p)

    @torch.no_grad()
    def _take(self, index: int, p: Tensor) -> None:
        if p.grad is None:
            return
        # in bfloat16 what a later batch adds to a sum 256 times as large would be lost
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
        """Clip the global gradient norm, update, write back; returns the norm before clipping.

        FloatingPointError: it is not finite; nothing was changed.
        """
        self.collect()
        lower = dict(self._lower())
        sums = [self._sums[i] if i in lower else p.grad for i, p in enumerate(self._parameters)]
        norm = parallel.whole(_clip([x for x in sums if x is not None], max_grad_norm)).item()
        if not norm < float("inf"):  # nan is not less either
            raise FloatingPointError(f"the gradient norm is {norm}; the weights are unchanged")
        self.zero_grad()
        for part in self._passing():
            for index in part:  # AdamW leaves alone what has no gradient: the other parts
                self._masters[index].grad, sums[index] = sums[index], None
            self._adamw.step()
            for index in part:
                self._masters[index].grad = None
                if index in lower:  # rounded to nearest; the master keeps what the rounding drops
                    lower[index].copy_(self._masters[index])
        return float(norm)

    def _passing(self) -> Iterator[Sequence[int]]:
        """All parameters together; or, their state elsewhere, one after the other with it here."""
        numbers = range(len(self._parameters))
        if not self._offloads:
            yield numbers
            return
        for index in numbers:
            for tensor in self._held(index).values():
                tensor.data = tensor.detach().to(self._parameters[0].device, non_blocking=True)
            yield [index]
            self._put_back(index)
        torch.cuda.synchronize()  # until here the host's copies are only queued

    def _put_back(self, index: int) -> None:
        """Let a parameter's state wait in host memory, behind what is queued."""
        for name, tensor in self._held(index).items():
            if (index, name) not in self._host:
                waits = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
                self._host[index, name] = waits
            host = self._host[index, name]
            if tensor.data_ptr() != host.data_ptr():
                tensor.data = host.copy_(tensor.detach(), non_blocking=True)

    def _held(self, index: int) -> Mapping[str, Tensor]:
        """This rank's numbers of a parameter's state, by name."""
        master = self._masters[index]
        held = {} if master is self._parameters[index] else {"master": master}
        moments = self._adamw.state.get(master, {}) if self._adamw is not None else {}
        held |= {name: moments[name] for name in _MOMENTS if name in moments}
        with torch.no_grad():  # else a DTensor's own tensor is not what comes
            return {name: parallel.mine_of(x) for name, x in held.items()}

    def state_dict(self) -> dict[str, Any]:
        """Moments, and the masters of parameters that are not float32: whole, in host memory.

        On several ranks all must call it; the first one gets the tensors, the others None for each.
        """
        return {
            "adamw": tree_map(_on_first_host, self._adamw.state_dict()),
            # not made again from the rounded parameters: a resumed run must come to the same bits
            "masters": [parallel.on_first_host(self._masters[i]) for i, _ in self._lower()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict() returned, for the same parameters."""
        adamw, lower = dict(state["adamw"]), self._lower()
        if len(state["masters"]) != len(lower):
            raise ValueError(f"{len(state['masters'])} masters, expected {len(lower)}")
        adamw["state"] = {
            index: {name: self._mine(index, name, value) for name, value in moments.items()}
            for index, moments in adamw["state"].items()
        }
        self._adamw.load_state_dict(adamw)
        for (index, _), saved in zip(lower, state["masters"], strict=True):
            master = self._masters[index]
            master.copy_(parallel.sharded_like(saved, master))
        if self._offloads:
            self._settle()

    def _settle(self) -> None:
        """Torch has put all state where the masters are, which is the host."""
        if self._adamw.param_groups[0].get("fused"):  # which wants its count beside the parameter
            for moments in self._adamw.state.values():
                moments["step"] = moments["step"].to(self._parameters[0].device)
        for index in range(len(self._parameters)):
            self._put_back(index)
        torch.cuda.synchronize()

    def _lower(self) -> list[tuple[int, Tensor]]:
        """Parameters that are not float32, and their numbers."""
        pairs = enumerate(zip(self._parameters, self._masters, strict=True))
        return [(index, p) for index, (p, master) in pairs if master is not p]

    def _mine(self, index: int, name: str, value: Any) -> Any:
        if name not in _MOMENTS:  # a count
            return value
        if index >= len(self._masters) or value.shape != self._masters[index].shape:
            want = tuple(self._masters[index].shape) if index < len(self._masters) else "none"
            raise ValueError(f"{name} of parameter {index}: {tuple(value.shape)}, expected {want}")
        return parallel.sharded_like(value, self._masters[index])


def _hand_over(to: weakref.ref[MasterAdamW], index: int, p: Tensor) -> None:
    """The hook of a parameter, which must not keep the optimizer alive."""
    if (optimizer := to()) is not None:
        optimizer._take(index, p)


def _clip(gradients: Sequence[Tensor], most: float) -> Tensor:
    """The norm of all of them together; above `most` they are scaled down to it, in place."""
    norm: Tensor = torch.nn.utils.get_total_norm(gradients)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_() has it
    for gradient in gradients:
        gradient.mul_(factor)
    return norm


def _on_first_host(value: Any) -> Any:
    return parallel.on_first_host(value) if isinstance(value, Tensor) else value
