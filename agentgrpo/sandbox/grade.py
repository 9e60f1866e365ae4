"""Grading without letting the graded code near the verdict.

The code under test runs in one session; what judges it runs elsewhere: output is compared by the
host, tests run in a second session. Between the two only plain data crosses (guest/exchange.py,
checked where it arrives, in a session), so that printed "PASSED", ``sys.exit(0)``, patched asserts,
overwritten test files and objects that equal everything change nothing.
"""

import builtins
import functools
import os
import shlex
import symtable
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgrpo.sandbox.api import Sandbox
from agentgrpo.sandbox.boundary import as_bytes, public
from agentgrpo.sandbox.errors import InvalidArgumentException, NotEnoughSpaceException, printable
from agentgrpo.sandbox.guest.exchange import read, spell
from agentgrpo.sandbox.jail import shown_site_dirs
from agentgrpo.sandbox.limits import Limits
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.program import Program
from agentgrpo.sandbox.result import StepResult, StepStatus
from agentgrpo.sandbox.session import Session

GUEST = Path(__file__).parent / "guest"
START = "start = lambda judge, *tests: (exec(judge, globals()), begin(*tests))[1]"
JUDGE = (
    "import sys, types\nsys.modules['exchange'] = types.ModuleType('exchange')\n"
    f"exec({(GUEST / 'exchange.py').read_text()!r}, vars(sys.modules['exchange']))\n"
    + (GUEST / "judge.py").read_text()
)
BLANK = " \t\r"
"""What does not count at the end of a line."""
MODULE_NAMES = ("__name__", "__file__", "__doc__", "__annotations__")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether code passed, and why not."""

    passed: bool
    reason: str = ""
    infra_error: bool = False
    """The machine failed, not the code: retry, or drop the sample."""


@public
def check_output(
    pool: SandboxPool, code: str, expected: str, *, stdin: str = "", timeout_s: float = 10.0
) -> Verdict:
    """Run code as a program of its own and compare what it prints.

    It passes if it ends by itself with exit code 0 and its standard output has the expected lines;
    space at the end of lines and of the output does not count.

    Raises:
        ValueError: nobody may print as much as is expected.
    """
    return _check_output(pool, code, expected, stdin, timeout_s)[0]


def _check_output(
    pool: SandboxPool, code: str, expected: str, stdin: str, timeout_s: float
) -> tuple[Verdict, float]:
    """The verdict, and how many seconds the program ran, without what the machine took before."""
    require_printable(pool.limits, expected)
    python = [pool.template.interpreter, "-s", "-S", "-X", "utf8", "main.py"]
    path = os.pathsep.join(shown_site_dirs(pool.template))
    with Sandbox.create(pool=pool, timeout=timeout_s + 60.0) as sandbox:  # later than the program
        try:
            sandbox.files.write("main.py", code)
        except NotEnoughSpaceException as error:
            return Verdict(False, str(error)), 0.0
        command = f"exec {shlex.join(python)}"
        started = sandbox.commands.start(command, envs={"PYTHONPATH": path}, stdin=True)
        began = time.monotonic()
        verdict = _judge_program(started.program, expected, stdin, timeout_s)
        return verdict, time.monotonic() - began


def _judge_program(program: Program, expected: str, stdin: str, timeout_s: float) -> Verdict:
    program.offer_stdin(as_bytes(stdin))
    if not program.wait(timeout_s):
        return Verdict(False, f"still running after {timeout_s:g} s")
    if program.machine_failed:
        return Verdict(False, program.machine_failed, infra_error=True)
    if program.exit_code != 0:
        shown = program.error or program.stderr.decode("utf-8", "replace")[-2000:]
        return Verdict(False, f"exit code {program.exit_code}: {shown}")
    printed = program.stdout.decode("utf-8", "replace")
    if _lines(printed) != _lines(expected):
        return Verdict(False, f"expected {expected[:1000]!r}, got {printed[:1000]!r}")
    return Verdict(True)


def require_printable(limits: Limits, expected: str) -> None:
    """Raise ValueError for an output that no program can have within the limits."""
    size = len(as_bytes("\n".join(_lines(expected))))
    if size > limits.output_max_mib << 20:
        raise InvalidArgumentException(
            f"expected output has {size} bytes; a program may print {limits.output_max_mib} MiB "
            "(Limits.output_max_mib)"
        )


def _lines(text: str) -> list[str]:
    return [line.rstrip(BLANK) for line in text.rstrip(f"{BLANK}\n").split("\n")]


@public
def check_tests(
    pool: SandboxPool,
    code: str,
    tests: str,
    *,
    timeout_s: float = 10.0,
    names: Mapping[str, str] | None = None,
) -> Verdict:
    """Run tests (asserts, or anything that raises on failure) against code.

    The tests run in a session that the code never enters. The names under test stand for what the
    code calls so; calls, attributes and items of it are forwarded. Data of a closed set of types
    (guest/exchange.py) is handed over, anything else stays there and is known only by a number.
    Every other name is the tests' own: what they do not define is a module of the standard library
    or is not there.

    Args:
        pool: where to run; two sessions are used.
        code: what is graded. It is run first, and must not raise.
        tests: trusted source.
        timeout_s: wall time of all of it together.
        names: name in the tests to name (or expression) in the code, {"candidate": "f"}; None: the
            one name that the tests use and do not define.

    Raises:
        ValueError: the tests are not Python, names are missing, or the pool has one place only.
    """
    modules, names = names_of(tests, names)
    graded, judge = pool.acquire_pair()
    deadline = time.monotonic() + timeout_s
    with graded, judge:
        loaded = graded.step(code, timeout_s)
        if loaded.status is not StepStatus.OK:
            return _failed(loaded, "the code did not run")
        if failed := _begin(judge, (JUDGE, tests, modules, names), deadline):
            return failed
        return _relay(graded, judge, deadline)


def _begin(judge: Session, tests: tuple[Any, ...], deadline: float) -> Verdict | None:
    """Start the tests, of any size. What fails for want of memory is not for the code to answer."""
    what = "the tests could not be started"
    begun = judge.step(START)
    if begun.status is StepStatus.OK:
        left = max(deadline - time.monotonic(), 1e-3)
        begun = judge.ask(spell(("call_name", "start", tests), id), left)
    if begun.status is StepStatus.OOM:
        return replace(_failed(begun, what), infra_error=True)
    if begun.status is not StepStatus.OK:
        return _failed(begun, what)
    match read(begun.value or "", int):
        case ("value", None):
            return None
        case ("raise", [name, *_], _, why):
            return Verdict(False, printable(f"{what}: {name}: {why}"), infra_error=True)
        case broken:
            return Verdict(False, f"{what}: {broken}")


def _failed(step: StepResult, what: str) -> Verdict:
    shown = step.error.traceback if step.error is not None else step.detail
    return Verdict(False, f"{what} ({step.status}): {shown}", step.status is StepStatus.INFRA_ERROR)


def _relay(graded: Session, judge: Session, deadline: float) -> Verdict:
    """Carry the judge's questions to the graded session and its answers back, unread."""
    answer = ""
    while (left := deadline - time.monotonic()) > 0:
        asked = judge.ask(spell(("call_name", "proceed", (answer,)), id), left)
        if asked.status is StepStatus.TIMEOUT:
            break
        if asked.status is not StepStatus.OK:
            return _failed(asked, "the tests broke")
        match read(asked.value or "", int):  # the judge's own words
            case ("value", ("ask", str() as question)):
                pass
            case ("value", (kind, why)):
                return Verdict(kind == "passed", printable(why))
            case broken:
                return Verdict(False, f"the tests broke: {broken}")
        answered = graded.ask(question, max(deadline - time.monotonic(), 1e-3))
        if answered.status is not StepStatus.OK:
            return _failed(answered, f"{question[:200]} was not answered")
        answer = answered.value or ""
    return Verdict(False, "the tests ran out of time")


