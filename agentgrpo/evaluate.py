"""Held-out tasks, played greedily: the number that says whether the policy learned.

`agentgrpo evaluate CONFIG [section.key=value ...]` plays them with config.model and
prints the metrics as JSON; `model=RUN/checkpoints/step_000010` evaluates a checkpoint, an adapter's
too (on the model that its adapter_config.json names; learner.lora.serve says how). What is
measured besides, with intervals and by kind of task, is in its "measures" (measures/,
[measures] of the config). `--report DIR` writes all of it, per task, as report.json and report.md;
`--compare DIR/report.json` adds the paired difference to an earlier report on the same tasks.
Under torchrun every rank plays its share, and there is one report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from agentgrpo import parallel
from agentgrpo.actions import InfrastructureError
from agentgrpo.build import Player
from agentgrpo.config.arguments import config_parser
from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.engine.endpoints import Endpoint, make_endpoint
from agentgrpo.machine.runtime import prepare_environment
from agentgrpo.measures import measures
from agentgrpo.rewards.rewards import Reward
from agentgrpo.rewards.scoring import Scoring, score_all
from agentgrpo.rollout.sampler import AnySampler
from agentgrpo.run.atomic import write_json, write_text
from agentgrpo.sandbox import SandboxUnavailable
from agentgrpo.types import Group, Metrics, Rollout, Status, Task


def evaluate(
    sampler: AnySampler,
    tasks: Sequence[Task],
    reward: Reward | Scoring,
    *,
    seed: int = 0,
    attempts: int = 1,
    temperature: float = 0.0,
    filters: Mapping[str, float] = MappingProxyType({}),
) -> tuple[list[Group], Metrics]:
    """Play each task, once and greedily if not told otherwise, and score it; every rank its share.

    Returns:
        The groups (of `attempts` rollouts each), and their metrics; `solved` is the share of
        rollouts that were (Rollout.solved), and left out where nobody says what that is. Rollouts
        that the machine broke are counted and left out.
    """
    own_seed = seed + parallel.RANK_SEED * parallel.rank()
    played, _ = sampler.play(
        parallel.mine(tasks), attempts, seed=own_seed, temperature=temperature, filters=filters
    )
    score_all(played, reward)
    groups = parallel.interleave(parallel.gather(played))
    return groups, summarize(groups)


def summarize(groups: Sequence[Group]) -> Metrics:
    """Means over the rollouts of groups that the machine did not break.

    Raises:
        InfrastructureError: it broke more than half of them; such numbers would mean nothing.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    valid = [rollout for rollout in rollouts if rollout.status is not Status.INFRA_ERROR]
    metrics: Metrics = {
        "rollouts": float(len(rollouts)),
        "infra_errors": float(len(rollouts) - len(valid)),
    }
    if 2 * len(valid) < len(rollouts):
        said = next((rollout.error for rollout in rollouts if rollout.error), "nothing")
        raise InfrastructureError(
            f"the machine, not the policy, broke {len(rollouts) - len(valid)} of {len(rollouts)} "
            f"rollouts; the first: {said}"
        )
    if not valid:
        return metrics
    metrics["reward"] = fmean(rollout.reward for rollout in valid)
    if any(rollout.solved is not None for rollout in valid):
        metrics["solved"] = fmean(bool(rollout.solved) for rollout in valid)
    metrics["answered"] = fmean(rollout.answer is not None for rollout in valid)
    metrics["sampled_tokens"] = fmean(rollout.num_sampled for rollout in valid)
    for name in dict.fromkeys(name for rollout in valid for name in rollout.stats):
        metrics[name] = fmean(rollout.stats.get(name, 0.0) for rollout in valid)
    for status in Status:
        metrics[f"status_{status}"] = fmean(rollout.status is status for rollout in valid)
    return metrics


def evaluate_recipe(config: RecipeConfig, player: Player) -> dict[str, Any]:
    """Play the held-out tasks as the config says; the metrics and measures.report()'s measures.

    On several ranks all must call it: each plays its share of the tasks. The first one asks the
    judges and gets the report, the others an empty one.

    Raises:
        ValueError: a task has no answer to compare with.
        InfrastructureError: the machine broke most rollouts, or a judge does not answer.
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
    judge = _judge(config, c.judge, "measures.judge")
    votes = _judge(config, c.conciseness_judge, "measures.conciseness_judge")

    def text_of(rollout: Rollout) -> str:
        told = [segment.token_ids for segment in rollout.segments[1:]]
        return "".join(player.tokenizer.decode(ids) for ids in told)

    rows = measures.measure_tasks(
        groups,
        measures.quality_by(c.quality, weight=config.reward.answer, judge=judge),
        concise=None if votes is None else measures.conciseness(votes, text_of),
        ks=c.pass_k,
    )
    return measures.report(rows, model=player.model, seed=config.seed, **metrics)


def _judge(config: RecipeConfig, name: str, key: str) -> Endpoint | None:
    if not name:
        return None
    if name not in config.endpoints or config.endpoints[name].kind == "engine":
        raise ValueError(f"{key}: expected an endpoint of kind http or script, got {name!r}")
    return make_endpoint(config.endpoints[name], name)


def read_report(path: Path) -> dict[str, Any]:
    """An earlier report.json.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        measures.markdown(report)
        measures.rows_of(report)
        report["model"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a report of --report: {error!r}") from error
    return report


def write_report(folder: Path, report: dict[str, Any], before: dict[str, Any] | None) -> None:
    """report.json and report.md, with the comparison if there is an earlier report.

    Raises:
        ValueError: the earlier report is of other tasks; report.json has been written.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    text = f"Model: {report['model']}\n\n{measures.markdown(report)}"
    if before is not None:
        text += f"\nBefore: {before['model']}\n\n"
        text += measures.markdown_of_comparison({"before": before, "after": report})
    write_text(folder / "report.md", text)


def main(arguments: list[str]) -> int:
    """Parse the command line, play, print. Returns the exit status."""
    parser = config_parser("evaluate", __doc__)
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.json, report.md")
    parser.add_argument("--compare", type=Path, metavar="REPORT.json", help="an earlier report")
    args = parser.parse_intermixed_args(arguments)
    if args.compare and not args.report:
        parser.error("--compare needs --report")
    prepare_environment()
    from rich.console import Console

    from agentgrpo.build import build_player
    from agentgrpo.run.progress import Progress

    try:
        config = load_config_of(RecipeConfig, args.config, args.overrides)
        before = None if args.compare is None else read_report(args.compare)
        parallel.start()
        console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=parallel.rank() > 0)
        player = build_player(config, progress=Progress(config.steps, console))
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        report = evaluate_recipe(config, player)
        if args.report and parallel.rank() == 0:
            write_report(args.report, report, before)
    except (ValueError, OSError, InfrastructureError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        player.close()
        parallel.stop()
    shown = {key: value for key, value in report.items() if key not in ("per_task", "kinds")}
    if parallel.rank() == 0:
        print(json.dumps(shown, indent=1))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
