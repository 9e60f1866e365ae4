"""Measure learning curves of a 135M-parameter model on two cores, one task per kind of agent.

    python -m bench.curves [TASK ...] [--seeds 0 1 2] [--folder DIR]
    python -m bench.curves --know-nothing [TASK ...]     no-skill baselines
    python -m bench.curves --losses [TASK ...]           two of the tasks with each loss type
    python -m bench.curves --write                       write its tables and figures

A task is a shipped config. Each seed is a row of bench/results/curves.jsonl; a seed that has a row
with the same settings is skipped, so the same command continues after a stop. Held-out tasks are
played greedily. Except for `program`, runs repeat bit by bit, also on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from agentgrpo import examples
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_config
from agentgrpo.records.checkpoint import newest
from agentgrpo.records.rollouts import read_rollouts
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.types import Rollout
from bench import terminal
from bench.harness import RESULTS, measured_commit, rows_folder, traced_row
from bench.pages import with_made

DOCS = Path(__file__).parents[1] / "docs"
TABLES = RESULTS / "README.md"
HELDOUT = 128


class Lesson(NamedTuple):
    """The config of a task."""

    changes: tuple[str, ...] = ()
    """What differs from the shipped config, which is short for those who try it."""
    config: Path | None = None
    """Of a lesson whose config is not shipped."""


LESSONS: Mapping[str, Lesson] = {
    "quickstart": Lesson((f"data.num_heldout={HELDOUT}",)),
    "letters": Lesson(),
    "console": Lesson(),
    "tools": Lesson(),
    "inline": Lesson(),
    "walk": Lesson(),
    "functions": Lesson(),
    "guess": Lesson(),
    "program": Lesson((f"data.num_heldout={HELDOUT}",)),
    "terminal": Lesson(config=terminal.CONFIG),
}
# with four updates a step, so that the ratio leaves 1; clip ranges as in each paper
LOSSES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("loss_type=grpo",),
    "bnpo": ("loss_type=bnpo",),
    "dapo": ("loss_type=dapo", "epsilon_high=0.28"),
    "dr_grpo": ("loss_type=dr_grpo", "scale_rewards=none"),
    "gspo": (
        "loss_type=grpo", "importance_sampling_level=sequence", "epsilon=3e-4", "epsilon_high=4e-4",
    ),
    "cispo": ("loss_type=cispo", "epsilon_high=5.0"),
    "gmpo": ("loss_type=gmpo",),
    "sapo": ("loss_type=sapo",),
}  # fmt: skip
COMPARED = ("letters", "functions")


def lesson(name: str) -> Lesson:
    """That of a task, or of a task with a loss type: `letters/gspo`."""
    task, _, loss = name.partition("/")
    if not loss:
        return LESSONS[task]
    changes = ("num_mini_batches=4", *LOSSES[loss])
    return LESSONS[task]._replace(changes=tuple(f"loss.{change}" for change in changes))


def source_of(name: str) -> str:
    """The shipped config's name, or the path of one that is not shipped."""
    return str(lesson(name).config or name.partition("/")[0])


def config_of(name: str) -> TrainConfig:
    return load_config(source_of(name), lesson(name).changes)


def picture_of(name: str) -> Path:
    """The curve of a lesson, beside its config."""
    config = lesson(name).config
    return config.with_suffix(".png") if config else examples.FOLDER / name / "curve.png"


def write_tasks(name: str, folder: Path) -> None:
    """The tasks of a lesson whose config is not shipped, in the directory in which it is used."""
    if lesson(name).config and not (folder / "terminal.train.jsonl").exists():
        terminal.write(folder)