def names_of(tests: str, names: Mapping[str, str] | None) -> tuple[list[str], dict[str, str]]:
    """What tests find besides their own names: modules, and names under test with what they are
    called in the code.

    Raises:
        ValueError: the tests are not Python, or they use several names that are not theirs.
    """
    if not isinstance(tests, str):
        raise InvalidArgumentException(f"'tests' are not Python: expected text, got {tests!r:.80}")
    free = _free_names(tests)
    known = [name for name in free if name in sys.stdlib_module_names]
    if names is None:
        tested = [name for name in free if name not in known] or known
        if len(tested) > 1:
            raise InvalidArgumentException(
                f"'tests' use {', '.join(tested)} and define none of them: `names` must say which "
                f"are under test, such as { {tested[0]: tested[0]}!r}"
            )
        names = {name: name for name in tested}
    return [name for name in known if name not in names], dict(names)


@functools.lru_cache(1024)
def _free_names(tests: str) -> tuple[str, ...]:
    """Names that the tests use but neither define nor find among the builtins. Remembered, as every
    attempt at a task asks.
    """
    try:
        warnings.filterwarnings("ignore", module="<tests>")  # for good: threads share the filters
        compile(tests, "<tests>", "exec", dont_inherit=True)
        todo = [symtable.symtable(tests, "<tests>", "exec")]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgumentException(f"'tests' are not Python: {error}") from None
    used: dict[str, None] = {}
    defined = {*dir(builtins), *MODULE_NAMES}
    for table in todo:
        todo += table.get_children()
        for symbol in table.get_symbols():
            top = table.get_type() == "module"
            if top or symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported():
                    defined.add(symbol.get_name())
                elif symbol.is_referenced():
                    used[symbol.get_name()] = None
    return tuple(name for name in used if name not in defined)


@public
def check_all(
    pool: SandboxPool, code: str, cases: Sequence[tuple[str, str]], *, timeout_s: float = 10.0
) -> list[Verdict]:
    """check_output() for several (stdin, expected output) pairs, each in a session of its own.

    timeout_s is the wall time of the programs, all of them together; waiting for a place and
    starting sessions do not count.
    """
    left, verdicts = timeout_s, []
    for stdin, expected in cases:
        verdict, took = Verdict(False, f"not run: those before took {timeout_s:g} s"), 0.0
        if left > 0:
            verdict, took = _check_output(pool, code, expected, stdin, left)
        left -= took
        verdicts.append(verdict)
    return verdicts
