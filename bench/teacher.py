"""Compare learning from a teacher with GRPO from the same start, by held-out share solved.

    python -m bench.teacher model TEACHER [section.key=value ...] [--seeds 0 1 2] [--arms ...]
    python -m bench.teacher feedback [section.key=value ...] [--seeds 0 1 2] [--arms ...]
    python -m bench.teacher sums [--seeds 0 1 2]
    python -m bench.teacher --write                 its table in bench/results/README.md

model: the quickstart, with the checkpoint TEACHER as its teacher, or with rewards only. feedback:
the config `functions` (programs with hidden tests) with rewards only, or with a teacher that reads
the errors, those of another task, or a correct rollout. Eight steps of 48 rollouts. Every run has
its own process, an empty folder and a row: the share after the last step, and in its note the share
after each evaluation, the sampled tokens and the teacher's seconds. sums: like model, but in
minutes, with the tests' two-layer model, which adds two digits by code in two of three tries; its
teacher is its own last checkpoint after 40 steps of rewards. Evaluated at temperature 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.support.runtime import prepare_environment
from agentgrpo.train.teacher_setup import FORMS
from bench.harness import RESULTS, append_row, measured_commit
from bench.pages import with_made

PAGE = RESULTS / "README.md"
STEPS = ["steps=8", "save_every=8", "keep_checkpoints=1", "rollout.refill_below=0",
         "rollout.max_refills=0", "rollout.tasks_per_step=6", "rollout.group_size=8",
         "data.num_heldout=64"]  # fmt: skip
RUNS = {"model": ("quickstart", "eval_every=2"), "feedback": ("functions", "eval_every=4")}
"""A shipped config, and which steps are looked at."""
ARMS = {
    "model": {"grpo": "", "teacher": "model={given}"},
    "feedback": {
        "grpo": "",
        "errors": "feedback=errors",
        "shuffled": "feedback=bench.teacher:shuffled",
        "solutions": "feedback=solutions",
    },
}
_said: dict[str, str] = {}


def shuffled(view: Any) -> str:
    """What was wrong with the last attempt at another task that something was wrong with, in the
    words that `errors` has around it.
    """
    if own := "\n".join(filter(None, view.feedback)):
        _said.pop(view.task.id, None)
        _said[view.task.id] = own
    others = [said for task, said in _said.items() if task != view.task.id]
    told = FORMS["errors"].format(others[-1]) if own and others else ""
    return told.removeprefix("\n")  # one of two line breaks is there already


def run(part: str, arm: str, seed: int, given: str, folder: Path, overrides: list[str]) -> None:
    """One run, and its row."""
    teacher = ARMS[part][arm].format(given=given)
    settings = [*STEPS, *overrides, *([f"teacher.{teacher}"] if teacher else [])]
    command = [sys.executable, "-m", "agentgrpo.train", *RUNS[part], *settings]
    subprocess.run([*command, f"seed={seed}", f"out_dir={folder}"], check=True)
    append(part, " ".join([arm, *overrides]), seed, read_lines(folder / "metrics.jsonl"))


def run_sums(seeds: list[int], made: Path) -> None:
    """Both arms of each seed, all in this process, and their rows."""
    from agentgrpo import Trainer
    from tests import tiny

    model = tiny.make_agent_dir(made / "model", tied=False)
    for name, count in (("train", 60), ("heldout", 64)):
        lines = [json.dumps(row) + "\n" for row in tiny.sums(count, seed=count)]
        (made / f"{name}.jsonl").write_text("".join(lines))
    base: dict[str, Any] = {
        "model": str(model), "save_every": 40, "keep_checkpoints": 1, "eval_every": 2,
        "agent": {"options": {"system_prompt": "S"}},
        "rollout": {"tasks_per_step": 4, "group_size": 8, "max_turns": 2, "max_turn_tokens": 24},
        "engine": {"max_model_len": 192, "kv_cache_gib": 0.0625},
        "evaluation": {"temperature": 1.0},
        "data": {"train": str(made / "train.jsonl"), "heldout": str(made / "heldout.jsonl"),
                 "num_heldout": 64},
        "learner": {"learning_rate": 3e-4},
    }  # fmt: skip

    def played(out: Path, **more: Any) -> list[dict[str, Any]]:
        config = TrainConfig.model_validate({**base, "out_dir": str(out), **more})
        with Trainer(config) as trainer:
            trainer.train()
        return read_lines(out / "metrics.jsonl")

    rows = played(made / "long", steps=40, seed=100, eval_every=20)
    curve = {row["step"]: row["eval/solved"] for row in rows if "eval/solved" in row}
    print(f"the teacher: {curve}", flush=True)
    teacher = {"model": str(made / "long" / "checkpoints" / "step_000040")}
    for seed in seeds:
        arms: dict[str, dict[str, str]] = {"grpo": {}, "teacher": teacher}
        for arm, given in arms.items():
            rows = played(made / f"{arm}_{seed}", steps=8, seed=seed, teacher=given)
            append("sums", arm, seed, rows, f"teacher {curve[40]:.3f} ")


def append(part: str, arm: str, seed: int, rows: list[dict[str, Any]], note: str = "") -> None:
    """A run's row."""
    curve = {row["step"]: round(row["eval/solved"], 3) for row in rows if "eval/solved" in row}
    steps = [row for row in rows if "learner/loss" in row]
    tokens = sum(row["rollout/total_sampled_tokens"] for row in steps)
    spent = sum(row.get("learner/teacher_s", 0.0) for row in steps)
    learning = sum(row["learner/seconds"] for row in steps)
    append_row(
        "teacher", f"{part}, {arm}", [curve[max(curve)]], unit="share",
        shape={"seed": seed, "steps": max(curve)},
        note=f"{note}by step {curve}, {tokens:.0f} tokens sampled, "
        f"{spent:.1f} s of {learning:.1f} s of learning were the teacher's",
    )  # fmt: skip


