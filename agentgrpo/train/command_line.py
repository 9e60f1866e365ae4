"""Runs a command that reads a config: parse, load, check, work, report errors in one line."""

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
from agentgrpo.support.user_calls import UserCodeError, describe_error, error_location, print_stderr
from agentgrpo.train.interrupt import die_with_parent, interruptible

Begin = Callable[[], None]
"""A command calls it when its checks are done: errors after that are not usage errors."""


class ChildFailed(Exception):
    """A command started by this one failed. It has already printed the reason."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} ended with status {status}")
        self.status = status if status >= 0 else 128 - status


@dataclass(slots=True)
class Outcome:
    """How a command ended."""

    status: int = 0
    begun: bool = False
    """Whether the checks are done and the work has begun."""
    resume_hint: Callable[[], str] = lambda: ""
    """What the same command would do if started again; printed after the error."""

    def begin(self) -> None:
        self.begun = True


@contextlib.contextmanager
def report_errors() -> Iterator[Outcome]:
    """Print the error that stops a command as one line on stderr, and set the exit status.

    2: invalid input or failing user code, before the work has begun.
    1: the same after it has begun; also non-finite numbers and out of memory.
    3: machine failure, failing user code during the work, or sampler and learner disagree.
    130: Ctrl-C. A child command that failed: its own status.
    Any other exception is a bug of agentgrpo and propagates with its traceback.
    """
    outcome = Outcome()
    try:
        yield outcome
    except (Disagreement, InfrastructureError) as error:
        outcome.status, message = 3, f"error: {error}"
    except UserCodeError as error:
        outcome.status, message = 3, f"error: {error}"
        if not outcome.begun:
            outcome.status, outcome.resume_hint = 2, lambda: ""
    except (FloatingPointError, MemoryError) as error:
        outcome.status, message = 1, f"error: {str(error) or 'out of memory'}"
    except (ValueError, OSError, SandboxUnavailable) as error:
        outcome.status = 1
        message = f"error: {format_os_error(error) if isinstance(error, OSError) else error}"
        if not outcome.begun:
            outcome.status, outcome.resume_hint = 2, lambda: ""
        if isinstance(error, parallel.RanksDiffer) and parallel.rank() > 0:
            return
    except KeyboardInterrupt:
        outcome.status, message = 130, "interrupted"
    except SystemExit as error:  # user code called sys.exit(); without this a run ends silently
        where = error_location(error, None)
        outcome.status, message = 3, f"error: your code {describe_error(error)} (at {where})"
    except ChildFailed as error:
        outcome.status, message = error.status, f"error: {error}"
    else:
        return
    print_stderr(". ".join(filter(None, (message, outcome.resume_hint()))))


def resume_hint(out_dir: Path, saved: Sequence[str]) -> str:
    """A sentence that names what the same command would resume from."""
    newest = newest_saved(out_dir, saved)
    if newest is None:
        return "Nothing was saved: the same command starts from the beginning."
    return f"The same command continues from {newest}."


def run_command(
    name: str,
    description: str | None,
    arguments: Sequence[str],
    run: Callable[[Config, argparse.Namespace, Begin], int | None],
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    *,
    kind: type[Config],
    saved: Sequence[str] = (),
) -> int:
    """Parse the command line, load the config and call `run`. Returns the exit status.

    Args:
        name: of the command, for usage and error messages.
        description: for --help.
        arguments: the command line after the command's name.
        run: makes all checks; with args.dry_run it prints the plan and returns. Otherwise it calls
            `begin`, does the work and may return an exit status.
        options: adds the command's own options to the parser.
        kind: class of the config.
        saved: glob patterns below out_dir of what the same command resumes from.
    """
    parser = config_parser(name, description)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config, data, template, sandbox, device and memory; print the plan; exit",
    )
    # set by the recipe, which passes all of its settings to each of its commands
    parser.add_argument("--of-recipe", action="store_true", help=argparse.SUPPRESS)
    options(parser)
    args, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        parser.error(f"{unknown[0]}: expected section.key=value, without dashes")
    with interruptible(), report_errors() as outcome:
        prepare_environment()
        if args.of_recipe:
            die_with_parent()
        reader = "" if args.of_recipe else name
        config = load_config_of(kind, args.config, args.overrides, reader)
        if not args.dry_run:
            outcome.resume_hint = lambda: resume_hint(config.out_dir, saved)
        outcome.status = run(config, args, outcome.begin) or 0
    return outcome.status
