"""One training run: `python -m agentgrpo.train CONFIG [section.key=value ...]`.

trainer.py has what this is written with, loop.py what becomes of a step.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: a package may be missing
    from agentgrpo import cli

    cli.run("train")

import contextlib
from collections.abc import Callable, Iterator

from agentgrpo.build import Parts, build
from agentgrpo.command import Work, command
from agentgrpo.config import TrainConfig
from agentgrpo.loop import SAVED
from agentgrpo.plan import planned
from agentgrpo.trainer import Trainer


@contextlib.contextmanager
def prepared(config: TrainConfig, build: Callable[[TrainConfig], Parts]) -> Iterator[Work]:
    """Build the parts; yields the training, which returns the exit status."""
    with Trainer(config, make=build) as trainer:

        def work() -> int:
            trainer.train()
            return 130 if trainer.step < config.steps else 0

        yield work


def main(arguments: list[str]) -> int:
    """Parse the command line, build the parts, train. Returns the exit status."""
    about = "Train a policy. The same command continues what was stopped."
    return command(
        "train", about, arguments, lambda config, _: prepared(config, build),
        kind=TrainConfig, plan=lambda config, _: planned(config), saved=SAVED,
    )  # fmt: skip
