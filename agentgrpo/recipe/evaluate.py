"""Evaluate a model on the held-out tasks: `agentgrpo evaluate CONFIG [section.key=value ...]`.

It plays the tasks with config.model and prints metrics as JSON. `model=RUN/checkpoints/step_000010`
evaluates a checkpoint, also an adapter (on the base model in its adapter_config.json). The key
"measures" has further measures with confidence intervals, overall and by kind of task ([measures]
of the config). `--report DIR` writes everything, also per task, as report.json and report.md.
`--compare DIR/report.json` adds the paired difference to an earlier report on the same tasks. Under
torchrun each rank plays its share, and there is one report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.engine.in_process import EngineLoop, endpoint_of
from agentgrpo.recipe.measures import measure_tasks
from agentgrpo.recipe.processes import command
from agentgrpo.recipe.report import markdown, markdown_of_comparison, report, rows_of
from agentgrpo.records.run_folder import require_folder
from agentgrpo.rewards.answer_quality import conciseness, make_quality
from agentgrpo.support import parallel
from agentgrpo.support.atomic_files import write_json, write_text
from agentgrpo.support.files import read_table
from agentgrpo.train.build import build_eval
from agentgrpo.train.command_line import Begin
from agentgrpo.train.dry_run import format_plan, playing_lines
from agentgrpo.train.evaluate import evaluate
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import prepare_run
from agentgrpo.train.progress import Progress
from agentgrpo.types import Rollout


def evaluate_recipe(config: RecipeConfig, player: Parts) -> dict[str, Any]:
    """Play the held-out tasks. Returns a report (recipe/report.py) with the metrics.

    On several ranks all must call it, and each plays its share. Rank 0 calls the judges and gets
    the report; the others get an empty dict.
    """
    c = config.measures
    groups, metrics = evaluate(
        player.sampler,
        player.heldout,
        player.reward,
        seed=config.seed,
        attempts=c.attempts,
        temperature=c.temperature,
        filters=config.evaluation.filters,
    )
    if parallel.rank() > 0:
        return {}
    loop = EngineLoop(player.engine)
    judge, votes = (
        endpoint_of(player.models[name], loop, player.chat) if name else None
        for name in (c.judge, c.conciseness_judge)
    )

    def text_of(rollout: Rollout) -> str:
        ids_per_segment = [segment.token_ids for segment in rollout.segments[1:]]
        return "".join(player.chat.tokenizer.decode(ids) for ids in ids_per_segment)

    measure = partial(
        measure_tasks,
        groups,
        make_quality(c.quality, weight=config.reward.answer, judge=judge),
        concise=None if votes is None else conciseness(votes, text_of),
        ks=c.pass_k,
    )
    return report(loop.serve_while(measure), model=player.played, seed=config.seed, **metrics)


def read_report(path: Path) -> dict[str, Any]:
    """Read an earlier report.json. Raises ValueError if it is not a report."""
    report_values = read_table(path)
    try:
        markdown(report_values)
        rows_of(report_values)
        report_values["model"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a report of --report, got {error!r}") from error
    return report_values


def write_report(
    folder: Path, report_values: dict[str, Any], before: dict[str, Any] | None
) -> None:
    """Write report.json and report.md, with a comparison if there is an earlier report."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report_values)
    text = f"Model: {report_values['model']}\n\n{markdown(report_values)}"
    if before is not None:
        text += f"\nBefore: {before['model']}\n\n"
        text += markdown_of_comparison({"before": before, "after": report_values})
    write_text(folder / "report.md", text)


def run_evaluation(config: RecipeConfig, args: argparse.Namespace, begin: Begin) -> None:
    """Evaluate and report, or print the plan of a dry run."""
    if args.compare and not args.report:
        raise ValueError("--compare needs --report")
    if args.report is not None:
        require_folder(args.report, "--report")
    before = None if args.compare is None else read_report(args.compare)
    if args.dry_run:
        with contextlib.closing(prepare_run(config, trained=False)) as parts:
            lines = playing_lines(config, parts, parts.heldout)
            print(format_plan(config, parts, lines, trained=False, saved=()))
        return
    parallel.start()
    try:
        console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=parallel.rank() > 0)
        progress = Progress(config.steps, console)
        with contextlib.closing(build_eval(config, progress=progress)) as player:
            begin()
            report_values = evaluate_recipe(config, player)
            if parallel.rank() > 0:
                return
            if args.report:
                write_report(args.report, report_values, before)
            summary = {
                key: value
                for key, value in report_values.items()
                if key not in ("per_task", "kinds")
            }
            print(json.dumps(summary, indent=1))
    finally:
        parallel.stop()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.json, report.md")
    parser.add_argument("--compare", type=Path, metavar="REPORT.json", help="an earlier report")


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status."""
    return command("evaluate", __doc__, arguments, run_evaluation, _options)
