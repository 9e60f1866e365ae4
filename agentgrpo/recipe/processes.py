"""Run the parts of a recipe in order. Each part is one command.

Each part runs in its own process, so that it gets the device in the state of a fresh run. After an
interruption at any time, the same command skips finished parts, and the next part resumes.
out_dir/recipe.json lists the finished parts with their seconds.
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
    command: str
    """The command: `agentgrpo COMMAND`."""
    extra_arguments: Callable[[], Sequence[str]] = tuple
    """Returns arguments after the recipe's own. Called just before the part starts."""
    is_done: Callable[[], bool] | None = None
    """Whether the part is finished. None: it is finished after its first success."""
    quiet: bool = False
    """Discard its output, which is in the report."""

    def is_pending(self, seconds: Mapping[str, float]) -> bool:
        """Whether the part must run. `seconds`: durations of finished parts."""
        return self.name not in seconds if self.is_done is None else not self.is_done()


def require_same_work(
    recipe: RecipeConfig, command: str, saved: Collection[str], *,
    may_change: Collection[str] = (), data: Mapping[str, str] = MappingProxyType({}), write: bool,
) -> None:  # fmt: skip
    """Compare the settings with those of the command's earlier work in out_dir, and store them.

    They are in settings/COMMAND.json. All settings that the command reads must be equal, except
    those that any run may change and `may_change`. `saved`: patterns, below out_dir, of files from
    which it continues. `data`: the content that a setting names. Without `write` nothing is stored.
    """
    path = recipe.out_dir / "settings" / f"{command}.json"
    pattern = (
        "*.json" if command == "recipe" else path.name
    )  # its parts may have run as single commands
    has_begun = newest_saved(recipe.out_dir, saved) is not None
    if has_begun and not [*path.parent.glob(pattern)]:
        raise ValueError(
            f"out_dir: expected settings/{path.name} beside earlier work in "
            f"{str(recipe.out_dir)!r}, got none. Choose another out_dir"
        )
    table = flatten(recipe.model_dump(mode="json"))
    settings = {key: value for key, value in table.items() if uses(command, key)} | {**data}
    require_same_settings(
        path, settings, MAY_CHANGE.union(may_change), begun=has_begun, write=write
    )


def run_parts(
    recipe: RecipeConfig, parts: Sequence[Part], arguments: Sequence[str]
) -> dict[str, float]:
    """Run the remaining parts in order with these command-line arguments.

    Returns the seconds of each part, in this call or an earlier one.
    """
    path = recipe.out_dir / "recipe.json"
    seconds: dict[str, float] = read_table(path) if path.exists() else {}
    for part in parts:
        if not part.is_pending(seconds):
            continue
        print(f"== {part.name}", flush=True)
        command = [sys.executable, "-m", "agentgrpo", part.command, *arguments, "--of-recipe"]
        command += part.extra_arguments()
        started = time.perf_counter()
        status, interrupted = run_child(command, stdout=subprocess.DEVNULL if part.quiet else None)
        if status:
            raise ChildFailed(part.name, status)
        seconds[part.name] = time.perf_counter() - started
        write_json(path, seconds)
        if interrupted:
            raise KeyboardInterrupt
    return seconds


command = partial(run_command, kind=RecipeConfig)
"""agentgrpo.train.command_line.run_command() for a RecipeConfig."""
