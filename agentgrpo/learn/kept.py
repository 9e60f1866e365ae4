"""What a backward pass keeps of a batch, counted on a model without storage.

The policy's own layers score a batch whose tensors have shapes alone, and autograd says what it
saves: of any kind of layer, with frozen ones, adapters and Liger's kernels, as they are. Only of
attention there is a stand-in, since its kernels are the device's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental import _config as shapes
from transformers import AttentionInterface
from triton import KernelInterface

from agentgrpo.config import LearnerConfig
from agentgrpo.kernels.linear_logp import LOGITS_BYTES_CPU, LOGITS_BYTES_CUDA
from agentgrpo.learn.attention import TREE, tree_attention
from agentgrpo.learn.fused import fuse
from agentgrpo.learn.lora import Adapter
from agentgrpo.learn.policy import Scorer, freeze_all_but
from agentgrpo.learn.rehearsal import batches_of
from agentgrpo.learn.rows import layers_of
from agentgrpo.machine.footprint import Kept
from agentgrpo.models.liger import why_plain

COUNTED = "counted"
"""The stand-in's name in transformers' registry."""


def kept(model: Any, learner: LearnerConfig, *, cuda: bool) -> Kept:
    """Bytes kept of learner.max_tokens tokens, all of them loss terms, in the largest batch.

    Args:
        model: from loading.hollow(), in the learner's dtype; it is changed.
        learner: settings.
        cuda: on a GPU.

    Raises:
        RuntimeError: a layer needs numbers.
    """
    model.to("meta")
    if learner.lora.rank:
        Adapter(model, learner.lora)
    else:
        freeze_all_but(model, learner.trained_layers)
    if cuda and why_plain(learner.use_liger_kernel, model.config, "cuda") is None:
        fuse(model)
    scorer = Scorer(model)
    if model.config._attn_implementation in (TREE, "sdpa"):
        AttentionInterface.register(COUNTED, functools.partial(_attend, cuda=cuda))
        model.set_attn_implementation(COUNTED)
    layers = layers_of(model)
    saved = _Saved(model)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, here=index: saved.enter(here))
        layer.register_forward_hook(lambda *_: saved.enter(None))
    count, head = learner.max_tokens, model.get_output_embeddings().weight
    exact = learner.cast_lm_head_to_fp32 or not cuda
    rows = count * head.shape[0] * (4 if exact else head.element_size())
    hidden = count * head.shape[1] * head.element_size()
    found = []
    for batch in batches_of(count, trees=scorer.rows is None, cuda=cuda):
        saved.bytes.clear()
        with _without_numbers(), torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            scorer._hidden(batch)
        by_layer = [saved.bytes[index] for index in range(len(layers)) if saved.bytes[index]]
        found.append(
            Kept(
                layers=sum(by_layer),
                largest=max(by_layer, default=0),
                inputs=hidden * len(by_layer),
                beside=saved.bytes[None] + hidden,  # the head's
                logits=min(rows, LOGITS_BYTES_CUDA if cuda else LOGITS_BYTES_CPU),
            )
        )
    return max(found, key=lambda kept: kept.whole)


class _Saved:
    """Storages that autograd holds, each once, by the layer that was the first to save it."""

    def __init__(self, model: Any) -> None:
        own = (*model.parameters(), *model.buffers())
        self._seen = {x.untyped_storage()._cdata: x for x in own}
        self.bytes: Counter[int | None] = Counter()
        self._here: int | None = None

    def enter(self, layer: int | None) -> None:
        self._here = layer

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = x  # held, or another would get its address
            self.bytes[self._here] += storage.nbytes()
        return x


@contextmanager
def _without_numbers() -> Iterator[None]:
    """All of a mask is 1, and Triton's kernels have nothing to compute with."""
    with (
        shapes.patch(meta_nonzero_assume_all_nonzero=True),  # type: ignore[attr-defined]
        mock.patch.object(torch.Tensor, "__bool__", return_value=True),
        mock.patch.object(KernelInterface, "__getitem__"),
    ):
        yield


class _Attention(torch.autograd.Function):
    """In its place: what it saves, and no work."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, by_head: bool) -> Tensor:
        batch, heads, count, _ = query.shape
        size = (heads, count) if by_head else (count, heads)
        out = query.new_empty(batch, *size, value.shape[-1])
        sums = query.new_empty(batch, heads, count, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *,
    cuda: bool, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As FlexAttention is called on a card (flex.py), and our kernel on a CPU."""
    if not cuda:
        if more.get("softcap") is not None:
            return tree_attention(module, query, key, value, mask, **more)
        return _Attention.apply(query, key, value, False), None  # type: ignore[no-untyped-call]
    whole = torch.contiguous_format
    own = [x.clone(memory_format=whole) if x._is_view() else x for x in (query, key, value)]
    out: Tensor = _Attention.apply(*own, True)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), None
