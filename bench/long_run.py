"""Measure resident memory, seconds and open files of each step of a long run.

    python -m bench.long_run [section.key=value ...] [--config quickstart] [--steps 200] [--no-rows]

`--config tiny`: the tests' two-layer model with 64 rollouts per step, some seconds each. Trains in
a temporary folder. Rows cover the steps after the 20th; their notes compare the first ten of these
with the last ten. `in_use` is the memory that glibc counts as not freed, over all its arenas; the
rest of the resident memory is code, the KV cache and other mappings.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgrpo import Callback, Trainer
from agentgrpo.config.read import load_config
from agentgrpo.support.atomic_files import write_lines
from agentgrpo.support.memory import rss_bytes
from agentgrpo.support.runtime import prepare_environment
from agentgrpo.types import Metrics
from bench.harness import append_row, measured_commit

WARM = 20
TINY = """
model = "{folder}/agent"
out_dir = "o"
steps = 4
save_every = 50
eval_every = 5
[agent.options]
system_prompt = "S"
[rollout]
tasks_per_step = 8
group_size = 8
max_turns = 2
max_turn_tokens = 24
refill_below = 2
[engine]
max_model_len = 192
kv_cache_gib = 0.0625
[data]
train = "{folder}/train.jsonl"
heldout = "{folder}/heldout.jsonl"
num_heldout = 4
[learner]
learning_rate = 1e-4
"""
UNITS = {"rss": "GiB", "in_use": "GiB", "step": "s", "files": "descriptors"}


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(f"f{i}", ctypes.c_size_t) for i in range(10)]


def in_use_bytes() -> int:
    """What glibc has handed out, mapped blocks included."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return int(info.f7 + info.f4)  # uordblks, hblkhd


class Watch(Callback):
    """Looks at the process as each step ends."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {name: [] for name in UNITS}
        self._since = time.perf_counter()

    def on_step_end(self, trainer: Any, step: int, metrics: Metrics) -> None:
        """Write the numbers of this step down."""
        now = time.perf_counter()
        numbers = {
            "rss": rss_bytes() / 2**30,
            "in_use": in_use_bytes() / 2**30,
            "step": now - self._since,
            "files": len(os.listdir("/proc/self/fd")),
        }
        self._since = now
        for name, number in numbers.items():
            self.seen[name].append(number)
        if step % 10 == 0:
            print(step, *(f"{name} {number:.3f}" for name, number in numbers.items()), flush=True)


def tiny_config(folder: Path) -> Path:
    """A model that adds small numbers by code, its tasks and its config."""
    from tests import tiny

    tiny.make_agent_dir(folder / "agent", tied=False)
    for name, count, seed in (("train", 200, 0), ("heldout", 4, 1)):
        write_lines(folder / f"{name}.jsonl", tiny.sums(count, seed=seed))
    config = folder / "tiny.toml"
    config.write_text(TINY.format(folder=folder))
    return config


def main(arguments: Sequence[str]) -> None:
    """Train, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-rows", action="store_true", help="print only")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(arguments)
    if not args.no_rows:
        measured_commit()
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        chosen = tiny_config(Path(folder)) if args.config == "tiny" else args.config
        own = [f"steps={args.steps}", f"out_dir={folder}/run"]
        watch = Watch()
        with Trainer(load_config(chosen, [*args.overrides, *own]), callbacks=watch) as trainer:
            trainer.train()
    for name, values in watch.seen.items():
        later = values[WARM:]
        first, last = (statistics.fmean(some) for some in (later[:10], later[-10:]))
        note = f"{first:.4g} -> {last:.4g} ({last / first - 1:+.1%}), most {max(later):.4g}"
        if args.no_rows:
            print(name, note)
            continue
        append_row(
            "long_run", f"{args.config}_{name}", later, unit=UNITS[name],
            shape={"steps": len(values)}, note=f"{note} {' '.join(args.overrides)}",
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
