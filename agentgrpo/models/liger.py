"""Whether Liger-Kernel's RMSNorm, RoPE and SwiGLU can replace those of a model's layers.

Told from its config.json, so that a dry run says it before anything is loaded; learn/fused.py
replaces them.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any, Literal, NamedTuple


class Family(NamedTuple):
    """What of a model type Liger's kernels compute as its plain layers do."""

    act: str = "silu"
    """The activation of the MLP, which the kernels have built in and do not ask for."""
    rope: bool = True


COMPARED = "0.8.5"
"""The version of Liger that tests/learn/test_fused.py compares with plain layers."""
GELU = "gelu_pytorch_tanh"
FAMILIES = {
    "gemma": Family(GELU),
    "gemma2": Family(GELU),
    "gemma3_text": Family(GELU),
    "gemma4_text": Family(GELU, rope=False),  # rotates queries and keys one after the other
    "granite": Family(),
    "llama": Family(),
    "ministral": Family(),
    "mistral": Family(),
    "olmo2": Family(),
    "olmo3": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_5_text": Family(),
    "qwen3_next": Family(),
    "smollm3": Family(),
}
"""By transformers' model type; each is held to its plain layers by tests/learn/test_fused.py."""


def why_plain(asked: bool | Literal["auto"], config: Any, device: str) -> str | None:
    """Why a model's layers are computed as transformers has them; None: by Liger's kernels.

    Args:
        asked: learner.use_liger_kernel.
        config: of transformers, of the language model.
        device: "cpu" or "cuda".

    Raises:
        ValueError: the kernels are asked for and cannot be had; names the key and why.
    """
    if asked is False:
        return "learner.use_liger_kernel = false"
    why = _why_not(config, device)
    if why and asked is True:
        raise ValueError(f"learner.use_liger_kernel = true: {why}")
    return why


def _why_not(config: Any, device: str) -> str | None:
    if device != "cuda":
        return "Liger's kernels need an NVIDIA GPU"
    found = version("liger-kernel") if importlib.util.find_spec("liger_kernel") else "none"
    if found != COMPARED:
        return (
            f"the layers were compared with liger-kernel {COMPARED}, and {found} is installed; "
            "remedy: pip install 'agentgrpo[liger]'"
        )
    return unlike(config)


def unlike(config: Any) -> str | None:
    """Why layers of this kind are not known to be what Liger's kernels compute; None: they are."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return (
            f"layers of model type {config.model_type!r} were not compared with Liger's; those of "
            f"{', '.join(FAMILIES)} were"
        )
    # Gemma's later configs have the second name
    act = getattr(config, "hidden_activation", None) or config.hidden_act
    if act != family.act:
        return f"the MLPs have the activation {act!r}, and Liger's kernel has {family.act!r}"
    return None
