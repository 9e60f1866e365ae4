"""How every command of a recipe runs, and how several run in order: a recipe is a list of parts.

Each part has a process of its own, so that it gets the device as a fresh run would. Kill it at any
moment and repeat the command: finished parts are skipped, the others go on as they do by
themselves. out_dir/recipe.json has the parts that ended well, with their seconds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from agentgrpo.config.command_settings import uses
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.records.run_folder import MAY_CHANGE, flatten, newest_saved, require_same_settings
from agentgrpo.support.atomic_files import write_json
from agentgrpo.support.files import read_table
from agentgrpo.train.command_line import ChildFailed, run_command
from agentgrpo.train.interrupt import run_child


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One command of a recipe, as a process."""

    name: str
    word: str
    """Behind `agentgrpo`."""
    more: Callable[[], Sequence[str]] = tuple
    """Arguments behind the recipe's own; asked for when its turn has come."""
    done: Callable[[], bool] | None = None
    """Whether nothing is left of it; else it is done when it has ended well once."""
    quiet: bool = False
    """What it prints is in the report."""

    def left(self, seconds: Mapping[str, float]) -> bool:
        """Whether it is to be run."""
        return self.name not in seconds if self.done is None else not self.done()


def require_same_work(
    recipe: RecipeConfig, command: str, saved: Collection[str], *,
    may_change: Collection[str] = (), data: Mapping[str, str] = MappingProxyType({}), write: bool,
) -> None:  # fmt: skip
    """Make what a command has begun in out_dir this recipe's: settings/COMMAND.json says whose.

    All settings that it reads must be as it was begun, but for what any run may change and
    `may_change`. `saved`: patterns, below out_dir, of what it continues from. `data`: what was
    read, for a setting that names it. Not `write`: they are only compared.
    """
    path = recipe.out_dir / "settings" / f"{command}.json"
    any_of = "*.json" if command == "recipe" else path.name  # its parts may have begun alone
    begun = newest_saved(recipe.out_dir, saved) is not None
    if begun and not [*path.parent.glob(any_of)]:
        raise ValueError(
            f"out_dir {str(recipe.out_dir)!r} holds work without settings/{path.name}: choose "
            "another out_dir"
        )
    table = flatten(recipe.model_dump(mode="json"))
    now = {key: value for key, value in table.items() if uses(command, key)} | {**data}
    require_same_settings(path, now, MAY_CHANGE.union(may_change), begun=begun, write=write)


def run_parts(
    recipe: RecipeConfig, parts: Sequence[Part], arguments: Sequence[str]
) -> dict[str, float]:
    """Run the parts that are left, in order, with these command-line arguments.

    Returns the seconds that each part has taken, in this call or an earlier one.
    """
    path = recipe.out_dir / "recipe.json"
    seconds: dict[str, float] = read_table(path) if path.exists() else {}
    for part in parts:
        if not part.left(seconds):
            continue
        print(f"== {part.name}", flush=True)  # noqa: T201
        command = [sys.executable, "-m", "agentgrpo", part.word, *arguments, "--of-recipe"]
        command += part.more()
        started = time.perf_counter()
        status, asked = run_child(command, stdout=subprocess.DEVNULL if part.quiet else None)
        if status:
            raise ChildFailed(part.name, status)
        seconds[part.name] = time.perf_counter() - started
        write_json(path, seconds)
        if asked:
            raise KeyboardInterrupt
    return seconds


command = partial(run_command, kind=RecipeConfig)
"""One command of a recipe, as agentgrpo.train.command_line has it."""
