"""How every command that reads a config runs: parse, read, check or work, say what stops it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentgrpo.actions import InfrastructureError
from agentgrpo.config import TrainConfig
from agentgrpo.config.arguments import config_parser
from agentgrpo.config.read import Config, load_config_of
from agentgrpo.engine.agreement import Disagreement
from agentgrpo.machine.runtime import prepare_environment
from agentgrpo.plan import planned
from agentgrpo.rewards.rewards import RewardError
from agentgrpo.sandbox import SandboxUnavailable

CONTINUE = "The same command continues where it stopped."


class Stopped(Exception):
    """A command that this one has started did not end well, and has said why itself.

    Args:
        name: of what it does.
        status: its exit status, which is this command's too; negative: the signal that ended it.
    """

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} ended with status {status}")
        self.status = status if status >= 0 else 128 - status


@dataclass(slots=True)
class Outcome:
    """How a command ended."""

    status: int = 0
    begun: bool = False
    """Whether there is something to continue: what stops it from now on is no fault of the call."""

    def begin(self) -> None:
        """Say that there is something to continue now."""
        self.begun = True


@contextlib.contextmanager
def told(then: str = CONTINUE) -> Iterator[Outcome]:
    """Say what stops a command, in one line on stderr and without a traceback.

    Status 2: something that the user can change, before anything was begun; 1: the same after it,
    numbers that are not finite, or no memory; 3: the machine, a reward or the agreement of sampler
    and learner is not to be trusted; 130: Ctrl-C; that of a command which was started, if it
    stopped. A fault of ours passes, with its traceback.

    Args:
        then: what the user can do; nothing is said of it where the call is to be changed.
    """
    outcome = Outcome()
    try:
        yield outcome
    except (Disagreement, InfrastructureError, RewardError) as error:
        outcome.status, said = 3, f"error: {error}. {then}"
    except (FloatingPointError, MemoryError) as error:
        outcome.status, said = 1, f"error: {str(error) or 'out of memory'}. {then}"
    except (ValueError, OSError, SandboxUnavailable) as error:
        outcome.status = 1 if outcome.begun else 2
        said = f"error: {error}. {then}" if outcome.begun else f"error: {error}"
    except KeyboardInterrupt:
        outcome.status, said = 130, f"interrupted. {then}"
    except Stopped as error:
        outcome.status, said = error.status, f"error: {error}. {then}"
    else:
        return
    print(said, file=sys.stderr)  # noqa: T201


def command(
    name: str,
    description: str | None,
    arguments: Sequence[str],
    work: Callable[[Config, argparse.Namespace, Callable[[], None]], int | None],
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    *,
    kind: type[Config],
    as_run: Callable[[Config], TrainConfig],
    then: str = CONTINUE,
) -> int:
    """Parse the command line, read the config, do the work or (--dry-run) say what it would be.

    Args:
        name: behind `agentgrpo`.
        description: for `--help`.
        arguments: of the command line.
        work: given the settings, the parsed arguments and what to call when it has begun
            (Outcome.begin); may return an exit status.
        options: adds options of its own to the parser.
        kind: which sections the config may have.
        as_run: the training run in it, of which a dry run says the plan.
        then: as of told().

    Returns:
        The exit status: that of the work, or as told() has it.
    """
    parser = config_parser(name, description)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config, data, template, sandbox, device and memory; print the plan; stop",
    )
    options(parser)
    args = parser.parse_intermixed_args(arguments)
    prepare_environment()
    with told(then) as outcome:
        config = load_config_of(kind, args.config, args.overrides)
        if args.dry_run:
            print(planned(as_run(config)))  # noqa: T201
        else:
            outcome.status = work(config, args, outcome.begin) or 0
    return outcome.status
