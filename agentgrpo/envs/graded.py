"""Grade programs with hidden tests, in sandboxes that the policy's code never enters.

A task's spec has `tests` (Python source that raises if the answer is wrong, or a list of sources)
or `cases`, a list of [stdin, expected stdout]. `names` maps the names under test to their names in
the answer. It may be omitted if the tests use only one name that they do not define, if they import
from `solution`, or if they define check(candidate) and the spec has an `entry_point`.
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

FENCED_BLOCK = re.compile(
    r"^(?:[ \t]*+(?:(?:[-*+>]|\d+\.)[ \t]++)?|[^\n`]*+(?=```(?i:py|python|)[ \t\r]*+$))"
    r"(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>[^\s`]*+)"
    r"[^\n`]*+\n(?P<text>.*?)(?:^[ \t]*+(?P=fence)|(?P=fence)[ \t\r]*+$|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""A fenced block. A Python fence may follow text on its line. An open one ends with the answer."""
PYTHON_LANGUAGE = re.compile(r"\{?\.?py(?:thon)?[\d.]*\}?", re.IGNORECASE)
"""Names of Python in fences: py, Python3.11, {.python}."""
GRADERS = 4


class GradingPool:
    """Sandboxes for grading only. Rollouts cannot hold them, so grading never waits long."""

    def __init__(
        self, template_pool: SandboxPool, *, template: Template | None = None, memory_mib: int = 0
    ) -> None:
        self._rollout_pool, self._template, self._memory_mib = template_pool, template, memory_mib
        self.slots = threading.BoundedSemaphore(GRADERS)
        """Acquired while an answer is graded: at most GRADERS at the same time."""
        self._pool: SandboxPool | None = None
        self._lock = threading.Lock()

    def pool(self) -> SandboxPool:
        with self._lock:
            if self._pool is None:
                limits = replace(self._rollout_pool.limits, niceness=1)  # grading before rollouts
                self._pool = SandboxPool(
                    limits=replace(limits, memory_mib=max(limits.memory_mib, self._memory_mib)),
                    template=self._template or self._rollout_pool.template,
                    max_live=2 * GRADERS,
                    min_idle=0,
                    zygotes=1,
                    allow_degraded=self._rollout_pool.degraded,
                    all_cpus=self._rollout_pool.all_cpus,
                )
            return self._pool

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


def partial_credit(share: float) -> dict[str, float]:
    """The part `solved` if the share of passed tests is 1, else the part `partial`.

    >>> partial_credit(1.0), partial_credit(0.5)
    ({'solved': 1.0, 'partial': 0.0}, {'solved': 0.0, 'partial': 0.5})
    """
    return {"solved": float(share >= 1.0), "partial": share if share < 1.0 else 0.0}


TESTS_TIMEOUT_S = 10.0
"""CPU seconds for all tests of an answer. The wall-clock limit is five times as long. For `cases`,
only the time in which programs run counts."""


MAX_SAMPLED_TASKS, MAX_WEAK_SAMPLES = 2000, 20
"""Number of tasks, evenly spread over the data, whose tests are checked before a run: with programs
that do nothing, and with programs that always return one value."""


