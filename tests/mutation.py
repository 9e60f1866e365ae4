# ruff: noqa: T201 - a program
"""Change source in small ways and see that the tests notice every one.

A mutant replaces one piece of source in a copy of the tree, in which the tests named for its file
are run to their first failure. A mutant that survives is printed and sets the exit status. A piece
that no longer occurs as often as said is an error: the lists must follow the code.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """Replace the `nth` occurrence of `old` by `new` in `file`."""

    file: str
    old: str
    new: str
    nth: int = 0


def replace_nth(text: str, mutant: Mutant) -> str:
    parts = text.split(mutant.old)
    if len(parts) < mutant.nth + 2:
        raise SystemExit(f"{mutant.file} has no occurrence {mutant.nth} of {mutant.old!r}")
    before, after = parts[: mutant.nth + 1], parts[mutant.nth + 1 :]
    return mutant.old.join(before) + mutant.new + mutant.old.join(after)


def survives(mutant: Mutant, path: Path, tests: Sequence[str], tree: Path) -> bool:
    """Runs the tests in a fork, which inherits what is imported already."""
    original = path.read_text()
    path.write_text(replace_nth(original, mutant))
    log = tree / "log.txt"
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            os._exit(run_tests(tests, tree))
        finally:  # an error must not unwind into the parent's work
            traceback.print_exc()
            os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    path.write_text(original)
    # 2: it does not even import; SIGSEGV: Triton's interpreter reads wild addresses as told
    if code not in (0, 1, 2, -signal.SIGSEGV):
        raise SystemExit(f"pytest itself failed on {mutant}:\n{log.read_text()}")
    return code == 0


def run_tests(names: Sequence[str], tree: Path) -> int:
    os.chdir(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("agentgrpo", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    paths = [str(tree / "tests" / name) for name in names]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(tree), "--timeout", "60"]
    imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *imported, *paths]))


def hunt(
    mutants: Sequence[Mutant],
    folder: str,
    tests: Mapping[str, Sequence[str]],
    words: Sequence[str],
) -> int:
    """Try the mutants whose file or piece has one of the words (all, without words).

    Args:
        mutants: of files in `folder`.
        folder: relative to the repository.
        tests: of each file, relative to tests/.
        words: of the command line.

    Returns:
        The exit status: 1 if one survived.
    """
    chosen = [m for m in mutants if not words or any(w in m.file + m.old for w in words)]
    alive = []
    with tempfile.TemporaryDirectory() as copy:
        tree = Path(copy) / "tree"
        ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "models", "runs")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignore)
        for number, mutant in enumerate(chosen, 1):
            lives = survives(mutant, tree / folder / mutant.file, tests[mutant.file], tree)
            alive += [mutant] * lives
            state = "SURVIVED" if lives else "caught"
            change = f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}"
            print(f"{number}/{len(chosen)} {state:8} {change}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} caught")
    return len(alive) > 0
