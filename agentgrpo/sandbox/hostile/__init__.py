"""The hostile suite: every case is one attack on one property, and passes if the property holds.

`agentgrpo sandbox selftest` runs it on this machine, the tests on every rung, with those that no
machine makes a difference to (tests/sandbox/attacks_on_*.py). A case gets a fresh session (or the
pool) and raises AssertionError if it got through.
"""

from agentgrpo.sandbox.hostile import escape, kernel, resources
from agentgrpo.sandbox.hostile.case import CASES, LIMITS, Case, Skip, run_cases

__all__ = ["CASES", "LIMITS", "Case", "Skip", "escape", "kernel", "resources", "run_cases"]
