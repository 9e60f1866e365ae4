"""A model beside the policy: what the KL penalty is taken to, or what teaches it."""

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

Ask = Callable[[list[int], int], Scores]
"""What a server says of ids and so many of the likeliest (engine.endpoints.HttpEndpoint.score)."""
AT_ONCE = 16
"""Rows that a server is asked of."""


@dataclass(frozen=True)
class Served:
    """A Scorer's part, of a model behind a server, which is asked row by row."""

    ask: Ask
    unpacked_reason = "a server reads rows"

    def __call__(self, batch: PackedBatch, temperature: float, topk: int = 0) -> PolicyOutput:
        ends_R = np.flatnonzero(np.diff(batch.tout_T, append=-1)) + 1
        rows = np.split(batch.input_ids_T, ends_R[:-1])
        target = dict(zip(batch.row_N.tolist(), batch.target_N.tolist(), strict=True))
        ids = [[*row.tolist(), target[end - 1]] for row, end in zip(rows, ends_R, strict=True)]
        with ThreadPoolExecutor(AT_ONCE, "asks a server") as side:
            said = [*side.map(lambda row: self.ask(row, topk), ids)]
        logp_N, logp_NK, ids_NK = (
            torch.from_numpy(np.concatenate(each)[batch.row_N]) for each in zip(*said, strict=True)
        )
        return PolicyOutput(logp_N, torch.full_like(logp_N, torch.nan), logp_NK, ids_NK)


class Reference:
    """A frozen model, or the policy with copies of its trained parameters, as they began.

    `source`: the model's directory or name, or what asks its server; None: the copies, which keep
    `decay` of themselves at each update.
    """

    def __init__(self, policy: Policy, source: str | Path | Ask | None, decay: float = 1.0) -> None:
        self._policy, self._decay = policy, decay
        self.scorer: Scorer | Served | None = None
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Parameters of its own that a resumed run needs, each with the policy's."""
        if source is None:
            kept = torch.float32 if decay < 1 else None  # bfloat16 would round small steps away
            self._pairs = [
                (parallel.whole(ours).to(kept or ours.dtype, copy=True), ours)
                for ours in policy.trained
            ]
        elif callable(source):
            self.scorer = Served(source)
        else:
            frozen = load_model(source, device=policy.device, dtype=policy.dtype)
            self.scorer = Scorer(frozen, exact=policy.scorer.exact)

    @torch.no_grad()
    def __call__(self, batch: PackedBatch, temperature: float, topk: int = 0) -> PolicyOutput:
        """What it makes of the batch's terms, as a Scorer."""
        if self.scorer is not None:
            return self.scorer(batch, temperature, topk)
        with self._swapped():
            return self._policy.scorer(batch, temperature, topk)  # type: ignore[no-any-return]

    @torch.no_grad()
    def follow(self) -> None:
        """The policy was updated."""
        for theirs, ours in self._pairs if self._decay < 1 else ():
            theirs.mul_(self._decay).add_(parallel.whole(ours), alpha=1 - self._decay)

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
