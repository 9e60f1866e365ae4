"""What the updates of a learner step add up to: losses, norms, how far the sampler was off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgrpo.kernels.objective import Objective
from agentgrpo.kernels.reduce import Metrics as TermMetrics
from agentgrpo.kernels.reduce import combine_metrics
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.token_weights import mismatch_metrics
from agentgrpo.support import parallel
from agentgrpo.types import Float32, Int32, Metrics


class OldLogps(NamedTuple):
    """What is known of a batch's terms before the first update of a step, [N] each."""

    old_logp: Tensor | None
    """None: that of the update's own forward pass, which is the same."""
    ref_logp: Tensor | None


class ScoredBatch(NamedTuple):
    """What the learner made of a batch's terms, still where it was computed."""

    update: int
    sample_N: Int32
    turn_N: Int32
    seen_3N: Tensor
    """Log-probabilities, entropies, and how far the former are from the sampler's; fp32."""

    @classmethod
    def at(cls, update: int, batch: PackedBatch, logp_N: Tensor, entropy_N: Tensor) -> ScoredBatch:
        logp = logp_N.detach().float()
        gap = logp - batch.terms(logp.device).old_logp_N
        seen = torch.stack([logp, entropy_N.detach().float(), gap])
        return cls(update, *batch.labels, seen)


Made = tuple[int, Int32, Int32, dict[str, NDArray[Any]]]
"""An update, sample_N and turn_N of terms, and what was made of them: [N] or [N, K] of each field
of a rollout."""


class StepRecord:
    """What the updates of one step add up to, on this rank."""

    def __init__(self) -> None:
        self.before: dict[tuple[int, int], OldLogps] = {}
        self.looked = False
        """Whether every batch was scored before the first update."""
        self.entropy_threshold: float | None = None
        self.above_threshold: Counter[int] = Counter()
        """Terms of each update, on all ranks."""
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.parts: list[TermMetrics] = []
        self.gaps: list[Float32] = []
        self.made: list[Made] = []
        """What the rollouts are told, of this rank's batches."""
        self._labels: list[tuple[int, Int32]] = []

    def saw(self, batch: ScoredBatch) -> None:
        """Remember what the learner made of the terms of an update's batch; waits for it."""
        logp, entropy, gap = batch.seen_3N.cpu().numpy()
        self.gaps.append(gap)
        self._labels.append((batch.update, batch.sample_N))
        fields = {"learner_logprobs": logp, "entropies": entropy}
        self.made.append((batch.update, batch.sample_N, batch.turn_N, fields))

    def told(self) -> list[Made]:
        """What all ranks made."""
        return [made for part in parallel.gather(self.made) for made in part]

    def metrics(self, objective: Objective) -> Metrics:
        metrics = {
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
        }
        if len(self.norms) > 1:
            metrics["grad_norm_max"] = max(self.norms)
        metrics |= combine_metrics(
            [
                {name: torch.tensor(value) for name, value in part.items()}
                for parts in parallel.gather(_as_floats(self.parts))
                for part in parts
            ]
        )
        ours = parallel.gather(list(zip(self.gaps, self._labels, strict=True)))
        gaps, samples = [], []
        for gap, (update, sample) in (item for part in ours for item in part):
            gaps.append(gap)
            # rows of one rollout may lie in several batches, but in those of one update
            samples.append(np.stack([np.full_like(sample, update), sample]))
        if gaps:
            _, sample_N = np.unique(np.concatenate(samples, 1), axis=1, return_inverse=True)
            metrics |= mismatch_metrics(np.concatenate(gaps), sample_N.astype(np.int32), objective)
        return metrics


def _as_floats(parts: Sequence[TermMetrics]) -> list[dict[str, float]]:
    """One transfer from the device."""
    if not parts:
        return []
    names = sorted(parts[0])
    rows = torch.stack([torch.stack([p[name].double() for name in names]) for p in parts])
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()]
