"""A few tokens through the model as transformers has it, and as it is trained, before it is.

What a model makes of its logits (a factor, a cap), and what its layers do with what they are given,
is in its code alone: names in a config are guesses. An engine that sampled would disagree; in
fine-tuning there is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agentgrpo import parallel
from agentgrpo.learn.attention import TREE, Tree
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.rows import decoder_of, why_rows
from agentgrpo.machine.memory import out_of_memory
from agentgrpo.types import Group, Rollout, Segment, Status, Task

TASK = Task(id="trial", messages=(), spec={})
PROMPT, BRANCHES = 8, (5, 9)
"""Tokens that two rollouts share, and of each behind them: most see what a branch must not."""
WITHIN, WITHIN_16_BIT = 1e-3, 0.3
"""Nats that half of the tokens may be apart, of which experts and rounding move a few further."""


class Trial:
    """What the model itself gives the tokens; to be made before its attention is replaced."""

    def __init__(self, model: Any) -> None:
        rng = np.random.default_rng(0)
        vocab = model.get_output_embeddings().weight.shape[0]
        prompt, *branches = (
            rng.integers(vocab, size=size, dtype=np.int32) for size in (PROMPT, *BRANCHES)
        )
        given = Segment(prompt)
        self._group = Group(task=TASK, rollouts=[
            Rollout(
                task=TASK, status=Status.COMPLETED, advantage=1.0,
                segments=[given, Segment(ids, np.zeros(len(ids), np.float32))],
            )
            for ids in branches
        ])  # fmt: skip
        self._wanted: Any = None
        if model.device.type == "meta":  # without numbers there is nothing to try
            return
        self._within = WITHIN if model.dtype.itemsize > 2 else WITHIN_16_BIT
        self._attention = model.config._attn_implementation
        if model._can_set_attn_implementation():
            model.set_attn_implementation("eager")  # transformers' sdpa leaves soft caps out
        self._wanted = np.concatenate([_plain(model, r) for r in self._group.rollouts])
        self.undo(model)

    def undo(self, model: Any) -> None:
        """Give the model back the attention that it had."""
        if model._can_set_attn_implementation():
            model.set_attn_implementation(self._attention)

    @torch.no_grad()
    def why_not(self, scorer: Any) -> str | None:
        """How the scorer fails, or differs from the model; None: they agree.

        A tree is tried on a CPU only: on CUDA its kernel would be compiled, for half a minute. On
        several ranks all must call it.
        """
        if self._wanted is None:
            return None
        shares = scorer.rows is None and scorer.device.type != "cuda"
        (batch,) = pack_tree([self._group], max_tokens=1 << 10, share_prefixes=shares)
        gap, failed = float("inf"), ""
        try:
            logp = scorer(batch, 1.0).logp_N.double().cpu().numpy()
        except Exception as error:
            if out_of_memory(error):
                raise
            failed = f"{type(error).__name__}: {error}"
        else:
            logp = logp[np.lexsort((batch.positions_T[batch.row_N], batch.sample_N))]
            gap = float(np.median(np.abs(logp - self._wanted)))
        gap = parallel.largest(gap)
        if gap <= self._within:
            return None
        return failed or f"half of its log-probabilities are {gap:.2g} nats or more off"


@torch.no_grad()
def foreseen(model: Any) -> str | None:
    """Why a model must see every rollout alone, as far as one without storage tells; else None.

    Raises:
        ValueError: it cannot be trained.
    """
    if why := why_rows(model):
        return why
    model.to("meta").set_attn_implementation(TREE)
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    tree = Tree(np.full(2, 2, np.int32), np.arange(2, dtype=np.int32), "meta")
    try:
        decoder_of(model)(input_ids=ids, position_ids=ids, use_cache=False, tree=tree)
    except ValueError as error:  # of attention's that is not handed the tree
        return str(error)
    except RuntimeError:  # of those that look at numbers
        pass
    return None


@torch.no_grad()
def _plain(model: Any, rollout: Rollout) -> Any:
    """Log-probabilities of its sampled tokens by the model's own forward pass."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64)).to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, PROMPT - 1 : -1]
    every = torch.log_softmax(logits.double(), -1)
    return every.gather(1, ids[PROMPT:, None])[:, 0].cpu().numpy()
