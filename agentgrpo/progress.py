"""What the person at the terminal sees: a line per event, and a live status line on a TTY."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from agentgrpo import parallel
from agentgrpo.types import Metrics


class Progress:
    """Says what the run is doing, and for how long it still will.

    Lines stay; the status line (spinner, phase, time left) exists on a terminal only.

    Args:
        total_steps: of the run.
        console: rich's; the default writes to stdout, on the first rank only.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._total = total_steps
        self._console = console or Console(
            highlight=False, soft_wrap=True, quiet=parallel.rank() > 0
        )
        self._step_started: list[float] = []
        self._started = time.monotonic()
        self._solved: dict[int, float] = {}

    def say(self, line: str) -> None:
        """Print a line, with the seconds since the start before it."""
        self._console.print(f"{time.monotonic() - self._started:6.0f}s  {line}", markup=False)

    def begin_step(self) -> None:
        """Note when a step starts: what the time left is computed from."""
        self._step_started.append(time.monotonic())

    def step_done(self, step: int, rollout: Metrics, learner: Metrics, engine: Metrics) -> None:
        """The line of a finished step."""
        self.say(
            f"step {step + 1}/{self._total}  reward {rollout['reward']:.3f}  "
            f"solved {rollout['solved']:.0%}  live groups {rollout['live_groups']:.0f}/"
            f"{rollout['groups']:.0f}  tool calls {rollout['tool_calls']:.2f}  "
            f"sampled {rollout['decode_s'] + rollout['idle_s']:.1f}s  "
            f"learned {learner['seconds']:.1f}s on {learner['packed_tokens']:.0f} tokens  "
            f"{_infra(rollout)}"
            f"agreement {max(engine['max_dlogp'], learner.get('sampler_gap_max', 0.0)):.1e}  "
            f"left {self.time_left(step + 1)}"
        )

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """The line of an evaluation."""
        self._solved[step] = metrics["solved"]
        self.say(
            f"held-out after {step} steps: solved {metrics['solved']:.3f} of "
            f"{metrics['rollouts']:.0f} tasks, greedy  (answered {metrics['answered']:.0%}, "
            f"tool errors {metrics['tool_errors']:.2f} a rollout)  {_infra(metrics)}"
        )

    def finished(self, out_dir: Path) -> None:
        """What the run was for, and where everything is."""
        if len(self._solved) > 1:
            (first, before), *_, (last, after) = self._solved.items()
            self.say(f"held-out solved: {before:.3f} after {first} steps, {after:.3f} after {last}")
        self.say(f"done. Everything is in {out_dir.resolve()}:")
        for name, what in {
            "run.json": "resolved config, what was chosen, versions",
            "metrics.jsonl": "one line a step",
            "rollouts.jsonl": "every rollout, token by token",
            "checkpoints/": "Hugging Face model directories, loadable by transformers",
        }.items():
            self.say(f"  {name:16s} {what}")

    def time_left(self, next_step: int) -> str:
        """Estimate from the mean of the steps so far; "?" before the first has ended."""
        steps = len(self._step_started)
        if steps == 0:
            return "?"
        each = (time.monotonic() - self._step_started[0]) / steps
        minutes, seconds = divmod(round(each * (self._total - next_step)), 60)
        return f"{minutes}m{seconds:02d}s"

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Show what is being done now (on a terminal)."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(what):
            yield


def _infra(metrics: Metrics) -> str:
    broken = metrics["infra_errors"]
    return f"BROKEN BY THE MACHINE {broken:.0f}  " if broken else ""
