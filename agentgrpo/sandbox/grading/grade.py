"""Grading without letting the graded code near the verdict.

The code under test runs in one session; what judges it runs elsewhere: output is compared by the
host, tests run in a second session. Between the two only plain data crosses (inside/exchange.py,
checked where it arrives, in a session), so that printed "PASSED", ``sys.exit(0)``, patched asserts,
overwritten test files and objects that equal everything change nothing.
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
from agentgrpo.sandbox.isolation.guards import as_bytes, public
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.program import Program
from agentgrpo.sandbox.session.result import StepResult, StepStatus
from agentgrpo.sandbox.session.session import Session

GUEST = Path(__file__).parents[1] / "inside"
START = """globals().pop("__proceed__", None)  # of the tests before these
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
"""What does not count at the end of a line."""
WALL = 5.0
"""Times the CPU seconds of a verdict that it may take by the wall."""
LOOK_S = 0.02
MORE_MEMORY = "the judge has too little memory; remedy: a larger limits.memory_mib"
HOME = "solution"
"""The module that tests import the answer from."""
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
"""Programs that do nothing, whatever is called."""
CONSTANTS = tuple(
    f"globals().update(dict.fromkeys(NAMES, lambda *args, **options: {value}))"
    for value in ("True", "1.5", "'a'", "[1]", "(1,)", "{'a': 1}")
)
"""Programs that return one value, whatever is called: tests that only look at types pass one."""
MODULE_NAMES = ("__name__", "__file__", "__doc__", "__annotations__")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether code passed, and why not."""

    passed: bool
    reason: str = ""
    infra_error: bool = False
    """The machine failed, not the code: retry, or drop the sample."""
    word: str = ""
    """The judge's: passed, failed, memory, or unused or broken, as judge.py says."""


class NamesOfTests(NamedTuple):
    """What tests find besides their own names."""

    modules: list[str]
    names: dict[str, str]
    """Names under test, and what they are called in the code."""
    entry: str
    """That which check(candidate) is called with."""
    homes: tuple[str, ...]
    """Modules that stand for the code."""
    values: frozenset[str]
    """Names that they do not only call, so that constants of the code may be tested."""


@public
def check_output(
    pool: SandboxPool, code: str, expected: str, *, stdin: str = "", timeout_s: float = 10.0
) -> Verdict:
    """Run code as a program of its own and compare what it prints.

    It passes if it ends by itself with exit code 0 and its standard output has the expected lines;
    space at the end of lines and of the output does not count. timeout_s is CPU time of the
    session; by the wall it is WALL times as much, for a machine that is busy with others.

    Raises:
        ValueError: nobody may print as much as is expected.
    """
    return _check_output(pool, code, expected, stdin, timeout_s)[0]


def _check_output(
    pool: SandboxPool, code: str, expected: str, stdin: str, timeout_s: float
) -> tuple[Verdict, float]:
    """The verdict, and the CPU seconds of the program, without what the machine took before."""
    require_printable(pool.limits, expected)
    with Sandbox.create(pool=pool, timeout=WALL * timeout_s + 60.0) as sandbox:  # later than it
        try:
            sandbox.files.write("main.py", code)
        except NotEnoughSpaceException as error:
            return Verdict(False, str(error)), 0.0
        places = sandbox._session.places
        python = [places.interpreter, "-s", "-S", "-X", "utf8", "main.py"]
        command, path = f"exec {shlex.join(python)}", os.pathsep.join(places.site_dirs)
        started: Any = sandbox.commands.run(command, True, {"PYTHONPATH": path}, stdin=True)
        clock = VerdictClock(timeout_s, sandbox._session)
        started.program.offer_stdin(as_bytes(stdin))
        verdict = _judge_program(started.program, expected, clock)
        return verdict, clock.spent()


