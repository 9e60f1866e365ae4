"""One weight replica: a transformers model whose parameters are views of vLLM's own tensors.

vLLM fuses q/k/v and gate/up along dim 0 and pads the vocabulary at the end, so every Hugging Face
parameter is a contiguous slice of a vLLM parameter. An optimizer that updates in place therefore
updates the sampler: there is nothing to copy and nothing that can be forgotten. Checked on Qwen2/3,
Llama, Mistral, Gemma 3 and Phi-3; tied embeddings stay tied.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class CannotShare(Exception):
    """These two models cannot hold one set of weights; the message says which tensor and why."""


_RENAMED = {".conv.": ".short_conv."}
"""Parts of layers (LFM2's) that vLLM calls otherwise than transformers."""
_WRAPPED = ".base_layer"
"""Where vLLM keeps a layer that it has wrapped for adapters."""


class Slices:
    """Where in the tensors of vLLM's model, unquantised, a Hugging Face parameter lies."""

    def __init__(self, sampler: nn.Module) -> None:
        sizes = (getattr(module, "tp_size", None) or 1 for module in sampler.modules())
        self._divided = any(size > 1 for size in sizes)
        self._fused_of = _fused_parts(sampler)
        self.whole = {n.replace(_WRAPPED, ""): p for n, p in sampler.named_parameters()}
        """All of vLLM's parameters, by its own names; those of adapted layers as without."""
        self.buffers = dict(sampler.named_buffers())
        self._modules = {n.removesuffix(_WRAPPED): m for n, m in sampler.named_modules()}

    def find(self, name: str, shape: torch.Size) -> tuple[str, Tensor]:
        """VLLM's name of the tensor that holds a parameter, and the slice of it."""
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
            if len(sizes) != parts:  # by index one would be mistaken for another of its size
                raise CannotShare(f"{name}: {fused} is of {len(sizes)} parts, not of {parts}")
            source = f"{fused_path}.{leaf}"
            start, rows = sum(sizes[: pieces.start]), sum(sizes[pieces.start : pieces.stop])
        whole = self.whole.get(source)
        if whole is None or whole.numel() == 0:
            raise CannotShare(f"{name}: vLLM holds no tensor {source}")
        if (rows, *whole.shape[1:]) != shape or whole.shape[0] < start + rows:
            raise CannotShare(f"{name}: {tuple(shape)} is no slice of {tuple(whole.shape)}")
        # .data: the learner makes leaves of it, whose gradients are none of vLLM's business
        return source, whole.data.narrow(0, start, rows)

    def _renamed(self, name: str) -> str:
        for ours, theirs in _RENAMED.items():
            before, part, after = name.partition(ours)
            if part and before + theirs.removesuffix(".") in self._modules:
                return before + theirs + after
        return name


def _fused_parts(sampler: nn.Module) -> dict[str, tuple[str, range, int]]:
    """Of each module that vLLM has fused: into which, which of its parts, of how many."""
    found = {}
    of_several = {  # Qwen3.5's q, k and v are one module, and three parts of qkvz
        part.strip("."): len(index)
        for module in sampler.modules()
        for part, (_, index) in _stacked(module).items()
        if isinstance(index, tuple)
    }
    for fused, parts in (getattr(sampler, "packed_modules_mapping", None) or {}).items():
        sizes = [of_several.get(part, 1) for part in parts]
        for index, part in enumerate(parts if list(parts) != [fused] else ()):
            start = sum(sizes[:index])
            found[part] = (fused, range(start, start + sizes[index]), sum(sizes))
    return found


def _stacked(module: nn.Module) -> dict[str, tuple[str, Any]]:
    mapper = getattr(module, "hf_to_vllm_mapper", None)
    return getattr(mapper, "orig_to_new_stacked", None) or {}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Of a transformers model, those that a checkpoint holds (Gemma 4 scales layers by some)."""
    # not by state_dict(): FSDP gathers and drops its shards there, under whoever holds them
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def views_for(sampler: nn.Module, learner: nn.Module) -> dict[str, Tensor]:
    """Hugging Face name of a parameter or buffer -> the slice of vLLM's tensors that holds it.

    Of the learner only names and shapes are read. CannotShare: a parameter has no slice of its own
    shape, or a vLLM weight has no owner.
    """
    slices = Slices(sampler)
    views: dict[str, Tensor] = {}
    owned: Counter[str] = Counter()
    for name, parameter in learner.named_parameters():
        source, views[name] = slices.find(name, parameter.shape)
        whole = slices.whole[source]
        owned[source] += len(whole) if source == name else len(views[name])  # padding: no owner
    for name, buffer in saved_buffers(learner).items():
        there = slices.buffers.get(name)
        if there is None or there.shape != buffer.shape:
            raise CannotShare(f"{name}: vLLM holds no such buffer")
        views[name] = there
    if missed := sorted(name for name, t in slices.whole.items() if owned[name] < len(t)):
        raise CannotShare(f"the learner has no parameter for vLLM's {', '.join(missed[:3])}")
    return views


def install(learner: nn.Module, views: dict[str, Tensor]) -> None:
    """Replace each parameter and buffer of learner by its view; tied parameters stay tied."""
    new = {id(p): nn.Parameter(views[name]) for name, p in learner.named_parameters()}
    for module in learner.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[key] = new[id(parameter)]
    for name in saved_buffers(learner):
        path, _, key = name.rpartition(".")
        learner.get_submodule(path)._buffers[key] = views[name]


class InPlaceCopy:
    """Writes a learner's tensors into the sampler's, which stay where they are.

    For what cannot be shared: another dtype, sharded or adapted parameters (taken from an iterator
    a bucket at a time, so that no second whole replica exists), or layouts that only vLLM's own
    loader knows, as this rank's part of a tensor-parallel model.
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
        """Copy whole tensors under their Hugging Face names; returns the bytes that were read."""
        copied = held = 0
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in named:
            bucket.append((name, tensor))
            held += tensor.nbytes
            if held >= self._bucket_bytes:
                self._copy(bucket)
                bucket, copied, held = [], copied + held, 0
        self._copy(bucket)
        return copied + held

    def _copy(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        into, values, rest = [], [], []
        for name, tensor in bucket:
            try:
                into.append(self._slices.find(name, tensor.shape)[1])
                values.append(tensor.detach())
            except CannotShare:
                rest.append((name, tensor.detach()))
        if into:  # in place: CUDA graphs and the learner's views hold these addresses
            torch._foreach_copy_(into, values)
        if rest:
            self._load(rest)


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
