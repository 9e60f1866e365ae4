"""Which models can take packed trees; the others see every rollout alone, and it is said why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from agentgrpo.learn import recurrent

MASKED_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers (config.layer_types) whose tokens see exactly what the tree lets them see."""


def why_rows(model: Any) -> str | None:
    """Why this model must see every rollout alone; None if it can take packed trees.

    Raises:
        ValueError: as of decoder_of().
    """
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
    """The part of a causal language model below its head.

    Raises:
        ValueError: transformers does not tell it apart.
    """
    decoder = model.get_decoder()
    if decoder is model or not hasattr(decoder, "config"):
        raise ValueError(
            f"a model of type {model.config.model_type!r} cannot be trained: transformers does not "
            "say which part of it is below the head"
        )
    return decoder


def layers_of(model: Any) -> Sequence[nn.Module]:
    """Those of a model's decoder, whatever it calls them.

    Raises:
        ValueError: it has no list of them.
    """
    decoder = decoder_of(model)
    count = model.config.get_text_config().num_hidden_layers
    parts = dict(decoder.named_children())
    for part in (parts.pop("layers", None), *parts.values()):
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return [*part]
    raise ValueError(f"{type(decoder).__name__} has no list of its {count} layers")
