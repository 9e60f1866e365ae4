"""What a training step must compute and move, on paper: the share of an H100's peak it can reach.

    python -m bench.gpu.roofline

A layer of the real shapes goes forward and backward on no device, as transformers has it and with
Liger's kernels in it (models/liger.py), and every operation that would launch a kernel is counted:
products by their FLOP, the others by the bytes that they read and write. Attention, head and
optimizer are formulas. Nothing here was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM
from triton import KernelInterface

from agentgrpo.models.liger import fuse

PEAK, RATE = 989e12, 3.35e12
"""An H100 SXM's: dense bfloat16 FLOP/s, bytes/s of its memory (NVIDIA's data sheet)."""
PRODUCTS = ("mm", "addmm", "bmm")
SILENT = ("detach", "empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view")
WRITTEN_TOO = {"_triton_rope": (0, 2), "_swiglu_backward_kernel": (1, 2)}
"""Of Liger's kernels: which arguments they read and write in place."""
OPTIMIZER_BYTES = 54
"""Of a trained parameter and update: norm 4, clipping 8, fused AdamW 28 (sum, master and moments
read, the last three written), bfloat16 written 2; and of one batch the gradient of 2 written and
added: 2 + 2 + 8."""


class _Attention(torch.autograd.Function):
    """In its place: tensors of the right shapes, no work."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.shapes = q, k, v
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.shapes))


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
    return _Attention.apply(q, k, v).transpose(1, 2), None  # type: ignore[no-untyped-call]


@dataclass
class Counted(TorchDispatchMode):
    """Operations that launch kernels: views and the making of tensors do not."""

    launches: Counter[str] = field(default_factory=Counter)
    flop: int = 0
    moved: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        if func.is_view or name in SILENT:
            return out
        self.launches[name] += 1
        if name in PRODUCTS:
            *_, a, b = (x for x in args if isinstance(x, Tensor))
            self.flop += 2 * math.prod(a.shape) * b.shape[-1]
        else:
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
            self.moved += sum(_bytes(x) for x in tensors)
        return out

    @contextmanager
    def triton(self) -> Iterator[None]:
        """Count Triton's kernels instead of launching them: each tensor once, or written too."""

        def launched(kernel: Any) -> Any:
            name = kernel.fn.__name__

            def launch(*args: Any, **_: Any) -> None:
                self.launches[name] += 1
                touched = [*args, *(args[i] for i in WRITTEN_TOO.get(name, ()))]
                self.moved += sum(_bytes(x) for x in touched if isinstance(x, Tensor))

            return launch

        with mock.patch.object(KernelInterface, "__getitem__", lambda self, _: launched(self)):
            yield


def _bytes(x: Tensor) -> int:
    """What is read of a tensor: expanded sizes cost nothing."""
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return x.element_size() * math.prod(sizes)


def layer(config: Any, tokens: int, *, fused: bool = False) -> tuple[Counted, Counted]:
    """What a layer's forward and backward pass over so many tokens launch, in bfloat16.

    Args:
        config: of transformers; changed.
        tokens: in one row.
        fused: with Liger's kernels, as on a card of one multiprocessor: the partial gradients of
            norms' weights, of which others write and add more, are not counted.
    """
    AttentionInterface.register("nothing", _attend)
    config.num_hidden_layers = 1
    config._attn_implementation = "nothing"
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = whole.model
        x = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        at = torch.empty(1, tokens, dtype=torch.int64)
        places = model.rotary_emb(x, at)
    if fused:
        fuse(whole)
    with Counted() as forward, forward.triton():
        out = model.layers[0](x, position_embeddings=places, position_ids=at)
    gradient = torch.empty_like(out)
    with Counted() as backward, backward.triton():
        out.backward(gradient)
    return forward, backward


@dataclass(frozen=True)
class Paper:
    """Of one update on `tokens` tokens, all of them trained; seconds at an H100's peak."""

    model: float
    """6 FLOP a parameter and token, and attention's 12: what MFU counts."""
    products: float
    """All that is computed: the head's logits a second time, attention's scores too."""
    elementwise: float
    """Bytes between the products of the layers."""
    optimizer: float
    launches: int

    @property
    def bound(self) -> float:
        """The MFU with every kernel at its roof."""
        return self.model / (self.products + self.elementwise + self.optimizer)

    def needed(self, goal: float) -> float:
        """The share of the peak that products must reach for an MFU of `goal`."""
        return self.products / (self.model / goal - self.elementwise - self.optimizer)


def paper(config: Any, *, tokens: int, context: int, fused: bool = False) -> Paper:
    """The roofline of a dense model.

    Args:
        config: of transformers.
        tokens: of the update.
        context: keys that a token attends to, on average.
        fused: with Liger's kernels.
    """
    layers, hidden = config.num_hidden_layers, config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    forward, backward = layer(config, tokens=1024, fused=fused)
    weights = forward.flop // (2 * 1024)
    head = hidden * config.vocab_size
    attention = heads * context * layers
    model = 6 * (weights * layers + head) + 12 * attention
    computed = (forward.flop + backward.flop) / 1024 * layers + 8 * head + 14 * attention
    moved = (forward.moved + backward.moved) / 1024
    return Paper(
        model=model * tokens / PEAK,
        products=computed * tokens / PEAK,
        elementwise=moved * layers * tokens / RATE,
        optimizer=OPTIMIZER_BYTES * (weights * layers + head) / RATE,
        launches=sum(forward.launches.values()) + sum(backward.launches.values()),
    )


def table(config_of: Any) -> str:
    """The rows of docs/gpu.md: 65,536 tokens, 4,096 keys a token."""
    rows = []
    for size in ("0.6b", "1.7b", "4b", "8b"):
        for fused in (False, True):
            p = paper(config_of(size), tokens=65536, context=4096, fused=fused)
            kind = f"{'fused' if fused else 'plain'}, {p.launches} kernels a layer"
            rows.append(
                f"| {size.upper()}, {kind} | {p.products:.2f} s | {p.elementwise:.2f} s | "
                f"{p.optimizer:.2f} s | {p.bound:.0%} | {p.needed(0.45):.0%} |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    from tests import qwen3

    print(table(qwen3.config))
