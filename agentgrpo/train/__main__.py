"""`agentgrpo train CONFIG [section.key=value ...]`.

The path to the first step: main() -> run_command() (command_line.py) loads the config -> Trainer
(trainer.py) -> build() (build.py): prepare() checks the config and opens data and sandbox
(prepare.py), then vLLM is started and the learner made -> loop.train() evaluates on the held-out
tasks and runs the steps.
"""

from __future__ import annotations

if __name__ == "__main__":  # started by torchrun; cli reports a package that the imports below lack
    from agentgrpo import cli

    cli.exit_with("train")

import argparse
import contextlib
from collections.abc import Callable

from agentgrpo.config import TrainConfig
from agentgrpo.train.build import build, prepare
from agentgrpo.train.command_line import Begin, run_command
from agentgrpo.train.dry_run import format_plan, run_length_line, training_lines
from agentgrpo.train.loop import SAVED
from agentgrpo.train.parts import Parts
from agentgrpo.train.trainer import Trainer


def train_or_plan(config: TrainConfig, args: argparse.Namespace, begin: Begin) -> int:
    """Train, or print the plan of a dry run. Returns the exit status."""
    if args.dry_run:
        with contextlib.closing(prepare(config)) as parts:
            lines = [*training_lines(config, parts), run_length_line(config, parts.resumed)]
            print(format_plan(config, parts, lines))
        return 0
    return train(config, begin, build)


def train(config: TrainConfig, begin: Begin, make: Callable[[TrainConfig], Parts]) -> int:
    """Build the parts and train. Returns the exit status: 130 if stopped before the last step."""
    with Trainer(config, make=make) as trainer:
        begin()
        trainer.train()
        return 130 if trainer.step < config.steps else 0


def main(arguments: list[str]) -> int:
    """Entry point of `agentgrpo train`."""
    description = "Train a policy. The same command resumes a stopped run."
    return run_command(
        "train", description, arguments, train_or_plan, kind=TrainConfig, saved=SAVED
    )
