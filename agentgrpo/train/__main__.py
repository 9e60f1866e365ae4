"""One training run: `agentgrpo train CONFIG [section.key=value ...]`.

trainer.py has what this is written with, loop.py what becomes of a step.
"""

from __future__ import annotations

if __name__ == "__main__":  # as torchrun starts it; before the imports: a package may be missing
    from agentgrpo import cli

    cli.run("train")

import argparse
import contextlib
from collections.abc import Callable

from agentgrpo.config import TrainConfig
from agentgrpo.train.build import build, prepare
from agentgrpo.train.command_line import Begin, command
from agentgrpo.train.dry_run import of_steps, of_training, plan
from agentgrpo.train.loop import SAVED
from agentgrpo.train.parts import Parts
from agentgrpo.train.trainer import Trainer


def run(config: TrainConfig, args: argparse.Namespace, begin: Begin) -> int:
    """Train, or say what a run would do; the exit status."""
    if args.dry_run:
        with contextlib.closing(prepare(config)) as parts:
            lines = [*of_training(config, parts), of_steps(config, parts.resumed)]
            print(plan(config, parts, lines))  # noqa: T201
        return 0
    return work(config, begin, build)


def work(config: TrainConfig, begin: Begin, make: Callable[[TrainConfig], Parts]) -> int:
    """Build the parts and train; the exit status."""
    with Trainer(config, make=make) as trainer:
        begin()
        trainer.train()
        return 130 if trainer.step < config.steps else 0


def main(arguments: list[str]) -> int:
    """Parse the command line, build the parts, train. Returns the exit status."""
    about = "Train a policy. The same command continues what was stopped."
    return command("train", about, arguments, run, kind=TrainConfig, saved=SAVED)
