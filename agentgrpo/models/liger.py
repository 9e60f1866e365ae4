"""RMSNorm, RoPE and SwiGLU of a model's layers as one kernel each, by Liger-Kernel.

As transformers has them each is five to ten kernels, which read and write the same tensors again
and again: docs/gpu.md has what that costs. Liger's own patches know what the norms of a model type
add and cast. They are applied to one model, and what they replace in transformers' modules for all
models is put back: vLLM, the KL's reference and other learners see nothing of it. Its losses are
not used: the head is ours (kernels/). Whether they can replace a model's layers is told from its
config.json, so that a dry run says it before anything is loaded.

On an H100 Qwen3's and Llama's were run (docs/gpu.md); others in Triton's interpreter, where the
patched layers give the plain ones' gradients.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from types import FunctionType, MethodType
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
    """Why a model's layers are computed as transformers has them; None: by Liger's kernels."""
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


ROTATION = "apply_rotary_pos_emb"
"""Transformers' name for it, in the module of each model type."""


def fuse(model: Any) -> str:
    """Have a model's norms, rotations and MLPs computed by Liger's kernels.

    Its modules are changed in place (on CUDA, or anywhere in Triton's interpreter), its parameters
    are not, and neither are other models. Returns the library's version and how many modules it
    computes.
    """
    if why := unlike(model.config):
        raise ValueError(why)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    shared = vars(sys.modules[type(model).__module__])
    before = dict(shared)
    try:
        MODEL_TYPE_TO_APPLY_LIGER_FN[kind](
            model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        shared.update(before)
    patched = sum("forward" in vars(module) for module in model.modules())
    rotated = sum(map(_rotate, model.modules())) if FAMILIES[kind].rope else 0
    return f"liger-kernel {version('liger-kernel')}: {patched} norms and MLPs, {rotated} rotations"


def _rotate(module: Any) -> bool:
    """Give an attention module Liger's rotation; whether it has one at all."""
    plain: Any = type(module).forward
    if ROTATION not in plain.__code__.co_names:
        return False
    names = {**plain.__globals__, ROTATION: _rotation}
    own = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    module.forward = MethodType(own, module)
    return True


def _rotation(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    # not the function of Liger's that chooses: where CUTLASS is installed it takes other kernels
    from liger_kernel.ops.rope import LigerRopeFunction

    rotated: tuple[Any, Any] = LigerRopeFunction.apply(q, k, cos, sin)
    return rotated
