"""What a core does in float32 products: PyTorch's own (MKL on x86) and oneDNN's, alternated.

    python -m bench.products

One thread, its CPU time; the shapes are the quickstart's: its layers and its head, for a learner's
batch and for the engine's decoding. GFLOP/s of a layer forward, and of both its gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from agentgrpo.kernels import products
from bench.harness import append_row, cpu_seconds

SHAPES = ((2000, 576, 3072), (2000, 1536, 576), (1146, 576, 49152), (96, 576, 3072), (4, 576, 576))
"""Rows, inputs, outputs."""
ROUNDS = 7


def onednn(a: Tensor, b: Tensor) -> Tensor:
    """Whatever products.matmul() would choose."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return product


def main(arguments: Sequence[str]) -> None:
    """Check that both agree, time them in turns, append the rows."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    chosen = "oneDNN's" if products.by_onednn() else "PyTorch's"
    for rows, into, out in SHAPES:
        x, weight, grad = torch.randn(rows, into), torch.randn(out, into), torch.randn(rows, out)
        for what, a, b in (
            ("forward", x, weight.T), ("input's gradient", grad, weight),
            ("weight's gradient", grad.T, x),
        ):  # fmt: skip
            exact = a[:64].double() @ b[:, :64].double()
            seen: dict[str, list[float]] = {"PyTorch": [], "oneDNN": []}
            ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
                "PyTorch": torch.matmul, "oneDNN": onednn,
            }  # fmt: skip
            for name, way in ways.items():
                off = (way(a, b)[:64, :64] - exact).abs().max().item()
                if not off <= 1e-5 * a.shape[1]:
                    raise RuntimeError(f"{name}'s {what} of {rows, into, out} is off by {off}")
            for _ in range(ROUNDS):
                for name, way in ways.items():
                    (seconds,) = cpu_seconds(partial(way, a, b), repeats=1, warmup=1)
                    seen[name].append(2e-9 * rows * into * out / seconds)
            for name, values in seen.items():
                append_row(
                    "products", f"{name}: {what}", values, unit="GFLOP/s",
                    shape={"rows": rows, "inputs": into, "outputs": out},
                    note=f"one thread; chosen on this CPU: {chosen}",
                )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
