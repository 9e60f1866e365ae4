"""Held-out tasks, played and measured: `agentgrpo evaluate CONFIG [section.key=value ...]`.

It plays them with config.model and prints the metrics as JSON;
`model=RUN/checkpoints/step_000010` evaluates a checkpoint, an adapter's too (on the model that its
adapter_config.json names). What is measured besides, with intervals and by kind of task, is in its
"measures" (measures/, [measures] of the config). `--report DIR`
writes all of it, per task, as report.json and report.md; `--compare DIR/report.json` adds the
paired difference to an earlier report on the same tasks. Under torchrun every rank plays its share,
and there is one report.
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
    """Play the held-out tasks as the config says; the metrics and measures.report()'s measures.

    On several ranks all must call it: each plays its share of the tasks. The first one asks the
    judges and gets the report, the others an empty one.
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
        told = [segment.token_ids for segment in rollout.segments[1:]]
        return "".join(player.chat.tokenizer.decode(ids) for ids in told)

    measured = partial(
        measure_tasks,
        groups,
        make_quality(c.quality, weight=config.reward.answer, judge=judge),
        concise=None if votes is None else conciseness(votes, text_of),
        ks=c.pass_k,
    )
    return report(loop.serve_while(measured), model=player.played, seed=config.seed, **metrics)


def read_report(path: Path) -> dict[str, Any]:
    """An earlier report.json."""
    written = read_table(path)
    try:
        markdown(written)
        rows_of(written)
        written["model"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a report of --report: {error!r}") from error
    return written


def write_report(folder: Path, made: dict[str, Any], before: dict[str, Any] | None) -> None:
    """report.json and report.md, with the comparison if there is an earlier report."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", made)
    text = f"Model: {made['model']}\n\n{markdown(made)}"
    if before is not None:
        text += f"\nBefore: {before['model']}\n\n"
        text += markdown_of_comparison({"before": before, "after": made})
    write_text(folder / "report.md", text)


def asked_for(config: RecipeConfig, args: argparse.Namespace) -> dict[str, Any] | None:
    """The earlier report, folders checked."""
    if args.compare and not args.report:
        raise ValueError("--compare needs --report")
    if args.report is not None:
        require_folder(args.report, "--report")
    return None if args.compare is None else read_report(args.compare)


def run(config: RecipeConfig, args: argparse.Namespace, begin: Begin) -> None:
    """Play, measure and report, or say what would be played."""
    before = asked_for(config, args)
    if args.dry_run:
        with contextlib.closing(prepare_run(config, trained=False)) as parts:
            lines = playing_lines(config, parts, parts.heldout)
            print(format_plan(config, parts, lines, trained=False, saved=()))  # noqa: T201
        return
    parallel.start()
    try:
        console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=parallel.rank() > 0)
        progress = Progress(config.steps, console)
        with contextlib.closing(build_eval(config, progress=progress)) as player:
            begin()
            made = evaluate_recipe(config, player)
            if parallel.rank() > 0:
                return
            if args.report:
                write_report(args.report, made, before)
            shown = {key: value for key, value in made.items() if key not in ("per_task", "kinds")}
            print(json.dumps(shown, indent=1))  # noqa: T201
    finally:
        parallel.stop()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.json, report.md")
    parser.add_argument("--compare", type=Path, metavar="REPORT.json", help="an earlier report")


def main(arguments: list[str]) -> int:
    """Parse the command line, play, print. Returns the exit status."""
    return command("evaluate", __doc__, arguments, run, _options)
