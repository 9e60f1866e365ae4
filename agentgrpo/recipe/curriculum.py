"""Stages of rollout, selection and training: `agentgrpo curriculum CONFIG [...]`.

Stage k starts from the last checkpoint of stage k-1 (the first from config.model, or from what
fine-tuning made). Its policy plays `candidates` training tasks; those that teach most are selected
(recipe/pareto.py); reinforcement learning runs on them for the stage's steps. Everything is in
out_dir/stage_k:

    pool.jsonl     the candidates' rollouts; grows by chunks
    select.json    which were selected, counts, where the stream of tasks stands; written last
    rl/            the training run, as of agentgrpo.train
    stage.json     from which model to which checkpoint; written when the stage is done

Kill it at any moment and repeat the command (processes.py): playing goes on behind the last whole
chunk and training from its last checkpoint.
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
"""What it continues from."""
MAY_CHANGE = ("curriculum.stages", "curriculum.steps", "curriculum.epochs")
"""Settings of the curriculum that may be raised to go on."""


def folder_of(recipe: RecipeConfig, stage: int) -> Path:
    """Where a stage, counted from 0, keeps everything."""
    return recipe.out_dir / f"stage_{stage}"


def start_model(recipe: RecipeConfig, stage: int) -> str:
    """The model that a stage starts from."""
    if stage == 0 and recipe.curriculum.start == "model":
        return recipe.model
    folder = recipe.out_dir / "sft" if stage == 0 else folder_of(recipe, stage - 1) / "rl"
    found = checkpoint.newest(folder)
    if found is None:
        raise ValueError(f"stage {stage} starts from the last checkpoint in {folder}: none there")
    return str(found)


def steps_of(recipe: RecipeConfig, stage: int, selected: int | None = None) -> int:
    """Optimizer steps of a stage, counted from 0."""
    c = recipe.curriculum
    if c.epochs is None:
        return c.steps[min(stage, len(c.steps) - 1)]
    if selected is None:
        selected = len(read_table(folder_of(recipe, stage) / "select.json")["selected"])
    return -(-c.epochs * selected // recipe.rollout.tasks_per_step)


def training_config(recipe: RecipeConfig, stage: int) -> TrainConfig:
    """The stage's run, from the model that it starts from; its tasks are selected_tasks()."""
    model, steps = start_model(recipe, stage), steps_of(recipe, stage)
    out_dir = str(folder_of(recipe, stage) / "rl")
    return recipe.of_run(model=model, out_dir=out_dir, steps=steps)


# -- the parts of a stage --------------------------------------------------------------------------


def select(recipe: RecipeConfig, stage: int, player: Parts, stream: Tasks) -> dict[str, Any]:
    """Play the candidates and write what is selected of them.

    ValueError: none has both right and wrong rollouts, as selection = "pareto" asks.
    """
    folder = folder_of(recipe, stage)
    folder.mkdir(parents=True, exist_ok=True)
    if stage > 0:
        done = read_table(folder_of(recipe, stage - 1) / "select.json")
        stream.load_state_dict(done["stream"])
    groups = [group for some in _chunks(recipe, stage, player, stream) for group in some]
    quality = make_quality("answer", weight=recipe.reward.answer)
    chosen = _selected(recipe, stage, groups, quality)
    seen = [contrast(group, quality) for group in groups]
    summary = {
        "model": player.played,
        "candidates": len(groups),
        "mixed": sum(point.mixed for point in seen),
        "selected": [*dict.fromkeys(groups[index].task.id for index in chosen)],
        "quality": sum(quality(r) for g in groups for r in g.rollouts)
        / sum(len(g.rollouts) for g in groups),
        "stream": stream.state_dict(),
    }
    write_json(folder / "select.json", summary)
    return summary


def _selected(
    recipe: RecipeConfig, stage: int, groups: Sequence[Group], quality: Quality
) -> list[int]:
    """Which candidates are trained on, ascending; errors as of select()."""
    c = recipe.curriculum
    if c.selection == "random":
        rng = random.Random(f"{recipe.seed}/selection {stage}")
        return sorted(rng.sample(range(len(groups)), min(c.select, len(groups))))
    chosen = select_groups(
        groups,
        c.select,
        quality,
        kind=(lambda group: kind_of(group.task)) if c.by_kind else (lambda group: ""),
    )
    if not chosen:
        raise ValueError(
            f"stage {stage}: of {len(groups)} candidates none has both right and wrong rollouts; "
            "play more (curriculum.candidates, curriculum.group_size) or other tasks"
        )
    return chosen


