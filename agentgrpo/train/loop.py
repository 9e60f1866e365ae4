"""The loop of a training run: this file is the whole story of a step.

Each line of it is a module of its own. trainer.py makes the parts and calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from agentgrpo.config import TrainConfig
from agentgrpo.engine.agreement import check_agreement
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.records import checkpoint
from agentgrpo.support import parallel
from agentgrpo.train.collect import collect
from agentgrpo.train.command_line import next_time
from agentgrpo.train.evaluate import evaluate
from agentgrpo.train.parts import Parts
from agentgrpo.types import Group, Metrics

SAVED = (checkpoint.SAVED,)
"""What a run continues from."""


Tell = Callable[..., None]
"""Given an event of Callback's and its values but the trainer."""


def train(
    config: TrainConfig,
    parts: Parts,
    stopping: Callable[[], bool] = lambda: False,
    tell: Tell = lambda event, *values: None,
) -> None:
    """Run up to optimizer step config.steps, from the one the learner was resumed at.

    Ends earlier, with a checkpoint, after the step in which stopping() has become true.
    """
    learner, log, progress = parts.learner, parts.log, parts.progress
    evaluate_if_due(config, parts, learner.step_count, tell)
    for step in range(learner.step_count, config.steps):
        progress.begin_step()
        with engine_awake(parts) as synced:
            groups, played = collect(config, parts, step)
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
        numbers = log.write(step, rollout=played, learner=learned, engine=synced, time=spent)
        progress.step_done(step, played, learned, synced, spent)
        tell("on_step_end", learner.step_count, numbers)
        last = learner.step_count == config.steps
        stop = any(parallel.gather(stopping()))
        if learner.step_count % config.save_every == 0 or last or stop:
            with progress.phase("saving"):
                progress.say_path(f"saved {(saved := parts.save(config))}")
            tell("on_save", learner.step_count, saved)
        if stop and not last:
            progress.say_path(f"stopped. {next_time(config.out_dir, SAVED)}")
            return
        evaluate_if_due(config, parts, learner.step_count, tell)
    log.require_there()
    progress.finished(config.out_dir)


@contextlib.contextmanager
def engine_awake(parts: Parts) -> Iterator[Metrics]:
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


def evaluate_if_due(config: TrainConfig, parts: Parts, step: int, tell: Tell) -> None:
    """Play the held-out tasks as config.evaluation says; record and print what share was solved.

    Due before the first step, after the last and every eval_every: a function of the step alone, so
    that a resumed run records what an uninterrupted one does.
    """
    if step not in (0, config.steps) and (config.eval_every == 0 or step % config.eval_every):
        return
    groups, metrics = play_heldout(config, parts)
    parts.log.rollouts(step, groups, split="heldout")
    numbers = parts.log.write(step, eval=metrics, time=parts.progress.lap())
    parts.progress.evaluated(step, metrics)
    tell("on_evaluate", step, numbers)


def play_heldout(config: TrainConfig, parts: Parts) -> tuple[list[Group], Metrics]:
    """The held-out tasks with the policy as it is, and their metrics."""
    with engine_awake(parts), parts.progress.phase(f"evaluating {len(parts.heldout)} tasks"):
        return evaluate(
            parts.sampler, parts.heldout, parts.reward, seed=config.seed,
            temperature=config.evaluation.temperature, filters=config.evaluation.filters,
        )  # fmt: skip
