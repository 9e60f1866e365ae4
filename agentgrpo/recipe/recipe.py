"""A whole recipe by one command: `agentgrpo recipe CONFIG [section.key=value ...]`.

In order, each part in a process of its own:

    prompting     the held-out tasks, played by config.model           measures/prompting/
    flywheel      recipe/flywheel.py                                     flywheel/
    sft           recipe/sft.py, on what the flywheel kept                    sft/
    tuned         the held-out tasks, played by what came of it        measures/tuned/
    curriculum    recipe/curriculum.py, from there                       stage_0/, stage_1/, ...
    trained       the held-out tasks, played by the last checkpoint    measures/trained/

and out_dir/report.md and report.json: performance and efficiency of the three, what was made and
selected, who played which role, and where the time went. Kill it at any moment and repeat the
command: finished parts (recipe.json) are skipped, the others go on as they do by themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgrpo.config.arguments import config_parser
from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.measures import measures
from agentgrpo.recipe.curriculum import PartFailed, folder_of, start_model
from agentgrpo.recipe.sft import cli_errors
from agentgrpo.run.atomic import write_json, write_text
from agentgrpo.run.folder import flat, require_same_settings

MODULES = {
    "prompting": "agentgrpo.evaluate",
    "flywheel": "agentgrpo.recipe.flywheel",
    "sft": "agentgrpo.recipe.sft",
    "tuned": "agentgrpo.evaluate",
    "curriculum": "agentgrpo.recipe.curriculum",
    "trained": "agentgrpo.evaluate",
}
"""The parts in their order, and what does them."""
MEASURED = [part for part, module in MODULES.items() if module == "agentgrpo.evaluate"]

STAGE_COLUMNS = ["stage", "candidates", "mixed", "selected", "steps", "rollouts", "branched"]


def run(recipe: RecipeConfig, arguments: Sequence[str]) -> dict[str, Any]:
    """Do the parts that are left, with these command-line arguments; returns the report.

    Raises:
        PartFailed: a part did not end well.
        ValueError: the folder holds another recipe's work, or the stages start from elsewhere.
    """
    if recipe.curriculum.start != "sft":
        raise ValueError("curriculum.start: a recipe's stages start from 'sft', got 'model'")
    recipe.out_dir.mkdir(parents=True, exist_ok=True)
    settings = flat(recipe.model_dump(mode="json", exclude={"out_dir"}))
    require_same_settings(recipe.out_dir / "settings.json", settings)
    path = recipe.out_dir / "recipe.json"
    seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    for part in MODULES:
        if part not in seconds:
            print(f"== {part}", flush=True)  # noqa: T201
            seconds[part] = _run_part(recipe, part, arguments)
            write_json(path, seconds)
    made = report(recipe, seconds)
    write_json(recipe.out_dir / "report.json", made)
    write_text(recipe.out_dir / "report.md", markdown(made))
    return made


def _run_part(recipe: RecipeConfig, part: str, arguments: Sequence[str]) -> float:
    """Returns the seconds that it took."""
    command = [sys.executable, "-m", MODULES[part], *arguments]
    if part in MEASURED:
        command += [f"model={_model(recipe, part)}", "--report", str(_measures(recipe, part))]
    started = time.perf_counter()
    quiet = subprocess.DEVNULL if part in MEASURED else None  # what is printed is in the report
    status = subprocess.run(command, stdout=quiet, check=False).returncode
    if status:
        raise PartFailed(f"{part} ended with status {status}")
    return time.perf_counter() - started


def _model(recipe: RecipeConfig, part: str) -> str:
    if part == "prompting":
        return recipe.model
    return start_model(recipe, 0 if part == "tuned" else recipe.curriculum.stages)


def _measures(recipe: RecipeConfig, part: str) -> Path:
    return recipe.out_dir / "measures" / part


# -- the report ------------------------------------------------------------------------------------


def report(recipe: RecipeConfig, seconds: dict[str, float]) -> dict[str, Any]:
    """All that report.md says, as JSON values."""
    reports = {
        part: json.loads((_measures(recipe, part) / "report.json").read_text()) for part in MEASURED
    }
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
        "flywheel": json.loads((recipe.out_dir / "flywheel" / "summary.json").read_text()),
        "stages": [_stage(folder_of(recipe, k)) for k in range(recipe.curriculum.stages)],
        "seconds": seconds,
    }


def _role(recipe: RecipeConfig, name: str) -> str:
    endpoint = recipe.endpoints.get(name)
    if endpoint is None or endpoint.kind == "engine":
        return "the run's own model"
    if endpoint.kind == "script":
        return f"a script in a model's place ({endpoint.function})"
    return f"{endpoint.model} at {endpoint.url}"


def _stage(folder: Path) -> dict[str, Any]:
    """stage.json, with how many of its training rollouts branched off another."""
    with (folder / "rl" / "rollouts.jsonl").open() as lines:
        played = [r for r in map(json.loads, lines) if r["split"] == "train"]
    branched = sum(rollout["parent"] is not None for rollout in played)
    stage: dict[str, Any] = json.loads((folder / "stage.json").read_text())
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
        measures.markdown_of_comparison(reports),
        "By kind of task (quality, efficiency, tool calls):",
        "",
        measures.table_of(["kind", *MEASURED], _by_kind(reports)),
        f"Flywheel: {flywheel['trajectories']} trajectories of {flywheel['questions']} questions, "
        f"{flywheel['kept']} kept ({flywheel['rule']}). Roles: {roles}.",
        "",
        measures.table_of(
            ["operator", "made", "right", "kept"],
            [[name, *map(str, counts.values())] for name, counts in flywheel["operators"].items()],
        ),
        "Stages:",
        "",
        measures.table_of(
            STAGE_COLUMNS,
            [[str(stage[key]) for key in STAGE_COLUMNS] for stage in made["stages"]],
        ),
        f"Time: {sum(made['seconds'].values()) / 60:.1f} minutes ({spent}).",
    ]
    return "\n".join(lines) + "\n"


def _by_kind(reports: dict[str, Any]) -> list[list[str]]:
    names = ("quality", "efficiency", "tool_calls")

    def cell(part: str, kind: str) -> str:
        seen = reports[part]["kinds"][kind]["measures"]
        return ", ".join(f"{seen[name]['value']:.3f}" for name in names)

    kinds = reports["trained"]["kinds"]
    return [[kind, *(cell(part, kind) for part in MEASURED)] for kind in kinds]


def main(arguments: list[str]) -> int:
    """Parse the command line, do the parts, print the report. Returns the exit status."""
    args = config_parser("recipe", __doc__).parse_intermixed_args(arguments)
    with cli_errors("The same command continues where it stopped.") as outcome:
        recipe = load_config_of(RecipeConfig, args.config, args.overrides)
        print(markdown(run(recipe, [args.config, *args.overrides])))  # noqa: T201
        print(f"everything is in {recipe.out_dir}")  # noqa: T201
    return outcome.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
