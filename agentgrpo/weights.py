"""One weight replica: a transformers model whose parameters are views of vLLM's own tensors.

vLLM fuses q/k/v and gate/up along dim 0 and pads the vocabulary at the end, so every Hugging Face
parameter is a contiguous slice of a vLLM parameter. An optimizer that updates in place therefore
updates the sampler: there is nothing to copy and nothing that can be forgotten. Checked on Qwen2/3,
Llama, Mistral, Gemma 3 and Phi-3; tied embeddings stay tied.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class CannotShare(Exception):
    """These two models cannot hold one set of weights; the message says which tensor and why."""


def views_for(sampler: nn.Module, learner: nn.Module) -> dict[str, Tensor]:
    """Hugging Face parameter name -> the slice of vLLM's tensors that holds it.

    Args:
        sampler: vLLM's model, unquantised, tensor-parallel size 1.
        learner: the transformers model of the same checkpoint; only names and shapes are read.

    Raises:
        CannotShare: a parameter has no slice of its own shape, or a vLLM weight has no owner.
    """
    fused_of = {
        part: (fused, index)
        for fused, parts in (getattr(sampler, "packed_modules_mapping", None) or {}).items()
        if list(parts) != [fused]
        for index, part in enumerate(parts)
    }
    theirs = dict(sampler.named_parameters())
    modules = dict(sampler.named_modules())
    views: dict[str, Tensor] = {}
    owned: Counter[str] = Counter()
    for name, parameter in learner.named_parameters():
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        fused, index = fused_of.get(module, (module, 0))
        fused_path = f"{parent}.{fused}" if parent else fused
        source, start, rows = name, 0, parameter.shape[0]
        if module in fused_of and fused_path in modules:
            sizes = list(modules[fused_path].output_sizes)
            source, start, rows = f"{fused_path}.{leaf}", sum(sizes[:index]), sizes[index]
        whole = theirs.get(source)
        if whole is None or whole.numel() == 0:
            raise CannotShare(f"{name}: vLLM holds no tensor {source}")
        if (rows, *whole.shape[1:]) != parameter.shape or whole.shape[0] < start + rows:
            raise CannotShare(
                f"{name}: {tuple(parameter.shape)} is no slice of {tuple(whole.shape)}"
            )
        views[name] = whole.data.narrow(0, start, rows)
        owned[source] += len(whole) if source == name else rows  # padding needs no owner
    if missed := sorted(name for name, whole in theirs.items() if owned[name] < len(whole)):
        raise CannotShare(f"the learner has no parameter for vLLM's {', '.join(missed[:3])}")
    return views


def install(learner: nn.Module, views: dict[str, Tensor]) -> None:
    """Replace every parameter of learner by its view; tied parameters stay tied."""
    new = {id(p): nn.Parameter(views[name]) for name, p in learner.named_parameters()}
    for module in learner.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[key] = new[id(parameter)]


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside get parameters without storage; buffers (rotary inv_freq) are real."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
