"""A frozen or slowly averaged model in addition to the policy: the KL reference, or a teacher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.policy import Policy, PolicyOutput, Scorer, load_model
from agentgrpo.models.endpoints import Scores
from agentgrpo.support import parallel

ServerScorer = Callable[[list[int], int], Scores]
"""(token ids, k) -> a server's scores with its k likeliest tokens (HttpEndpoint.score)."""
MAX_CONCURRENT_REQUESTS = 16


@dataclass(frozen=True)
class RemoteScorer:
    """Scorer's interface for a model behind a server; one request per row."""

    score_row: ServerScorer
    unpacked_reason = "a server reads rows"

    def __call__(self, batch: PackedBatch, temperature: float, topk: int = 0) -> PolicyOutput:
        ends_R = np.flatnonzero(np.diff(batch.tout_T, append=-1)) + 1
        rows = np.split(batch.input_ids_T, ends_R[:-1])
        target = dict(zip(batch.row_N.tolist(), batch.target_N.tolist(), strict=True))
        ids = [[*row.tolist(), target[end - 1]] for row, end in zip(rows, ends_R, strict=True)]
        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS, "teacher requests") as pool:
            scores = [*pool.map(lambda row: self.score_row(row, topk), ids)]
        logp_N, logp_NK, ids_NK = (
            torch.from_numpy(np.concatenate(column)[batch.row_N])
            for column in zip(*scores, strict=True)
        )
        return PolicyOutput(logp_N, torch.full_like(logp_N, torch.nan), logp_NK, ids_NK)


class Reference:
    """A frozen model, or the policy with copies of its trained parameters as they were at the
    start.

    `source`: the model's directory or name, or a server's scoring function. None: the copies, as an
    exponential moving average of the policy with this `decay` per update (1: frozen).
    """

    def __init__(
        self, policy: Policy, source: str | Path | ServerScorer | None, decay: float = 1.0
    ) -> None:
        self._policy, self._decay = policy, decay
        self.scorer: Scorer | RemoteScorer | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """(copy, policy's parameter); the copies are saved for a resumed run."""
        if source is None:
            # bfloat16 would round the average's small steps to nothing
            dtype = torch.float32 if decay < 1 else None
            self._pairs = [
                (parallel.full_tensor(param).to(dtype or param.dtype, copy=True), param)
                for param in policy.trained
            ]
        elif callable(source):
            self.scorer = RemoteScorer(source)
        else:
            frozen = load_model(source, device=policy.device, dtype=policy.dtype)
            self.scorer = Scorer(frozen, exact=policy.scorer.exact)

    @torch.no_grad()
    def __call__(self, batch: PackedBatch, temperature: float, topk: int = 0) -> PolicyOutput:
        if self.scorer is not None:
            return self.scorer(batch, temperature, topk)
        with self._policy_replaced():
            return self._policy.scorer(batch, temperature, topk)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update_average(self) -> None:
        """Move the average towards the policy; to be called after each optimizer update."""
        for copy, param in self._pairs if self._decay < 1 else ():
            copy.mul_(self._decay).add_(parallel.full_tensor(param), alpha=1 - self._decay)

    def state(self) -> list[Tensor | None]:
        """The copies, on the first rank (None elsewhere); all ranks must call it."""
        return [parallel.on_first_host(copy) for copy, _ in self._pairs]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        if len(state) != len(self._pairs):
            raise ValueError(
                f"a reference has {len(self._pairs)} parameters, {len(state)} were saved: "
                "an earlier version of agentgrpo wrote this run; choose another out_dir"
            )
        for (copy, _), saved in zip(self._pairs, state, strict=True):
            copy.copy_(saved)

    @contextlib.contextmanager
    def _policy_replaced(self) -> Iterator[None]:
        """Put the copies in the policy's parameters within the context.

        In place and restored bit by bit: the sampler's weights are views of the same memory.
        """
        originals = [parallel.local_part(param).clone() for _, param in self._pairs]
        try:
            for copy, param in self._pairs:
                param.copy_(parallel.sharded_like(copy, param))
            parallel.reshard(self._policy.scorer)
            yield
        finally:
            for original, (_, param) in zip(originals, self._pairs, strict=True):
                parallel.local_part(param).copy_(original)
            parallel.reshard(self._policy.scorer)
