"""Folders of the cache that are made when they are first asked for, by one process of several."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """`folder`, made whole or not at all; other processes that ask for it wait.

    Args:
        folder: what it will be called.
        make: given an empty folder, puts files there; returns the folder that becomes `folder`.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
                make(Path(partial)).rename(folder)
    return folder
