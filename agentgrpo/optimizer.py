"""AdamW that keeps float32 masters of parameters stored in less, and writes them back in place.

In bfloat16 an update of 1e-6 is lost to rounding; and the parameters are views of the sampler's
weights, so they may be written to but never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class MasterAdamW:
    """torch.optim.AdamW over float32 copies; a parameter that is float32 already is its own master.

    Args:
        parameters: leaves that require a gradient; updated in place.
        lr, weight_decay: as in torch.optim.AdamW (betas 0.9, 0.999; eps 1e-8).
    """

    def __init__(self, parameters: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        self._parameters = list(parameters)
        self._masters = [
            p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for p in self._parameters
        ]
        self._adamw = torch.optim.AdamW(self._masters, lr=lr, weight_decay=weight_decay)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._adamw.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        for group in self._adamw.param_groups:
            group["lr"] = lr

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self._parameters:
            p.grad = None

    @torch.no_grad()
    def step(self, *, max_grad_norm: float) -> float:
        """Clip the global gradient norm, update, write back; returns the norm before clipping.

        Raises:
            FloatingPointError: the norm is not finite; nothing was changed.
        """
        for p, master in zip(self._parameters, self._masters, strict=True):
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, max_grad_norm).item()
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradient norm is {norm}; the weights are unchanged")
        self._adamw.step()
        for p, master in zip(self._parameters, self._masters, strict=True):
            if master is not p:
                p.copy_(master)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments, and the masters of parameters that are not float32."""
        lower = [m for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        return {"adamw": self._adamw.state_dict(), "masters": [m.detach() for m in lower]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict() returned, for the same parameters."""
        self._adamw.load_state_dict(state["adamw"])
        lower = [m for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        for master, saved in zip(lower, state["masters"], strict=True):
            master.copy_(saved)