def _judge_program(program: Program, expected: str, clock: "VerdictClock") -> Verdict:
    while not program.wait(clock.pause()):
        if clock.is_over():
            return Verdict(False, f"still running after {clock.said}")
    if program.machine_failed:
        return Verdict(False, program.machine_failed, infra_error=True)
    if program.exit_code != 0:
        shown = program.error or program.stderr.decode("utf-8", "replace")[-2000:]
        return Verdict(False, f"exit code {program.exit_code}: {shown}")
    lines = itertools.zip_longest(_lines(program.stdout), _lines(as_bytes(expected)))
    if any(one != other for one, other in lines):
        printed = program.stdout[:1000].decode("utf-8", "backslashreplace")
        return Verdict(False, f"expected {expected[:1000]!r}, got {printed!r}")
    return Verdict(True)


class VerdictClock:
    """The time of a verdict: CPU seconds of its sessions, which a busy machine makes no more. Code
    that only waits has WALL times as many by the wall.
    """

    def __init__(self, timeout_s: float, *sessions: Session) -> None:
        self._timeout_s, self._sessions = timeout_s, sessions
        self._began, self._before = time.monotonic(), self._cpu_seconds()
        self._cpus = len(sessions) * max(1.0, sessions[0].limits.cpus)
        self.said = f"{timeout_s:g} s of a processor, or {WALL * timeout_s:g} s in all"

    def _cpu_seconds(self) -> float:
        return sum(session.cpu_seconds() for session in self._sessions)

    def spent(self) -> float:
        """Seconds so far."""
        wall = time.monotonic() - self._began
        return max(self._cpu_seconds() - self._before, wall / WALL)

    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.spent() >= self._timeout_s

    def seconds(self) -> float:
        """Left by the wall; never none, for what ends by it."""
        return max(1e-3, self._began + WALL * self._timeout_s - time.monotonic())

    def pause(self) -> float:
        """How long it cannot be over, or LOOK_S."""
        return max(LOOK_S, (self._timeout_s - self.spent()) / self._cpus)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within this the sessions are ended when it is over."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(self.pause()):
                if self.is_over():
                    for session in self._sessions:
                        session.end_by(StepStatus.TIMEOUT_KILLED, f"it took {self.said}")
                    return

        threading.Thread(target=watch, name="sandbox-verdict", daemon=True).start()
        try:
            yield
        finally:
            done.set()


def require_printable(limits: Limits, expected: str) -> None:
    """Raise ValueError for an output that no program can have within the limits."""
    size = sum(len(line) + 1 for line in _lines(as_bytes(expected))) - 1
    if size > limits.output_max_mib << 20:
        raise InvalidArgumentException(
            f"expected output has {size} bytes; a program may print {limits.output_max_mib} MiB "
            "(Limits.output_max_mib)"
        )


def _lines(text: bytes | bytearray) -> Iterator[bytes]:
    return (line.rstrip(BLANK + b"\n") for line in io.BytesIO(text.rstrip(BLANK + b"\n")))


