"""Skips tests marked nsjail on machines that cannot isolate code, and counts them.

With AGENTGRPO_SANDBOX_REQUIRED=1 they fail instead, for machines where isolation must work.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

import pytest

from agentgrpo.sandbox import SandboxPool, SandboxUnavailable
from agentgrpo.sandbox.isolation.cgroup import CgroupsUnavailable
from agentgrpo.sandbox.isolation.zygote import LADDER, Rung
from agentgrpo.sandbox.session import spawner

Completed = subprocess.CompletedProcess[str]


@functools.cache
def _missing(rungs: tuple[Rung, ...]) -> str:
    """Why none of these rungs can isolate here; "" if one can."""
    try:
        SandboxPool(max_live=1, min_idle=0, zygotes=1, rungs=rungs).close()
    except SandboxUnavailable as reason:
        return str(reason)
    return ""


def need_isolation(*rungs: Rung) -> None:
    """Skip or fail the running test unless one of these rungs (default: any) isolates here."""
    if missing := _missing(rungs or LADDER):
        required = os.environ.get("AGENTGRPO_SANDBOX_REQUIRED") == "1"
        (pytest.fail if required else pytest.skip)(missing)


def refuse_control_groups(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CgroupsUnavailable("refused by the test")

    patch.setattr(spawner, "Cgroups", refuse)


def run_python(code: str, *args: object, before: Sequence[str] = ()) -> Completed:
    """Run code in another Python, started by the command before if there is one."""
    command = [*before, sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def within(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Wait for a condition; returns whether it held in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def gone(pid: int) -> bool:
    """Wait for a process to end; returns whether it did within 10 s."""

    def ended() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    return within(ended)


def summarize(reporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped, so that a green run is not mistaken for a full one."""
    skipped = reporter.stats.get("skipped", [])
    if count := sum(report.longrepr[0] == __file__ for report in skipped):
        reporter.write_line(
            f"NOT TESTED: {count} tests, which need a machine that can isolate code"
            " (`agentgrpo sandbox doctor` lists what is missing;"
            " AGENTGRPO_SANDBOX_REQUIRED=1 makes them fail)",
            yellow=True,
        )
