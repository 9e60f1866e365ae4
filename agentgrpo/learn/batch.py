"""Packed batches as runs over the tokens of a step, expanded on the device that computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.types import Float32, Int32, Segment

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from agentgrpo.kernels.delta_pack import Terms, Tokens

Int64 = NDArray[np.int64]
PADDING = 256
"""Maximum number of padding tokens of a batch."""


class Deltas:
    """The tokens of a step, concatenated. A segment that several rollouts share is stored once.

    They are uploaded to a device once, for the first batch that is expanded there. PADDING zeros
    follow the last token.
    """

    def __init__(self, segments: Iterable[Segment]) -> None:
        distinct = {id(segment): segment for segment in segments}.values()
        logp = [segment.logprobs for segment in distinct if segment.logprobs is not None]
        padding = np.zeros(PADDING, np.int32)
        self.ids_D: Int32 = np.concatenate([*(segment.token_ids for segment in distinct), padding])
        self.logp_L: Float32 = np.concatenate([np.zeros(0, np.float32), *logp])
        self._places: dict[int, tuple[int, int, int]] = {}
        start = logp_start = 0
        for segment in distinct:
            size = len(segment.token_ids)
            self._places[id(segment)] = start, size, logp_start if segment.sampled else -1
            start += size
            logp_start += size if segment.sampled else 0
        self.largest = int(self.ids_D.max())
        self._on: dict[str, tuple[Tensor, Tensor]] = {}

    def places(self, segments: Iterable[Segment]) -> Int32:
        """[3, segments]: start, size, and start in logp_L (-1 if not sampled)."""
        places = [self._places[id(segment)] for segment in segments]
        return np.array(places, np.int32).reshape(-1, 3).T.copy()

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(ids_D, logp_L) in the device's memory, cached."""
        if str(device) not in self._on:
            self._on[str(device)] = _upload(self.ids_D, device), _upload(self.logp_L, device)
        return self._on[str(device)]


class PackedBatch:
    """Rollouts as one prefix tree in depth-first order: T tokens, N loss terms.

    A token that several rollouts share is laid out once. Token q attends to token k if and only if
    k <= q < tout_T[k]. A shared token has one loss term per rollout that sampled it, so every sum
    over terms is a sum over samples.

    The batch is stored as runs over the step's tokens, both tables ascending by start.
    kernels/delta_pack.py expands them into tokens and terms on first use, on CUDA by a Triton
    kernel. The array properties below are in host memory.
    """

    def __init__(
        self, deltas: Deltas, runs_4R: Int32, runs_8Q: Int32, num_tokens: int, num_terms: int
    ) -> None:
        self.deltas, self.runs_4R, self.runs_8Q = deltas, runs_4R, runs_8Q
        self.num_tokens, self.num_terms = num_tokens, num_terms
        self._tokens: dict[str, Tokens] = {}
        self._terms: dict[str, Terms] = {}

    def tokens(self, device: torch.device) -> Tokens:
        from agentgrpo.kernels.delta_pack import pack_tokens

        if str(device) not in self._tokens:
            ids_D, _ = self.deltas.on(device)
            tokens = pack_tokens(ids_D, _upload(self.runs_4R, device), self.num_tokens)
            self._tokens[str(device)] = tokens
        return self._tokens[str(device)]

    def terms(self, device: torch.device) -> Terms:
        from agentgrpo.kernels.delta_pack import pack_terms

        if str(device) not in self._terms:
            terms = pack_terms(
                *self.deltas.on(device), _upload(self.runs_8Q, device), self.num_terms
            )
            self._terms[str(device)] = terms
        return self._terms[str(device)]

    def padded(self, missing: int) -> PackedBatch:
        """A copy with up to PADDING more tokens, which no term reads and no token attends to."""
        total = self.num_tokens + missing
        run = [self.num_tokens, len(self.deltas.ids_D) - PADDING, 0, total]
        runs_4R = np.column_stack([self.runs_4R, np.array(run, np.int32)])
        return PackedBatch(self.deltas, runs_4R, self.runs_8Q, total, self.num_terms)

    @property
    def input_ids_T(self) -> Int64:
        import torch

        return self.tokens(torch.device("cpu")).input_ids_T.numpy()

    @property
    def positions_T(self) -> Int32:
        """Depth in the tree, which is the position in the rollout (for RoPE)."""
        start_R, _, position_R, _ = self.runs_4R
        return self._spread(position_R - start_R) + np.arange(self.num_tokens, dtype=np.int32)

    @property
    def tout_T(self) -> Int32:
        """Packed index one past the last token that attends to this one: the end of its subtree."""
        return self._spread(self.runs_4R[3])

    def _spread(self, values_R: Int32) -> Int32:
        return np.repeat(values_R, np.diff(self.runs_4R[0], append=self.num_tokens))

    @property
    def row_N(self) -> Int64:
        """Packed index of the token whose hidden state predicts the target: the previous token."""
        return self._host_terms.row_N.numpy()

    @property
    def target_N(self) -> Int64:
        return self._host_terms.target_N.numpy()

    @property
    def sample_N(self) -> Int64:
        """Index of the rollout, in group and rollout order over the step."""
        return self._host_terms.sample_N.numpy()

    @property
    def turn_N(self) -> Int32:
        """Index among the rollout's sampled segments, from 0."""
        return self.labels[1]

    @property
    def labels(self) -> tuple[Int32, Int32]:
        """(sample_N, turn_N), computed from the runs without expanding the terms."""
        sizes = np.diff(self.runs_8Q[0], append=self.num_terms)
        return np.repeat(self.runs_8Q[4], sizes), np.repeat(self.runs_8Q[5], sizes)

    @property
    def old_logp_N(self) -> Float32:
        """The sampler's log-probability in nats."""
        return self._host_terms.old_logp_N.numpy()

    @property
    def advantage_N(self) -> Float32:
        return self._host_terms.advantage_N.numpy()

    @property
    def weight_N(self) -> Float32:
        """The factor of a term's loss in the sum; contains the normaliser of the whole step."""
        return self._host_terms.weight_N.numpy()

    @property
    def uses_U(self) -> Int64:
        """Number of terms that each predicting token has, in token order; from the runs alone."""
        first_Q = self.runs_8Q[3]
        end_Q = first_Q + np.diff(self.runs_8Q[0], append=self.num_terms)
        begin_T, end_T = (np.bincount(x, minlength=self.num_tokens + 1) for x in (first_Q, end_Q))
        uses_T = np.cumsum(begin_T - end_T)
        return uses_T[uses_T > 0]

    @property
    def _host_terms(self) -> Terms:
        import torch

        return self.terms(torch.device("cpu"))


def _upload(array: NDArray[Any], device: torch.device) -> Tensor:
    import torch  # not at the top: planning a step does not need torch

    from agentgrpo.kernels.checks import upload

    return upload(torch.from_numpy(array), device)
