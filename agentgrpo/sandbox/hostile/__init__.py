"""The hostile suite: every case is one attack on one property, and passes if the property holds.

`agentgrpo sandbox selftest` runs it on this machine; the tests run it on every
rung. A case gets a fresh session (or the pool) and raises AssertionError if it got through.
"""

from agentgrpo.sandbox.hostile import escape, host, kernel, lifecycle, protocol, resources, verdicts
from agentgrpo.sandbox.hostile.case import CASES, LIMITS, Case, Skip, run_cases

__all__ = ["CASES", "LIMITS", "Case", "Skip", "escape", "host", "kernel", "lifecycle",
           "protocol", "resources", "run_cases", "verdicts"]  # fmt: skip
