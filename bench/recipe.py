"""Compare the recipe's held-out quality and efficiency with prompting.

    python -m bench.recipe [section.key=value ...] [--seeds 0 1 2] [--folder DIR] [--no-rows]

Each seed works in DIR/seed_N and continues after a stop; the tree must not change in between. Rows
per seed: quality, efficiency and tool calls of prompting, of the fine-tuned policy and of the last
stage's policy, the latter with the paired 95 % interval of the gain; wall seconds. Rows over
several seeds have one value per seed (`quality of 3 seeds, trained`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgrpo.recipe.measures import differences
from agentgrpo.recipe.report import rows_of
from bench.harness import append_row


def run_seed(seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The report of a seed's recipe, finished if it is not."""
    out_dir = folder / f"seed_{seed}"
    command = [sys.executable, "-m", "agentgrpo", "recipe", "recipe", *overrides]
    subprocess.run([*command, f"seed={seed}", f"out_dir={out_dir}"], check=True)
    report: dict[str, Any] = json.loads((out_dir / "report.json").read_text())
    return report


def append_rows(report: dict[str, Any], overrides: Sequence[str]) -> None:
    """The rows of a seed."""
    reports = report["reports"]
    shape = {"seed": report["seed"], "tasks": reports["trained"]["tasks"]}
    first, last = (rows_of(reports[part]) for part in ("prompting", "trained"))
    gained = differences(first, last)
    for name in ("quality", "efficiency", "tool_calls"):
        gain = f"gain {gained[name].value:.3f} [{gained[name].low:.3f}, {gained[name].high:.3f}]"
        for part, measured in reports.items():
            append_row(
                "recipe", f"{name}, {part}", [measured["measures"][name]["value"]],
                unit="calls" if name == "tool_calls" else "share", shape=shape,
                note=", ".join([*overrides, *([gain] if part == "trained" else [])]),
            )  # fmt: skip
    parts = ", ".join(f"{part} {seconds:.0f}" for part, seconds in report["seconds"].items())
    total = sum(report["seconds"].values())
    append_row("recipe", "wall_s", [total], unit="s", shape=shape, note=parts)


def append_rows_of_all(reports: Sequence[dict[str, Any]], overrides: Sequence[str]) -> None:
    """The rows of several seeds, in the order of `reports`."""
    seeds = f"{len(reports)} seeds"
    shape = {"seeds": len(reports), "tasks": reports[0]["reports"]["trained"]["tasks"]}
    for name in ("quality", "efficiency", "tool_calls"):
        for part in reports[0]["reports"]:
            values = [report["reports"][part]["measures"][name]["value"] for report in reports]
            append_row(
                "recipe", f"{name} of {seeds}, {part}", values,
                unit="calls" if name == "tool_calls" else "share", shape=shape,
                note=", ".join([*overrides, f"by seed: {[round(value, 3) for value in values]}"]),
            )  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Run the seeds, append the rows of each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/recipe_bench"))
    parser.add_argument("--no-rows", action="store_true", help="print only")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(arguments)
    reports = []
    for seed in args.seeds:
        reports.append(run_seed(seed, args.folder, args.overrides))
        if not args.no_rows:
            append_rows(reports[-1], args.overrides)
    if len(reports) > 1 and not args.no_rows:
        append_rows_of_all(reports, args.overrides)


if __name__ == "__main__":
    main(sys.argv[1:])
