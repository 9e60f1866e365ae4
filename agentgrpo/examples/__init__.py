"""Examples, a folder each: config.toml, its code, README.md, and its curve where one was measured.

`agentgrpo train NAME` runs one from anywhere; `agentgrpo init --examples [FOLDER]` copies all of
them, to change them. harbor/ has ten task folders for `agentgrpo init --harbor`.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FOLDER = Path(__file__).parent


def copy_examples(to: Path) -> list[Path]:
    """Copy every folder into `to`, which is made; the copies name the code beside them."""
    folders = sorted(path.parent for path in FOLDER.glob("*/README.md"))
    for folder in folders:
        if (to / folder.name).exists():
            raise FileExistsError(f"{to / folder.name} is there already")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in folders:
        shutil.copytree(folder, to / folder.name, ignore=ignored)
        for path in (to / folder.name).glob("*.toml"):
            path.write_text(path.read_text().replace(f"{__name__}.{folder.name}.", ""))
    return [to / folder.name for folder in folders]


def shuffled(every: Iterable[T]) -> list[T]:
    """All items, in an order that is always the same."""
    order = list(every)
    random.Random("lessons").shuffle(order)
    return order
