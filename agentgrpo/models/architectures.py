"""What kind of layers and weights a model has, from its config.json, and what is unsupported.

A dry run reports unsupported models by name, before anything is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

from agentgrpo.models.multimodal_text import TEXT_PARTS, language_model

RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}
"""Entries of transformers' layer_types whose layers carry a state from token to token."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config keys of the number of experts; 0 and None: dense."""
NEEDS_TORCHVISION = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Model types whose code in vLLM imports torchvision, even for text only."""

GATED_DELTA_NETS = {*NEEDS_TORCHVISION, "qwen3_next"}
"""Model types whose CPU kernels in vLLM support bfloat16 only, and no adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Architecture of a causal language model, as far as support depends on it."""

    model_type: str
    layers: tuple[str, ...]
    """The type of each layer, by transformers' names."""
    experts: int
    """Experts per layer; 0: dense."""
    quantized: str
    """The weights' storage format ("mxfp4", "fp8", ...); "": not quantised."""
    wrapped: str = ""
    """The model type of the language model of a multimodal checkpoint; "": a text model."""

    @property
    def recurrent(self) -> bool:
        return bool(RECURRENT & {*self.layers})


def read_architecture(model: str) -> Architecture:
    """Read the architecture of a model directory or hub name."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES,
    )

    try:
        config = AutoConfig.from_pretrained(model)
    except (KeyError, ValueError) as error:
        raise ValueError(f"model {model!r}: config.json cannot be read: {error}") from error
    if language_model(config).model_type not in ARCHITECTURES:
        raise ValueError(
            f"model {model!r}: transformers has no causal language model of type "
            f"{config.model_type!r}"
        )
    return architecture_of(config)


def architecture_of(config: Any) -> Architecture:
    """The architecture of a transformers config (of the full model)."""
    text: Any = config.get_text_config()
    layers = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    quantization = getattr(config, "quantization_config", None) or {}
    experts = next((n for name in EXPERTS if (n := getattr(text, name, None))), 0)
    return Architecture(
        model_type=config.model_type,
        layers=tuple(layers),
        experts=experts,
        quantized=str(quantization.get("quant_method", "unknown")) if quantization else "",
        wrapped="" if text is config else text.model_type,
    )


def unsupported(
    architecture: Architecture,
    *,
    device: str,
    trained: bool,
    dtype: str = "bfloat16",
    adapters: bool = False,
) -> str | None:
    """Why such a model cannot be used; None: it can."""
    if architecture.model_type in GATED_DELTA_NETS and device == "cpu":
        if dtype != "bfloat16":
            return (
                "vLLM's gated delta net for CPU supports bfloat16 only: set engine.dtype to "
                f"'bfloat16', it is {dtype!r}"
            )
        if adapters:
            return "vLLM's gated delta net for CPU supports no adapters: set learner.lora.rank = 0"
    if architecture.model_type in NEEDS_TORCHVISION and not _installed("torchvision"):
        return (
            f"vLLM's code for {architecture.model_type} imports torchvision, which is not "
            "installed: install the build for this torch"
        )
    if not trained:
        return None
    if architecture.wrapped and architecture.model_type not in TEXT_PARTS:
        return (
            f"{architecture.model_type} is multimodal: only its language model "
            f"{architecture.wrapped} can be trained, and directly only from checkpoints of "
            f"{', '.join(sorted(TEXT_PARTS))}. Save it as a separate model: "
            "AutoModelForImageTextToText.from_pretrained(...).language_model"
        )
    if architecture.quantized:
        return (
            f"its weights are stored as {architecture.quantized}, and trained weights must not be "
            "quantised: use a bfloat16 version"
        )
    if architecture.experts and device == "cpu":
        return (
            f"its layers have {architecture.experts} experts, whose weights vLLM packs on CPU, so "
            "that it would misread an update, and it supports no adapters for them there"
        )
    return None


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
