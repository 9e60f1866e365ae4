"""Programs graded by tests the policy never sees, in sandboxes that its own code never enters.

A task's spec has `tests` (Python source that raises where the answer is wrong, or a list of such)
or `cases`, a list of [stdin, expected stdout]. `names` says what the names under test are called in
the answer; it may be left out where the tests use but one that they do not define, import from
`solution`, or define check(candidate) and the spec has an `entry_point`.
"""

from __future__ import annotations

import builtins
import itertools
import re
import textwrap
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from typing import Any

from agentgrpo.actions import InfrastructureError
from agentgrpo.envs.python import PythonEnv, PythonEpisode, as_infra_error
from agentgrpo.sandbox import HostTools, SandboxPool
from agentgrpo.sandbox.grading.grade import (
    CONSTANTS,
    STUBS,
    TESTS_FAULTS,
    Verdict,
    check_all,
    check_tests,
    faults_of_tests,
    names_of,
    require_printable,
)
from agentgrpo.sandbox.isolation.template import Template
from agentgrpo.types import Task

BLOCK = re.compile(
    r"^(?:[ \t]*+(?:(?:[-*+>]|\d+\.)[ \t]++)?|[^\n`]*+(?=```(?i:py|python|)[ \t\r]*+$))"
    r"(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>[^\s`]*+)"
    r"[^\n`]*+\n(?P<text>.*?)(?:^[ \t]*+(?P=fence)|(?P=fence)[ \t\r]*+$|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""A fenced block, of Python behind words too; one that is not closed ends with the answer."""
PYTHON = re.compile(r"\{?\.?py(?:thon)?[\d.]*\}?", re.IGNORECASE)
"""Python, as fences name it: py, Python3.11, {.python}."""
GRADERS = 4


class GradingPool:
    """Sandboxes for grading alone: no rollout holds one, so that grading never waits long."""

    def __init__(
        self, like: SandboxPool, *, template: Template | None = None, memory_mib: int = 0
    ) -> None:
        self._like, self._template, self._memory_mib = like, template, memory_mib
        self.places = threading.BoundedSemaphore(GRADERS)
        """Held by who grades."""
        self._pool: SandboxPool | None = None
        self._lock = threading.Lock()

    def pool(self) -> SandboxPool:
        """They, started at the first use."""
        with self._lock:
            if self._pool is None:
                limits = replace(self._like.limits, niceness=1)  # verdicts before rollouts
                self._pool = SandboxPool(
                    limits=replace(limits, memory_mib=max(limits.memory_mib, self._memory_mib)),
                    template=self._template or self._like.template,
                    max_live=2 * GRADERS,
                    min_idle=0,
                    zygotes=1,
                    allow_degraded=self._like.degraded,
                    all_cpus=self._like.all_cpus,
                )
            return self._pool

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


def partial_credit(share: float) -> dict[str, float]:
    """`solved` for all of a task, `partial` for less.

    >>> partial_credit(1.0), partial_credit(0.5)
    ({'solved': 1.0, 'partial': 0.0}, {'solved': 0.0, 'partial': 0.5})
    """
    return {"solved": float(share >= 1.0), "partial": share if share < 1.0 else 0.0}


TESTS_TIMEOUT_S = 10.0
"""Seconds of a processor for all tests of an answer, or five times as many by the wall; of
programs, while they run."""


MOST_TRIED, MOST_WEAK = 2000, 20
"""Tasks of a list whose tests are run before a run begins, evenly spread: by programs that do
nothing, and by those that always return one value.
"""


class UnitTestEnv(PythonEnv):
    """Episodes of PythonEnv whose answer is a program.

    Args:
        pool: where the policy's own code runs.
        timeout_s: of one of its steps.
        host_tools: as for PythonEnv; tests have none.
        tests: Column of the tests, such as HumanEval's `test` and MBPP's `test_list`.
    """

    judges = True

    def __init__(
        self, pool: SandboxPool, timeout_s: float, *, host_tools: HostTools | None = None,
        tests: str = "tests",
    ) -> None:  # fmt: skip
        super().__init__(pool, timeout_s, host_tools=host_tools)
        self.graders, self._column = GradingPool(pool), tests

    def tests_of(self, task: Task) -> tuple[Any, dict[str, Any]]:
        """A task's tests, None if it has cases, and what they call names of the answer."""
        named = {"names": task.spec.get("names"), "entry_point": task.spec.get("entry_point")}
        return task.spec.get(self._column), named

    def check_tasks(self, tasks: Sequence[Task]) -> str:
        """Grade programs that do nothing by the tasks' tests. Returns what was tried.

        Raises:
            ValueError: tasks whose tests such a program passes, or that no program can pass.
        """
        faults, tested = [], []
        for task in tasks:
            try:
                self.reset(task)
            except ValueError as error:
                faults.append(str(error))
            else:
                tested += [task] * (self.tests_of(task)[0] is not None)
        tried = tested[:: -(-len(tested) // MOST_TRIED) or 1]
        for task, fault in self._try(tried, STUBS):
            faults += [f"task {task.id}: its 'tests' cannot judge: {fault}"] * bool(fault)
        if faults:
            raise ValueError(
                f"{len(faults)} of {len(tasks)} tasks cannot be graded; remove or mend their rows "
                "(modules for the tests: sandbox.site_dirs):\n" + "\n".join(faults[:20])
            )
        some = tried[:: -(-len(tried) // MOST_WEAK) or 1]
        weak = [
            task.id
            for task, fault in self._try(some, CONSTANTS)
            if fault.startswith(TESTS_FAULTS["passed"])
        ]
        named = f"; tests of {len(weak)} of {len(some)} pass a program that always returns one "
        named += f"value, such as those of {', '.join(weak[:3])}: compare with what is expected"
        return (
            f"tests of {len(tried)} of {len(tested)} tasks tried: a program that does nothing fails"
        ) + (named if weak else "")

    def _try(self, tasks: Sequence[Task], stubs: Sequence[str]) -> list[tuple[Task, str]]:
        """Tasks, and what these programs show of their tests."""
        rows = [(tests, *named.values()) for tests, named in map(self.tests_of, tasks)]

        def try_share(first: int) -> list[tuple[Task, str]]:
            shown = faults_of_tests(self.graders.pool(), rows[first::GRADERS], stubs=stubs)
            return [*zip(tasks[first::GRADERS], shown, strict=True)]

        with as_infra_error(), ThreadPoolExecutor(GRADERS) as threads:
            return [*itertools.chain(*threads.map(try_share, range(GRADERS)))]

    def reset(self, task: Task) -> UnitTestEpisode:
        (tests, named), cases = self.tests_of(task), task.spec.get("cases")
        if tests is None and cases is None:
            raise ValueError(
                f"task {task.id}: its spec has neither {self._column!r} nor 'cases'; "
                "env.options.tests names the column of the tests"
            )
        try:
            if tests is not None:
                names_of(tests, **named)
            elif (
                not cases
                or not isinstance(cases, list | tuple)
                or any(not isinstance(case, list | tuple) or len(case) != 2 for case in cases)
            ):
                raise ValueError(
                    f"'cases': expected [[stdin, expected stdout], ...], got {cases!r:.80}. "
                    "Pair columns of inputs and outputs: [*zip(inputs, outputs)]"
                )
            elif not any(str(expected).strip() for _, expected in cases):
                raise ValueError("'cases' expect no output, so they pass an empty program")
            else:
                for _, expected in cases:
                    require_printable(self.pool.limits, str(expected))
        except ValueError as error:
            raise ValueError(f"task {task.id}: its {error}") from None
        return UnitTestEpisode(self, task)

    def close(self) -> None:
        self.graders.close()


class UnitTestEpisode(PythonEpisode):
    """One rollout."""

    _env: UnitTestEnv
    feedback = ""
    """What was wrong with the answer, for a teacher."""

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved`: all tests pass; with cases, `partial` is the share of those that do."""
        tests, named = self._env.tests_of(self._task)
        names = {} if tests is None else names_of(tests, **named).names
        code = program_in(answer, names.values())
        if code is None:
            self.feedback = "there is no answer"
            return {"solved": 0.0}
        with self._env.graders.places:
            verdicts = self._grade(code)
        for verdict in verdicts:
            if verdict.infra_error:
                raise InfrastructureError(verdict.reason)
        failed = [without_tests(verdict.reason) for verdict in verdicts if not verdict.passed]
        if failed:
            self.feedback = f"{len(failed)} of {len(verdicts)} hidden tests fail: {failed[0]}"
        return partial_credit(sum(verdict.passed for verdict in verdicts) / len(verdicts))

    def _grade(self, code: str) -> list[Verdict]:
        pool, limit, spec = self._env.graders.pool(), TESTS_TIMEOUT_S, self._spec
        with as_infra_error():
            tests, named = self._env.tests_of(self._task)
            if tests is not None:
                return [check_tests(pool, code, tests, timeout_s=limit, **named)]
            cases = [(str(given), str(expected)) for given, expected in spec["cases"]]
            return check_all(pool, code, cases, timeout_s=limit)


def without_tests(reason: str) -> str:
    """Why a program failed, and nothing of what is hidden: not what a test says or gives it."""
    if reason.startswith(("the code did not run", "still running", "not run")):
        return reason[:2000]  # of the program's own code
    last = reason.rpartition("Traceback (most recent call last):\n")[2]
    names = re.findall(r"^\w+(?=:|$)", last, re.MULTILINE)
    raised = [name for name in names if isinstance(getattr(builtins, name, None), type)]
    return raised[0] if raised else "it gives nothing, or something else"


def program_in(answer: str | None, names: Iterable[str] = ()) -> str | None:
    r"""The program of an answer: its last block that says Python, else the last that names no
    language, else all of it; None if there is none. Blocks that define more of the names under test
    go before those that use them.

    >>> program_in("For\n```text\n1\n```\n:\n```Python\nprint(1)\n```\nIt prints\n```\n1\n```")
    'print(1)\n'
    """
    if answer is None or not answer.strip():
        return None
    asked = "|".join(re.findall(r"^\w+", "\n".join(map(str, names)), re.MULTILINE)) or "(?!)"
    defines = re.compile(
        rf"^[ \t]*+(?:(?:async +)?def +|class +|(?=\w+ *(?::[^=\n]+)?=[^=]))({asked})\b",
        re.MULTILINE,
    )
    last: dict[bool, tuple[int, str]] = {}
    for block in BLOCK.finditer(answer):
        text, python = block["text"], bool(PYTHON.fullmatch(block["language"]))
        if text.strip() and (python or not block["language"]):
            found = len({*defines.findall(text)}), text
            last[python] = max(found, last.get(python, found), key=itemgetter(0))
    _, text = last.get(True) or last.get(False) or (0, answer)
    return textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text
