"""Grades code by its output or by hidden tests, so that the code cannot forge the verdict.

The graded code runs in one session. The host compares its output, or the tests run in a second
session. Only plain data passes between the two (inside/exchange.py, checked on arrival in the
judge's session). So a printed "PASSED", ``sys.exit(0)``, patched asserts, overwritten test files
and objects that equal everything have no effect.
"""

import ast
import builtins
import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import symtable
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from agentgrpo.sandbox.e2b.api import Sandbox
from agentgrpo.sandbox.inside.exchange import decode, encode
from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    NotEnoughSpaceException,
    printable,
)
from agentgrpo.sandbox.isolation.guards import as_bytes, wraps_os_errors
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.program import Program
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepResult, StepStatus

GUEST = Path(__file__).parents[1] / "inside"
START = """globals().pop("__proceed__", None)  # left by the tests before
if "start" not in globals():
    from functools import cache
    compiled = cache(lambda judge: compile(judge, "<judge>", "exec"))
    start = lambda judge, *tests: (exec(compiled(judge), globals()), begin(*tests))[1]"""
JUDGE = (
    "import sys, types\nif 'exchange' not in sys.modules:\n"
    " sys.modules['exchange'] = types.ModuleType('exchange')\n"
    f" exec({(GUEST / 'exchange.py').read_text()!r}, vars(sys.modules['exchange']))\n"
    + (GUEST / "judge.py").read_text()
)
BLANK = b" \t\r"
"""Characters that are ignored at the end of a line."""
WALL = 5.0
"""Wall time limit of a verdict, as a multiple of its CPU time limit."""
POLL_S = 0.02
MORE_MEMORY = "the judge has too little memory; remedy: a larger limits.memory_mib"
HOME = "solution"
"""The module from which tests import the answer."""
TESTS_FAULTS = {
    "passed": "they pass a program that does nothing",
    "unused": "they pass any program",
    "broken": "no program can pass them",
}
STUBS = (
    """class Nothing:
 __call__ = __getattr__ = lambda self, *args, **options: self
 __bool__ = lambda self: False
globals().update(dict.fromkeys(NAMES, Nothing()))""",
    "globals().update(dict.fromkeys(NAMES, lambda *args, **options: None))",
)
"""Programs in which every name does nothing."""
CONSTANTS = tuple(
    f"globals().update(dict.fromkeys(NAMES, lambda *args, **options: {value}))"
    for value in ("True", "1.5", "'a'", "[1]", "(1,)", "{'a': 1}")
)
"""Programs in which every call returns one value: tests that check only types pass one of them."""
MODULE_NAMES = ("__name__", "__file__", "__doc__", "__annotations__")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the code passed, and the reason if not."""

    passed: bool
    reason: str = ""
    infra_error: bool = False
    """The machine failed, not the code: retry, or drop the sample."""
    word: str = ""
    """The judge's verdict: passed, failed, memory, unused or broken, see inside/judge.py."""


class NamesOfTests(NamedTuple):
    """Names that are defined for the tests."""

    modules: list[str]
    names: dict[str, str]
    """Names under test, and the name or expression of each in the code."""
    entry: str
    """The name that is passed to check(candidate)."""
    homes: tuple[str, ...]
    """Modules that stand for the code."""
    values: frozenset[str]
    """Names that the tests use other than by a call: these may be constants of the code."""


@wraps_os_errors
def check_output(
    pool: SandboxPool, code: str, expected: str, *, stdin: str = "", timeout_s: float = 10.0
) -> Verdict:
    """Run code as a program and compare its output.

    It passes if it exits with code 0 and its standard output has the expected lines. White space at
    the end of lines and of the output is ignored. timeout_s is CPU time of the session; the limit
    of wall time is 5 times as long, for a busy machine.

    Raises:
        ValueError: the expected output exceeds limits.output_max_mib.
    """
    return _check_output(pool, code, expected, stdin, timeout_s)[0]