def table() -> str:
    """Of each arm its shares by seed, and the tokens of its longest run, from the newest rows."""
    steps = 0, 2, 4, 6, 8
    found: dict[str, dict[int, tuple[dict[int, float], int]]] = {}
    for row in read_lines(RESULTS / "teacher.jsonl"):
        curve, _, spent = row["note"].partition("by step ")[2].partition("}, ")
        said = ast.literal_eval(curve + "}"), int(spent.split()[0])
        found.setdefault(row["variant"], {})[row["shape"]["seed"]] = said
    lines = [f"| part, arm | {' | '.join(f'after {step} steps' for step in steps)} | tokens |"]
    lines.append("|---" * (2 + len(steps)) + "|")
    for arm, seeds in found.items():
        runs = [run for _, run in sorted(seeds.items())]
        cells = [", ".join(f"{c[step]:.2f}" for c, _ in runs if step in c) for step in steps]
        lines.append(f"| {' | '.join([arm, *cells])} | {max(spent for _, spent in runs):,} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Run the seeds, each with every arm before the next."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*ARMS, "sums"])
    parser.add_argument("given", nargs="*", help="TEACHER of model, and section.key=value ...")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_intermixed_args(arguments)
    if args.write:
        PAGE.write_text(with_made(PAGE.read_text(), "bench.teacher", table()))
        return
    if args.part is None or (args.part == "model" and not args.given):
        parser.error("a part, and of model its TEACHER")
    measured_commit()  # before the first run, and not after it
    if args.part == "sums":
        prepare_environment()
        with tempfile.TemporaryDirectory() as made:
            run_sums(args.seeds, Path(made))
        return
    teacher = args.given.pop(0) if args.part == "model" else ""
    for seed in args.seeds:
        for arm in args.arms or ARMS[args.part]:
            with tempfile.TemporaryDirectory() as made:  # a checkpoint in each
                run(args.part, arm, seed, teacher, Path(made), args.given)


if __name__ == "__main__":
    main(sys.argv[1:])
