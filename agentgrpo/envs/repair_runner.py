"""Run tests with pytest and record each outcome. Runs in a session (repair_judge.py)."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest

MAX_ERRORS = 3


class OutcomeRecorder:
    """A pytest plugin that records each test's outcome (p: passed, f, s), error and executed lines.

    failed_at: the last line of the test's file in the traceback, and the assertion's message. Only
    the first MAX_ERRORS errors of tests in `with_errors` are formatted, since pytest parses a file
    for each line of a traceback.

    limit_s: CPU seconds. A test fails after a 48th of them, and none starts after three quarters,
    so that a slow test does not cost the results of the others.
    """

    with_errors: Sequence[str] | None = None
    limit_s = 0.0

    def __init__(self, tests: Sequence[str], root: str, backwards: bool, traced: bool) -> None:
        self.tests, self.root, self.backwards, self.traced = {*tests}, root, backwards, traced
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.failed_at: dict[str, tuple[int, str]] = {}
        self.lines: dict[str, dict[str, list[int]]] = {}
        self.ran: set[tuple[str, int]] = set()
        self.began = time.process_time()
        self.error_length = min(3000, 24000 // (len(self.tests) or 8))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        ids = [(item, {item.nodeid, item.nodeid.partition("[")[0]}) for item in items]
        items[:] = [item for item, names in ids if not self.tests or names & self.tests]
        if self.backwards:
            items.reverse()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        names = {item.nodeid, item.nodeid.partition("[")[0]}
        hidden = self.with_errors is not None and not names & {*self.with_errors}
        if hidden or len([*filter(None, self.errors.values())]) >= MAX_ERRORS:
            item.repr_failure = lambda _: ""
        self.ran = set()
        sys.settrace(self.trace if self.traced else None)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines = self.lines.setdefault(item.nodeid, {})
            for file, line in sorted(self.ran):
                lines.setdefault(file[len(self.root) + 1 :], []).append(line)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        signal.setitimer(signal.ITIMER_PROF, self.limit_s / 48)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            if self.limit_s and time.process_time() - self.began > 0.75 * self.limit_s:
                item.session.shouldstop = "the time is over"

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.root):
            return None
        self.ran.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        entries = [e.lineno + 1 for e in call.excinfo.traceback if str(e.path) == str(node.path)]
        asserted = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
        message = f"{call.excinfo.value}\n"[:300] if asserted else ""
        self.failed_at[node.nodeid] = (entries[-1] if entries else 0, message)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors[report.nodeid] = report.longreprtext[-self.error_length :]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test passed only if all three phases passed and it is not marked as xfail."""
        skipped = report.skipped or hasattr(report, "wasxfail")
        letter = "s" if skipped else "p" if report.passed else "f"
        if letter != "p":
            self.outcomes[report.nodeid] = letter
            self.errors.setdefault(report.nodeid, report.longreprtext[-self.error_length :])
        elif report.when == "teardown":
            self.outcomes.setdefault(report.nodeid, letter)


def run(
    tests: Sequence[str], root: str, backwards: bool = False, traced: bool = False,
    with_errors: Sequence[str] | None = None, limit_s: float = 0.0,
) -> str:  # fmt: skip
    """Run the tests, or all without names. Returns the results as base64 of JSON."""
    watch, stderr = OutcomeRecorder(tests, root, backwards, traced), io.StringIO()
    watch.with_errors, watch.limit_s = with_errors, limit_s
    if limit_s:
        signal.signal(signal.SIGPROF, lambda *_: pytest.fail("it takes too long"))
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", root, "-W", "ignore"]
    files = sorted({test.partition("::")[0] for test in tests})
    with contextlib.redirect_stderr(stderr):
        code = pytest.main([*options, "--continue-on-collection-errors", *files], plugins=[watch])
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        watch.errors.setdefault("", stderr.getvalue()[-3000:])  # such as a conftest that fails
    results = {
        "outcomes": watch.outcomes, "errors": watch.errors, "failed_at": watch.failed_at,
        "lines": watch.lines if traced else {},
    }  # fmt: skip
    return base64.b64encode(json.dumps(results).encode()).decode()
