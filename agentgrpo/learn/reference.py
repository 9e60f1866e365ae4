"""What the KL penalty is taken to: the policy that training began with, or one that follows it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from agentgrpo import parallel
from agentgrpo.config import LossConfig
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.loading import load_frozen
from agentgrpo.learn.policy import Policy, Scorer


class Reference:
    """A frozen model, or of an adapter's policy the policy without it.

    Args:
        policy: that is trained.
        loss: sync_ref_model and what belongs to it are read.
        source: the directory or name that training began with; not read where an adapter is
            trained.

    Raises:
        ValueError: there is neither.
    """

    def __init__(self, policy: Policy, loss: LossConfig, source: str | Path | None) -> None:
        self._policy, self._loss = policy, loss
        self.scorer: Scorer | None = None
        if policy.adapter is None:
            if source is None:
                raise ValueError("loss.beta needs a reference model, or an adapter to switch off")
            frozen = load_frozen(source, device=policy.device, dtype=policy.dtype)
            self.scorer = Scorer(frozen, exact=policy.scorer.exact)

    @torch.no_grad()
    def __call__(self, batch: PackedBatch, temperature: float) -> Tensor:
        """Log-probabilities of the batch's terms, [N]."""
        if self.scorer is not None:
            return self.scorer(batch, temperature).logp_N  # type: ignore[no-any-return]
        assert self._policy.adapter is not None
        with self._policy.adapter.off():
            return self._policy.scorer(batch, temperature).logp_N  # type: ignore[no-any-return]

    @torch.no_grad()
    def follow(self, updates: int) -> None:
        """Move towards the policy, if it is time after so many updates (TR-DPO, arXiv:2404.09656).

        As TRL's SyncRefModelCallback does.
        """
        if updates % self._loss.ref_model_sync_steps == 0:
            alpha = self._loss.ref_model_mixup_alpha
            for theirs, ours in self._following():
                theirs.mul_(1 - alpha).add_(parallel.whole(ours), alpha=alpha)

    def state(self) -> list[Tensor | None]:
        """What a resumed run needs of it, on the first rank; all must ask."""
        return [parallel.on_first_host(theirs) for theirs, _ in self._following()]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        """Restore what state() gave."""
        for (theirs, _), saved in zip(self._following(), state, strict=True):
            theirs.copy_(saved)

    def _following(self) -> list[tuple[Tensor, Tensor]]:
        """Its parameters that follow the policy's, each with the one it follows."""
        if self.scorer is None or not self._loss.sync_ref_model:
            return []
        pairs = zip(self.scorer.model.parameters(), self._policy.model.parameters(), strict=True)
        return [(theirs, ours) for theirs, ours in pairs if ours.requires_grad]
