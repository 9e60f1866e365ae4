"""Run a whole recipe: `agentgrpo recipe CONFIG [section.key=value ...]`.

The parts run in this order (processes.py) and write to out_dir:

    prompting               config.model on the held-out tasks                   measures/prompting/
    flywheel                flywheel.py                                          flywheel/
    sft                     sft.py, on the flywheel's selected trajectories      sft/
    tuned                   the fine-tuned model on the held-out tasks           measures/tuned/
    0.select, 0.train, ...  curriculum.py, from the fine-tuned model             stage_0/, ...
    trained                 the last checkpoint on the held-out tasks            measures/trained/

At the end it writes report.md and report.json: quality and efficiency of the three models, what was
generated and selected, the model of each role, and the time of each part.
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
"""Files below out_dir from which the command continues."""
MEASURED = ("prompting", "tuned", "trained")
STAGE_COLUMNS = ["stage", "candidates", "mixed", "selected", "steps", "rollouts", "branched"]


def parts_of(recipe: RecipeConfig) -> list[Part]:
    """All parts in order."""

    def measure_part(name: str, model: Callable[[], str]) -> Part:
        folder = _measures(recipe, name)

        def is_measured() -> bool:
            """Whether the current checkpoint was measured. out_dir may have moved since."""
            path = folder / "report.json"
            measured_model = read_table(path)["model"] if path.exists() else ""
            model_path = Path(model()).relative_to(recipe.out_dir).parts
            return Path(measured_model).parts[-len(model_path) :] == model_path

        return Part(
            name=name,
            command="evaluate",
            extra_arguments=lambda: [f"model={model()}", "--report", str(folder)],
            is_done=None if name == "prompting" else is_measured,
            quiet=True,
        )

    return [
        measure_part("prompting", lambda: recipe.model),
        Part(name="flywheel", command="flywheel"),
        Part(name="sft", command="sft"),
        measure_part("tuned", lambda: start_model(recipe, 0)),
        *curriculum.parts_of(recipe),
        measure_part("trained", lambda: start_model(recipe, recipe.curriculum.stages)),
    ]


def run_recipe(recipe: RecipeConfig, args: argparse.Namespace, begin: Begin) -> None:
    """Run the remaining parts and write the report, or print the plan of a dry run.

    The fine-tuning data and the stages' start models do not exist yet: their parts check them.
    """
    if recipe.curriculum.start != "sft":
        raise ValueError("curriculum.start: expected 'sft' in a recipe, got 'model'")
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
                print(format_plan(recipe, parts, lines, saved=SAVED))
                return
        begin()
        report_values = report(
            recipe, run_parts(recipe, parts_of(recipe), [args.config, *args.overrides])
        )
        write_json(recipe.out_dir / "report.json", report_values)
        write_text(recipe.out_dir / "report.md", markdown(report_values))
        print(f"{markdown(report_values)}\nresults are in {recipe.out_dir}")


def _measures(recipe: RecipeConfig, part: str) -> Path:
    return recipe.out_dir / "measures" / part


# -- the report ------------------------------------------------------------------------------------


def report(recipe: RecipeConfig, seconds: dict[str, float]) -> dict[str, Any]:
    """The content of report.md as JSON values."""
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
    """The content of stage.json, with the number of rollouts and of branched rollouts."""
    rows = numbered_rows(folder / "rl" / "rollouts.jsonl")
    training_rows = [row for _, row in rows if row["split"] == "train"]
    num_branched = sum(rollout["parent"] is not None for rollout in training_rows)
    stage: dict[str, Any] = read_table(folder / "stage.json")
    return {**stage, "rollouts": len(training_rows), "branched": num_branched}


def markdown(report_values: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    reports, flywheel = report_values["reports"], report_values["flywheel"]
    judge = "a model judges" if report_values["quality"] == "judge" else "no model judges"
    role_text = "; ".join(f"{role}: {who}" for role, who in report_values["roles"].items())
    durations = ", ".join(
        f"{part} {value:.0f} s" for part, value in report_values["seconds"].items()
    )
    lines = [
        f"# Recipe: {report_values['model']}, seed {report_values['seed']}",
        "",
        f"Held-out tasks: {reports['trained']['tasks']}. Quality: `{report_values['quality']}`, "
        f"{judge}. Efficiency: quality per tool call. Values with 95 % intervals. Difference: "
        "`trained` minus `prompting`, paired by task.",
        "",
        markdown_of_comparison(reports),
        "By kind of task (quality, efficiency, tool calls):",
        "",
        table_of(["kind", *MEASURED], _by_kind(reports)),
        f"Flywheel: {flywheel['trajectories']} trajectories of {flywheel['questions']} questions, "
        f"{flywheel['kept']} kept ({flywheel['rule']}). Roles: {role_text}.",
        "",
        table_of(
            ["operator", "made", "right", "kept"],
            [[name, *map(str, counts.values())] for name, counts in flywheel["operators"].items()],
        ),
        "Stages:",
        "",
        table_of(
            STAGE_COLUMNS,
            [[str(stage[key]) for key in STAGE_COLUMNS] for stage in report_values["stages"]],
        ),
        f"Time: {sum(report_values['seconds'].values()) / 60:.1f} minutes ({durations}).",
    ]
    return "\n".join(lines) + "\n"


def _by_kind(reports: dict[str, Any]) -> list[list[str]]:
    names = ("quality", "efficiency", "tool_calls")

    def cell(part: str, kind: str) -> str:
        values = [reports[part]["kinds"][kind]["measures"][name]["value"] for name in names]
        return ", ".join("-" if value is None else f"{value:.3f}" for value in values)

    kinds = reports["trained"]["kinds"]
    return [[kind, *(cell(part, kind) for part in MEASURED)] for kind in kinds]


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status."""
    return command("recipe", __doc__, arguments, run_recipe, saved=SAVED)
