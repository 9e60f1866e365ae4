"""Decides which models can process packed trees; all others process every rollout alone.

The model's code and config rule out some. For the rest, a few tokens go through the original model
and through the scorer that trains it, and the log-probabilities are compared: only the model's code
shows what it does with its logits (a scale, a cap) and what its layers do with their inputs. In RL
the engine's sampled tokens would reveal a difference; in fine-tuning nothing else would.
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
"""Number of shared tokens of two rollouts, and of the tokens after them in each rollout. More
branch than prompt tokens: if branches saw each other, most positions would differ."""
TOLERANCE, TOLERANCE_16_BIT = 1e-3, 0.3
"""Largest median difference in nats; expert routing and rounding move a few tokens further."""


class ForwardCheck:
    """Log-probabilities of the original model; to be made before its attention is replaced."""

    def __init__(self, model: Any) -> None:
        rng = np.random.default_rng(0)
        vocab = model.get_output_embeddings().weight.shape[0]
        prompt, *branches = (
            rng.integers(vocab, size=size, dtype=np.int32) for size in (PROMPT, *BRANCHES)
        )
        prompt_segment = Segment(prompt)
        self._group = Group(task=TASK, rollouts=[
            Rollout(
                task=TASK, status=Status.COMPLETED, advantage=1.0,
                segments=[prompt_segment, Segment(ids, np.zeros(len(ids), np.float32))],
            )
            for ids in branches
        ])  # fmt: skip
        self._expected: Any = None
        if model.device.type == "meta":  # no values to compare
            return
        self._tolerance = TOLERANCE if model.dtype.itemsize > 2 else TOLERANCE_16_BIT
        self._attention = model.config._attn_implementation
        if model._can_set_attn_implementation():
            model.set_attn_implementation("eager")  # transformers' sdpa ignores soft caps
        self._expected = np.concatenate([_model_logps(model, r) for r in self._group.rollouts])
        self.restore_attention(model)

    def restore_attention(self, model: Any) -> None:
        if model._can_set_attn_implementation():
            model.set_attn_implementation(self._attention)

    def failure(self, scorer: Any) -> str | None:
        """How the scorer fails or differs from the model; None: they agree.

        A gradient is computed too, because on CUDA a tree's backward kernel is compiled separately
        and may fail alone. On several ranks all must call it.
        """
        if self._expected is None:
            return None
        shares = scorer.unpacked_reason is None
        (batch,) = pack_tree([self._group], max_tokens=1 << 10, share_prefixes=shares)
        gap, failure = float("inf"), ""
        try:
            logp = self._pass(scorer, batch)
        except Exception as error:
            if out_of_memory(error):
                raise
            failure = f"{type(error).__name__}: {error}"
        else:
            # the tree orders terms by branch; the expected values are by rollout and position
            logp = logp[np.lexsort((batch.positions_T[batch.row_N], batch.sample_N))]
            gap = float(np.median(np.abs(logp - self._expected)))
        gap = parallel.largest(gap)  # all ranks must take the same path: one failure fails all
        if gap <= self._tolerance:
            return None
        return failure or f"half of its log-probabilities are {gap:.2g} nats or more off"

    @staticmethod
    def _pass(scorer: Any, batch: PackedBatch) -> Any:
        with torch.enable_grad():
            logp = scorer(batch, 1.0).logp_N
            trained = [p for p in scorer.parameters() if p.requires_grad][:1]
            if trained:
                torch.autograd.grad(logp.sum(), trained)
        return logp.detach().double().cpu().numpy()


@torch.no_grad()
def _model_logps(model: Any, rollout: Rollout) -> Any:
    """Log-probabilities of the sampled tokens by the model's own forward pass."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64)).to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, PROMPT - 1 : -1]
    logp = torch.log_softmax(logits.double(), -1)
    return logp.gather(1, ids[PROMPT:, None])[:, 0].cpu().numpy()


MASKED_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Entries of config.layer_types whose attention takes exactly the mask of the tree."""


def why_not_packed(model: Any) -> str | None:
    """Why this model must process every rollout alone; None if it can take packed trees."""
    decoder_of(model)
    config = model.config.get_text_config()
    kinds = list(getattr(config, "layer_types", None) or ())
    if unsupported := sorted({*kinds} - MASKED_LAYERS - recurrent.LAYER_TYPES):
        return f"{', '.join(unsupported)} layers cannot tell the branches of a tree apart"
    stateful = getattr(model, "_is_stateful", False)
    if stateful and not kinds:
        return f"{config.model_type} carries a state from token to token"
    for kind, layer in zip(kinds, layers_of(model) if kinds else (), strict=False):
        if kind in recurrent.LAYER_TYPES and not recurrent.mixers_in(layer):
            parts = ", ".join(sorted({type(part).__name__ for part in layer.children()}))
            return f"no part of its {kind} layers ({parts}) can be given the state at a branch"
    if getattr(config, "attention_chunk_size", None):
        return "attention in chunks counts tokens, not positions"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "attention sinks are not supported"
    # some hybrids whose attention does use the registry do not set the flag
    uses_registry = getattr(model, "_supports_attention_backend", False) or (
        stateful and model._can_set_attn_implementation()
    )
    if not uses_registry:
        return f"{type(model).__name__} does not take attention from transformers' registry"
    return None


def decoder_of(model: Any) -> Any:
    """The model below the head: token ids to hidden states."""
    decoder = model.get_decoder()
    if decoder is model or not hasattr(decoder, "config"):
        raise ValueError(
            f"a model of type {model.config.model_type!r} cannot be trained: transformers does not "
            "expose its decoder"
        )
    return decoder


def layers_of(model: Any) -> Sequence[nn.Module]:
    """The decoder's layers, under any attribute name."""
    decoder = decoder_of(model)
    count = model.config.get_text_config().num_hidden_layers
    parts = dict(decoder.named_children())
    for part in (parts.pop("layers", None), *parts.values()):
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return [*part]
    raise ValueError(f"{type(decoder).__name__} has no list of its {count} layers")