def _chunks(
    recipe: RecipeConfig, stage: int, player: Parts, stream: Tasks
) -> Iterator[list[Group]]:
    """The candidates' groups: from disk as far as they are there, then played and recorded."""
    c, path = recipe.curriculum, folder_of(recipe, stage) / "pool.jsonl"
    recorded, progress = complete_lines(path), player.progress
    for start in range(0, c.candidates, c.chunk):
        tasks = stream.next(min(c.chunk, c.candidates - start))
        size = len(tasks) * c.group_size
        if len(recorded) >= size:
            rollouts = [read_rollout(json.loads(line)) for line in recorded[:size]]
            recorded = recorded[size:]
            played = [rollouts[i : i + c.group_size] for i in range(0, size, c.group_size)]
            groups = [Group(task=members[0].task, rollouts=members) for members in played]
            for task, group in zip(tasks, groups, strict=True):
                if task.id != group.task.id:
                    raise ValueError(
                        f"{path}: holds task {group.task.id!r} where this recipe plays {task.id!r}"
                    )
        else:
            if recorded:  # of a chunk that is not whole
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
    """The stage's tasks as they were played, drawn as the recipe says."""
    folder = folder_of(recipe, stage)
    pool = folder / "pool.jsonl"
    played = {r.task.id: r.task for _, r in read_rollouts(pool)}
    for task in stream.rows if isinstance(stream, RowTasks) else ():
        if task.id in played:  # in the words that were played: an environment says them anew
            task = replace(task, messages=played[task.id].messages)
            if question_and_spec(task) != question_and_spec(played[task.id]):
                raise ValueError(f"task {task.id!r} is another one than was played for {pool}")
            played[task.id] = task
    rows = [played[name] for name in read_table(folder / "select.json")["selected"]]
    source, seed = f"stage {stage}, {digest_of(rows)}", recipe.seed + stage
    tasks = RowTasks(rows, source=source, seed=seed)
    earlier = [folder_of(recipe, number) / "stage.json" for number in range(stage)]
    tasks.steps_before = sum(read_table(path)["steps"] for path in earlier)
    return tasks


# -- the order of the parts ------------------------------------------------------------------------


def parts_of(recipe: RecipeConfig) -> list[Part]:
    """Two of each stage, "K.select" and "K.train"; what is done of them is seen on disk."""

    def selected(stage: int) -> bool:
        return (folder_of(recipe, stage) / "select.json").exists()

    def trained(stage: int) -> bool:
        path = folder_of(recipe, stage) / "stage.json"
        return path.exists() and bool(read_table(path)["steps"] >= steps_of(recipe, stage))

    return [
        Part(
            name=f"{stage}.{what}",
            word="curriculum",
            more=partial(list, ["--part", f"{stage}.{what}"]),
            done=partial(done, stage),
        )
        for stage in range(recipe.curriculum.stages)
        for what, done in (("select", selected), ("train", trained))
    ]


def finish_stage(recipe: RecipeConfig, stage: int) -> None:
    """Write stage.json."""
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
    """Make the stages in out_dir this recipe's; `write`: their settings, else only compare them."""
    require_same_work(recipe, "curriculum", SAVED, may_change=MAY_CHANGE, write=write)
    c, parts = recipe.curriculum, parts_of(recipe)
    for stage in range(c.stages - 1):
        if (folder_of(recipe, stage + 1) / "pool.jsonl").exists() and parts[2 * stage + 1].left({}):
            raise ValueError(
                f"curriculum.{'steps' if c.epochs is None else 'epochs'}: stage {stage + 1} has "
                f"begun from stage {stage}, which cannot be trained for longer now: set it back"
            )


def of_stages(recipe: RecipeConfig) -> Check:
    """What the stages would do."""
    c = recipe.curriculum
    numbers = ", ".join(str(steps_of(recipe, stage, c.select)) for stage in range(c.stages))
    trained = f"{numbers} steps" if c.epochs is None else f"at most {numbers} steps"
    return plan_line(
        "stages",
        f"{c.stages}: {c.candidates} candidates x {c.group_size}, {trained}, saved every "
        f"{recipe.save_every}",
    )


def run(recipe: RecipeConfig, args: argparse.Namespace, begin: Begin) -> int | None:
    """Do the parts that are left, each in a process of its own; or one of them; or say what."""
    if args.part:
        stage, _, what = args.part.partition(".")
        part = {"select": select_part, "train": train_part}[what]
        return part(recipe, int(stage), begin)
    with contextlib.nullcontext() if args.dry_run else lock_run_dir(recipe.out_dir):
        config = recipe.of_run(model=start_model(recipe, 0))
        with contextlib.closing(prepare(config)) as parts:
            require_stages(recipe, write=not args.dry_run)
            if args.dry_run:
                lines = [of_stages(recipe), *training_lines(config, parts)]
                print(format_plan(config, parts, lines, saved=SAVED))  # noqa: T201
                return None
        begin()
        run_parts(recipe, parts_of(recipe), [args.config, *args.overrides])
        print(f"done: {start_model(recipe, recipe.curriculum.stages)}")  # noqa: T201
    return None


def select_part(recipe: RecipeConfig, stage: int, begin: Begin) -> None:
    """Play a stage's candidates and select, in this process."""
    config = recipe.of_run(model=start_model(recipe, stage))
    with lock_run_dir(folder_of(recipe, stage)), contextlib.closing(build_eval(config)) as player:
        tasks = training_stream(config, player)
        begin()
        select(recipe, stage, player, tasks)


def train_part(recipe: RecipeConfig, stage: int, begin: Begin) -> int:
    """Train on what a stage selected, in this process; the exit status."""

    def drawn(stream: Tasks) -> Tasks:
        tasks = selected_tasks(recipe, stage, stream)
        print(f"stage {stage}: trains on the {len(tasks)} that were selected", flush=True)  # noqa: T201
        return tasks

    status = train.train(training_config(recipe, stage), begin, partial(build, draw=drawn))
    if not status:
        finish_stage(recipe, stage)
    return status


def main(arguments: list[str]) -> int:
    """Parse the command line, go through the stages. Returns the exit status."""
    return command(
        "curriculum", __doc__, arguments, run,
        lambda parser: parser.add_argument("--part", default="", help=argparse.SUPPRESS),
        saved=SAVED,
    )  # fmt: skip
