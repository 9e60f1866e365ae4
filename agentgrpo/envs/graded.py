"""Programs graded by tests the policy never sees, in sandboxes that its own code never enters.

A task's spec has `tests` (Python source that raises where the answer is wrong; `names` may say what
its names are called in the answer) or `cases`, a list of [stdin, expected stdout].
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping

from agentgrpo.envs.base import InfrastructureError
from agentgrpo.envs.python import PythonEnv, PythonEpisode
from agentgrpo.sandbox import SandboxException, SandboxPool
from agentgrpo.sandbox.grade import Verdict, check_all, check_tests
from agentgrpo.types import Task

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
GRADERS = 4


class UnitTestEnv(PythonEnv):
    """Episodes of PythonEnv whose answer is a program.

    Args:
        pool: where the policy's own code runs.
        timeout_s: of one of its steps.
        test_timeout_s: wall-clock seconds of all tests of an answer.
    """

    judges = True

    def __init__(
        self, pool: SandboxPool, timeout_s: float, *, test_timeout_s: float = 10.0
    ) -> None:
        super().__init__(pool, timeout_s)
        if not test_timeout_s > 0:
            raise ValueError(f"test_timeout_s: expected more than 0, got {test_timeout_s}")
        self.test_timeout_s = test_timeout_s
        self.places = threading.BoundedSemaphore(GRADERS)
        self._graders: SandboxPool | None = None
        self._lock = threading.Lock()

    def graders(self) -> SandboxPool:
        """Sandboxes for grading alone: no rollout holds one, so that grading never waits long."""
        with self._lock:
            if self._graders is None:
                self._graders = SandboxPool(
                    limits=self.pool.limits,
                    template=self.pool.template,
                    max_live=2 * GRADERS,
                    min_idle=0,
                    zygotes=1,
                )
            return self._graders

    def reset(self, task: Task) -> UnitTestEpisode:
        """An episode with hidden tests at its end.

        Raises:
            ValueError: the task's spec has neither `tests` nor `cases`.
        """
        if not {"tests", "cases"} & task.spec.keys():
            raise ValueError(f"task {task.id}: its spec has neither 'tests' nor 'cases'")
        return UnitTestEpisode(self, task)

    def close(self) -> None:
        """End the sandboxes for grading."""
        with self._lock:
            if self._graders is not None:
                self._graders.close()
                self._graders = None


class UnitTestEpisode(PythonEpisode):
    """One rollout."""

    def __init__(self, env: UnitTestEnv, task: Task) -> None:
        super().__init__(env, task)
        self._grading = env

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved`: all tests pass; with cases, `partial` is the share of those that do."""
        code = program_in(answer)
        if code is None:
            return {"solved": 0.0}
        with self._grading.places:
            verdicts = self._grade(code)
        for verdict in verdicts:
            if verdict.infra_error:
                raise InfrastructureError(verdict.reason)
        passed = sum(verdict.passed for verdict in verdicts) / len(verdicts)
        return {"solved": float(passed == 1.0), "partial": passed if passed < 1.0 else 0.0}

    def _grade(self, code: str) -> list[Verdict]:
        pool, limit, spec = self._grading.graders(), self._grading.test_timeout_s, self._spec
        try:
            if "tests" in spec:
                names = spec.get("names")
                return [check_tests(pool, code, spec["tests"], timeout_s=limit, names=names)]
            cases = [(str(given), str(expected)) for given, expected in spec["cases"]]
            return check_all(pool, code, cases, timeout_s=limit / len(cases))
        except SandboxException as error:
            raise InfrastructureError(str(error)) from error


def program_in(answer: str | None) -> str | None:
    r"""The program of an answer: its last fenced block, else all of it; None if there is none.

    >>> program_in("Here:\n```python\nprint(1)\n```")
    'print(1)\n'
    """
    if answer is None or not answer.strip():
        return None
    blocks: list[str] = FENCE.findall(answer)
    return blocks[-1] if blocks else answer
