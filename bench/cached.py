"""Folders of the cache that are made when they are first asked for, by one process of several."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


class NotToBeHad(Exception):
    """A file that this machine cannot get; says which and why."""


def made_once(folder: Path, make: Callable[[Path], Path]) -> Path:
    """`folder`, made whole or not at all; other processes that ask for it wait.

    Args:
        folder: what it will be called.
        make: given an empty folder, puts files there; returns the folder that becomes `folder`.

    Raises:
        NotToBeHad: make() does; or did, asked by another process of the same run of the tests,
            all of which must find the same.
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