class UnitTestEnv(PythonEnv):
    """Episodes of PythonEnv whose answer is a program.

    Args:
        pool: sandboxes for the policy's code steps.
        timeout_s: limit of one code step, in seconds.
        host_tools: as for PythonEnv. Tests cannot call them.
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
        """A task's tests (None if it has cases), and its `names` and `entry_point`."""
        names = {"names": task.spec.get("names"), "entry_point": task.spec.get("entry_point")}
        return task.spec.get(self._column), names

    def check_tasks(self, tasks: Sequence[Task]) -> str:
        """Run the tasks' tests on programs that do nothing. Returns a summary.

        Raises:
            ValueError: such a program passes a task's tests, or no program can pass them.
        """
        faults, testable = [], []
        for task in tasks:
            try:
                self.reset(task)
            except ValueError as error:
                faults.append(str(error))
            else:
                testable += [task] * (self.tests_of(task)[0] is not None)
        sampled = testable[:: -(-len(testable) // MAX_SAMPLED_TASKS) or 1]
        for task, fault in self._grade_stubs(sampled, STUBS):
            faults += [f"task {task.id}: its 'tests' cannot grade: {fault}"] * bool(fault)
        if faults:
            raise ValueError(
                f"{len(faults)} of {len(tasks)} tasks cannot be graded. Remove or fix their rows "
                "(modules for the tests: sandbox.site_dirs):\n" + "\n".join(faults[:20])
            )
        weak_sample = sampled[:: -(-len(sampled) // MAX_WEAK_SAMPLES) or 1]
        weak_ids = [
            task.id
            for task, fault in self._grade_stubs(weak_sample, CONSTANTS)
            if fault.startswith(TESTS_FAULTS["passed"])
        ]
        warning = (
            f"; tests of {len(weak_ids)} of {len(weak_sample)} accept a program that always "
            f"returns one value, such as those of {', '.join(weak_ids[:3])}: compare with the "
            "expected value"
        )
        return (
            f"checked the tests of {len(sampled)} of {len(testable)} tasks: a program that does "
            "nothing fails them"
        ) + (warning if weak_ids else "")

    def _grade_stubs(self, tasks: Sequence[Task], stubs: Sequence[str]) -> list[tuple[Task, str]]:
        """Run the tasks' tests on the stub programs. Returns each task with its tests' fault."""
        rows = [(tests, *names.values()) for tests, names in map(self.tests_of, tasks)]

        def try_share(first: int) -> list[tuple[Task, str]]:
            messages = faults_of_tests(self.graders.pool(), rows[first::GRADERS], stubs=stubs)
            return [*zip(tasks[first::GRADERS], messages, strict=True)]

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
    """An episode whose answer is graded in a separate sandbox."""

    _env: UnitTestEnv
    feedback = ""
    """Why the answer failed, for a teacher (config.teacher)."""

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved`: all tests pass. With cases, `partial` is the share that passes."""
        tests, name_options = self._env.tests_of(self._task)
        functions = {} if tests is None else names_of(tests, **name_options).names
        code = program_in(answer, functions.values())
        if code is None:
            self.feedback = "there is no answer"
            return {"solved": 0.0}
        with self._env.graders.slots:
            verdicts = self._grade(code)
        for verdict in verdicts:
            if verdict.infra_error:
                raise InfrastructureError(verdict.reason)
        failed = [redacted_reason(verdict.reason) for verdict in verdicts if not verdict.passed]
        if failed:
            self.feedback = f"{len(failed)} of {len(verdicts)} hidden tests fail: {failed[0]}"
        return partial_credit(sum(verdict.passed for verdict in verdicts) / len(verdicts))

    def _grade(self, code: str) -> list[Verdict]:
        pool, limit, spec = self._env.graders.pool(), TESTS_TIMEOUT_S, self._spec
        with as_infra_error():
            tests, name_options = self._env.tests_of(self._task)
            if tests is not None:
                return [check_tests(pool, code, tests, timeout_s=limit, **name_options)]
            cases = [(str(stdin), str(expected)) for stdin, expected in spec["cases"]]
            return check_all(pool, code, cases, timeout_s=limit)


def redacted_reason(reason: str) -> str:
    """Why a program failed, without hidden data: no messages and inputs of tests."""
    if reason.startswith(("the code did not run", "still running", "not run")):
        return reason[:2000]  # an error in the program itself
    last = reason.rpartition("Traceback (most recent call last):\n")[2]
    names = re.findall(r"^\w+(?=:|$)", last, re.MULTILINE)
    exceptions = [name for name in names if isinstance(getattr(builtins, name, None), type)]
    return exceptions[0] if exceptions else "it gives nothing, or something else"


def program_in(answer: str | None, names: Iterable[str] = ()) -> str | None:
    r"""Extract the program from an answer: its last Python block, else its last block without a
    language, else the whole answer. None: the answer is empty. Blocks that define more of the names
    under test take precedence.

    >>> program_in("For\n```text\n1\n```\n:\n```Python\nprint(1)\n```\nIt prints\n```\n1\n```")
    'print(1)\n'
    """
    if answer is None or not answer.strip():
        return None
    wanted_names = "|".join(re.findall(r"^\w+", "\n".join(map(str, names)), re.MULTILINE)) or "(?!)"
    defines = re.compile(
        rf"^[ \t]*+(?:(?:async +)?def +|class +|(?=\w+ *(?::[^=\n]+)?=[^=]))({wanted_names})\b",
        re.MULTILINE,
    )
    last: dict[bool, tuple[int, str]] = {}
    for block in FENCED_BLOCK.finditer(answer):
        text, is_python = block["text"], bool(PYTHON_LANGUAGE.fullmatch(block["language"]))
        if text.strip() and (is_python or not block["language"]):
            candidate = len({*defines.findall(text)}), text
            last[is_python] = max(candidate, last.get(is_python, candidate), key=itemgetter(0))
    _, text = last.get(True) or last.get(False) or (0, answer)
    return textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text
