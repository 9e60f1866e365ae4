"""What a model is made of, read from its config.json alone, and what of that does not work here.

So that a dry run says it by name, before anything is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

from agentgrpo.models.multimodal_text import TEXT_PARTS, language_model

RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}
"""Kinds of layers that carry a state from token to token, in transformers' layer_types."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How configs of mixtures of experts name how many there are; 0 and None: dense."""
NEEDS_TORCHVISION = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Model types whose code in vLLM imports torchvision, even where no image is ever seen."""

GATED_DELTA_NETS = {*NEEDS_TORCHVISION, "qwen3_next"}
"""Model types whose kernels for CPU in vLLM take bfloat16 only, and no adapters beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """What a causal language model is made of."""

    model_type: str
    layers: tuple[str, ...]
    """Of each layer, as transformers names it."""
    experts: int
    """Per layer; 0: dense."""
    quantized: str
    """How its weights are stored, if not plain: "mxfp4", "fp8", ...; "": plain."""
    wrapped: str = ""
    """The model type of its language model, if it has parts for images or sound beside it."""

    @property
    def recurrent(self) -> bool:
        return bool(RECURRENT & {*self.layers})


def kinds_of(model: str) -> Kinds:
    """Of a model directory or hub name."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    try:
        whole = AutoConfig.from_pretrained(model)
    except (KeyError, ValueError) as error:
        raise ValueError(f"model {model!r}: its config.json is not understood: {error}") from error
    if language_model(whole).model_type not in KNOWN:
        raise ValueError(
            f"model {model!r}: transformers has no causal language model of type "
            f"{whole.model_type!r}"
        )
    return kinds_in(whole)


def kinds_in(config: Any) -> Kinds:
    """Of a transformers config, that of the whole model."""
    text: Any = config.get_text_config()
    layers = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    stored = getattr(config, "quantization_config", None) or {}
    experts = next((n for name in EXPERTS if (n := getattr(text, name, None))), 0)
    return Kinds(
        model_type=config.model_type,
        layers=tuple(layers),
        experts=experts,
        quantized=str(stored.get("quant_method", "unknown")) if stored else "",
        wrapped="" if text is config else text.model_type,
    )


def unsupported(
    kinds: Kinds, *, device: str, trained: bool, dtype: str = "bfloat16", adapters: bool = False
) -> str | None:
    """Why such a model cannot be used here; None: it can."""
    if kinds.model_type in GATED_DELTA_NETS and device == "cpu":
        if dtype != "bfloat16":
            return (
                "vLLM's gated delta net for CPU takes bfloat16 only: set engine.dtype to "
                f"'bfloat16', it is {dtype!r}"
            )
        if adapters:
            return "vLLM's gated delta net for CPU has no adapters beside it: train it whole"
    if kinds.model_type in NEEDS_TORCHVISION and not _installed("torchvision"):
        return (
            f"vLLM's code for {kinds.model_type} imports torchvision, which is not installed: "
            "install the one that was built for this torch"
        )
    if not trained:
        return None
    if kinds.wrapped and kinds.model_type not in TEXT_PARTS:
        return (
            f"{kinds.model_type} has parts for images or sound beside its language model "
            f"{kinds.wrapped}: only that can be trained, from such checkpoints of "
            f"{', '.join(sorted(TEXT_PARTS))}; save it as a model of its own, "
            "AutoModelForImageTextToText.from_pretrained(...).language_model"
        )
    if kinds.quantized:
        return (
            f"its weights are stored as {kinds.quantized}, and what is trained must be plain: "
            "take a bfloat16 version of it"
        )
    if kinds.experts and device == "cpu":
        return (
            f"its layers have {kinds.experts} experts, whose weights vLLM packs on CPU, so that "
            "an update would be misread, and it has no adapters beside them there"
        )
    return None


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