def key_of(name: str) -> str:
    """Names the settings of a task and its environment: rows of one key answer one question."""
    config = config_of(name)
    table = config.model_dump(mode="json", exclude={"out_dir", "seed"}, exclude_unset=True)
    asked = hashlib.sha256(json.dumps(table).encode())
    for path in sorted((examples.FOLDER / name.partition("/")[0]).glob("*.py")):
        asked.update(path.read_bytes())
    if lesson(name).config:
        asked.update(Path(terminal.__file__).read_bytes())
    return asked.hexdigest()[:12]


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train once; what its row holds."""
    out = folder / f"{name.replace('/', '-')}-{seed}"
    write_tasks(name, folder)
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "agentgrpo.train",
        source_of(name),
        *lesson(name).changes,
    ]
    root = Path(__file__).parents[1]
    used, began = _cpu_seconds(), time.perf_counter()
    subprocess.run(
        [*command, f"seed={seed}", f"out_dir={out}", "keep_checkpoints=1"],
        cwd=folder, check=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    spent = {"seconds": time.perf_counter() - began, "cpu_s": _cpu_seconds() - used}
    row = {**{key: round(value) for key, value in spent.items()}, **row_of(out)}
    shutil.rmtree(out / "checkpoints")
    return row


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row_of(run: Path) -> dict[str, Any]:
    """The numbers of a run, and a held-out task's rollouts before and after."""
    rows = read_lines(run / "metrics.jsonl")
    steps = [row for row in rows if "learner/loss" in row]
    played = list(read_rollouts(run / "rollouts.jsonl"))
    heldout: dict[int, dict[str, Rollout]] = {}
    for place, rollout in played:
        if place["split"] == "heldout":
            heldout.setdefault(place["step"], {})[rollout.task.id] = rollout
    first, last = heldout[min(heldout)], heldout[max(heldout)]
    gained = [id for id, rollout in first.items() if last[id].solved and not rollout.solved]
    shown = next(iter(gained or first))
    saved = newest(run)
    assert saved is not None, f"{run}: no checkpoint"
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    return {
        "heldout": [[row["step"], row["eval/solved"]] for row in rows if "eval/solved" in row],
        "train": [round(step["rollout/solved"], 4) for step in steps],
        "live_groups": [step["rollout/live_groups"] for step in steps],
        "solved": {
            step: "".join(str(int(bool(rollout.solved))) for rollout in of.values())
            for step, of in heldout.items()
        },
        "tokens": sum(rollout.num_sampled for _, rollout in played),
        "tool_calls": sum(rollout.num_calls for _, rollout in played),
        "max_dlogp": max(step["engine/max_dlogp"] for step in steps),
        "shown": [_text(of[shown], tokenizer) for of in (first, last)],
    }


def _text(rollout: Rollout, tokenizer: Tokenizer) -> str:
    """What was asked, and all that was written and shown behind it; marks of the template go."""
    _, *after = rollout.segments
    said = [str(rollout.task.messages[-1]["content"])]
    return "\n".join([*said, *(tokenizer.decode(s.token_ids.tolist()).strip() for s in after)])


def know_nothing(name: str) -> dict[str, float]:
    """By the name of a policy that knows nothing, the share of held-out tasks that it solves."""
    from agentgrpo.testing import assert_no_cheat_pays

    config = config_of(name)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_tasks(name, Path(folder))
        played = assert_no_cheat_pays(config, at_most=1.0, reward_at_most=1e9, tasks=HELDOUT)
    return {policy: round(seen.solved, 4) for policy, seen in played.items()}


# -- what the rows say -----------------------------------------------------------------------------


