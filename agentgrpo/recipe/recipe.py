"""A whole recipe by one command: `agentgrpo recipe CONFIG [section.key=value ...]`.

In order (processes.py), in out_dir:

    prompting               the held-out tasks, played by config.model           measures/prompting/
    flywheel                flywheel.py                                          flywheel/
    sft                     sft.py, on what the flywheel kept                    sft/
    tuned                   the held-out tasks, played by the tuned model        measures/tuned/
    0.select, 0.train, ...  curriculum.py, from there                            stage_0/, ...
    trained                 the held-out tasks, played by the last checkpoint    measures/trained/

and report.md and report.json: performance and efficiency of the three, what was made and selected,
who played which role, and where the time went.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.recipe import curriculum, flywheel, sft
from agentgrpo.recipe.curriculum import folder_of, start_model
from agentgrpo.recipe.processes import Part, command, require_same_work, run_parts
from agentgrpo.recipe.report import markdown_of_comparison, table_of
from agentgrpo.records.run_folder import lock_run_dir
from agentgrpo.support.atomic_files import numbered_rows, write_json, write_text
from agentgrpo.support.files import read_table
from agentgrpo.train.build import prepare
from agentgrpo.train.command_line import Begin
from agentgrpo.train.dry_run import format_plan, plan_line, training_lines

SAVED = ("recipe.json", *flywheel.SAVED, *sft.SAVED, *curriculum.SAVED)
"""What it continues from."""
MEASURED = ("prompting", "tuned", "trained")
STAGE_COLUMNS = ["stage", "candidates", "mixed", "selected", "steps", "rollouts", "branched"]


def parts_of(recipe: RecipeConfig) -> list[Part]:
    """All parts, in their order."""

    def measured(name: str, model: Callable[[], str]) -> Part:
        folder = _measures(recipe, name)

        def done() -> bool:
            """Whether the checkpoint that is there now was measured; out_dir may have moved."""
            path = folder / "report.json"
            told = read_table(path)["model"] if path.exists() else ""
            now = Path(model()).relative_to(recipe.out_dir).parts
            return Path(told).parts[-len(now) :] == now

        return Part(
            name=name,
            word="evaluate",
            more=lambda: [f"model={model()}", "--report", str(folder)],
            done=None if name == "prompting" else done,
            quiet=True,
        )

    return [
        measured("prompting", lambda: recipe.model),
        Part(name="flywheel", word="flywheel"),
        Part(name="sft", word="sft"),
        measured("tuned", lambda: start_model(recipe, 0)),
        *curriculum.parts_of(recipe),
        measured("trained", lambda: start_model(recipe, recipe.curriculum.stages)),
    ]


def run(recipe: RecipeConfig, args: argparse.Namespace, begin: Begin) -> None:
    """Do the parts that are left, and report; or say what they would do.

    Fine-tuning's data and what stages begin with are made on the way, and checked there.
    """
    if recipe.curriculum.start != "sft":
        raise ValueError("curriculum.start: a recipe's stages start from 'sft', got 'model'")
    flywheel.check(recipe)
    sft.settings_of(recipe)
    with contextlib.nullcontext() if args.dry_run else lock_run_dir(recipe.out_dir):
        with contextlib.closing(prepare(recipe)) as parts:
            require_same_work(recipe, "recipe", SAVED, write=not args.dry_run)
            curriculum.require_stages(recipe, write=not args.dry_run)
            questions = flywheel.questions_of(recipe, parts.tasks, write=False)
            if args.dry_run:
                rounds, c = recipe.flywheel.rounds, recipe.sft
                lines = [
                    plan_line("flywheel", f"{len(questions)} questions, {rounds} rounds"),
                    plan_line("sft", f"{c.epochs} epochs in steps of {c.batch_size} examples"),
                    curriculum.of_stages(recipe),
                    *training_lines(recipe, parts),
                ]
                print(format_plan(recipe, parts, lines, saved=SAVED))  # noqa: T201
                return
        begin()
        made = report(recipe, run_parts(recipe, parts_of(recipe), [args.config, *args.overrides]))
        write_json(recipe.out_dir / "report.json", made)
        write_text(recipe.out_dir / "report.md", markdown(made))
        print(f"{markdown(made)}\neverything is in {recipe.out_dir}")  # noqa: T201


def _measures(recipe: RecipeConfig, part: str) -> Path:
    return recipe.out_dir / "measures" / part


# -- the report ------------------------------------------------------------------------------------


def report(recipe: RecipeConfig, seconds: dict[str, float]) -> dict[str, Any]:
    """All that report.md says, as JSON values."""
    reports = {part: read_table(_measures(recipe, part) / "report.json") for part in MEASURED}
    return {
        "model": recipe.model,
        "seed": recipe.seed,
        "quality": recipe.measures.quality,
        "roles": {
            "generator": "the run's own model",
            "critic": _role(recipe, recipe.flywheel.critic),
            "reflector": _role(recipe, recipe.flywheel.reflector),
        },
        "reports": reports,
        "flywheel": read_table(recipe.out_dir / "flywheel" / "summary.json"),
        "stages": [_stage(folder_of(recipe, k)) for k in range(recipe.curriculum.stages)],
        "seconds": seconds,
    }


def _role(recipe: RecipeConfig, name: str) -> str:
    endpoint = recipe.endpoints.get(name)
    if endpoint is None or endpoint.kind == "engine":
        return "the run's own model"
    if endpoint.kind == "script":
        return f"a script instead of a model ({endpoint.function})"
    return f"{endpoint.model} at {endpoint.url}"


def _stage(folder: Path) -> dict[str, Any]:
    """stage.json, with how many of its training rollouts branched off another."""
    rows = numbered_rows(folder / "rl" / "rollouts.jsonl")
    played = [row for _, row in rows if row["split"] == "train"]
    branched = sum(rollout["parent"] is not None for rollout in played)
    stage: dict[str, Any] = read_table(folder / "stage.json")
    return {**stage, "rollouts": len(played), "branched": branched}


def markdown(made: dict[str, Any]) -> str:
    """The report for people."""
    reports, flywheel = made["reports"], made["flywheel"]
    judged = "a model judges" if made["quality"] == "judge" else "no model judges"
    roles = "; ".join(f"{role}: {who}" for role, who in made["roles"].items())
    spent = ", ".join(f"{part} {value:.0f} s" for part, value in made["seconds"].items())
    lines = [
        f"# Recipe: {made['model']}, seed {made['seed']}",
        "",
        f"Held-out tasks: {reports['trained']['tasks']}. Quality: `{made['quality']}`, {judged}. "
        "Efficiency: quality per tool call. Values with 95 % intervals; the difference is of "
        "`trained` to `prompting`, paired by task.",
        "",
        markdown_of_comparison(reports),
        "By kind of task (quality, efficiency, tool calls):",
        "",
        table_of(["kind", *MEASURED], _by_kind(reports)),
        f"Flywheel: {flywheel['trajectories']} trajectories of {flywheel['questions']} questions, "
        f"{flywheel['kept']} kept ({flywheel['rule']}). Roles: {roles}.",
        "",
        table_of(
            ["operator", "made", "right", "kept"],
            [[name, *map(str, counts.values())] for name, counts in flywheel["operators"].items()],
        ),
        "Stages:",
        "",
        table_of(
            STAGE_COLUMNS,
            [[str(stage[key]) for key in STAGE_COLUMNS] for stage in made["stages"]],
        ),
        f"Time: {sum(made['seconds'].values()) / 60:.1f} minutes ({spent}).",
    ]
    return "\n".join(lines) + "\n"


def _by_kind(reports: dict[str, Any]) -> list[list[str]]:
    names = ("quality", "efficiency", "tool_calls")

    def cell(part: str, kind: str) -> str:
        seen = [reports[part]["kinds"][kind]["measures"][name]["value"] for name in names]
        return ", ".join("-" if value is None else f"{value:.3f}" for value in seen)

    kinds = reports["trained"]["kinds"]
    return [[kind, *(cell(part, kind) for part in MEASURED)] for kind in kinds]


def main(arguments: list[str]) -> int:
    """Parse the command line, do the parts, print the report. Returns the exit status."""
    return command("recipe", __doc__, arguments, run, saved=SAVED)
