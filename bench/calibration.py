"""Measure what RL, and each of its parts, adds to fine-tuning in right answers and calls.

    python -m bench.calibration [--arms NAME ...] [--seeds 0 1 2] [--budget HOURS] [--folder DIR]
        [--no-rows] [section.key=value ...]
    python -m bench.calibration --table
    python -m bench.calibration --graph FILE.png

Each arm of each seed is a row of bench/results/calibration.jsonl; an arm that has a row with the
same settings and tasks is skipped. It can be stopped at any time; the same command continues in
DIR. An arm starts only if the longest one so far would still end within HOURS. All arms of a seed
share its flywheel and fine-tuning, and the rollouts of the first stage's candidates where these are
equal; their seconds count for `full`. Checkpoints of an arm are deleted after its row is written.
The code must not change in between.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.word_problems import Split
from agentgrpo.recipe.curriculum import steps_of
from agentgrpo.recipe.processes import run_parts
from agentgrpo.recipe.recipe import parts_of
from agentgrpo.records import checkpoint
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.support.files import read_table
from bench import tallies
from bench.harness import measured_commit, rows_folder, traced_row

CONFIG = str(Path(__file__).with_suffix(".toml"))
SHARED: Mapping[str, Sequence[str]] = {
    "prompting": ["prompting"],
    "tuned": ["flywheel", "sft", "tuned"],
}
"""Arms without RL, and the parts of a recipe that they are."""
ARMS: Mapping[str, Sequence[str]] = {
    "prompting": (),
    "tuned": (),
    "full": (),
    # not 0, which would also change what a wrong form costs
    "no sigmas": ("reward.sigma_tool=1e-9", "reward.sigma_length=0"),
    "no branching": ("rollout.branching={initial=0}",),
    "no selection": ("curriculum.selection=random", "curriculum.by_kind=false"),
    "one stage": ("curriculum.stages=1",),
}
"""What is changed in each; `one stage` also gets the work of all stages (see job_of())."""
UNREAD = "data.num_heldout=4"
"""For what each run of a stage measures by itself, at its begin and its end."""
DRAWS = 10_000
Flags = NDArray[np.float64]


def job_of(
    arm: str, seed: int, folder: Path, overrides: Sequence[str]
) -> tuple[list[str], Sequence[str]]:
    """Overrides of the config for an arm, and names of a recipe's parts to be done with them.

    Raises:
        ValueError: the seed's policy is not fine-tuned.
    """
    given = [*overrides, *ARMS[arm], f"seed={seed}"]
    given.append(f"out_dir={folder_of(arm, seed, folder, overrides)}")
    if arm in SHARED:
        return given, SHARED[arm]
    recipe = load_config_of(RecipeConfig, CONFIG, overrides)
    c, stages = recipe.curriculum, range(recipe.curriculum.stages)
    if arm == "one stage":
        given += [f"curriculum.{k}={getattr(c, k) * c.stages}" for k in ("candidates", "select")]
        given.append(f"curriculum.steps=[{sum(steps_of(recipe, stage) for stage in stages)}]")
        stages = range(1)
    tuned = checkpoint.newest(folder_of("tuned", seed, folder, overrides) / "sft")
    if tuned is None:
        raise ValueError(f"{arm}, seed {seed}: begins with what the arm `tuned` makes")
    parts = [f"{stage}.{what}" for stage in stages for what in ("select", "train")]
    return [*given, f"model={tuned}", "curriculum.start=model"], [*parts, "trained"]


def folder_of(arm: str, seed: int, folder: Path, overrides: Sequence[str]) -> Path:
    """Of an arm's work: another for other settings, whose work is not to be taken for these'."""
    return folder / f"seed_{seed}" / f"{arm.replace(' ', '_')}-{key_of(arm, overrides)}"


def key_of(arm: str, overrides: Sequence[str]) -> str:
    """Names the settings of an arm, and the tasks: rows of one key answer one question."""
    recipe = load_config_of(RecipeConfig, CONFIG, overrides)
    given = recipe.model_dump(mode="json", exclude_unset=True, exclude={"out_dir"})
    table = [given, ARMS[arm], _tasks()]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:12]


@cache
def _tasks() -> str:
    """All that there is to be asked, as JSON."""
    splits: tuple[Split, Split] = ("train", "heldout")
    return json.dumps(
        [(t.messages, dict(t.spec)) for split in splits for t in tallies.tasks(split)]
    )


def run_arm(arm: str, seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Do what is left of an arm; what its row holds."""
    before = _cpu_seconds()
    settings, names = job_of(arm, seed, folder, overrides)
    recipe = load_config_of(RecipeConfig, CONFIG, settings)
    recipe.out_dir.mkdir(parents=True, exist_ok=True)
    if arm not in SHARED:
        _share_candidates(recipe, folder_of("full", seed, folder, overrides))
    parts = {part.name: part for part in parts_of(recipe)}
    *first, last = [parts[name] for name in names]
    run_parts(recipe, first, [CONFIG, *settings, UNREAD])
    seconds = run_parts(recipe, [last], [CONFIG, *settings])
    report = read_table(recipe.out_dir / "measures" / last.name / "report.json")
    spent = {"seconds": round(sum(seconds.values())), "cpu_s": round(_cpu_seconds() - before)}
    return {**spent, **row_of(report["per_task"])}


