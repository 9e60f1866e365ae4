"""Time the loss kernels on a GPU beside their peers and the machine's own roof.

python -m bench.gpu.kernels [--values | --sweep] [--no-rows] [--repeats N] [--dry-run] (see run.sh)

Per hidden width and share of sampled positions: forward and backward of one packed batch, median
of CUDA events, peak memory beyond what was there before, gradients included. Roofs measured in the
same run: device-to-device copy, and the three bare matrix products. Values are checked first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentgrpo.kernels import rows
from agentgrpo.kernels.checks import backend_for
from agentgrpo.kernels.delta_pack import pack_terms, pack_tokens
from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.kernels.logp import logp
from bench.gpu.peers import FROM_HIDDEN, FROM_LOGITS, Batch, Way, available
from bench.harness import append_row

SHARES = (1.0, 0.33, 0.125)


@dataclass
class Setting:
    """What is run: real shapes on a GPU, or the same code on a CPU to see that it works."""

    device: str
    positions: int
    vocab: int
    widths: tuple[int, ...]
    repeats: int
    write: bool

    def times_ms(
        self, fn: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> list[float]:
        """Of each repeat; `before` each is not timed."""
        for _ in range(3 if self.device == "cuda" else 1):
            before()
            fn()
        return [self._once_ms(fn, before) for _ in range(self.repeats)]

    def _once_ms(self, fn: Callable[[], object], before: Callable[[], object]) -> float:
        before()
        if self.device == "cpu":
            start = time.perf_counter()
            fn()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    def peak_mib(self, fn: Callable[[], object]) -> float:
        """Beyond what was allocated before; nan on a CPU, which does not count."""
        if self.device == "cpu":
            return float("nan")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def record(self, variant: str, values: list[float], unit: str, **shape: int) -> float:
        if self.write:
            return append_row("gpu_kernels", variant, values, unit=unit, shape=shape)
        return statistics.median(values)


def check(setting: Setting, width: int) -> None:
    """Our values and gradients at full size against fp32 products in plain torch, row by row."""
    batch = Batch.random((setting.positions, setting.vocab, width), 0.125, setting.device)
    where = batch.mask.nonzero().squeeze(1)
    targets = batch.targets[where]
    for logits_dtype, tolerance in ((torch.float32, 2e-3), (None, 0.15)):
        got, entropy = linear_logp(
            batch.hidden, batch.head, where, targets, logits_dtype=logits_dtype
        )
        (grad,) = torch.autograd.grad(got.sum(), batch.hidden)
        seen: list[tuple[float, float, float]] = []
        head = batch.head.detach().float()
        for some in torch.split(torch.arange(len(where), device=where.device), 256):
            leaf = batch.hidden.detach()[where[some]].float().requires_grad_()
            log_p = (leaf @ head.T).log_softmax(-1)
            want = log_p.gather(-1, targets[some, None])[:, 0]
            (want_grad,) = torch.autograd.grad(want.sum(), leaf, retain_graph=True)
            want_entropy = -(log_p.exp() * log_p).sum(-1)
            error = (grad[where[some]].float() - want_grad).norm() / want_grad.norm()
            off, off_entropy = (got[some] - want).abs().max(), (entropy[some] - want_entropy).abs()
            seen.append((off.item(), off_entropy.max().item(), error.item()))
        # numpy's: of Python's max nothing is left of a nan
        worst, worst_entropy, worst_grad = (float(x) for x in np.max(seen, axis=0))
        print(
            f"check H={width} logits {logits_dtype or 'default'}: max error logp {worst:.2e}, "
            f"entropy {worst_entropy:.2e}, gradient (relative) {worst_grad:.2e}"
        )
        shape = {"T": setting.positions, "V": setting.vocab, "H": width}
        errors = {"logp": worst, "entropy": worst_entropy, "gradient, relative": worst_grad}
        for what, error in errors.items():
            wide = "float32" if logits_dtype else "default"
            setting.record(f"error, logits {wide}: {what}", [error], "nats", **shape)
        if not (worst <= tolerance and worst_entropy <= tolerance and worst_grad <= 2e-2):
            raise SystemExit("the kernels are wrong on this machine: nothing is timed")


def copy_roof(setting: Setting) -> float:
    """TB/s of a device-to-device copy, read and write counted."""
    size = (2 << 30) if setting.device == "cuda" else (8 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    rates = [2 * size / ms / 1e9 for ms in setting.times_ms(lambda: target.copy_(source))]
    return setting.record("roof: copy", rates, "TB/s", bytes=size)


def products_roof(setting: Setting, width: int) -> float:
    """Ms of the three bare matrix products at all rows."""
    batch = Batch.random((setting.positions, setting.vocab, width), 1.0, setting.device)
    hidden, head = batch.hidden.detach(), batch.head.detach()

    def three() -> None:
        logits = hidden @ head.T
        _ = logits @ head
        _ = logits.T @ hidden

    shape = {"T": setting.positions, "V": setting.vocab, "H": width}
    return setting.record("roof: three products", setting.times_ms(three), "ms", **shape)


def step(batch: Batch, way: Way) -> Callable[[], None]:
    def run() -> None:
        torch.autograd.grad(way(batch), batch.leaves, allow_unused=True)

    return run


def time_ways(
    setting: Setting, title: str, ways: dict[str, Way], batch: Batch, share: float, width: int
) -> dict[str, float]:
    medians = {}
    given = None if batch.logits is None else batch.logits.detach().clone()

    def refill() -> None:  # two ways leave their gradient where the logits were
        if batch.logits is not None and given is not None:
            batch.logits.detach().copy_(given)

    for name, way in ways.items():
        run = step(batch, way)
        label = f"{title}: {name}"
        shape = {"T": setting.positions, "V": setting.vocab, "H": width}
        shape["sampled"] = int(batch.mask.sum())
        try:
            refill()
            memory = setting.peak_mib(run)
            times = setting.times_ms(run, refill)
        except Exception as error:  # a peer's failure is a result too; ours is raised
            if name.startswith("ours"):
                raise
            print(f"  {label:42s} share {share:5.3f}  FAILED {type(error).__name__}: {error}"[:200])
            times = []
        if not times:
            if setting.device == "cuda":  # here and not above: the error's frames hold tensors
                torch.cuda.empty_cache()
            continue
        medians[name] = setting.record(label, times, "ms", **shape)
        if setting.device == "cuda":
            setting.record(f"{label}, peak memory", [memory], "MiB", **shape)
        numbers = f"{medians[name]:10.2f} ms {memory:10.0f} MiB"
        print(f"  {label:42s} H {width:5d} share {share:5.3f} {numbers}")
    return medians


def from_hidden(setting: Setting, ways: dict[str, Way], width: int) -> None:
    roof = products_roof(setting, width)
    for share in SHARES:
        batch = Batch.random((setting.positions, setting.vocab, width), share, setting.device)
        medians = time_ways(setting, "from hidden", ways, batch, share, width)
        mine = medians["ours"]
        if share == 1.0:
            print(f"  -> {mine / roof:.2f} x three bare products ({roof:.2f} ms); target <= 1.15")
        others = {x: ms for x, ms in medians.items() if "ours" not in x and "gathered" not in x}
        if best := min(others, key=others.__getitem__, default=""):
            print(f"  -> {others[best] / mine:.2f} x faster than the best on every row, {best}")


def from_logits(setting: Setting, ways: dict[str, Way], bandwidth: float) -> None:
    shape = (setting.positions, setting.vocab, 16)
    for share in SHARES:
        batch = Batch.random(shape, share, setting.device, logits=True)
        time_ways(setting, "from logits", ways, batch, share, 0)
    batch = Batch.random(shape, 1.0, setting.device, logits=True)
    assert batch.logits is not None
    logits = batch.logits.detach()
    rate = forward_rate(setting, logits, batch.targets)
    print(f"  -> forward reads {rate:.2f} TB/s, {rate / bandwidth:.0%} of the copy; target >= 84 %")


def forward_of(logits: Tensor, targets: Tensor) -> Callable[[], object]:
    """The kernel that reads all logits, alone: logp() also checks targets, and waits for that."""
    if logits.is_cuda:
        return lambda: rows.triton_stats(logits, None, 1.0, None)
    return lambda: logp(logits, targets)


def forward_rate(setting: Setting, logits: Tensor, targets: Tensor) -> float:
    """TB/s of logits read by the forward kernel."""
    times = setting.times_ms(forward_of(logits, targets))
    rates = [logits.numel() * logits.itemsize / ms / 1e9 for ms in times]
    return setting.record(
        "from logits: forward read", rates, "TB/s", T=len(targets), V=logits.shape[1]
    )


def from_runs(setting: Setting) -> None:
    """A batch made on the device from runs, beside what it would take to send it, expanded."""
    length = 64 if setting.device == "cuda" else 8
    count = setting.positions
    ids = torch.arange(count, dtype=torch.int32, device=setting.device)
    start = torch.arange(0, count, length, dtype=torch.int32, device=setting.device)
    tokens, terms = start.repeat(4, 1), start.repeat(8, 1)
    logp = ids.float()
    made = [*pack_tokens(ids, tokens, count), *pack_terms(ids, logp, terms, count)]
    host = [x.cpu().pin_memory() if x.is_cuda else x for x in made]
    ways: dict[str, Callable[[], object]] = {
        "from runs": lambda: (
            pack_tokens(ids, tokens, count), pack_terms(ids, logp, terms, count)
        ),
        "from runs: the same, sent": lambda: [
            x.to(setting.device, non_blocking=True) for x in host
        ],
    }  # fmt: skip
    for label, way in ways.items():
        median = setting.record(label, setting.times_ms(way), "ms", T=count, runs=len(start))
        print(f"  {label}: {median:.3f} ms")


def sweep(setting: Setting) -> None:
    """The forward kernel's launch shapes, to choose those at the head of kernels/rows.py from."""
    batch = Batch.random((setting.positions, setting.vocab, 16), 1.0, setting.device, logits=True)
    assert batch.logits is not None
    logits = batch.logits.detach()
    chosen = rows.FORWARD_BLOCK_V, rows.FORWARD_WARPS, rows.FORWARD_STAGES
    for block, warps in ((2048, 4), (4096, 4), (8192, 4), (4096, 8), (8192, 8), (8192, 16)):
        for stages in (1, 3, 4):
            rows.FORWARD_BLOCK_V, rows.FORWARD_WARPS, rows.FORWARD_STAGES = block, warps, stages
            times = setting.times_ms(forward_of(logits, batch.targets))
            label = f"sweep: forward block {block} warps {warps} stages {stages}"
            median = setting.record(label, times, "ms", T=setting.positions, V=setting.vocab)
            print(f"  {label}: {median:.3f} ms")
    rows.FORWARD_BLOCK_V, rows.FORWARD_WARPS, rows.FORWARD_STAGES = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--values", action="store_true", help="check them and time nothing")
    parser.add_argument("--sweep", action="store_true", help="also try other launch shapes")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.dry_run:
        write = "BENCH_OUT" in os.environ
        setting = Setting("cpu", 64, 509, (16, 32), 2, write)
    elif torch.cuda.is_available():
        write = not arguments.no_rows
        setting = Setting("cuda", 16_384, 151_936, (1024, 2560, 4096), arguments.repeats, write)
    else:
        raise SystemExit("no CUDA device: --dry-run shows on a CPU that the script works")
    print(f"device {setting.device}, kernels by {backend_for(torch.device(setting.device))}")
    if arguments.dry_run:
        print("a dry run: that it ends is all that its numbers say")
    hidden_ways, hidden_absent = available(FROM_HIDDEN)
    logits_ways, logits_absent = available(FROM_LOGITS)
    for name, why in {**hidden_absent, **logits_absent}.items():
        print(f"absent: {name} ({why})")
    for width in setting.widths:
        check(setting, width)
    if arguments.values:
        return
    bandwidth = copy_roof(setting)
    print(f"roof: copy {bandwidth:.3f} TB/s")
    for width in setting.widths:
        from_hidden(setting, hidden_ways, width)
    from_logits(setting, logits_ways, bandwidth)
    from_runs(setting)
    if arguments.sweep:
        sweep(setting)


if __name__ == "__main__":
    main()
