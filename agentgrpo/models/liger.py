"""RMSNorm, RoPE and SwiGLU as one fused kernel each, by Liger-Kernel.

In transformers each of them is five to ten kernels, which read and write the same tensors again and
again (cost: docs/gpu.md). Liger's own patches know what the norms of a model type add and cast.
They are applied to one model only: what they replace in transformers' modules for all models is
restored, so vLLM, the KL reference and other learners are unaffected. Liger's losses are not used:
the head is computed by kernels/. Support is decided from a model's config.json, so that a dry run
reports it before anything is loaded.

Qwen3 and Llama were run on an H100 (docs/gpu.md); the other families in Triton's interpreter, where
the patched layers give the gradients of the original ones.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from types import FunctionType, MethodType
from typing import Any, Literal

TESTED_VERSION = "0.8.5"
"""The version of Liger that tests/learn/test_fused.py compares with the original layers."""
FAMILIES = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text"), "gelu_pytorch_tanh"),
    **dict.fromkeys(
        (
            *("granite", "llama", "ministral", "mistral", "olmo2", "olmo3", "phi3", "smollm3"),
            *("qwen2", "qwen3", "qwen3_5_text", "qwen3_next"),
        ),
        "silu",
    ),
}
"""By transformers' model type the activation of the MLP, which is built into Liger's kernels.
tests/learn/test_fused.py compares each family with its original layers."""
UNROTATED = {"gemma4_text"}
"""Families whose queries and keys are rotated one after the other, not by Liger's kernel."""


def why_not_fused(setting: bool | Literal["auto"], config: Any, device: str) -> str | None:
    """Why the model keeps transformers' layers; None: Liger's kernels replace them."""
    if setting is False:
        return "learner.use_liger_kernel = false"
    reason = _why_unsupported(config, device)
    if reason and setting is True:
        raise ValueError(f"learner.use_liger_kernel = true: {reason}")
    return reason


def _why_unsupported(config: Any, device: str) -> str | None:
    if device != "cuda":
        return "Liger's kernels need an NVIDIA GPU"
    installed = version("liger-kernel") if importlib.util.find_spec("liger_kernel") else "none"
    if installed != TESTED_VERSION:
        return (
            f"the layers were compared with liger-kernel {TESTED_VERSION}, and {installed} is "
            "installed; remedy: pip install 'agentgrpo[liger]'"
        )
    return why_layers_differ(config)


def why_layers_differ(config: Any) -> str | None:
    """Why layers of this model may differ from what Liger's kernels compute; None: tested equal."""
    fused_act = FAMILIES.get(config.model_type)
    if fused_act is None:
        return (
            f"layers of model type {config.model_type!r} were not compared with Liger's; those of "
            f"{', '.join(FAMILIES)} were"
        )
    # Gemma's later configs use hidden_activation
    act = getattr(config, "hidden_activation", None) or config.hidden_act
    if act != fused_act:
        return f"the MLPs use activation {act!r}, Liger's kernel uses {fused_act!r}"
    return None


ROTATION = "apply_rotary_pos_emb"
"""The function's name in transformers' module of each model type."""


def fuse_layers(model: Any) -> str:
    """Let Liger's kernels compute the model's norms, rotations and MLPs.

    The model's modules are patched in place (on CUDA, or anywhere in Triton's interpreter); its
    parameters and other models are unchanged. Returns the library's version and the number of
    patched modules.
    """
    if reason := why_layers_differ(model.config):
        raise ValueError(reason)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    # Liger also replaces functions in transformers' module, for all models: restored below
    module_vars = vars(sys.modules[type(model).__module__])
    original = dict(module_vars)
    try:
        MODEL_TYPE_TO_APPLY_LIGER_FN[kind](
            model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        module_vars.update(original)
    patched = sum("forward" in vars(module) for module in model.modules())
    rotated = 0 if kind in UNROTATED else sum(map(_fuse_rotation, model.modules()))
    return f"liger-kernel {version('liger-kernel')}: {patched} norms and MLPs, {rotated} rotations"


def _fuse_rotation(module: Any) -> bool:
    """Give an attention module Liger's rotation; False if it has no rotation."""
    original: Any = type(module).forward
    if ROTATION not in original.__code__.co_names:
        return False
    names = {**original.__globals__, ROTATION: _rotation}
    function = FunctionType(
        original.__code__, names, original.__name__, original.__defaults__, original.__closure__
    )
    module.forward = MethodType(function, module)
    return True


def _rotation(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    # not Liger's dispatching function: where CUTLASS is installed it chooses other kernels
    from liger_kernel.ops.rope import LigerRopeFunction

    rotated: tuple[Any, Any] = LigerRopeFunction.apply(q, k, cos, sin)
    return rotated