@public
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

    After their module's code come `check(candidate)`, functions `test*`, classes `Test*` and
    TestCases; tests that import pytest are run by it. Tests that used nothing of the code are not
    passed.

    The tests run in a session that the code never enters. The names under test stand for what the
    code calls so; calls, attributes and items of it are forwarded. Data of a closed set of types
    (inside/exchange.py) is handed over, anything else stays there and is known only by a number.
    Every other name is the tests' own: what they do not define is a module of the standard library
    or is not there.

    Args:
        pool: where to run; two sessions are used.
        code: what is graded. It is run first, and must not raise.
        tests: trusted source.
        timeout_s: CPU time of both sessions together, or WALL times as much by the wall.
        names: name in the tests to name (or expression) in the code, {"candidate": "f"}; None: the
            one name that the tests use and do not define, and what they import from `solution`.
        entry_point: what `check(candidate)` is called with, a name or an expression.

    Raises:
        ValueError: the tests are not Python, names are missing, or the pool has one place only.
    """
    told = source_of(tests), *names_of(tests, names, entry_point), False
    graded, judge = pool.acquire_pair()
    with graded, judge:
        return _check_tests(graded, judge, code, told, timeout_s)


def _check_tests(
    graded: Session, judge: Session, code: str, told: tuple[Any, ...], timeout_s: float
) -> Verdict:
    clock = VerdictClock(timeout_s, graded, judge)
    with clock.running():
        loaded = graded.step(code, clock.seconds())
        if loaded.status is not StepStatus.OK:
            return _failed(loaded, "the code did not run")
        begun = encode(("call_name", "start", (JUDGE, *told)), id)
        return _begin(judge, begun, clock) or _relay(graded, judge, clock)


def faults_of_tests(
    pool: SandboxPool, tasks: Sequence[tuple[Any, Any, Any]], *, timeout_s: float = 5.0,
    stubs: Sequence[str] = STUBS,
) -> list[str]:  # fmt: skip
    """What programs that do nothing show of tests: that they pass any, or can pass none; or "".

    Args:
        pool: where to run, one pair of sessions for many tasks: 10 ms of a core each.
        tasks: of each `tests`, `names` and `entry_point`, as of check_tests().
        timeout_s: CPU time of each; what takes longer shows nothing.
        stubs: the programs.
    """
    faults = []
    with contextlib.ExitStack() as sessions:
        pair: tuple[Session, ...] = ()
        for task in tasks:
            fault = _fault_of_tests(pair, *task, timeout_s, stubs) if pair else "not tried"
            if fault or not all(session.alive for session in pair):  # perhaps by those before it
                sessions.close()
                pair = tuple(map(sessions.enter_context, pool.acquire_pair()))
                fault = _fault_of_tests(pair, *task, timeout_s, stubs)
            faults.append(fault)
    return faults


def _fault_of_tests(
    pair: tuple[Session, ...], tests: Any, names: Any, entry_point: Any, timeout_s: float,
    stubs: Sequence[str],
) -> str:  # fmt: skip
    told = source_of(tests), *(found := names_of(tests, names, entry_point)), True
    called = sorted(set(re.findall(r"[^\W\d]\w*", " ".join(found.names.values()))))
    for stub in stubs:
        graded, judge = pair
        verdict = _check_tests(graded, judge, f"NAMES = {called!r}\n{stub}", told, timeout_s)
        if fault := TESTS_FAULTS.get(verdict.word):
            return f"{fault}: {verdict.reason.strip().rpartition(chr(10))[2]}".removesuffix(": ")
    return ""


def _begin(judge: Session, tests: str, clock: VerdictClock) -> Verdict | None:
    """Start the tests, of any size."""
    what = "the tests could not be started"
    begun = judge.step(START)
    if begun.status is StepStatus.OK:
        begun, answer = judge.ask([tests.encode()], clock.seconds())
    if begun.status is not StepStatus.OK:
        return _failed_judge(begun, what)
    match decode(b"".join(answer).decode(), int):  # the judge's own words
        case ("value", None):
            return None
        case ("raise", [name, *_], _, why):
            return Verdict(False, printable(f"{what}: {name}: {why}"), infra_error=True)
        case broken:
            return Verdict(False, f"{what}: {broken}")


def _failed(step: StepResult, what: str) -> Verdict:
    shown = step.error.traceback if step.error is not None else step.detail
    return Verdict(False, f"{what} ({step.status}): {shown}", step.status is StepStatus.INFRA_ERROR)


def _failed_judge(step: StepResult, what: str) -> Verdict:
    """What fails for want of memory is not for the code to answer."""
    verdict = _failed(step, what)
    if step.status is not StepStatus.OOM and getattr(step.error, "name", "") != "MemoryError":
        return verdict
    return replace(verdict, reason=f"{verdict.reason}; {MORE_MEMORY}", infra_error=True)


def _relay(graded: Session, judge: Session, clock: VerdictClock) -> Verdict:
    """Carry the judge's questions to the graded session and its answers back, unread."""
    answer: list[bytes] = []
    while True:
        asked, question = judge.ask(answer, clock.seconds())
        if asked.status is not StepStatus.OK:
            return _failed_judge(asked, "the tests broke")
        if question[0][:1] != b"[":  # no question of exchange.py: the judge's own words
            word, _, why = b"".join(question).decode().partition("\n")
            if word == "memory":
                return Verdict(False, f"an answer, too large to be read; {MORE_MEMORY}", True)
            return Verdict(word == "passed", printable(why), word=word)
        answered, answer = graded.ask(question, clock.seconds())
        if answered.status is not StepStatus.OK:
            return _failed(answered, f"{question[0][:200].decode()} was not answered")