def _check_output(
    pool: SandboxPool, code: str, expected: str, stdin: str, timeout_s: float
) -> tuple[Verdict, float]:
    """The verdict and the CPU seconds of the program, without the start of the session."""
    require_printable(pool.limits, expected)
    # the sandbox's own timeout must not come before the clock's
    with Sandbox.create(pool=pool, timeout=WALL * timeout_s + 60.0) as sandbox:
        try:
            sandbox.files.write("main.py", code)
        except NotEnoughSpaceException as error:
            return Verdict(False, str(error)), 0.0
        places = sandbox._session.places
        python = [places.interpreter, "-s", "-S", "-X", "utf8", "main.py"]
        command, path = f"exec {shlex.join(python)}", os.pathsep.join(places.site_dirs)
        handle: Any = sandbox.commands.run(command, True, {"PYTHONPATH": path}, stdin=True)
        clock = VerdictClock(timeout_s, sandbox._session)
        handle.program.offer_stdin(as_bytes(stdin))
        verdict = _judge_program(handle.program, expected, clock)
        return verdict, clock.spent()


def _judge_program(program: Program, expected: str, clock: "VerdictClock") -> Verdict:
    while not program.wait(clock.pause()):
        if clock.is_over():
            return Verdict(False, f"still running after {clock.limit}")
    if program.machine_failed:
        return Verdict(False, program.machine_failed, infra_error=True)
    if program.exit_code != 0:
        message = program.error or program.stderr.decode("utf-8", "replace")[-2000:]
        return Verdict(False, f"exit code {program.exit_code}: {message}")
    lines = itertools.zip_longest(_lines(program.stdout), _lines(as_bytes(expected)))
    if any(actual != line for actual, line in lines):
        printed = program.stdout[:1000].decode("utf-8", "backslashreplace")
        return Verdict(False, f"expected {expected[:1000]!r}, got {printed!r}")
    return Verdict(True)


class VerdictClock:
    """The time limit of a verdict, in CPU seconds of its sessions.

    CPU time does not depend on how busy the machine is. Code that only waits has a limit of wall
    time, WALL times as long.
    """

    def __init__(self, timeout_s: float, *sessions: Session) -> None:
        self._timeout_s, self._sessions = timeout_s, sessions
        self._began, self._cpu_before = time.monotonic(), self._cpu_seconds()
        self._cpus = len(sessions) * max(1.0, sessions[0].limits.cpus)
        self.limit = f"{timeout_s:g} s of CPU time or {WALL * timeout_s:g} s of wall time"
        """The limit as text, for messages."""

    def _cpu_seconds(self) -> float:
        return sum(session.cpu_seconds() for session in self._sessions)

    def spent(self) -> float:
        """Seconds so far: CPU time, or wall time / WALL if that is more."""
        wall = time.monotonic() - self._began
        return max(self._cpu_seconds() - self._cpu_before, wall / WALL)

    def is_over(self) -> bool:
        return self.spent() >= self._timeout_s

    def seconds(self) -> float:
        """Remaining wall time, at least 1 ms."""
        return max(1e-3, self._began + WALL * self._timeout_s - time.monotonic())

    def pause(self) -> float:
        """A time within which the limit cannot be reached, at least POLL_S."""
        return max(POLL_S, (self._timeout_s - self.spent()) / self._cpus)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that kills the sessions when the time is over."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(self.pause()):
                if self.is_over():
                    for session in self._sessions:
                        session.end_by(StepStatus.TIMEOUT_KILLED, f"it took {self.limit}")
                    return

        threading.Thread(target=watch, name="sandbox-verdict", daemon=True).start()
        try:
            yield
        finally:
            done.set()


def require_printable(limits: Limits, expected: str) -> None:
    """Raise ValueError if no program can print the output within the limits."""
    size = sum(len(line) + 1 for line in _lines(as_bytes(expected))) - 1
    if size > limits.output_max_mib << 20:
        raise InvalidArgumentException(
            f"expected output: expected at most {limits.output_max_mib} MiB "
            f"(limits.output_max_mib), got {size} bytes"
        )


def _lines(text: bytes | bytearray) -> Iterator[bytes]:
    return (line.rstrip(BLANK + b"\n") for line in io.BytesIO(text.rstrip(BLANK + b"\n")))


