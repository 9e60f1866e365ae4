"""One training run: `python -m agentgrpo.train CONFIG [section.key=value ...]`.

This file is the whole story of a step; each line of the loop is a module of its own.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: a package may be missing
    from agentgrpo import cli

    cli.run("train")

import contextlib
from collections.abc import Callable, Iterator

from agentgrpo import parallel
from agentgrpo.build import Parts, build
from agentgrpo.collect import collect
from agentgrpo.command import Work, command, next_time
from agentgrpo.config import TrainConfig
from agentgrpo.engine.agreement import check_agreement
from agentgrpo.evaluate import evaluate
from agentgrpo.learn.updates import plan_updates
from agentgrpo.plan import planned
from agentgrpo.run import checkpoint
from agentgrpo.run.interrupt import stop_after_step
from agentgrpo.types import Metrics

SAVED = (checkpoint.SAVED,)
"""What a run continues from."""


def train(config: TrainConfig, parts: Parts, stopping: Callable[[], bool] = lambda: False) -> None:
    """Run up to optimizer step config.steps, from the one the learner was resumed at.

    Ends earlier, with a checkpoint, after the step in which stopping() has become true.
    """
    learner, log, progress = parts.learner, parts.log, parts.progress
    evaluate_if_due(config, parts, learner.step_count)
    for step in range(learner.step_count, config.steps):
        progress.begin_step()
        with awake(parts) as synced:
            groups, played = collect(config, parts, step)
        parts.tasks.feedback(groups)
        with progress.phase("packing"):
            shared = learner.shares_prefixes
            updates = plan_updates(groups, config, step=step, share_prefixes=shared)
        try:
            with progress.phase("learning"):
                learned = learner.step(updates)
        finally:  # refused or not, with what the learner made of them
            with progress.phase("recording"):
                log.rollouts(step, groups)
        spent = progress.lap()
        log.write(step, rollout=played, learner=learned, engine=synced, time=spent)
        progress.step_done(step, played, learned, synced, spent)
        last = learner.step_count == config.steps
        stop = any(parallel.gather(stopping()))
        if learner.step_count % config.save_every == 0 or last or stop:
            with progress.phase("saving"):
                progress.say(f"saved {parts.save(config)}")
        if stop and not last:
            progress.say(f"stopped. {next_time(config.out_dir, SAVED)}")
            return
        evaluate_if_due(config, parts, learner.step_count)
    log.require_there()
    progress.finished(config.out_dir)


@contextlib.contextmanager
def awake(parts: Parts) -> Iterator[Metrics]:
    """Give the device to the engine, with the learner's weights, proven to be the same."""
    with parts.progress.phase("waking the engine"):
        metrics = parts.engine.wake()
    try:
        with parts.progress.phase("syncing the weights"):
            metrics |= parts.learner.publish()
            metrics |= check_agreement(
                parts.engine, parts.learner, parts.probes, threshold=parts.agreement_threshold
            )
        yield metrics
    finally:
        parts.engine.sleep()


def evaluate_if_due(config: TrainConfig, parts: Parts, step: int) -> None:
    """Play the held-out tasks as config.evaluation says; record and print what share was solved.

    Due before the first step, after the last and every eval_every: a function of the step alone, so
    that a resumed run records what an uninterrupted one does.
    """
    if step not in (0, config.steps) and (config.eval_every == 0 or step % config.eval_every):
        return
    with awake(parts), parts.progress.phase(f"evaluating {len(parts.heldout)} tasks"):
        groups, metrics = evaluate(
            parts.sampler, parts.heldout, parts.reward, seed=config.seed,
            temperature=config.evaluation.temperature, filters=config.evaluation.filters,
        )  # fmt: skip
    parts.log.rollouts(step, groups, split="heldout")
    parts.log.write(step, eval=metrics, time=parts.progress.lap())
    parts.progress.evaluated(step, metrics)


@contextlib.contextmanager
def prepared(config: TrainConfig, build: Callable[[TrainConfig], Parts]) -> Iterator[Work]:
    """Build the parts; yields the training."""
    parallel.start()
    try:
        with contextlib.closing(build(config)) as parts:
            yield lambda: run(config, parts)
    finally:
        parallel.stop()


def run(config: TrainConfig, parts: Parts) -> int:
    """Train until the last step, or until somebody asks to stop. Returns the exit status."""
    with stop_after_step(parts.progress.say) as stopping:
        train(config, parts, stopping)
    return 130 if parts.learner.step_count < config.steps else 0


def main(arguments: list[str]) -> int:
    """Parse the command line, build the parts, train. Returns the exit status."""
    about = "Train a policy. The same command continues what was stopped."
    return command(
        "train", about, arguments, lambda config, _: prepared(config, build),
        kind=TrainConfig, plan=lambda config, _: planned(config), saved=SAVED,
    )  # fmt: skip
