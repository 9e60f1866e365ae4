"""Train in stages of rollout, selection and RL: `agentgrpo curriculum CONFIG [...]`.

Stage k starts from the last checkpoint of stage k-1 (stage 0 from config.model or the fine-tuned
model). Its policy plays `candidates` training tasks. The most informative ones are selected
(recipe/pareto.py), and RL runs on them for the stage's steps. out_dir/stage_k contains:

    pool.jsonl     the candidates' rollouts, appended in chunks
    select.json    the selected tasks, counts, the state of the task stream; written last
    rl/            the training run, as of `agentgrpo train`
    stage.json     start model and final checkpoint; written when the stage is finished

After an interruption at any time, the same command resumes (processes.py): playing continues after
the last complete chunk, training from its last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.tasks import RowTasks, Tasks, digest_of, question_and_spec
from agentgrpo.recipe.measures import kind_of
from agentgrpo.recipe.pareto import contrast, select_groups
from agentgrpo.recipe.processes import Part, command, require_same_work, run_parts
from agentgrpo.records import checkpoint
from agentgrpo.records.rollouts import read_rollout, read_rollouts, rollout_record
from agentgrpo.records.run_folder import lock_run_dir
from agentgrpo.rewards.answer_quality import Quality, make_quality
from agentgrpo.support.atomic_files import append_lines, complete_lines, write_json
from agentgrpo.support.checks import Check
from agentgrpo.support.files import read_table
from agentgrpo.train import __main__ as train
from agentgrpo.train.build import build, build_eval, prepare
from agentgrpo.train.command_line import Begin
from agentgrpo.train.dry_run import format_plan, plan_line, training_lines
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import training_stream
from agentgrpo.types import Group

SAVED = ("stage_*/pool.jsonl", f"stage_*/rl/{checkpoint.SAVED}")
"""Files below out_dir from which the command continues."""
MAY_CHANGE = ("curriculum.stages", "curriculum.steps", "curriculum.epochs")
"""Settings of the curriculum that may be raised to continue."""


def folder_of(recipe: RecipeConfig, stage: int) -> Path:
    """The folder of a stage (from 0)."""
    return recipe.out_dir / f"stage_{stage}"


def start_model(recipe: RecipeConfig, stage: int) -> str:
    """The model that a stage starts from."""
    if stage == 0 and recipe.curriculum.start == "model":
        return recipe.model
    folder = recipe.out_dir / "sft" if stage == 0 else folder_of(recipe, stage - 1) / "rl"
    newest = checkpoint.newest(folder)
    if newest is None:
        raise ValueError(
            f"stage {stage}: expected a checkpoint in {folder} to start from, got none"
        )
    return str(newest)


def steps_of(recipe: RecipeConfig, stage: int, selected: int | None = None) -> int:
    """Optimizer steps of a stage (from 0)."""
    c = recipe.curriculum
    if c.epochs is None:
        return c.steps[min(stage, len(c.steps) - 1)]
    if selected is None:
        selected = len(read_table(folder_of(recipe, stage) / "select.json")["selected"])
    return -(-c.epochs * selected // recipe.rollout.tasks_per_step)


def training_config(recipe: RecipeConfig, stage: int) -> TrainConfig:
    """The config of a stage's training run, whose tasks are selected_tasks()."""
    model, steps = start_model(recipe, stage), steps_of(recipe, stage)
    out_dir = str(folder_of(recipe, stage) / "rl")
    return recipe.of_run(model=model, out_dir=out_dir, steps=steps)


# -- the parts of a stage --------------------------------------------------------------------------


def play_candidates(
    recipe: RecipeConfig, stage: int, player: Parts, stream: Tasks
) -> dict[str, Any]:
    """Play the candidates, select from them and write select.json.

    Raises:
        ValueError: no candidate has both right and wrong rollouts (selection = "pareto").
    """
    folder = folder_of(recipe, stage)
    folder.mkdir(parents=True, exist_ok=True)
    if stage > 0:
        previous = read_table(folder_of(recipe, stage - 1) / "select.json")
        stream.load_state_dict(previous["stream"])
    groups = [group for chunk in _play_chunks(recipe, stage, player, stream) for group in chunk]
    quality = make_quality("answer", weight=recipe.reward.answer)
    selected_indices = _select_candidates(recipe, stage, groups, quality)
    contrasts = [contrast(group, quality) for group in groups]
    summary = {
        "model": player.played,
        "candidates": len(groups),
        "mixed": sum(point.mixed for point in contrasts),
        "selected": [*dict.fromkeys(groups[index].task.id for index in selected_indices)],
        "quality": sum(quality(r) for g in groups for r in g.rollouts)
        / sum(len(g.rollouts) for g in groups),
        "stream": stream.state_dict(),
    }
    write_json(folder / "select.json", summary)
    return summary


