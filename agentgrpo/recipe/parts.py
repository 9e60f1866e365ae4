"""How every command of a recipe runs, and how several run in order: a recipe is a list of parts.

Each part has a process of its own, so that it gets the device as a fresh run would. Kill it at any
moment and repeat the command: finished parts are skipped, the others go on as they do by
themselves. out_dir/recipe.json has the parts that ended well, with their seconds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentgrpo.command import Stopped
from agentgrpo.command import command as run_command
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.files import read_table
from agentgrpo.run.atomic import write_json
from agentgrpo.run.folder import flat, require_same_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command of a recipe, as a process."""

    name: str
    module: str
    more: Callable[[], Sequence[str]] = tuple
    """Arguments behind the recipe's own; asked for when its turn has come."""
    done: Callable[[], bool] | None = None
    """Whether nothing is left of it; else it is done when it has ended well once."""
    quiet: bool = False
    """What it prints is in the report."""

    def left(self, seconds: Mapping[str, float]) -> bool:
        """Whether it is to be run."""
        return self.name not in seconds if self.done is None else not self.done()


def require_same_recipe(
    recipe: RecipeConfig,
    settings: str,
    *,
    include: set[str] | None = None,
    may_change: set[str] | frozenset[str] = frozenset(),
    write: bool = True,
) -> None:
    """Make the folder this recipe's.

    Args:
        recipe: the settings.
        settings: the file in out_dir that holds the settings with which its work was begun.
        include: the sections that must stay as they were begun; None: all but out_dir.
        may_change: settings within these that may be otherwise now.
        write: else they are only compared.

    Raises:
        ValueError: the folder holds work of other settings.
    """
    table = recipe.model_dump(mode="json", include=include, exclude={"out_dir"})
    require_same_settings(recipe.out_dir / settings, flat(table), may_change, write=write)


def run_parts(
    recipe: RecipeConfig, parts: Sequence[Part], arguments: Sequence[str]
) -> dict[str, float]:
    """Run the parts that are left, in order, with these command-line arguments.

    Returns:
        The seconds that each part has taken, in this call or an earlier one.

    Raises:
        Stopped: a part did not end well.
    """
    path = recipe.out_dir / "recipe.json"
    seconds: dict[str, float] = read_table(path) if path.exists() else {}
    for part in parts:
        if not part.left(seconds):
            continue
        print(f"== {part.name}", flush=True)  # noqa: T201
        command = [sys.executable, "-m", part.module, *arguments, "--of-recipe", *part.more()]
        started = time.perf_counter()
        output = subprocess.DEVNULL if part.quiet else None
        status = subprocess.run(command, stdout=output, check=False).returncode
        if status:
            raise Stopped(part.name, status)
        seconds[part.name] = time.perf_counter() - started
        write_json(path, seconds)
    return seconds


command = partial(run_command, kind=RecipeConfig)
"""One command of a recipe, as agentgrpo.command has it."""
