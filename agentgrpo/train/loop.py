"""The training loop: everything that happens in one step, in order.

Each call leads to a module of its own. trainer.py makes the parts and calls train().
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
from agentgrpo.train.command_line import resume_hint
from agentgrpo.train.evaluate import evaluate
from agentgrpo.train.parts import Parts
from agentgrpo.types import Group, Metrics

SAVED = (checkpoint.SAVED,)
"""Glob patterns, below out_dir, of what a run resumes from."""

Notify = Callable[..., None]
"""notify(event, *values): calls that method of every Callback."""


def train(
    config: TrainConfig,
    parts: Parts,
    stop_requested: Callable[[], bool] = lambda: False,
    notify: Notify = lambda event, *values: None,
) -> None:
    """Train from the learner's current step to optimizer step config.steps.

    Ends earlier, with a checkpoint, after the step in which stop_requested() becomes true.
    """
    learner, log, progress = parts.learner, parts.log, parts.progress
    evaluate_if_due(config, parts, learner.step_count, notify)
    for step in range(learner.step_count, config.steps):
        progress.begin_step()
        with engine_awake(parts) as engine_metrics:
            groups, rollout_metrics = collect(config, parts, step)
        with progress.phase("packing"):
            updates = plan_updates(
                groups, config, step=step, share_prefixes=learner.shares_prefixes
            )
        try:
            with progress.phase("learning"):
                learner_metrics = learner.step(updates)
        finally:  # also a step that the learner refuses is recorded, with its log-probabilities
            with progress.phase("recording"):
                log.rollouts(step, groups)
        times = progress.lap()
        metrics = log.write(
            step, rollout=rollout_metrics, learner=learner_metrics, engine=engine_metrics,
            time=times,
        )  # fmt: skip
        progress.step_done(step, rollout_metrics, learner_metrics, engine_metrics, times)
        notify("on_step_end", learner.step_count, metrics)
        is_last = learner.step_count == config.steps
        stop = any(parallel.gather(stop_requested()))  # all ranks must leave the loop together
        if learner.step_count % config.save_every == 0 or is_last or stop:
            with progress.phase("saving"):
                progress.print_path(f"saved {(folder := parts.save(config))}")
            notify("on_save", learner.step_count, folder)
        if stop and not is_last:
            progress.print_path(f"stopped. {resume_hint(config.out_dir, SAVED)}")
            return
        evaluate_if_due(config, parts, learner.step_count, notify)
    log.require_unchanged()
    progress.finished(config.out_dir)


@contextlib.contextmanager
def engine_awake(parts: Parts) -> Iterator[Metrics]:
    """Wake the engine, sync the learner's weights to it, and check that both sides agree.

    Yields the metrics of the sync. The engine sleeps afterwards: its KV cache frees the memory that
    the learner's activations need.
    """
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


def evaluate_if_due(config: TrainConfig, parts: Parts, step: int, notify: Notify) -> None:
    """Evaluate on the held-out tasks; record and print the result.

    Due before the first step, after the last one and every eval_every steps. This depends on the
    step alone, so that a resumed run writes the same records as an uninterrupted one.
    """
    if step not in (0, config.steps) and (config.eval_every == 0 or step % config.eval_every):
        return
    groups, eval_metrics = evaluate_heldout(config, parts)
    parts.log.rollouts(step, groups, split="heldout")
    metrics = parts.log.write(step, eval=eval_metrics, time=parts.progress.lap())
    parts.progress.evaluated(step, eval_metrics)
    notify("on_evaluate", step, metrics)


def evaluate_heldout(config: TrainConfig, parts: Parts) -> tuple[list[Group], Metrics]:
    """Play the held-out tasks with the current policy, as config.evaluation sets."""
    with engine_awake(parts), parts.progress.phase(f"evaluating {len(parts.heldout)} tasks"):
        return evaluate(
            parts.sampler, parts.heldout, parts.reward, seed=config.seed,
            temperature=config.evaluation.temperature, filters=config.evaluation.filters,
        )  # fmt: skip
