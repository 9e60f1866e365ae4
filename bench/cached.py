"""Creates cache folders on first use, in one of several processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


class NotToBeHad(Exception):
    """A file that this machine cannot download; the message has its name and the reason."""


def made_once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """Create `folder` completely or not at all; other processes wait for it.

    Args:
        folder: the final path.
        make: writes files into an empty folder; returns the folder that becomes `folder`.

    Raises:
        NotToBeHad: from make(), here or in another process of the same test run: all must agree.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    with folder.with_name(f".{folder.name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        lock.seek(0)
        failed_in, _, why = lock.read().partition("\n")
        if run and failed_in == run:
            raise NotToBeHad(why)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir()
        try:
            make(partial).rename(folder)
        except NotToBeHad as error:
            lock.truncate(0)
            lock.write(f"{run}\n{error}")
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder
