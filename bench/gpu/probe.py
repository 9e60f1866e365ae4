"""What this card is, and whether attention over trees is right on it.

python -m bench.gpu.probe [--dry-run]

The same tree through tree_attention() on the CPU in float32 and on the card in bfloat16: branches
(FlexAttention), rows (FlashAttention's variable-length kernel), a window, a soft cap, 3 query heads
a key head. Rows: |difference| / |value| of the output and of the three gradients.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import NamedTuple

from agentgrpo.support.runtime import prepare_environment

prepare_environment()

import numpy as np
import torch
from torch import Tensor

from agentgrpo.learn.attention import Tree, tree_attention
from agentgrpo.learn.batch import Deltas, PackedBatch
from agentgrpo.types import Segment
from bench.harness import append_row

NAME = "gpu_probe"
TOLERANCE = 2e-2
"""Of bfloat16 against float32, relative; a wrong mask is off by tenths."""


class Shape(NamedTuple):
    """A group of `rollouts` that share `prompt` tokens, `more` each, through `heads` heads."""

    prompt: int
    more: int
    rollouts: int
    heads: tuple[int, int]
    head_dim: int


class Case(NamedTuple):
    """One way through the attention of a layer."""

    name: str
    shared: bool
    window: int | None = None
    softcap: float | None = None
    heads: tuple[int, int] | None = None


CASES = (
    Case("tree", shared=True),
    Case("rows", shared=False),
    Case("tree, window", shared=True, window=700),
    Case("rows, window", shared=False, window=700),
    Case("tree, soft cap", shared=True, softcap=30.0),
    Case("tree, 12 on 4 heads", shared=True, heads=(12, 4)),
)


def layout(shape: Shape, *, shared: bool) -> PackedBatch:
    """The group, its prompt once or in each rollout."""
    prompt = shape.prompt if shared else 0
    length = shape.prompt + shape.more - prompt
    starts = prompt + length * np.arange(shape.rollouts)
    total = prompt + length * shape.rollouts
    runs = [[0, 0, 0, total]] * shared + [[s, s, prompt, s + length] for s in starts.tolist()]
    deltas = Deltas([Segment(np.zeros(total, np.int32))])
    runs_4R = np.array(runs, np.int32).T.copy()
    return PackedBatch(deltas, runs_4R, np.zeros((8, 0), np.int32), total, 0)


def through(
    case: Case, shape: Shape, given: list[Tensor], device: str, dtype: torch.dtype
) -> list[Tensor]:
    """The output and the gradients of query, key and value, in float32 on the CPU."""
    tree = Tree(layout(shape, shared=case.shared), device)
    leaves = [x.to(device, dtype).requires_grad_() for x in given[:3]]
    query, key, value = leaves
    out, _ = tree_attention(
        torch.nn.Identity(), query, key, value, None, sliding_window=case.window,
        softcap=case.softcap, tree=tree,
    )  # fmt: skip
    grads = torch.autograd.grad(out, leaves, given[3].to(device, dtype))
    return [x.detach().float().cpu() for x in (out, *grads)]


def compare(case: Case, shape: Shape, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors, and the seconds that the card's side took, compiling included."""
    torch.manual_seed(0)
    total = layout(shape, shared=case.shared).num_tokens
    query_heads, key_heads = case.heads or shape.heads
    sizes = [query_heads, key_heads, key_heads]
    given = [torch.randn(1, heads, total, shape.head_dim).bfloat16().float() for heads in sizes]
    given.append(torch.randn(1, total, query_heads, shape.head_dim).bfloat16().float())
    wanted = through(case, shape, given, "cpu", torch.float32)
    started = time.perf_counter()
    got = through(case, shape, given, device, dtype)
    seconds = time.perf_counter() - started
    errors = {
        name: ((a - b).norm() / b.norm()).item()
        for name, a, b in zip(("output", "query", "key", "value"), got, wanted, strict=True)
    }
    return {"seconds": seconds} | errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    asked = parser.parse_args()
    if asked.dry_run:
        shape, device, dtype = Shape(150, 30, 3, (4, 2), 16), "cpu", torch.float32
    elif torch.cuda.is_available():
        shape, device, dtype = Shape(1024, 256, 8, (16, 8), 128), "cuda", torch.bfloat16
    else:
        raise SystemExit("no CUDA device: --dry-run shows on a CPU that the script works")
    facts = {"cores": os.cpu_count() or 0}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        facts |= {"sm": properties.major * 10 + properties.minor, "free_mib": free >> 20}
        facts |= {"multiprocessors": properties.multi_processor_count}
        append_row(NAME, "device memory", [total / 2**20], unit="MiB", shape=facts)
    wrong = []
    for case in CASES:
        try:
            seen = compare(case, shape, device, dtype)
        except Exception as error:  # the others are worth having
            wrong.append(f"{case.name}: {type(error).__name__}: {error}"[:300])
            continue
        sizes = {"prompt": shape.prompt, "more": shape.more, "rollouts": shape.rollouts}
        for name, value in seen.items():
            unit = "s" if name == "seconds" else "relative"
            append_row(NAME, f"{case.name}: {name}", [value], unit=unit, shape=sizes)
            if name != "seconds" and not value < TOLERANCE:
                wrong.append(f"{case.name}: {name} is off by {value:.1e}")
    if wrong:
        raise SystemExit("wrong: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