def _select_candidates(
    recipe: RecipeConfig, stage: int, groups: Sequence[Group], quality: Quality
) -> list[int]:
    """Ascending indices of the selected candidates. Raises as play_and_select()."""
    c = recipe.curriculum
    if c.selection == "random":
        rng = random.Random(f"{recipe.seed}/selection {stage}")
        return sorted(rng.sample(range(len(groups)), min(c.select, len(groups))))
    selected_indices = select_groups(
        groups,
        c.select,
        quality,
        kind=(lambda group: kind_of(group.task)) if c.by_kind else (lambda group: ""),
    )
    if not selected_indices:
        raise ValueError(
            f"stage {stage}: expected candidates with both right and wrong rollouts, got none of "
            f"{len(groups)}. Raise curriculum.candidates or curriculum.group_size, or use other "
            "tasks"
        )
    return selected_indices


def _play_chunks(
    recipe: RecipeConfig, stage: int, player: Parts, stream: Tasks
) -> Iterator[list[Group]]:
    """Yield the candidates' groups in chunks: recorded ones from disk, the others played now."""
    c, path = recipe.curriculum, folder_of(recipe, stage) / "pool.jsonl"
    recorded, progress = complete_lines(path), player.progress
    for start in range(0, c.candidates, c.chunk):
        tasks = stream.next(min(c.chunk, c.candidates - start))
        size = len(tasks) * c.group_size
        if len(recorded) >= size:
            rollouts = [read_rollout(json.loads(line)) for line in recorded[:size]]
            recorded = recorded[size:]
            grouped = [rollouts[i : i + c.group_size] for i in range(0, size, c.group_size)]
            groups = [Group(task=members[0].task, rollouts=members) for members in grouped]
            for task, group in zip(tasks, groups, strict=True):
                if task.id != group.task.id:
                    raise ValueError(
                        f"{path}: expected task {task.id!r} of this recipe, got {group.task.id!r}"
                    )
        else:
            if recorded:  # rollouts of an incomplete chunk
                os.truncate(path, path.stat().st_size - sum(len(line) + 1 for line in recorded))
                recorded = []
            seed = recipe.seed_of(1_000_000 + stage * 1000 + start // c.chunk, 0)
            with progress.phase(f"playing {len(tasks)} candidates x {c.group_size}"):
                groups, _ = player.sampler.play(tasks, c.group_size, seed=seed)
            player.reward.score(groups)
            append_lines(path, [rollout_record(r) for group in groups for r in group.rollouts])
            progress.print(
                f"stage {stage}: {start + len(tasks)} of {c.candidates} candidates played"
            )
        yield groups


def selected_tasks(recipe: RecipeConfig, stage: int, stream: Tasks) -> RowTasks:
    """The stage's selected tasks as they were played, in the recipe's drawing order."""
    folder = folder_of(recipe, stage)
    pool = folder / "pool.jsonl"
    played_tasks = {r.task.id: r.task for _, r in read_rollouts(pool)}
    for task in stream.rows if isinstance(stream, RowTasks) else ():
        # An environment makes its messages again: keep those that were played.
        if task.id in played_tasks:
            task = replace(task, messages=played_tasks[task.id].messages)
            if question_and_spec(task) != question_and_spec(played_tasks[task.id]):
                raise ValueError(f"task {task.id!r}: it differs from the task played in {pool}")
            played_tasks[task.id] = task
    rows = [played_tasks[name] for name in read_table(folder / "select.json")["selected"]]
    source, seed = f"stage {stage}, {digest_of(rows)}", recipe.seed + stage
    tasks = RowTasks(rows, source=source, seed=seed)
    earlier = [folder_of(recipe, number) / "stage.json" for number in range(stage)]
    tasks.steps_before = sum(read_table(path)["steps"] for path in earlier)
    return tasks


# -- the order of the parts ------------------------------------------------------------------------


def parts_of(recipe: RecipeConfig) -> list[Part]:
    """The parts "K.select" and "K.train" of each stage K. Files on disk show if they are done."""

    def is_selected(stage: int) -> bool:
        return (folder_of(recipe, stage) / "select.json").exists()

    def is_trained(stage: int) -> bool:
        path = folder_of(recipe, stage) / "stage.json"
        return path.exists() and bool(read_table(path)["steps"] >= steps_of(recipe, stage))

    return [
        Part(
            name=f"{stage}.{action}",
            command="curriculum",
            extra_arguments=partial(list, ["--part", f"{stage}.{action}"]),
            is_done=partial(is_done, stage),
        )
        for stage in range(recipe.curriculum.stages)
        for action, is_done in (("select", is_selected), ("train", is_trained))
    ]


def finish_stage(recipe: RecipeConfig, stage: int) -> None:
    """Write stage.json, which marks the stage as finished."""
    folder = folder_of(recipe, stage)
    selected = read_table(folder / "select.json")
    trained = Path(start_model(recipe, stage + 1))
    write_json(
        folder / "stage.json",
        {
            "stage": stage,
            "from": selected["model"],
            "to": str(trained),
            "steps": checkpoint.step_of(trained),
            **{key: selected[key] for key in ("candidates", "mixed", "quality")},
            "selected": len(selected["selected"]),
        },
    )


def require_stages(recipe: RecipeConfig, *, write: bool) -> None:
    """Compare the settings with those of the stages in out_dir; with `write`, store them."""
    require_same_work(recipe, "curriculum", SAVED, may_change=MAY_CHANGE, write=write)
    c, parts = recipe.curriculum, parts_of(recipe)
    for stage in range(c.stages - 1):
        if (folder_of(recipe, stage + 1) / "pool.jsonl").exists() and parts[
            2 * stage + 1
        ].is_pending({}):
            raise ValueError(
                f"curriculum.{'steps' if c.epochs is None else 'epochs'}: expected the old value "
                f"for stage {stage}, since stage {stage + 1} has already started from it"
            )


def of_stages(recipe: RecipeConfig) -> Check:
    """Describe the stages, for the plan of a dry run."""
    c = recipe.curriculum
    numbers = ", ".join(str(steps_of(recipe, stage, c.select)) for stage in range(c.stages))
    trained = f"{numbers} steps" if c.epochs is None else f"at most {numbers} steps"
    return plan_line(
        "stages",
        f"{c.stages}: {c.candidates} candidates x {c.group_size}, {trained}, saved every "
        f"{recipe.save_every}",
    )


def run_curriculum(recipe: RecipeConfig, args: argparse.Namespace, begin: Begin) -> int | None:
    """Run the remaining parts, each in its own process; or one part; or print the plan."""
    if args.part:
        stage, _, action = args.part.partition(".")
        run_part = {"select": select_part, "train": train_part}[action]
        return run_part(recipe, int(stage), begin)
    with contextlib.nullcontext() if args.dry_run else lock_run_dir(recipe.out_dir):
        config = recipe.of_run(model=start_model(recipe, 0))
        with contextlib.closing(prepare(config)) as parts:
            require_stages(recipe, write=not args.dry_run)
            if args.dry_run:
                lines = [of_stages(recipe), *training_lines(config, parts)]
                print(format_plan(config, parts, lines, saved=SAVED))
                return None
        begin()
        run_parts(recipe, parts_of(recipe), [args.config, *args.overrides])
        print(f"done: {start_model(recipe, recipe.curriculum.stages)}")
    return None


def select_part(recipe: RecipeConfig, stage: int, begin: Begin) -> None:
    """Run a stage's part "select" in this process."""
    config = recipe.of_run(model=start_model(recipe, stage))
    with lock_run_dir(folder_of(recipe, stage)), contextlib.closing(build_eval(config)) as player:
        tasks = training_stream(config, player)
        begin()
        play_candidates(recipe, stage, player, tasks)


def train_part(recipe: RecipeConfig, stage: int, begin: Begin) -> int:
    """Run a stage's part "train" in this process. Returns the exit status."""

    def draw_tasks(stream: Tasks) -> Tasks:
        tasks = selected_tasks(recipe, stage, stream)
        print(f"stage {stage}: training on {len(tasks)} selected tasks", flush=True)
        return tasks

    status = train.train(training_config(recipe, stage), begin, partial(build, draw=draw_tasks))
    if not status:
        finish_stage(recipe, stage)
    return status


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status."""
    return command(
        "curriculum", __doc__, arguments, run_curriculum,
        lambda parser: parser.add_argument("--part", default="", help=argparse.SUPPRESS),
        saved=SAVED,
    )  # fmt: skip
