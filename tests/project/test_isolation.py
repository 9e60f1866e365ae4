"""Without isolation, tests that need it are skipped with a message, or fail if required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import isolation

ROOT = Path(__file__).parents[2]
NEEDS_ISOLATION = (
    "tests/examples/recipe/test_tasks.py::test_shots_match_the_environments_observations"
)


def test_machine_without_isolation_counts_skipped_tests() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", NEEDS_ISOLATION],
        env=os.environ | {"NSJAIL": "/nosuch/nsjail", "AGENTGRPO_SANDBOX_REQUIRED": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    assert "1 skipped" in ran.stdout
    assert "NOT TESTED: 1 tests, which need a machine that can isolate code" in ran.stdout


def test_missing_isolation_fails_if_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_missing", lambda rungs: "nothing isolates")
    monkeypatch.setenv("AGENTGRPO_SANDBOX_REQUIRED", "1")
    with pytest.raises(pytest.fail.Exception, match="nothing isolates"):
        isolation.need_isolation()