@wraps_os_errors
def check_tests(
    pool: SandboxPool,
    code: str,
    tests: str,
    *,
    timeout_s: float = 10.0,
    names: Mapping[str, str] | None = None,
    entry_point: str | None = None,
) -> Verdict:
    """Run tests (asserts, or anything that raises on failure) against code.

    The module's code runs first, then `check(candidate)`, functions `test*`, classes `Test*` and
    TestCases. Tests that import pytest are run by pytest. Tests that use nothing of the code do not
    pass.

    The tests run in a session that the code never enters. The names under test are proxies of the
    code's objects; calls, attributes and items are forwarded. Values of a closed set of types
    (inside/exchange.py) are copied, all other objects stay in the code's session. Every other name
    belongs to the tests: one that they do not define is a module of the standard library or is
    undefined.

    Args:
        pool: two of its sessions are used.
        code: the graded code. It runs first and must not raise.
        tests: trusted source code.
        timeout_s: CPU time of both sessions together; the limit of wall time is 5 times as long.
        names: from a name in the tests to a name or expression in the code, {"candidate": "f"}.
            None: the one name that the tests use and do not define, and their imports from
            `solution`.
        entry_point: a name or expression to pass to `check(candidate)`.

    Raises:
        ValueError: the tests are not Python, names are missing, or the pool's max_live is 1.
    """
    test_args = source_of(tests), *names_of(tests, names, entry_point), False
    graded, judge = pool.acquire_pair()
    with graded, judge:
        return _check_tests(graded, judge, code, test_args, timeout_s)


def _check_tests(
    graded: Session, judge: Session, code: str, test_args: tuple[Any, ...], timeout_s: float
) -> Verdict:
    clock = VerdictClock(timeout_s, graded, judge)
    with clock.running():
        result = graded.step(code, clock.seconds())
        if result.status is not StepStatus.OK:
            return _failed(result, "the code did not run")
        call = encode(("call_name", "start", (JUDGE, *test_args)), id)
        return _begin(judge, call, clock) or _relay(graded, judge, clock)


def faults_of_tests(
    pool: SandboxPool, tasks: Sequence[tuple[Any, Any, Any]], *, timeout_s: float = 5.0,
    stubs: Sequence[str] = STUBS,
) -> list[str]:  # fmt: skip
    """Find tests that any program passes, or that no program can pass, with programs that do
    nothing. Returns a message for each task, "" if nothing is wrong.

    Args:
        pool: many tasks share a pair of its sessions: 10 ms of a core per task.
        tasks: `tests`, `names` and `entry_point` of each, as for check_tests().
        timeout_s: CPU time of each; tests that take longer have no message.
        stubs: the programs.
    """
    faults = []
    with contextlib.ExitStack() as sessions:
        pair: tuple[Session, ...] = ()
        for task in tasks:
            fault = _fault_of_tests(pair, *task, timeout_s, stubs) if pair else "not tried"
            # tests before may have caused it: try again in new sessions
            if fault or not all(session.alive for session in pair):
                sessions.close()
                pair = tuple(map(sessions.enter_context, pool.acquire_pair()))
                fault = _fault_of_tests(pair, *task, timeout_s, stubs)
            faults.append(fault)
    return faults


def _fault_of_tests(
    pair: tuple[Session, ...], tests: Any, names: Any, entry_point: Any, timeout_s: float,
    stubs: Sequence[str],
) -> str:  # fmt: skip
    test_names = names_of(tests, names, entry_point)
    test_args = source_of(tests), *test_names, True
    code_names = sorted(set(re.findall(r"[^\W\d]\w*", " ".join(test_names.names.values()))))
    for stub in stubs:
        graded, judge = pair
        code = f"NAMES = {code_names!r}\n{stub}"
        verdict = _check_tests(graded, judge, code, test_args, timeout_s)
        if fault := TESTS_FAULTS.get(verdict.word):
            return f"{fault}: {verdict.reason.strip().rpartition(chr(10))[2]}".removesuffix(": ")
    return ""


def _begin(judge: Session, tests: str, clock: VerdictClock) -> Verdict | None:
    """Start the tests, by ask() because a step limits the size of its code."""
    message = "the tests could not be started"
    result = judge.step(START)
    if result.status is StepStatus.OK:
        result, answer = judge.ask([tests.encode()], clock.seconds())
    if result.status is not StepStatus.OK:
        return _failed_judge(result, message)
    match decode(b"".join(answer).decode(), int):  # from the judge, which is trusted
        case ("value", None):
            return None
        case ("raise", [name, *_], _, reason):
            return Verdict(False, printable(f"{message}: {name}: {reason}"), infra_error=True)
        case other:
            return Verdict(False, f"{message}: {other}")


