"""Accumulates the results of a learner step: losses, gradient norms, per-token scores, mismatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:  # it imports transformers
    from agentgrpo.learn.policy import PolicyOutput


class OldLogps(NamedTuple):
    """Log-probabilities of a batch's terms before the first update of a step, [N] each."""

    old_logp: Tensor | None
    """None: those of the update's own forward pass, which are the same."""
    ref_logp: Tensor | None


class ScoredBatch(NamedTuple):
    """The learner's scores of a batch's terms, on the device that computed them."""

    update: int
    sample_N: Int32
    turn_N: Int32
    scores_3N: Tensor
    """fp32: log-probabilities, entropies, log-probabilities minus the sampler's."""

    @classmethod
    def of(cls, update: int, batch: PackedBatch, out: PolicyOutput) -> ScoredBatch:
        logp = out.logp_N.detach().float()
        gap = logp - batch.terms(logp.device).old_logp_N
        scores = torch.stack([logp, out.entropy_N.detach().float(), gap])
        return cls(update, *batch.labels, scores)


TermFields = tuple[int, Int32, Int32, dict[str, NDArray[Any]]]
"""Update index, sample_N and turn_N of terms, and arrays [N] or [N, K] by rollout field."""


class StepRecord:
    """The results of the updates of one step, on this rank."""

    def __init__(self) -> None:
        self.old_logps: dict[tuple[int, int], OldLogps] = {}
        """By update and batch number."""
        self.scored_ahead = False
        """Whether every batch was scored before the first update."""
        self.entropy_threshold: float | None = None
        self.above_threshold: Counter[int] = Counter()
        """Terms of each update with at least that entropy, on all ranks."""
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.kernel_metrics: list[TermMetrics] = []
        self.gaps: list[Float32] = []
        self.fields: list[TermFields] = []
        """To be stored in the rollouts, of this rank's batches."""
        self._labels: list[tuple[int, Int32]] = []

    def add_scores(self, batch: ScoredBatch) -> None:
        """Copy the scores of a batch to the host, which waits for the device."""
        logp, entropy, gap = batch.scores_3N.cpu().numpy()
        self.gaps.append(gap)
        self._labels.append((batch.update, batch.sample_N))
        fields = {"learner_logprobs": logp, "entropies": entropy}
        self.fields.append((batch.update, batch.sample_N, batch.turn_N, fields))

    def gather_fields(self) -> list[TermFields]:
        """The fields of all ranks. A collective: every rank must call it."""
        return [fields for part in parallel.gather(self.fields) for fields in part]

    def metrics(self, objective: Objective) -> Metrics:
        metrics = {
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
        }
        if len(self.norms) > 1:
            metrics["grad_norm_max"] = max(self.norms)
        metrics |= combine_metrics(
            [
                {name: torch.tensor(value) for name, value in metrics_of_batch.items()}
                for part in parallel.gather(_as_floats(self.kernel_metrics))
                for metrics_of_batch in part
            ]
        )
        gathered = parallel.gather(list(zip(self.gaps, self._labels, strict=True)))
        gaps, samples = [], []
        for gap, (update, sample) in (item for part in gathered for item in part):
            gaps.append(gap)
            # rows of one rollout may be in several batches, but only of one update
            samples.append(np.stack([np.full_like(sample, update), sample]))
        if gaps:
            _, sample_N = np.unique(np.concatenate(samples, 1), axis=1, return_inverse=True)
            metrics |= mismatch_metrics(np.concatenate(gaps), sample_N.astype(np.int32), objective)
        return metrics


def _as_floats(parts: Sequence[TermMetrics]) -> list[dict[str, float]]:
    """With one transfer from the device instead of one per number."""
    if not parts:
        return []
    names = sorted(parts[0])
    rows = torch.stack([torch.stack([part[name].double() for name in names]) for part in parts])
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()]
