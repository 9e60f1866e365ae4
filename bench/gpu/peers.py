"""The ways to get from hidden states (or logits) to a GRPO loss and its gradients, ours among them.

A way is a function from a Batch to a loss. One that cannot be imported here is reported as absent
with its reason; one that fails is reported with its error: nothing is left out quietly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from agentgrpo.kernels.masked_grpo import masked_grpo_loss
from agentgrpo.kernels.objective import Objective

Way = Callable[["Batch"], Tensor]


@dataclass
class Batch:
    """One packed row of T positions, a share of them sampled; the head is trained."""

    hidden: Tensor
    head: Tensor
    targets: Tensor
    mask: Tensor
    advantage: Tensor
    logits: Tensor | None = None
    and_one: Tensor | None = None
    """The same memory with one position more, as Liger takes it."""

    @classmethod
    def random(
        cls, shape: tuple[int, int, int], share: float, device: str, *, logits: bool = False
    ) -> Batch:
        positions, vocab, width = shape
        gen = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(size, generator=gen, device=device, dtype=dtype).mul_(scale)

        whole = normal(positions + 1, vocab, scale=2.0) if logits else None
        order = torch.randperm(positions, generator=gen, device=device)
        return cls(
            hidden=normal(positions, width).requires_grad_(),
            head=normal(vocab, width, scale=2 / width**0.5).requires_grad_(),
            targets=torch.randint(vocab, (positions,), generator=gen, device=device),
            mask=order < round(positions * share),
            advantage=torch.randn(positions, generator=gen, device=device),
            logits=None if whole is None else whole[:-1].requires_grad_(),
            and_one=None if whole is None else whole.detach().requires_grad_(),
        )

    @property
    def leaves(self) -> list[Tensor]:
        """A way reads the logits with or without the position more."""
        if self.logits is None or self.and_one is None:
            return [self.hidden, self.head]
        return [self.logits, self.and_one]

    def surrogate(self, logp_T: Tensor) -> Tensor:
        """The dapo loss of log-probabilities of every position, masked afterwards."""
        ratio = torch.exp(logp_T - logp_T.detach())
        worst = torch.min(ratio * self.advantage, ratio.clamp(0.8, 1.2) * self.advantage)
        return -(worst * self.mask).sum() / self.mask.sum()


def ours(logits_dtype: torch.dtype | None = None, *, inplace: bool = False) -> Way:
    def way(batch: Batch) -> Tensor:
        source = batch.hidden if batch.logits is None else batch.logits
        return masked_grpo_loss(
            source, batch.head if batch.logits is None else None, batch.targets, batch.mask,
            batch.advantage, Objective(), sequence=torch.zeros_like(batch.targets),
            num_sequences=1, logits_dtype=logits_dtype, inplace_backward=inplace,
        )[0]  # fmt: skip

    return way


def plain(batch: Batch) -> Tensor:
    logits = batch.hidden @ batch.head.T if batch.logits is None else batch.logits
    logp = logits.float().log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    return batch.surrogate(logp)


def liger_fused() -> Way:
    peer = import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss

    fused = peer(beta=0.0, use_ref_model=False, compiled=True)

    def way(batch: Batch) -> Tensor:
        mean = batch.advantage.mean()[None]  # Liger has one advantage a sequence
        loss: Tensor = fused(
            batch.hidden[None], batch.head, batch.targets[None], batch.mask[None].float(), mean
        )[0]
        return loss

    return way


def liger_logits() -> Way:
    peer = import_module("liger_kernel.transformers.grpo_loss").triton_grpo_loss

    def way(batch: Batch) -> Tensor:
        assert batch.and_one is not None
        mask = batch.mask[None].float().contiguous()
        loss: Tensor = peer(
            batch.and_one[None], None, None, batch.targets[None],
            batch.advantage.mean()[None], mask, 1.0, 0.0, inplace=True, reduce=True,
        )[0]  # fmt: skip
        return loss

    return way


def trl_chunked(*, gathered: bool) -> Way:
    """gathered: TRL's async trainer. GRPOTrainer scores tool results too, hence every position."""
    peer = import_module("trl.kernels").ChunkedLogProbFunction

    def way(batch: Batch) -> Tensor:
        rows = batch.mask.nonzero().squeeze(1) if gathered else slice(None)
        logp = peer.apply(
            batch.hidden[rows],
            batch.head,
            None,
            batch.targets[rows],
            1.0,
            32768,
            None,
            1.0,
            ("entropy",),
        )[0]
        if gathered:
            logp = logp.new_zeros(len(batch.mask)).index_copy(0, rows, logp)
        return batch.surrogate(logp)

    return way


def verl_fused() -> Way:
    peer = import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def way(batch: Batch) -> Tensor:
        logp, _ = peer(batch.hidden, batch.head, batch.targets, 1.0, "none")
        return batch.surrogate(logp)

    return way


FROM_HIDDEN: dict[str, Callable[[], Way]] = {
    "ours": ours,
    "ours, fp32 logits": lambda: ours(torch.float32),
    "plain torch": lambda: plain,
    "Liger fused linear": liger_fused,
    "TRL chunked, every row": lambda: trl_chunked(gathered=False),
    "TRL chunked, gathered": lambda: trl_chunked(gathered=True),
    "verl fused linear": verl_fused,
}
FROM_LOGITS: dict[str, Callable[[], Way]] = {
    "ours": ours,
    "ours, in place": lambda: ours(inplace=True),
    "plain torch": lambda: plain,
    "Liger triton": liger_logits,
}


def available(ways: dict[str, Callable[[], Way]]) -> tuple[dict[str, Way], dict[str, str]]:
    """(those that can be imported, why the others cannot)."""
    present: dict[str, Way] = {}
    absent: dict[str, Any] = {}
    for name, make in ways.items():
        try:
            present[name] = make()
        except ImportError as error:
            absent[name] = f"{type(error).__name__}: {error}"
    return present, absent