def _failed(step: StepResult, message: str) -> Verdict:
    reason = step.error.traceback if step.error is not None else step.detail
    infra_error = step.status is StepStatus.INFRA_ERROR
    return Verdict(False, f"{message} ({step.status}): {reason}", infra_error)


def _failed_judge(step: StepResult, message: str) -> Verdict:
    """A judge without memory is an infra_error: the graded code is not at fault."""
    verdict = _failed(step, message)
    if step.status is not StepStatus.OOM and getattr(step.error, "name", "") != "MemoryError":
        return verdict
    return replace(verdict, reason=f"{verdict.reason}; {MORE_MEMORY}", infra_error=True)


def _relay(graded: Session, judge: Session, clock: VerdictClock) -> Verdict:
    """Pass the judge's questions to the graded session and its answers back, without parsing."""
    answer: list[bytes] = []
    while True:
        result, question = judge.ask(answer, clock.seconds())
        if result.status is not StepStatus.OK:
            return _failed_judge(result, "running the tests failed")
        if question[0][:1] != b"[":  # not a question of exchange.py, but the verdict
            word, _, reason = b"".join(question).decode().partition("\n")
            if word == "memory":
                return Verdict(False, f"an answer was too large to read; {MORE_MEMORY}", True)
            return Verdict(word == "passed", printable(reason), word=word)
        result, answer = graded.ask(question, clock.seconds())
        if result.status is not StepStatus.OK:
            return _failed(result, f"{question[0][:200].decode()} was not answered")


def source_of(tests: Any) -> str:
    """The source of tests: text, a list of texts, or such a list as JSON. Otherwise ValueError."""
    parts = tests
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            parts = ast.literal_eval(tests.strip())
    if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    if not isinstance(tests, str):
        raise InvalidArgumentException(
            f"'tests' are not Python: expected text or a list of texts, got {tests!r:.80}"
        )
    return tests


def names_of(
    tests: Any, names: Mapping[str, str] | None, entry_point: str | None = None
) -> NamesOfTests:
    """Names to define for tests, see check_tests(). ValueError if they are missing or unclear."""
    tests = source_of(tests)
    free, (homes, imported, values) = _free_names(tests), _imports(tests, entry_point or "")
    stdlib = [name for name in free if name in sys.stdlib_module_names and name != entry_point]
    if names is None:
        tested = [name for name in free if name not in stdlib and name != entry_point]
        if not (tested or imported or entry_point):
            tested = stdlib
        if "*" in imported:
            imported, tested = imported | {*tested}, []
        if len(tested) > (not entry_point and not imported):
            raise InvalidArgumentException(
                f"'tests' use {', '.join(tested)} and define none of them: set `names` to those "
                f"under test, such as { {tested[0]: tested[0]}!r}"
            )
        names = {name: name for name in tested}
    implied = {*imported, *filter(None, [entry_point])} - {"*"}
    names = {**{name: name for name in sorted(implied)}, **names}
    _require_separable(tests, {*names})
    if not names:
        raise InvalidArgumentException(
            "'tests' use nothing of the answer, so they pass any program. Call it by its name, "
            "import it from `solution`, or set the row's `entry_point`, which is passed to "
            "check(candidate) or which the tests import from another module"
        )
    entry = entry_point or (next(iter(names)) if len(names) == 1 else "")
    modules = [name for name in stdlib if name not in names]
    return NamesOfTests(modules, names, entry, homes, values)


