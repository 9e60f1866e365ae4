"""The attack suite: every case is one attack on one property, and passes if the property holds.

The tests run it on every rung; on_*.py has the cases that no machine makes a difference to. A
dozen cases are in the package (agentgrpo/sandbox/selftest.py), for `agentgrpo sandbox selftest`.
A case gets a fresh session (or the pool) and raises AssertionError if it got through.
"""

from agentgrpo.sandbox.selftest import CASES, LIMITS, Case, Skip, run_cases
from tests.sandbox.attacks import escape, kernel, resources

__all__ = ["CASES", "LIMITS", "Case", "Skip", "escape", "kernel", "resources", "run_cases"]
