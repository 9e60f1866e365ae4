"""Do the shipped configs for a CPU train, and do their metrics move as they should?

    python -m bench.configs [NAME ...] [--model DIR] [--no-rows] [section.key=value ...]

Each config trains for a few steps in a process of its own, beside the files of agentgrpo.examples,
cut in size by CUTS so that two cores need minutes (the tau benchmarks' as bench/small_tau.py says,
where tau2's first fine-tune on a few conversations).
A run counts if it ended well, lost no rollout to the machine, the sampler agreed with the learner
at every step, and what MOVES names is higher in the last third of its steps than in the first.
Rows: the values of each step, in order, in the note.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from agentgrpo import examples
from agentgrpo.run import checkpoint
from agentgrpo.run.atomic import read_lines
from bench import small_tau
from bench.harness import append_row

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("rollout.tasks_per_step=6", "data.num_heldout=4", "learner.decay=constant")
CUTS: Mapping[str, Sequence[str]] = {
    "code_format": (*SMALL, "steps=8"),
    "console": (*SMALL, "steps=5"),
    "frozen_lake": (*SMALL, "steps=6"),
    "inline": (*SMALL, "steps=6"),
    "quickstart": (*SMALL, "steps=6"),
    "reasoning_gym": (*SMALL, "steps=6"),
    "tools": (*SMALL, "steps=6"),
    "search": (*SMALL, "steps=4", "rollout.tasks_per_step=4"),
    "unit_tests": (*SMALL, "steps=6"),
    "mcp": (*SMALL, "steps=4", "rollout.tasks_per_step=4"),
    "verifiers": (*SMALL, "steps=6", "rollout.tasks_per_step=4"),
    "tau2_retail": (*SMALL, "steps=6", "data.num_heldout=1"),
    "tau2_telecom": (*SMALL, "steps=5", "rollout.tasks_per_step=17", "data.num_heldout=1"),
    "tau_bench": (*SMALL, "steps=3", "rollout.tasks_per_step=3", "data.num_heldout=1"),
}
COLD = (
    f"sft.data={small_tau.COLD_START}", "sft.epochs=3", "sft.batch_size=6",
    "sft.learning_rate=1e-4", "out_dir=cold",
)  # fmt: skip
MOVES: Mapping[str, Sequence[str]] = dict.fromkeys(CUTS, ("reward",)) | {
    "code_format": ("acted", "reward"),
}
"""What must rise, by config; `acted` is the share of rollouts that called a tool at all."""
DLOGP_LIMIT = 1e-3


def train(name: str, folder: Path, overrides: Sequence[str]) -> float:
    """Train once, in a process of its own, into folder/run; its wall seconds."""
    examples.write(folder)
    made = small_tau.MADE[name](folder) if name in small_tau.MADE else []
    settings = [*made, *CUTS[name], *overrides]

    def run(module: str, *more: str) -> None:
        command = [sys.executable, "-m", module, name, *settings, *more]
        subprocess.run(command, check=True, cwd=folder, env=environment())

    started = time.perf_counter()
    if (folder / small_tau.COLD_START).exists():
        run("agentgrpo.recipe.sft", *COLD)
        settings.append(f"model={checkpoint.newest(folder / 'cold' / 'sft')}")
    run("agentgrpo.train", "out_dir=run")
    return time.perf_counter() - started


def environment() -> dict[str, str]:
    """As where the environment is activated, with this checkout's agentgrpo."""
    first = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    paths = {name: [str(path), os.environ.get(name, "")] for name, path in first.items()}
    return os.environ | {name: os.pathsep.join(filter(None, both)) for name, both in paths.items()}


def steps_of(out_dir: Path) -> dict[str, list[float]]:
    """What each training step measured, by name, and its rollouts' own figures."""
    rows = read_lines(out_dir / "metrics.jsonl")
    steps = [row for row in rows if "rollout/reward" in row]
    found = {
        "reward": [row["rollout/reward"] for row in steps],
        "solved": [row["rollout/solved"] for row in steps if "rollout/solved" in row],
        "live_groups": [float(row["rollout/live_groups"]) for row in steps],
        "infra_errors": [row["rollout/infra_errors"] for row in steps],
        "grad_norm": [row.get("learner/grad_norm", 0.0) for row in steps],
        "max_dlogp": [
            max(row["engine/max_dlogp"], row.get("learner/sampler_gap_max", 0.0)) for row in steps
        ],
    }
    acted: dict[int, list[float]] = {}
    for rollout in read_lines(out_dir / "rollouts.jsonl"):
        if rollout["split"] == "train":
            share = acted.setdefault(rollout["step"], [])
            share.append(float(rollout["stats"]["tool_calls"] > 0))
    found["acted"] = [fmean(acted[step]) for step in sorted(acted)]
    return found


def rise(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last third."""
    third = max(1, len(values) // 3)
    return fmean(values[:third]), fmean(values[-third:])


def faults(name: str, found: Mapping[str, Sequence[float]]) -> list[str]:
    """What of a run is not as it should be."""
    wrong = []
    if sum(found["infra_errors"]):
        wrong.append(f"{sum(found['infra_errors']):.0f} rollouts broken by the machine")
    if max(found["max_dlogp"]) > DLOGP_LIMIT:
        wrong.append(f"sampler and learner differ by {max(found['max_dlogp']):.1e}")
    if not max(found["grad_norm"]) > 0:
        wrong.append("no step had a gradient")
    for metric in MOVES[name]:
        first, last = rise(found[metric])
        if not last > first:
            wrong.append(f"{metric} did not rise: {first:.3f} -> {last:.3f}")
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Run the configs, print and append the rows. Returns 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME|section.key=value")
    parser.add_argument("--model", help="a model directory instead of the configs' package")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    args = parser.parse_args(arguments)
    names = [name for name in args.names if "=" not in name] or list(CUTS)
    changed = [name for name in args.names if "=" in name]
    overrides = [*changed, *([f"model={Path(args.model).resolve()}"] if args.model else [])]
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            seconds = train(name, Path(folder), overrides)
            found = steps_of(Path(folder) / "run")
        wrong = faults(name, found)
        failed |= bool(wrong)
        print(name, f"{seconds:.0f} s", json.dumps(found), *wrong, sep="\n  ")
        if args.no_rows or wrong:
            continue
        shape = {"steps": len(found["reward"])}
        for metric in ("acted", "reward", "solved", "max_dlogp"):
            values = [round(value, 6) for value in found[metric]]
            if not values:
                continue  # nobody says what is solved
            unit = "nats" if metric == "max_dlogp" else "mean" if metric == "reward" else "share"
            note = f"by step: {values}; {' '.join([*CUTS[name], *changed])}"
            append_row("configs", f"{name}_{metric}", values, unit=unit, shape=shape, note=note)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
