"""Callback: methods called on the events of a run, as in transformers and TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentgrpo.types import Metrics


class Callback:
    """Base class; override the methods of the events that you need.

    The first argument is the Trainer: `trainer.stop()` ends the run after this step, with a
    checkpoint. An exception in a method ends the run. Under torchrun every rank calls its own
    callbacks.
    """

    def on_train_begin(self, trainer: Any) -> None:
        """Before the first step, and before its evaluation."""

    def on_step_end(self, trainer: Any, step: int, metrics: Metrics) -> None:
        """After an optimizer step.

        Args:
            trainer: the Trainer.
            step: number of optimizer steps so far; 1 after the first.
            metrics: the step's line of metrics.jsonl: rollout/reward, learner/loss, ...
        """

    def on_evaluate(self, trainer: Any, step: int, metrics: Metrics) -> None:
        """After an evaluation on the held-out tasks; metrics: eval/solved, eval/reward, ..."""

    def on_save(self, trainer: Any, step: int, folder: Path) -> None:
        """After a checkpoint was written."""

    def on_train_end(self, trainer: Any) -> None:
        """After the last step, or after the step at which the run was stopped."""