def by_task(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The rows of each task's newest settings, by seed; -1: what those get that know nothing."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for name in [*LESSONS, *(f"{task}/{loss}" for task in COMPARED for loss in LOSSES)]:
        newest = [row["settings"] for row in rows if row["variant"] == name]
        for row in rows:
            if row["variant"] == name and row["settings"] == newest[-1]:
                found.setdefault(name, {})[row["shape"]["seed"]] = row
    return found


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the table of all tasks."""
    found = by_task(rows)
    lines = [
        "| config | before | after, by seed | no-skill baseline | steps | tokens | calls "
        "| core minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, seeds in found.items():
        runs = _runs(seeds)
        if not runs or "/" in name:
            continue
        nothing = seeds.get(-1, {}).get("solved", {})
        best = max(nothing, key=nothing.__getitem__) if nothing else ""
        cells = [
            f"`{name}`", f"{runs[0]['heldout'][0][1]:.2f}",
            ", ".join(f"{run['heldout'][-1][1]:.2f}" for run in runs),
            (f"{nothing[best]:.2f} ({best})" if nothing[best] else "0") if nothing else "not run",
            str(len(runs[0]["train"])), _mean(runs, "tokens"), _mean(runs, "tool_calls"),
            _minutes(runs),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    commits = sorted({row["commit"] for seeds in found.values() for row in seeds.values()})
    devices = sorted({row["device"] for seeds in found.values() for row in seeds.values()})
    return "\n".join([*lines, "", f"Commits {', '.join(commits)};", f"{', '.join(devices)}."])


def loss_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the held-out and the sampled shares of each loss type."""
    shares = {name: _runs(seeds) for name, seeds in by_task(rows).items() if "/" in name}
    lines = [f"| loss | {' | '.join(COMPARED)} |", "|---" * (1 + len(COMPARED)) + "|"]
    lines += [
        f"| `{loss}` | {' | '.join(_cell(shares.get(f'{t}/{loss}', [])) for t in COMPARED)} |"
        for loss in LOSSES
    ]
    chances = [_chance([shares.get(f"{task}/{loss}", []) for loss in LOSSES]) for task in COMPARED]
    return "\n".join([*lines, f"| by chance | {' | '.join(chances)} |"])


def _runs(seeds: Mapping[int, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [seeds[seed] for seed in sorted(seeds) if seed >= 0]


def _cell(runs: Sequence[Mapping[str, Any]]) -> str:
    """Held-out shares by seed, and the mean share of all that was sampled in training."""
    if not runs:
        return ""
    shares = ", ".join(f"{run['heldout'][-1][1]:.2f}" for run in runs)
    return f"{shares}; {fmean(fmean(run['train']) for run in runs):.2f}"


def _chance(losses: Sequence[Sequence[Mapping[str, Any]]], times: int = 20_000) -> str:
    """How often the means of the losses vary as much when the losses are exchanged at random within
    each seed: held out; in training. The variance orders such tables as F, seeds as blocks, would.
    """
    if len({len(runs) for runs in losses}) > 1 or len(losses[0]) < 2:
        return ""
    random = np.random.default_rng(0)
    said = []
    for share in (lambda run: run["heldout"][-1][1], lambda run: fmean(run["train"])):
        shares = np.array([[share(run) for run in runs] for runs in losses])
        seen = shares.mean(1).var() - 1e-12  # rounding makes no difference
        shuffled = (random.permuted(shares, axis=0) for _ in range(times))
        said.append(f"{fmean(made.mean(1).var() >= seen for made in shuffled):.1%}")
    return "; ".join(said)


def _minutes(runs: Sequence[Mapping[str, Any]]) -> str:
    spent = [run["cpu_s"] / 60 for run in runs]
    return f"{min(spent):.1f} to {max(spent):.1f}"


def _mean(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    return f"{fmean(run[key] for run in runs):,.0f}"


def draw(name: str, seeds: Mapping[int, Mapping[str, Any]], path: Path) -> None:
    """Share solved by step: held out and in training, the mean of the seeds, their range shaded."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = _runs(seeds)
    figure, axis = pyplot.subplots(figsize=(5, 3))
    train = np.array([run["train"] for run in runs])
    heldout = np.array([[share for _, share in run["heldout"]] for run in runs])
    at = [step for step, _ in runs[0]["heldout"]]
    lines = [("in training, sampled", np.arange(train.shape[1]) + 0.5, train, "#9ab")]
    lines += [(f"held out ({runs[0]['shape']['tasks']}), greedy", np.array(at), heldout, "#1f4e79")]
    for label, steps, shares, colour in lines:
        axis.plot(steps, shares.mean(0), "o-", color=colour, markersize=3, label=label)
        axis.fill_between(steps, shares.min(0), shares.max(0), color=colour, alpha=0.25, lw=0)
    axis.set(ylim=(0, 1.02), xlabel="step", title=f"{name}: share solved, seeds: {len(runs)}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


# -- the command -----------------------------------------------------------------------------------


def _rows() -> list[dict[str, Any]]:
    path = rows_folder() / "curves.jsonl"
    return read_lines(path) if path.exists() else []


def study(names: Sequence[str], seeds: Sequence[int], work: Callable[..., dict[str, Any]]) -> None:
    """Write the rows that there are not yet, the first seed of all tasks first."""
    for seed in seeds:
        for name in names:
            key = key_of(name)
            if (name, key, seed) in {
                (row["variant"], row["settings"], row["shape"]["seed"]) for row in _rows()
            }:
                continue
            print(f"==== {name}, seed {seed}", flush=True)
            measured_commit()  # before the work: a row must name its code
            shape = {"seed": seed, "tasks": HELDOUT}
            traced_row("curves", name, {"shape": shape, "settings": key, **work(name, seed)})


def main(arguments: Sequence[str]) -> None:
    """Run what has no row yet, or show what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(LESSONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=None, help="for the runs' files; kept")
    parser.add_argument("--know-nothing", action="store_true")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(arguments)
    names = args.tasks or list(COMPARED if args.losses else LESSONS)
    if unknown := set(names) - set(LESSONS):
        parser.error(f"no such task: {', '.join(sorted(unknown))}")
    if args.losses:
        names = [f"{task}/{loss}" for task in names for loss in LOSSES]
    if args.write:
        rows = _rows()
        for path, table in ((DOCS / "results.md", page(rows)), (TABLES, loss_table(rows))):
            path.write_text(with_made(path.read_text(), "bench.curves", table))
        for name, seeds in by_task(rows).items():
            if "/" not in name and max(seeds) >= 0:
                draw(name, seeds, picture_of(name))
    elif args.know_nothing:
        study(names, [-1], lambda name, seed: {"solved": know_nothing(name)})
    elif args.folder:
        study(names, args.seeds, lambda name, seed: run(name, seed, args.folder))
    else:
        with tempfile.TemporaryDirectory() as folder:
            study(names, args.seeds, lambda name, seed: run(name, seed, Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
