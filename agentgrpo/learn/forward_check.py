"""Which models can take packed trees; the others see every rollout alone, and it is said why.

Told from a model's code and config first. Then a few tokens go through it as transformers has it,
and as it is trained: what it makes of its logits (a factor, a cap), and what its layers do with
what they are given, is in its code alone. An engine that sampled would disagree; in fine-tuning
there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from agentgrpo.learn import recurrent
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.packing import pack_tree
from agentgrpo.support import parallel
from agentgrpo.support.memory import out_of_memory
from agentgrpo.types import Group, Rollout, Segment, Status, Task

TASK = Task(id="trial", messages=(), spec={})
PROMPT, BRANCHES = 8, (5, 9)
"""Tokens that two rollouts share, and of each behind them: most see what a branch must not."""
WITHIN, WITHIN_16_BIT = 1e-3, 0.3
"""Nats that half of the tokens may be apart, of which experts and rounding move a few further."""


class ForwardCheck:
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

    def why_not(self, scorer: Any) -> str | None:
        """How the scorer fails, or differs from the model; None: they agree.

        The gradient of one parameter is asked for too: on CUDA a tree's kernels are compiled. On
        several ranks all must call it.
        """
        if self._wanted is None:
            return None
        shares = scorer.unpacked_reason is None
        (batch,) = pack_tree([self._group], max_tokens=1 << 10, share_prefixes=shares)
        gap, failed = float("inf"), ""
        try:
            logp = self._pass(scorer, batch)
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

    @staticmethod
    def _pass(scorer: Any, batch: PackedBatch) -> Any:
        """The batch's log-probabilities, once they have been learned from."""
        with torch.enable_grad():
            logp = scorer(batch, 1.0).logp_N
            trained = [p for p in scorer.parameters() if p.requires_grad][:1]
            if trained:
                torch.autograd.grad(logp.sum(), trained)
        return logp.detach().double().cpu().numpy()


@torch.no_grad()
def _plain(model: Any, rollout: Rollout) -> Any:
    """Log-probabilities of its sampled tokens by the model's own forward pass."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64)).to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, PROMPT - 1 : -1]
    every = torch.log_softmax(logits.double(), -1)
    return every.gather(1, ids[PROMPT:, None])[:, 0].cpu().numpy()


MASKED_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers (config.layer_types) whose tokens see exactly what the tree lets them see."""


def why_not_packed(model: Any) -> str | None:
    """Why this model must see every rollout alone; None if it can take packed trees."""
    decoder_of(model)
    config = model.config.get_text_config()
    kinds = list(getattr(config, "layer_types", None) or ())
    if odd := sorted({*kinds} - MASKED_LAYERS - recurrent.KINDS):
        return f"{', '.join(odd)} layers cannot tell the branches of a tree apart"
    stateful = getattr(model, "_is_stateful", False)
    if stateful and not kinds:
        return f"{config.model_type} carries a state from token to token"
    for kind, layer in zip(kinds, layers_of(model) if kinds else (), strict=False):
        if kind in recurrent.KINDS and not recurrent.mixers_in(layer):
            parts = ", ".join(sorted({type(part).__name__ for part in layer.children()}))
            return f"no part of its {kind} layers ({parts}) can be given the state at a branch"
    if getattr(config, "attention_chunk_size", None):
        return "attention in chunks counts tokens, not positions"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "attention sinks are not supported"
    # the flag is left out of hybrids whose attention does ask the registry
    asked = getattr(model, "_supports_attention_backend", False) or (
        stateful and model._can_set_attn_implementation()
    )
    if not asked:
        return f"{type(model).__name__} does not take attention from transformers' registry"
    return None


def decoder_of(model: Any) -> Any:
    """The part of a causal language model below its head."""
    decoder = model.get_decoder()
    if decoder is model or not hasattr(decoder, "config"):
        raise ValueError(
            f"a model of type {model.config.model_type!r} cannot be trained: transformers does not "
            "say which part of it is below the head"
        )
    return decoder


def layers_of(model: Any) -> Sequence[nn.Module]:
    """Those of a model's decoder, whatever it calls them."""
    decoder = decoder_of(model)
    count = model.config.get_text_config().num_hidden_layers
    parts = dict(decoder.named_children())
    for part in (parts.pop("layers", None), *parts.values()):
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return [*part]
    raise ValueError(f"{type(decoder).__name__} has no list of its {count} layers")
