"""What a run tells of itself while it trains, in the form that transformers and TRL have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentgrpo.types import Metrics


class Callback:
    """Told of a run's events; override what you want to hear of.

    Each method gets the Trainer first: `trainer.stop()` ends the run after this step, with a
    checkpoint. What a method raises ends the run. Under torchrun every rank calls its own.
    """

    def on_train_begin(self, trainer: Any) -> None:
        """Before the first step, and before its evaluation."""

    def on_step_end(self, trainer: Any, step: int, metrics: Metrics) -> None:
        """After an optimizer step.

        Args:
            trainer: of the run.
            step: how many there were, from 1.
            metrics: the step's line of metrics.jsonl: rollout/reward, learner/loss, ...
        """

    def on_evaluate(self, trainer: Any, step: int, metrics: Metrics) -> None:
        """After an evaluation on held-out tasks; metrics are eval/solved, eval/reward, ..."""

    def on_save(self, trainer: Any, step: int, folder: Path) -> None:
        """After a checkpoint was written."""

    def on_train_end(self, trainer: Any) -> None:
        """After the last step, or the one that the run was asked to stop after."""
