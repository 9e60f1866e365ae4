"""AdamW that keeps float32 masters of parameters stored in less, and writes them back in place.

In bfloat16 an update of 1e-6 is lost to rounding; and the parameters are views of the sampler's
weights, so they may be written to but never replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from agentgrpo import parallel
from agentgrpo.config import LearnerConfig

_EXACT = (torch.float32, torch.float64)
_MOMENTS = ("exp_avg", "exp_avg_sq", "state1", "state2")
"""What the optimizers keep of each number of a parameter, by torch's names and bitsandbytes'."""


class MasterAdamW:
    """torch.optim.AdamW over float32 copies; a parameter that is float32 already is its own master.

    Args:
        parameters: leaves that require a gradient, whole or sharded; updated in place.
        lr, weight_decay: as in torch.optim.AdamW (betas 0.9, 0.999; eps 1e-8).
        adamw: the class that does it, with AdamW's arguments. None: torch's, fused on CUDA.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, lr: float, weight_decay: float, adamw: Any = None
    ) -> None:
        self._parameters = list(parameters)
        self._masters = [
            p if p.dtype in _EXACT else p.detach().float().requires_grad_()
            for p in self._parameters
        ]
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        if adamw is None and self._parameters and self._parameters[0].is_cuda:
            options["fused"] = True
        self._adamw: Any = (adamw or torch.optim.AdamW)(self._masters, **options)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._adamw.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for group in self._adamw.param_groups:
            group["lr"] = lr

    @property
    def bytes_to_come(self) -> int:
        """Memory that the first step will take for the moments; 0 once they are there."""
        if self._adamw.state:
            return 0
        width = 8 if isinstance(self._adamw, torch.optim.AdamW) else 2
        return width * sum(parallel.mine_of(p).numel() for p in self._parameters)

    @property
    def bytes_of_sums(self) -> int:
        """Memory that collect() takes for as long as gradients are kept."""
        return 4 * sum(parallel.mine_of(master).numel() for _, master in self._lower())

    @torch.no_grad()
    def collect(self) -> None:
        """Add up what a backward pass left, in float32: to be called after each.

        Parameters that are their own masters add up by themselves.
        """
        for p, master in self._lower():
            if p.grad is None:
                continue
            # in bfloat16 what a later batch adds to a sum 256 times as large would be lost
            if master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad.add_(p.grad)
            p.grad = None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in (*self._parameters, *self._masters):
            p.grad = None

    @torch.no_grad()
    def step(self, *, max_grad_norm: float) -> float:
        """Clip the global gradient norm, update, write back; returns the norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite; nothing was changed.
        """
        self.collect()
        clipped = torch.nn.utils.clip_grad_norm_(self._masters, max_grad_norm)
        norm = parallel.whole(clipped).item()
        if not norm < float("inf"):  # nan is not less either
            raise FloatingPointError(f"the gradient norm is {norm}; the weights are unchanged")
        self._adamw.step()
        for p, master in self._lower():
            p.copy_(master)  # rounded to nearest; the master keeps what the rounding drops
            master.grad = None
        return float(norm)

    @torch.no_grad()
    def to(self, device: torch.device | str) -> None:
        """Move moments and masters; parameters that are their own masters stay where they are."""
        fused = self._adamw.param_groups[0].get("fused")
        for state in self._adamw.state.values():
            for name, value in state.items():
                # AdamW wants its scalar count on the CPU; a fused one beside the parameter
                if isinstance(value, Tensor) and (value.ndim or fused):
                    state[name] = value.to(device, non_blocking=True)
        for _, master in self._lower():
            own = parallel.mine_of(master)  # to set a DTensor's data leaves its shard where it was
            own.data = own.data.to(device, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Moments, and the masters of parameters that are not float32: whole, in host memory.

        On several ranks all must call it; the first one gets the tensors, the others None for each.
        """
        return {
            "adamw": tree_map(_on_first_host, self._adamw.state_dict()),
            # not made again from the rounded parameters: a resumed run must come to the same bits
            "masters": [parallel.on_first_host(master) for _, master in self._lower()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict() returned, for the same parameters.

        Raises:
            ValueError: it is of other parameters.
        """
        adamw, lower = dict(state["adamw"]), self._lower()
        if len(state["masters"]) != len(lower):
            raise ValueError(f"{len(state['masters'])} masters, expected {len(lower)}")
        adamw["state"] = {
            index: {name: self._mine(index, name, value) for name, value in moments.items()}
            for index, moments in adamw["state"].items()
        }
        self._adamw.load_state_dict(adamw)
        for (_, master), saved in zip(lower, state["masters"], strict=True):
            master.copy_(parallel.sharded_like(saved, master))

    def _lower(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self._parameters, self._masters, strict=True)
        return [(p, master) for p, master in pairs if master is not p]

    def _mine(self, index: int, name: str, value: Any) -> Any:
        if name not in _MOMENTS:  # a count; bitsandbytes' scales of blocks
            return value
        if index >= len(self._masters) or value.shape != self._masters[index].shape:
            want = tuple(self._masters[index].shape) if index < len(self._masters) else "none"
            raise ValueError(f"{name} of parameter {index}: {tuple(value.shape)}, expected {want}")
        return parallel.sharded_like(value, self._masters[index])


def make_optimizer(config: LearnerConfig, parameters: Sequence[Tensor]) -> MasterAdamW:
    """The optimizer that a config asks for.

    Raises:
        ValueError: adamw_8bit without a GPU, without bitsandbytes or on several ranks.
    """
    adamw: Any = None
    if config.optimizer == "adamw_8bit":  # NEVER RUN yet: it needs a GPU
        if not torch.cuda.is_available():
            raise ValueError("learner.optimizer = 'adamw_8bit' needs a CUDA device")
        if parallel.world_size() > 1:
            raise ValueError(
                "learner.optimizer = 'adamw_8bit' works on whole tensors, and each of "
                f"{parallel.world_size()} ranks holds a part of every one: use 'adamw'"
            )
        try:
            adamw = importlib.import_module("bitsandbytes.optim").AdamW8bit
        except ImportError as error:
            raise ValueError(
                f"learner.optimizer = 'adamw_8bit' needs the package bitsandbytes: {error}"
            ) from error
    return MasterAdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay, adamw=adamw
    )


def _on_first_host(value: Any) -> Any:
    return parallel.on_first_host(value) if isinstance(value, Tensor) else value