@functools.lru_cache(1024)
def _imports(
    tests: str, entry_point: str
) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """Modules that stand for the answer (`solution`, and those from which the entry point is
    imported); the names that tests import from them; and all names used other than by a call.
    """
    imports: dict[str, set[str]] = {HOME: set()}
    aliases, nodes = set(), [*ast.walk(ast.parse(tests, "<tests>"))]
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str() as home, level=0):
                names, root = {alias.name for alias in node.names}, home.partition(".")[0]
                has_entry = entry_point in names and root not in sys.stdlib_module_names
                if has_entry or home == HOME:
                    imports.setdefault(home, set()).update(names)
            case ast.AsyncFunctionDef() | ast.Import(names=[ast.alias(name="asyncio")]):
                raise InvalidArgumentException(
                    "'tests' are asynchronous, but they cannot await a coroutine of the answer. "
                    "Test an ordinary function instead"
                )
            case ast.Import():
                aliases |= {alias.asname or HOME for alias in node.names if alias.name == HOME}
    called, values = {id(node.func) for node in nodes if isinstance(node, ast.Call)}, set()
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in aliases and node.attr[0] != "_":
                imports[HOME].add(node.attr)
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in called:
            values.add(node.id if isinstance(node, ast.Name) else node.attr)
    return tuple(imports), frozenset().union(*imports.values()), frozenset(values)


def _require_separable(tests: str, tested: set[str]) -> None:
    """Raise ValueError for tests that work only in the answer's process: they read its source or
    classes, or replace what it uses.
    """
    nodes, names = [*ast.walk(ast.parse(tests, "<tests>"))], {"inspect"}
    for node in nodes:
        match node:
            case ast.Import():
                names |= {a.asname or "" for a in node.names if a.name == "inspect"}
            case ast.ImportFrom(module="inspect"):
                names |= {alias.asname or alias.name for alias in node.names}
    for node in nodes:
        match node:
            case ast.Call(ast.Name(name) | ast.Attribute(ast.Name(name)), [_, *_]) if name in names:
                looks = f"{ast.unparse(node.func)}()"
            case ast.Attribute(ast.Name(name), attr) if name in tested and attr[:2] == "__":
                looks = ast.unparse(node)
            case ast.Call(ast.Name("isinstance"), [_, ast.Name(name)]) if name in tested:
                looks = ast.unparse(node)
            case ast.ClassDef(bases=[ast.Name(name), *_]) if name in tested:
                looks = f"{name} as a base class"
            case ast.Name("patch") | ast.Attribute(attr="patch") if "mock" in tests:
                looks = "patches"
            case ast.arg("monkeypatch"):
                looks = "patches"
            case ast.Attribute(ast.Name("sys"), "stdin", ast.Store()):
                looks = "another sys.stdin"
            case ast.Attribute(attr="getvalue") if "StringIO" in tests:
                looks = "the printed output"
            case ast.Attribute(attr="readouterr"):
                looks = "the printed output"
            case _:
                continue
        raise InvalidArgumentException(
            f"'tests' use {looks}, which no program passes: the answer is in another process. Test "
            "what it returns, or what it reads and prints by `cases` ([[stdin, expected stdout]])"
        )


@functools.lru_cache(1024)
def _free_names(tests: str) -> tuple[str, ...]:
    """Names that the tests use without defining them, except builtins."""
    try:
        # permanent, because all threads share the filters
        warnings.filterwarnings("ignore", module="<tests>")
        compile(tests, "<tests>", "exec", dont_inherit=True)
        todo = [symtable.symtable(tests, "<tests>", "exec")]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgumentException(f"'tests' are not Python: {error}") from None
    used: dict[str, None] = {}
    defined = {*dir(builtins), *MODULE_NAMES}
    for table in todo:
        todo += table.get_children()
        for symbol in table.get_symbols():
            is_module = table.get_type() == "module"
            if is_module or symbol.is_global():
                if symbol.is_assigned() or symbol.is_imported():
                    defined.add(symbol.get_name())
                elif symbol.is_referenced():
                    used[symbol.get_name()] = None
    return tuple(name for name in used if name not in defined)


@wraps_os_errors
def check_all(
    pool: SandboxPool, code: str, cases: Sequence[tuple[str, str]], *, timeout_s: float = 10.0
) -> list[Verdict]:
    """check_output() for several (stdin, expected output) pairs, each in a new session.

    timeout_s is the time of all programs together. Waiting for a place and starting sessions do not
    count.
    """
    remaining_s, verdicts = timeout_s, []
    for stdin, expected in cases:
        verdict, seconds = Verdict(False, f"not run: those before took {timeout_s:g} s"), 0.0
        if remaining_s > 0:
            verdict, seconds = _check_output(pool, code, expected, stdin, remaining_s)
        remaining_s -= seconds
        verdicts.append(verdict)
    return verdicts
