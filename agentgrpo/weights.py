"""One weight replica: a transformers model whose parameters are views of vLLM's own tensors.

vLLM fuses q/k/v and gate/up along dim 0 and pads the vocabulary at the end, so every Hugging Face
parameter is a contiguous slice of a vLLM parameter. An optimizer that updates in place therefore
updates the sampler: there is nothing to copy and nothing that can be forgotten. Checked on Qwen2/3,
Llama, Mistral, Gemma 3 and Phi-3; tied embeddings stay tied.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
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


class InPlaceCopy:
    """Writes a learner's parameters into the sampler's tensors, which stay where they are.

    For what cannot be shared: another dtype, sharded parameters (gathered a bucket at a time, so
    that no second whole replica exists), or layouts that only vLLM's own loader knows.

    Args:
        sampler: vLLM's model.
        learner: the transformers model.
        load: vLLM's loader of Hugging Face named tensors, where there is no plain slice to write.
        bucket_bytes: gathered at once.
    """

    def __init__(
        self,
        sampler: nn.Module,
        learner: nn.Module,
        load: Callable[[Iterable[tuple[str, Tensor]]], None],
        *,
        bucket_bytes: int = 256 * 2**20,
    ) -> None:
        self._learner, self._load = learner, load
        self._bucket_bytes = bucket_bytes
        try:
            self._views: dict[str, Tensor] | None = views_for(sampler, learner)
        except CannotShare:
            self._views = None

    @torch.no_grad()
    def __call__(self) -> int:
        """Copy everything; returns the bytes that were read."""
        copied = 0
        for bucket in self._buckets():
            whole = {name: _whole(parameter) for name, parameter in bucket.items()}
            copied += sum(tensor.nbytes for tensor in whole.values())
            if self._views is None:
                self._load(whole.items())
            else:
                into = [self._views[name] for name in whole]
                torch._foreach_copy_(into, list(whole.values()), non_blocking=False)
        return copied

    def _buckets(self) -> Iterator[dict[str, Tensor]]:
        bucket: dict[str, Tensor] = {}
        size = 0
        for name, parameter in self._learner.named_parameters():
            bucket[name] = parameter
            size += parameter.nbytes
            if size >= self._bucket_bytes:
                yield bucket
                bucket, size = {}, 0
        if bucket:
            yield bucket


def _whole(parameter: Tensor) -> Tensor:
    """A parameter's value; of a sharded one, gathered from all ranks."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter.detach() if gather is None else gather().detach()


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
