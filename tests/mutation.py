# ruff: noqa: T201 - a program
"""Mutation testing: change the source in one place at a time and check that a test fails.

    python -m tests.mutation [FILE ...] [--since REV] [--most N] [--seed N]

Mutants come from the syntax trees of the named files, or of those that changed since REV. The tests
run once to record which test runs which line. For each mutant, the tests of its line run in a copy
of the tree until one fails. Surviving mutants are printed and set the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import coverage
import pytest

from agentgrpo.envs.repair_places import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("agentgrpo", "bench", "csrc", "docs", "kernels", "tests")
TestsByLine = dict[str, dict[int, list[str]]]


class Contexts:
    """A pytest plugin that records coverage under the name of each test."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.measured.switch_context(item.nodeid)


def in_a_fork(tree: Path, work: Callable[[], int]) -> int:
    """Run work() in a fork with third-party imports but none of ours; returns the exit code.

    Limited to 10 minutes. The output goes to tree/log.txt.
    """
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(tree / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            signal.alarm(600)
            for name in [n for n in sys.modules if n.partition(".")[0] in ("agentgrpo", "tests")]:
                del sys.modules[name]
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            sys.dont_write_bytecode = True
            os._exit(work())
        finally:  # an error must not unwind into the parent's code
            traceback.print_exc()
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_tests(tree: Path, tests: Sequence[str], *options: str, plugin: object = None) -> int:
    common = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "--rootdir", str(tree)]
    ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*common, *ignored, *options, *tests], plugins=[plugin or object()]))


def tests_by_line(tree: Path, files: Sequence[str], tests: Sequence[str]) -> TestsByLine:
    """The tests that run each line of each file."""

    def measure() -> int:
        measured = coverage.Coverage(data_file=str(tree / "lines"), include=[f"{tree}/*"])
        with measured.collect():
            code = run_tests(tree, tests, plugin=Contexts(measured))
        measured.save()
        return code

    if code := in_a_fork(tree, measure):
        raise SystemExit(f"unchanged, the tests end with {code}:\n{(tree / 'log.txt').read_text()}")
    data = coverage.CoverageData(str(tree / "lines"))
    data.read()
    return {file: data.contexts_by_lineno(str(tree / file)) for file in files}


def survives(tree: Path, mutant: Mutant, tests: Sequence[str]) -> bool:
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(mutant.apply(original))
    code = in_a_fork(tree, lambda: run_tests(tree, tests, "-x", "--timeout", "60"))
    path.write_text(original)
    return code == 0


def try_all(files: Sequence[str], tests: Sequence[str], chosen: Sequence[Mutant]) -> list[Mutant]:
    """Try the mutants, print each result, and return the survivors."""
    alive = []
    with tempfile.TemporaryDirectory() as copy:
        tree = Path(copy).resolve() / "tree"
        tree.mkdir()
        ignore = shutil.ignore_patterns(".*", "__pycache__")
        for part in PARTS:
            shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=ignore)
        for file in filter(Path.is_file, ROOT.iterdir()):
            shutil.copy(file, tree)
        lines = tests_by_line(tree, files, tests)
        for number, mutant in enumerate(chosen, 1):
            # Triton's interpreter recompiles kernels, so coverage does not see their lines
            file_lines = lines[mutant.file]
            covering = (
                [file_lines[mutant.line]] if mutant.line in file_lines else file_lines.values()
            )
            running = sorted({test for tests in covering for test in tests if test})
            lives = not running or survives(tree, mutant, running)
            alive += [mutant] * lives
            state = "SURVIVED" if lives else "caught"
            change = f"{mutant.file}:{mutant.line}: {mutant.old}  ->  {mutant.new}"
            print(f"{number}/{len(chosen)} {state:8} {change}  ({len(running)} tests)", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} caught")
    return alive


def tests_of(files: Sequence[str]) -> list[str]:
    """The test folders that mirror the files' folders; the test file of a top-level module."""
    parts = [Path(file).with_suffix("").parts for file in files]
    tests = {
        "tests/kernels" if part[0] == "kernels"
        else f"tests/{part[1]}" if len(part) > 2
        else f"tests/test_{part[1]}.py"
        for part in parts
    }  # fmt: skip
    return sorted(test for test in tests if (ROOT / test).exists())


def main(arguments: Sequence[str]) -> int:
    """Try the mutants; returns 1 if one survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("files", nargs="*", help="default: those that changed")
    parser.add_argument("--since", default="HEAD", metavar="REV", help="changed since then")
    parser.add_argument("--tests", nargs="+", help="default: those that mirror the files")
    parser.add_argument("--most", type=int, default=100, help="mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    git = ["git", "diff", "--name-only", args.since, "--", "agentgrpo", "kernels"]
    names = args.files or subprocess.check_output(git, cwd=ROOT, text=True).split()
    files = [name for name in names if name.endswith(".py") and (ROOT / name).exists()]
    mutants = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]
    chosen = random.Random(args.seed).sample(mutants, min(args.most, len(mutants)))
    return bool(try_all(files, args.tests or tests_of(files), sorted(chosen)))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # tensors are tiny, and threads would wait for each other
    os.environ["AGENTGRPO_SANDBOX_REQUIRED"] = "1"  # a mutant that breaks isolation must fail
    importlib.import_module("tests.conftest")  # sets the environment before torch and triton
    for name in ("hypothesis", "transformers", "triton.language"):
        importlib.import_module(name)  # else every fork imports them
    sys.exit(main(sys.argv[1:]))
