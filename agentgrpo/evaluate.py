"""Held-out tasks, played greedily: the number that says whether the policy learned.

`python -m agentgrpo.evaluate CONFIG [section.key=value ...]` plays them with config.model and
prints the metrics as JSON; `model=RUN/checkpoints/step_000010` evaluates a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import fmean

from agentgrpo.config import load_config
from agentgrpo.envs.base import InfrastructureError
from agentgrpo.rewards import Reward, score
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.runtime import prepare_environment
from agentgrpo.sandbox import SandboxUnavailable
from agentgrpo.types import Group, Metrics, Rollout, Status, Task


def evaluate(
    sampler: Sampler, tasks: Sequence[Task], reward: Reward, *, seed: int = 0
) -> tuple[list[Group], Metrics]:
    """Play each task once at temperature 0 and score it.

    Returns:
        The groups (of one rollout each), and their metrics; `solved` is the share of tasks whose
        answer was right. Rollouts that the machine broke are counted and left out of the shares.
    """
    groups, _ = sampler.play(tasks, 1, seed=seed, temperature=0.0)
    for group in groups:
        score(group, reward)
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
    metrics["solved"] = fmean(map(solved, valid))
    metrics["answered"] = fmean(rollout.answer is not None for rollout in valid)
    metrics["sampled_tokens"] = fmean(rollout.num_sampled for rollout in valid)
    for name in dict.fromkeys(name for rollout in valid for name in rollout.stats):
        metrics[name] = fmean(rollout.stats.get(name, 0.0) for rollout in valid)
    for status in Status:
        metrics[f"status_{status}"] = fmean(rollout.status is status for rollout in valid)
    return metrics


def solved(rollout: Rollout) -> bool:
    """Whether the answer was right: the environment's word ("solved"), else the reward's."""
    return rollout.rewards.get("solved", rollout.rewards.get("answer", 0.0)) > 0


def main(arguments: list[str]) -> int:
    """Parse the command line, play, print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m agentgrpo.evaluate", description=__doc__)
    parser.add_argument("config", help="a TOML file or the name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    prepare_environment()
    from rich.console import Console

    from agentgrpo.build import build_player
    from agentgrpo.progress import Progress

    try:
        config = load_config(args.config, args.overrides)
        quiet = Progress(config.steps, Console(stderr=True, highlight=False, soft_wrap=True))
        player = build_player(config, progress=quiet)
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        _, metrics = evaluate(player.sampler, player.heldout, player.reward, seed=config.seed)
    finally:
        player.close()
    print(json.dumps({"model": player.model, **metrics}, indent=1))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
