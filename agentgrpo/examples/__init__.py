"""Examples. Each folder has config.toml, its code, README.md and, if it was measured, its curve.

`agentgrpo train NAME` runs one from anywhere. `agentgrpo init --examples [FOLDER]` copies all, to
edit them. harbor/ has ten task folders for `agentgrpo init --harbor`.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FOLDER = Path(__file__).parent


def copy_examples(target: Path) -> list[Path]:
    """Copy all examples into the folder `target`. The copied configs use the copied code."""
    folders = sorted(path.parent for path in FOLDER.glob("*/README.md"))
    for folder in folders:
        if (target / folder.name).exists():
            raise FileExistsError(f"{target / folder.name} already exists")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in folders:
        shutil.copytree(folder, target / folder.name, ignore=ignored)
        for path in (target / folder.name).glob("*.toml"):
            path.write_text(path.read_text().replace(f"{__name__}.{folder.name}.", ""))
    return [target / folder.name for folder in folders]


def shuffled(items: Iterable[T]) -> list[T]:
    """The items in an order that is shuffled and always the same."""
    order = list(items)
    random.Random("lessons").shuffle(order)
    return order
