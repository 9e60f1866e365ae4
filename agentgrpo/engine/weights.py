"""Shared weights: a transformers model whose parameters are views of vLLM's tensors.

vLLM fuses q/k/v and gate/up along dim 0 and pads the vocabulary at the end, so every Hugging Face
parameter is a contiguous slice of a vLLM parameter. An optimizer that updates in place therefore
updates the sampler: no copy is needed and none can be forgotten. Checked on Qwen2/3, Llama,
Mistral, Gemma 3 and Phi-3; tied embeddings stay tied.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class CannotShare(Exception):
    """The two models cannot share weights; the message names the tensor and the reason."""


_RENAMED = {".conv.": ".short_conv."}
"""Submodules whose names differ: transformers' -> vLLM's (LFM2)."""
_WRAPPED = ".base_layer"
"""Suffix of a layer that vLLM has wrapped for adapters."""


class Slices:
    """Finds the slice of an unquantised vLLM model that holds a Hugging Face parameter."""

    def __init__(self, sampler: nn.Module) -> None:
        sizes = (getattr(module, "tp_size", None) or 1 for module in sampler.modules())
        self._divided = any(size > 1 for size in sizes)
        self._fused_of = _fused_parts(sampler)
        self.parameters = {n.replace(_WRAPPED, ""): p for n, p in sampler.named_parameters()}
        """vLLM's parameters by vLLM's names, without the suffix of wrapped layers."""
        self.buffers = dict(sampler.named_buffers())
        self._modules = {n.removesuffix(_WRAPPED): m for n, m in sampler.named_modules()}

    def find(self, name: str, shape: torch.Size) -> tuple[str, Tensor]:
        """The vLLM name of the tensor that holds a parameter, and the slice."""
        if self._divided:
            raise CannotShare(f"{name}: this rank's vLLM holds a part of it (tensor parallel)")
        source = self._renamed(name)
        path, _, leaf = source.rpartition(".")
        parent, _, module = path.rpartition(".")
        fused, pieces, parts = self._fused_of.get(module, (module, range(1), 1))
        fused_path = f"{parent}.{fused}" if parent else fused
        start, rows = 0, shape[0]
        if fused != module and fused_path in self._modules:
            sizes = list(self._modules[fused_path].output_sizes)
            if len(sizes) != parts:  # an index would select another part of the same size
                raise CannotShare(f"{name}: {fused} has {len(sizes)} parts, expected {parts}")
            source = f"{fused_path}.{leaf}"
            start, rows = sum(sizes[: pieces.start]), sum(sizes[pieces.start : pieces.stop])
        tensor = self.parameters.get(source)
        if tensor is None or tensor.numel() == 0:
            raise CannotShare(f"{name}: vLLM has no tensor {source}")
        if (rows, *tensor.shape[1:]) != shape or tensor.shape[0] < start + rows:
            raise CannotShare(f"{name}: {tuple(shape)} is not a slice of {tuple(tensor.shape)}")
        # .data: the learner makes leaf parameters of it, whose gradients vLLM must not track
        return source, tensor.data.narrow(0, start, rows)

    def _renamed(self, name: str) -> str:
        for hf_part, vllm_part in _RENAMED.items():
            before, part, after = name.partition(hf_part)
            if part and before + vllm_part.removesuffix(".") in self._modules:
                return before + vllm_part + after
        return name


def _fused_parts(sampler: nn.Module) -> dict[str, tuple[str, range, int]]:
    """By module name: its fused vLLM module, its parts of that, and the number of parts."""
    fused_parts = {}
    num_parts = {  # Qwen3.5's q, k and v are one module but three parts of qkvz
        part.strip("."): len(index)
        for module in sampler.modules()
        for part, (_, index) in _stacked(module).items()
        if isinstance(index, tuple)
    }
    for fused, parts in (getattr(sampler, "packed_modules_mapping", None) or {}).items():
        sizes = [num_parts.get(part, 1) for part in parts]
        for index, part in enumerate(parts if list(parts) != [fused] else ()):
            start = sum(sizes[:index])
            fused_parts[part] = (fused, range(start, start + sizes[index]), sum(sizes))
    return fused_parts


def _stacked(module: nn.Module) -> dict[str, tuple[str, Any]]:
    mapper = getattr(module, "hf_to_vllm_mapper", None)
    return getattr(mapper, "orig_to_new_stacked", None) or {}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a transformers checkpoint contains (Gemma 4 scales layers by some)."""
    # not state_dict(): there FSDP gathers and frees its shards, also for those who hold them
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def views_for(sampler: nn.Module, learner: nn.Module) -> dict[str, Tensor]:
    """Map each Hugging Face parameter or buffer name to the slice of vLLM's tensors that holds it.

    Only names and shapes of the learner are read. CannotShare: a parameter has no slice of its
    shape, or a vLLM weight has no parameter.
    """
    slices = Slices(sampler)
    views: dict[str, Tensor] = {}
    owned: Counter[str] = Counter()
    for name, parameter in learner.named_parameters():
        source, views[name] = slices.find(name, parameter.shape)
        tensor = slices.parameters[source]
        # the vocabulary's padding rows belong to no parameter, hence the full length
        owned[source] += len(tensor) if source == name else len(views[name])
    for name, buffer in saved_buffers(learner).items():
        shared = slices.buffers.get(name)
        if shared is None or shared.shape != buffer.shape:
            raise CannotShare(f"{name}: vLLM has no such buffer")
        views[name] = shared
    if unowned := sorted(name for name, t in slices.parameters.items() if owned[name] < len(t)):
        raise CannotShare(f"the learner has no parameter for vLLM's {', '.join(unowned[:3])}")
    return views


def install(learner: nn.Module, views: dict[str, Tensor]) -> None:
    """Replace each parameter and buffer of the learner by its view; tied parameters stay tied."""
    parameters = {id(p): nn.Parameter(views[name]) for name, p in learner.named_parameters()}
    for module in learner.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[key] = parameters[id(parameter)]
    for name in saved_buffers(learner):
        path, _, key = name.rpartition(".")
        learner.get_submodule(path)._buffers[key] = views[name]


class InPlaceCopy:
    """Copies a learner's tensors into the sampler's, in place.

    For weights that cannot be shared: other dtypes, sharded or adapted parameters (read from an
    iterator a bucket at a time, so that no second full replica exists), or layouts that only vLLM's
    own loader knows, such as a rank's part of a tensor-parallel model.
    """

    def __init__(
        self,
        sampler: nn.Module,
        load: Callable[[Iterable[tuple[str, Tensor]]], None],
        *,
        bucket_bytes: int = 256 * 2**20,
    ) -> None:
        self._slices, self._load, self._bucket_bytes = Slices(sampler), load, bucket_bytes

    @torch.no_grad()
    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> int:
        """Copy full tensors with Hugging Face names; returns the number of bytes read."""
        copied = pending = 0
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in named:
            bucket.append((name, tensor))
            pending += tensor.nbytes
            if pending >= self._bucket_bytes:
                self._copy(bucket)
                bucket, copied, pending = [], copied + pending, 0
        self._copy(bucket)
        return copied + pending

    def _copy(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        targets, values, rest = [], [], []
        for name, tensor in bucket:
            try:
                targets.append(self._slices.find(name, tensor.shape)[1])
                values.append(tensor.detach())
            except CannotShare:
                rest.append((name, tensor.detach()))
        if targets:  # in place: CUDA graphs and the learner's views hold these addresses
            torch._foreach_copy_(targets, values)
        if rest:
            self._load(rest)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built within get parameters without storage; buffers (rotary inv_freq) are real."""
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