def _share_candidates(recipe: RecipeConfig, full: Path) -> None:
    """What `full` played for its first selection, where this arm would play the same."""
    source, own = full / "stage_0" / "pool.jsonl", recipe.out_dir / "stage_0" / "pool.jsonl"
    if source.exists() and not own.exists() and recipe.rollout.branching.initial:
        own.parent.mkdir(parents=True)
        shutil.copy(source, own)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row_of(per_task: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of a report: means, and by task what they are means of.

    Raises:
        KeyError: a task is not of tallies.
    """
    least = {task.id: int(task.spec["least"]) for task in tallies.tasks("heldout")}
    solved = np.array([float(task["solved"]) for task in per_task])
    calls = np.array([task["columns"]["tool_calls"] for task in per_task])
    needed = np.array([least[task["id"]] for task in per_task], dtype=np.float64)
    kinds = sorted({task["kind"] for task in per_task})
    of = {kind: np.array([task["kind"] == kind for task in per_task]) for kind in kinds}
    return {
        **_means(solved, calls, needed),
        "kinds": {
            kind: _means(solved[of[kind]], calls[of[kind]], needed[of[kind]]) for kind in kinds
        },
        "solved": "".join(f"{value:.0f}" for value in solved),
        "calls": "".join(f"{value:.0f}" for value in calls),
        "least": "".join(f"{value:.0f}" for value in needed),
    }


def _means(solved: Flags, calls: Flags, least: Flags) -> dict[str, float | None]:
    """Share solved; calls, and calls beyond the least, of a solved task; calls of any task."""
    right = solved > 0
    some = bool(right.any())
    return {
        "quality": round(float(solved.mean()), 4),
        "calls_of_solved": round(float(calls[right].mean()), 3) if some else None,
        "needless": round(float((calls - least)[right].mean()), 3) if some else None,
        "calls_of_any": round(float(calls.mean()), 3),
    }


# -- what the rows say -----------------------------------------------------------------------------


def rows_by_arm(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The newest row of each arm and seed, of the newest settings."""
    newest = {row["variant"]: row["settings"] for row in rows}
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for arm in ARMS:
        for row in rows:
            if row["variant"] == arm and row["settings"] == newest[arm]:
                found.setdefault(arm, {})[row["shape"]["seed"]] = row
    return found


def _digits(rows: Sequence[Mapping[str, Any]], key: str) -> Flags:
    return np.array([[float(digit) for digit in row[key]] for row in rows])


def difference(
    ours: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]], what: str
) -> tuple[float, float, float] | None:
    """(ours - other, low, high) over the seeds that both have, paired by seed and task.

    The interval is the bootstrap's over tasks, 95 %: how sure these seeds' difference is.

    Args:
        ours: rows by seed.
        other: the same of what they are compared with.
        what: `quality`, or `needless`: calls beyond the least, of tasks solved in both.
    """
    seeds = sorted(ours.keys() & other.keys())
    if not seeds:
        return None
    a, b = [ours[seed] for seed in seeds], [other[seed] for seed in seeds]
    solved = _digits(a, "solved"), _digits(b, "solved")
    if what == "quality":
        top, bottom = solved[0] - solved[1], np.ones_like(solved[0])
    else:
        bottom = solved[0] * solved[1]
        top = (_digits(a, "calls") - _digits(b, "calls")) * bottom
    if not bottom.sum():
        return None
    tasks = bottom.shape[1]
    drawn = np.random.default_rng(0).integers(tasks, size=(DRAWS, tasks))
    weight = bottom.sum(0)[drawn].sum(1)
    draws = top.sum(0)[drawn].sum(1) / np.maximum(weight, 1.0)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(top.sum() / bottom.sum()), float(low), float(high)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each arm's means over seeds, by seed, and what it differs by from another arm."""
    found = rows_by_arm(rows)
    lines = [
        "| arm | right | by seed | calls of a solved task | needless | by seed "
        "| difference in right, paired | in calls where both solve | to | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, of_seed in found.items():
        seen = [of_seed[seed] for seed in sorted(of_seed)]
        base = "tuned" if arm == "full" else "full"
        gains = ["", ""]
        if arm not in SHARED and base in found:
            both = (difference(of_seed, found[base], what) for what in ("quality", "needless"))
            gains = ["" if g is None else f"{g[0]:+.3f} [{g[1]:+.3f}, {g[2]:+.3f}]" for g in both]
        needless = [row["needless"] for row in seen]
        minutes = sum(row["seconds"] for row in seen) / 60 / len(seen)
        cells = [
            arm, _mean(seen, "quality"), ", ".join(f"{row['quality']:.2f}" for row in seen),
            _mean(seen, "calls_of_solved"), _mean(seen, "needless"),
            ", ".join("-" if value is None else f"{value:.2f}" for value in needless),
            *gains, base if any(gains) else "", f"{minutes:.0f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    commits = sorted({row["commit"] for of_seed in found.values() for row in of_seed.values()})
    return "\n".join([*lines, "", f"commits: {', '.join(commits)}"])


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    known = [row[key] for row in rows if row[key] is not None]
    return f"{np.mean(known):.3f}" if known else "-"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Right answers and needless calls of each arm: a dot a seed, a bar for their mean."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = rows_by_arm(rows)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 0.5 + 0.42 * len(found)), sharey=True)
    titles = {"quality": "right answers", "needless": "calls beyond the least, of a solved task"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for place, of_seed in enumerate(found.values()):
            values = [row[key] for row in of_seed.values() if row[key] is not None]
            axis.barh(place, float(np.mean(values)) if values else 0, color="#c6d4e1", height=0.6)
            axis.plot(values, [place] * len(values), "o", color="#1f4e79", markersize=4)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(found)), list(found))
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# -- the command -----------------------------------------------------------------------------------


def study(args: argparse.Namespace) -> None:
    """Run the arms that have no row; stop where the next would not end in time."""
    started, longest = time.monotonic(), 0.0
    for seed, arm in itertools.product(args.seeds, ARMS):
        if args.arms and arm.replace(" ", "_") not in args.arms:
            continue
        if arm == "prompting" and seed != args.seeds[0]:  # greedy, and nothing is trained
            continue
        key = key_of(arm, args.overrides)
        if (arm, key, seed) in {(r["variant"], r["settings"], r["shape"]["seed"]) for r in _rows()}:
            continue
        begun = time.monotonic()
        if begun - started + longest > 3600 * args.budget:
            print(f"{arm}, seed {seed}: would not end within {args.budget} hours; go on later")
            return
        print(f"==== {arm}, seed {seed}", flush=True)
        if not args.no_rows:
            measured_commit()  # before the work: a row must name its code
        row = run_arm(arm, seed, args.folder, args.overrides)
        longest = max(longest, time.monotonic() - begun)
        print({name: row[name] for name in ("quality", "calls_of_solved", "needless")}, flush=True)
        if not args.no_rows:
            about = {"settings": key, "note": ", ".join(args.overrides)}
            shape = {"seed": seed, "tasks": len(row["solved"])}
            traced_row("calibration", arm, {"shape": shape, **about, **row})
            own = folder_of(arm, seed, args.folder, args.overrides)
            for made in own.glob("stage_*/rl/checkpoints"):
                shutil.rmtree(made)


def _rows() -> list[dict[str, Any]]:
    path = rows_folder() / "calibration.jsonl"
    return read_lines(path) if path.exists() else []


def main(arguments: Sequence[str]) -> None:
    """Run, or show what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [arm.replace(" ", "_") for arm in ARMS]
    parser.add_argument("--arms", nargs="+", choices=names, default=[], metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=float, default=6.0, metavar="HOURS")
    parser.add_argument("--folder", type=Path, default=Path("runs/calibration_bench"))
    parser.add_argument("--no-rows", action="store_true", help="print only")
    parser.add_argument("--table", action="store_true", help="of the rows that there are")
    parser.add_argument("--graph", type=Path, metavar="FILE.png", help="of the same")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(arguments)
    if not (args.table or args.graph):
        study(args)
    if args.graph:
        draw(_rows(), args.graph)
    print(table(_rows()))


if __name__ == "__main__":
    main(sys.argv[1:])
