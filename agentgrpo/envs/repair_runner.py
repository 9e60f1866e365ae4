"""Runs in a session (repair_judge.py): tests by pytest, and what came of each.

What the tests are run with, the tree aside, is compared before and afterwards: who replaces an
assertion, a reporter or a function of another module fails.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest


def instruments(root: str) -> dict[tuple[str, ...], Any]:
    """Functions, classes and methods of all modules but the tree's and what runs this."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in [*sys.modules.items()]:
        if name == "__main__" or str(getattr(module, "__file__", "")).startswith(root):
            continue
        for key, value in [*getattr(module, "__dict__", {}).items()]:
            if callable(value):
                found[name, key] = value
            if isinstance(value, type):
                found |= {
                    (name, key, k): v for k, v in vars(value).items() if hasattr(v, "__get__")
                }
    return found


def load_what_they_import(files: Sequence[str], root: str) -> None:
    """The modules that tests name, but the tree's: before the tree can change them."""
    path, sys.path = sys.path, [p for p in sys.path if not p.startswith(root)]
    for file in files:
        with contextlib.suppress(OSError), open(file, encoding="utf-8") as opened:
            said = re.findall(r"^ *(?:import|from) +(\w[\w., ]*)", opened.read(), re.MULTILINE)
            for names in (one.partition(" import ")[0].split(",") for one in said):
                for name in (named.split()[0] for named in names if named.strip()):
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
    sys.path = path


class Watch:
    """A plugin: how each test ended (p: passed, f, s), what it said, which lines it ran."""

    def __init__(self, root: str, backwards: bool, traced: bool) -> None:
        self.root, self.backwards, self.traced = root, backwards, traced
        self.outcomes: dict[str, str] = {}
        self.said: dict[str, str] = {}
        self.lines: dict[str, dict[str, list[int]]] = {}
        self.ran: set[tuple[str, int]] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.backwards:
            items.reverse()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.ran = set()
        sys.settrace(self.trace if self.traced else None)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines = self.lines.setdefault(item.nodeid, {})
            for file, line in sorted(self.ran):
                lines.setdefault(file[len(self.root) + 1 :], []).append(line)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.root):
            return None
        self.ran.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Passed only where all three phases have come and passed, and no mark says it need not."""
        skipped = report.skipped or hasattr(report, "wasxfail")
        letter = "s" if skipped else "p" if report.passed else "f"
        if letter != "p":
            self.outcomes[report.nodeid] = letter
            self.said.setdefault(report.nodeid, report.longreprtext[-3000:])
        elif report.when == "teardown":
            self.outcomes.setdefault(report.nodeid, letter)


def run(
    tests: Sequence[str], root: str, secret: str, backwards: bool = False, traced: bool = False
) -> str:
    """Run tests, or all; JSON of the secret and of what was seen, in base64."""
    load_what_they_import(sorted({test.partition("::")[0] for test in tests}), root)
    before, watch = instruments(root), Watch(root, backwards, traced)
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", root, "-W", "ignore"]
    pytest.main([*options, *tests], plugins=[watch])
    after = instruments(root)
    replaced = [".".join(key) for key in before if after.get(key) is not before[key]]
    said = [watch.said[test] for test in tests if test in watch.said]
    seen = {
        "secret": secret, "outcomes": {} if replaced else watch.outcomes,
        "said": f"replaced: {replaced[:5]}" if replaced else said[0] if said else "",
        "lines": watch.lines if traced else {},
    }  # fmt: skip
    return base64.b64encode(json.dumps(seen).encode()).decode()
