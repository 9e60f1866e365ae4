"""How every command that reads a config runs: parse, read, check or work, say what stops it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgrpo.actions import InfrastructureError
from agentgrpo.config.arguments import config_parser
from agentgrpo.config.read import Config, load_config_of
from agentgrpo.engine.agreement import Disagreement
from agentgrpo.records.run_folder import newest_saved
from agentgrpo.sandbox import SandboxUnavailable
from agentgrpo.support import parallel
from agentgrpo.support.files import format_os_error
from agentgrpo.support.runtime import prepare_environment
from agentgrpo.support.user_calls import UserCodeError, describe_error, error_location, tell
from agentgrpo.train.interrupt import die_with_parent, interruptible

Begin = Callable[[], None]
"""Told by a command that its work begins: what stops it from then on is no fault of the call."""


class Stopped(Exception):
    """A command that this one has started did not end well, and has said why itself."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} ended with status {status}")
        self.status = status if status >= 0 else 128 - status


@dataclass(slots=True)
class Outcome:
    """How a command ended."""

    status: int = 0
    begun: bool = False
    """Whether the work has begun."""
    then: Callable[[], str] = lambda: ""
    """What the same command does next time."""

    def begin(self) -> None:
        self.begun = True


@contextlib.contextmanager
def report_errors() -> Iterator[Outcome]:
    """Say what stops a command, in one line on stderr and without a traceback.

    Status 2: something that the user can change, before the work has begun, code of theirs that
    fails included; 1: the same after it, numbers that are not finite, or no memory; 3: the machine,
    the user's code or the agreement of sampler and learner is not to be trusted; 130: Ctrl-C; that
    of a command which was started, if it stopped. A bug passes, with its traceback.
    """
    outcome = Outcome()
    try:
        yield outcome
    except (Disagreement, InfrastructureError) as error:
        outcome.status, said = 3, f"error: {error}"
    except UserCodeError as error:
        outcome.status, said = 3, f"error: {error}"
        if not outcome.begun:
            outcome.status, outcome.then = 2, lambda: ""
    except (FloatingPointError, MemoryError) as error:
        outcome.status, said = 1, f"error: {str(error) or 'out of memory'}"
    except (ValueError, OSError, SandboxUnavailable) as error:
        outcome.status = 1
        said = f"error: {format_os_error(error) if isinstance(error, OSError) else error}"
        if not outcome.begun:
            outcome.status, outcome.then = 2, lambda: ""
        if isinstance(error, parallel.RanksDiffer) and parallel.rank() > 0:
            return
    except KeyboardInterrupt:
        outcome.status, said = 130, "interrupted"
    except SystemExit as error:  # nothing of ours raises it: it must not end a run without a word
        where = error_location(error, None)
        outcome.status, said = 3, f"error: code of yours {describe_error(error)} (at {where})"
    except Stopped as error:
        outcome.status, said = error.status, f"error: {error}"
    else:
        return
    tell(". ".join(filter(None, (said, outcome.then()))))


def next_time(out_dir: Path, saved: Sequence[str]) -> str:
    """What the same command does next time."""
    newest = newest_saved(out_dir, saved)
    if newest is None:
        return "Nothing was saved: the same command starts from the beginning."
    return f"The same command continues from {newest}."


def command(
    name: str,
    description: str | None,
    arguments: Sequence[str],
    run: Callable[[Config, argparse.Namespace, Begin], int | None],
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    *,
    kind: type[Config],
    saved: Sequence[str] = (),
) -> int:
    """Parse the command line, read the config, run; say in one line what stops it.

    `run` is given the settings and the parsed arguments, and makes all checks. It prints the plan
    and ends there if arguments.dry_run; else it makes what the work needs, calls `begin`, works,
    and may return an exit status. `options` adds options of its own to the parser. `saved`:
    patterns, below out_dir, of what the same command continues from. Returns the exit status.
    """
    parser = config_parser(name, description)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config, data, template, sandbox, device and memory; print the plan; stop",
    )
    # a part of a recipe is given all of the recipe's settings
    parser.add_argument("--of-recipe", action="store_true", help=argparse.SUPPRESS)
    options(parser)
    args, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        parser.error(f"{unknown[0]}: settings are written without dashes, section.key=value")
    with interruptible(), report_errors() as outcome:
        prepare_environment()
        if args.of_recipe:
            die_with_parent()
        reader = "" if args.of_recipe else name
        config = load_config_of(kind, args.config, args.overrides, reader)
        if not args.dry_run:
            outcome.then = lambda: next_time(config.out_dir, saved)
        outcome.status = run(config, args, outcome.begin) or 0
    return outcome.status