def source_of(tests: Any) -> str:
    """Tests as Python: text, or a list of texts, which may be written as JSON or Python.

    Raises:
        ValueError: they are neither.
    """
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
    """What tests find besides their own names; as of check_tests().

    Raises:
        ValueError: the tests are not Python, they use several names that are not theirs, or none.
    """
    tests = source_of(tests)
    free, (homes, imported, values) = _free_names(tests), _imports(tests, entry_point or "")
    known = [name for name in free if name in sys.stdlib_module_names and name != entry_point]
    if names is None:
        tested = [name for name in free if name not in known and name != entry_point]
        if not (tested or imported or entry_point):
            tested = known
        if "*" in imported:
            imported, tested = imported | {*tested}, []
        if len(tested) > (not entry_point and not imported):
            raise InvalidArgumentException(
                f"'tests' use {', '.join(tested)} and define none of them: `names` must say which "
                f"are under test, such as { {tested[0]: tested[0]}!r}"
            )
        names = {name: name for name in tested}
    own = {*imported, *filter(None, [entry_point])} - {"*"}
    names = {**{name: name for name in sorted(own)}, **names}
    _require_no_inspection(tests, {*names})
    if not names:
        raise InvalidArgumentException(
            "'tests' use nothing of the answer, so they pass any program: they must call it by its "
            "name, import it from `solution`, or the row must have its `entry_point`, which "
            "check(candidate) is called with, or which they import from another module"
        )
    entry = entry_point or (next(iter(names)) if len(names) == 1 else "")
    modules = [name for name in known if name not in names]
    return NamesOfTests(modules, names, entry, homes, values)


@functools.lru_cache(1024)
def _imports(
    tests: str, entry_point: str
) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """Modules that stand for the answer, `solution` and those that the entry point is imported
    from; what tests take from them; and all names that they do not only call.
    """
    taken: dict[str, set[str]] = {HOME: set()}
    aliases, nodes = set(), [*ast.walk(ast.parse(tests, "<tests>"))]
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str() as home, level=0):
                names, root = {alias.name for alias in node.names}, home.partition(".")[0]
                own = entry_point in names and root not in sys.stdlib_module_names
                if own or home == HOME:
                    taken.setdefault(home, set()).update(names)
            case ast.AsyncFunctionDef() | ast.Import(names=[ast.alias(name="asyncio")]):
                raise InvalidArgumentException(
                    "'tests' are asynchronous: no coroutine of the answer can be awaited by them; "
                    "ask for an ordinary function and test that"
                )
            case ast.Import():
                aliases |= {alias.asname or HOME for alias in node.names if alias.name == HOME}
    called, values = {id(node.func) for node in nodes if isinstance(node, ast.Call)}, set()
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in aliases and node.attr[0] != "_":
                taken[HOME].add(node.attr)
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in called:
            values.add(node.id if isinstance(node, ast.Name) else node.attr)
    return tuple(taken), frozenset().union(*taken.values()), frozenset(values)


def _require_no_inspection(tests: str, tested: set[str]) -> None:
    """Raise ValueError for tests that read the source, signature or docstring of the answer."""
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
            case _:
                continue
        raise InvalidArgumentException(
            f"'tests' use {looks}, which no program passes: the answer is in another process, and "
            "cannot be inspected; test what it returns"
        )


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

    timeout_s is the time of the programs, all of them together; waiting for a place and starting
    sessions do not count.
    """
    left, verdicts = timeout_s, []
    for stdin, expected in cases:
        verdict, took = Verdict(False, f"not run: those before took {timeout_s:g} s"), 0.0
        if left > 0:
            verdict, took = _check_output(pool, code, expected, stdin, left)
        left -= took
        verdicts.append(verdict)
    return verdicts
