"""One training run: `python -m agentgrpo.train CONFIG [section.key=value ...]`.

This file is the whole story of a step; each line of the loop is a module of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from agentgrpo import parallel
from agentgrpo.actions import InfrastructureError
from agentgrpo.build import Parts
from agentgrpo.config import TrainConfig
from agentgrpo.config.arguments import config_parser
from agentgrpo.config.read import load_config
from agentgrpo.engine.agreement import Disagreement, check_agreement
from agentgrpo.evaluate import evaluate, summarize
from agentgrpo.learn.advantages import assign_advantages, has_gradient, why_dead
from agentgrpo.learn.preflight import to_learn, to_sample
from agentgrpo.learn.updates import plan_updates
from agentgrpo.machine.memory import explained
from agentgrpo.machine.runtime import prepare_environment
from agentgrpo.rewards.rewards import RewardError
from agentgrpo.rewards.scoring import score_all
from agentgrpo.run.interrupt import stop_after_step
from agentgrpo.sandbox import SandboxUnavailable
from agentgrpo.types import Group, Metrics


def train(config: TrainConfig, parts: Parts, stopping: Callable[[], bool] = lambda: False) -> None:
    """Run up to optimizer step config.steps, from the one the learner was resumed at.

    Ends earlier, with a checkpoint, after the step in which stopping() has become true.
    """
    learner, log, progress = parts.learner, parts.log, parts.progress
    evaluate_if_due(config, parts, learner.step_count)
    for step in range(learner.step_count, config.steps):
        progress.begin_step()
        with generating(config, parts) as engine_metrics:
            groups, sampled = collect(config, parts, step)
        parts.tasks.feedback(groups)
        with progress.phase("packing"):
            shared = learner.shares_prefixes
            updates = plan_updates(groups, config, step=step, share_prefixes=shared)
        try:
            with (
                progress.phase("learning"),
                explained("learning", lambda: to_learn(config, learner)),
            ):
                learned = learner.step(updates)
        finally:  # refused or not, with what the learner made of them
            with progress.phase("recording"):
                log.rollouts(step, groups)
        time = progress.lap()
        log.write(step, rollout=sampled, learner=learned, engine=engine_metrics, time=time)
        progress.step_done(step, sampled, learned, engine_metrics)
        last = learner.step_count == config.steps
        stop = any(parallel.gather(stopping()))
        if learner.step_count % config.save_every == 0 or last or stop:
            with progress.phase("saving"):
                progress.say(f"saved {parts.save(config)}")
        if stop and not last:
            return
        evaluate_if_due(config, parts, learner.step_count)
    progress.finished(config.out_dir)


@contextlib.contextmanager
def generating(config: TrainConfig, parts: Parts) -> Iterator[Metrics]:
    """Lend the device to the engine, with the learner's weights, proven to be the same."""
    wakes = explained("waking the engine", lambda: to_sample(config))
    with parts.progress.phase("waking the engine"), wakes:
        metrics = parts.engine.wake()
    try:
        with parts.progress.phase("syncing the weights"):
            metrics |= parts.learner.publish()
            metrics |= check_agreement(
                parts.engine, parts.learner, parts.probes, threshold=parts.agreement_threshold
            )
        with explained("generating", lambda: to_sample(config)):
            yield metrics
    finally:
        parts.engine.sleep()


def collect(config: TrainConfig, parts: Parts, step: int) -> tuple[list[Group], Metrics]:
    """Play and score groups; play more while too few of them carry a gradient."""
    c = config.rollout
    groups: list[Group] = []
    metrics: Metrics = {}
    for refill in range(1 + c.max_refills):
        with parts.progress.phase(f"playing {c.tasks_per_step} tasks x {c.group_size}"):
            tasks = parallel.mine(parts.tasks.next(c.tasks_per_step))
            seed = config.seed_of(step, refill) + parallel.RANK_SEED * parallel.rank()
            played, stats = parts.sampler.play(tasks, c.group_size, seed=seed)
        score_all(played, parts.reward, step=step)
        groups += parallel.interleave(parallel.gather(played))
        assign_advantages(groups, config.loss, config.reward.weights)
        for counts in parallel.gather(stats.metrics()):
            for name, value in counts.items():
                metrics[name] = metrics.get(name, 0.0) + value
        live = sum(map(has_gradient, groups))
        if live >= c.refill_below:
            break
    metrics |= Counter(f"dead_{reason}" for group in groups if (reason := why_dead(group)))
    return groups, {**summarize(groups), **metrics, "groups": len(groups), "live_groups": live}


def evaluate_if_due(config: TrainConfig, parts: Parts, step: int) -> None:
    """Play the held-out tasks as config.evaluation says; record and print what share was solved.

    Due before the first step, after the last and every eval_every: a function of the step alone, so
    that a resumed run records what an uninterrupted one does.
    """
    if step not in (0, config.steps) and (config.eval_every == 0 or step % config.eval_every):
        return
    with generating(config, parts), parts.progress.phase(f"evaluating {len(parts.heldout)} tasks"):
        groups, metrics = evaluate(
            parts.sampler, parts.heldout, parts.reward, seed=config.seed,
            temperature=config.evaluation.temperature, filters=config.evaluation.filters,
        )  # fmt: skip
    parts.log.rollouts(step, groups, split="heldout")
    parts.log.write(step, eval=metrics, time=parts.progress.lap())
    parts.progress.evaluated(step, metrics)


CONTINUE = "The same command continues from the last checkpoint."


def main(arguments: list[str]) -> int:
    """Parse the command line, build the parts, train. Returns the exit status."""
    parser = config_parser("train", "Train a policy. The same command continues what was stopped.")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config, data, template, sandbox, device and memory; print the plan; stop",
    )
    args = parser.parse_intermixed_args(arguments)
    prepare_environment()
    from agentgrpo.build import build
    from agentgrpo.plan import planned

    try:
        config = load_config(args.config, args.overrides)
        if args.dry_run:
            print(planned(config))  # noqa: T201
            return 0
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return run(config, build)


def run(config: TrainConfig, build: Callable[[TrainConfig], Parts]) -> int:
    """Build the parts and train; says what went wrong. Returns the exit status."""
    try:
        parallel.start()
        parts = build(config)
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("interrupted before the first step", file=sys.stderr)  # noqa: T201
        return 130
    try:
        with stop_after_step(parts.progress.say) as stopping:
            train(config, parts, stopping)
    except (Disagreement, InfrastructureError, RewardError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 3
    except (FloatingPointError, OSError, ValueError) as error:
        print(f"error: {error}. {CONTINUE}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print(f"interrupted. {CONTINUE}", file=sys.stderr)  # noqa: T201
        return 130
    finally:
        parts.close()
        parallel.stop()
    if parts.learner.step_count < config.steps:
        parts.progress.say(f"stopped. {CONTINUE}")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
