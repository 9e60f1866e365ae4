"""A model beside the policy: what the KL penalty is taken to, or what teaches it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from agentgrpo import parallel
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.policy import Policy, PolicyOutput, Scorer, load_model


class Reference:
    """A frozen model, or the policy with copies of its trained parameters, as they began.

    `source`: the model's directory or name; None: the copies, which move() may change.
    """

    def __init__(self, policy: Policy, source: str | Path | None) -> None:
        self._policy = policy
        self.scorer: Scorer | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Parameters of its own that a resumed run needs, each with the policy's."""
        if source is None:
            self._pairs = [(parallel.whole(ours).clone(), ours) for ours in policy.trained]
            return
        frozen = load_model(source, device=policy.device, dtype=policy.dtype)
        self.scorer = Scorer(frozen, exact=policy.scorer.exact)

    @torch.no_grad()
    def __call__(self, batch: PackedBatch, temperature: float, topk: int = 0) -> PolicyOutput:
        """What it makes of the batch's terms, as a Scorer."""
        if self.scorer is not None:
            return self.scorer(batch, temperature, topk)  # type: ignore[no-any-return]
        with self._swapped():
            return self._policy.scorer(batch, temperature, topk)  # type: ignore[no-any-return]

    @torch.no_grad()
    def move(self, alpha: float) -> None:
        """Become alpha * policy + (1 - alpha) * itself."""
        for theirs, ours in self._pairs:
            theirs.mul_(1 - alpha).add_(parallel.whole(ours), alpha=alpha)

    def state(self) -> list[Tensor | None]:
        """What a resumed run needs of it, on the first rank; all must ask."""
        return [parallel.on_first_host(theirs) for theirs, _ in self._pairs]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        if len(state) != len(self._pairs):
            raise ValueError(
                f"a reference has {len(self._pairs)} parameters, {len(state)} were saved: "
                "the run is of an earlier agentgrpo; choose another out_dir"
            )
        for (theirs, _), saved in zip(self._pairs, state, strict=True):
            theirs.copy_(saved)

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        """The policy's parameters are the reference's meanwhile."""
        own = [parallel.mine_of(ours).clone() for _, ours in self._pairs]
        try:
            for theirs, ours in self._pairs:
                ours.copy_(parallel.sharded_like(theirs, ours))
            parallel.gather_anew(self._policy.scorer)
            yield
        finally:
            for mine, (_, ours) in zip(own, self._pairs, strict=True):
                parallel.mine_of(ours).copy_(mine)
            parallel.gather_anew(self._policy.scorer)
