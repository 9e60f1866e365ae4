"""Results of steps, and state between steps."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.sandbox import Limits, SandboxPool, SandboxUnavailable, Session, StepStatus
from agentgrpo.sandbox.selftest import ERROR, EXIT, TIMEOUT, run_steps
from tests.isolation import run_python

pytestmark = pytest.mark.nsjail
STARTS_WITH = ["__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__",
               "linecache", "sys"]  # fmt: skip
# fmt: off
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "the last expression is the value": [
        ("x = 20\nx + 22", ("42", lambda result: result.stdout == ""))],
    "a statement has no value": [
        (code, lambda result: result.value is None) for code in ("x = 1", "None")],
    "variables, imports, files and the directory persist": [
        ("import os\nx = 5\nos.makedirs('d')\nos.chdir('d')\nopen('f', 'w').write('kept')",),
        ("x, os.getcwd(), open('f').read()", "(5, '/home/user/d', 'kept')")],
    "functions see later definitions": [
        ("def f(): return g()",), ("def g(): return 7",), ("f()", "7")],
    "streams are separate and exact": [
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)",
         lambda result: (result.stdout, result.stderr) == ("out\n", "err\n"))],
    "output of programs is captured": [
        ("import os\nos.system('echo from a child')",
         lambda result: result.stdout == "from a child\n")],
    "a timeout ends the step after its time": [
        ("while True: pass", (TIMEOUT, lambda result: result.wall_s >= 0.2), 0.2)],
    "output before the end is kept, and an ended session reports its end again": [
        ("print('before'); import os; os._exit(0)",
         (EXIT, lambda result: (result.exit_code, result.stdout) == (0, "before\n"))),
        ("1", (EXIT, lambda result: result.state_lost and result.value is None))],
    "nothing of the zygote's warm-up is visible": [
        ("import linecache, sys; sorted(vars()), list(linecache.cache)",
         (str((STARTS_WITH, ["<cell 1>"])),
          lambda result: result.stdout == result.stderr == ""))],
    "an exception has a name, a value and a traceback of user code only": [
        ("def f():\n    return 1 / 0\nf()", (ERROR,
         lambda r: (r.error.name, r.error.value) == ("ZeroDivisionError", "division by zero"),
         lambda r: [line for line in r.error.traceback.splitlines() if line.strip(" ~^")][:4] == [
             "Traceback (most recent call last):",
             '  File "<cell 1>", line 3, in <module>',
             "    f()",
             '  File "<cell 1>", line 2, in f'],
         lambda r: "repl.py" not in r.error.traceback))],
}
# fmt: on


@pytest.mark.parametrize("name", ROWS)
def test_step_reports_value_output_and_status(session: Session, name: str) -> None:
    run_steps(session, *ROWS[name])


def test_printed_addresses_are_the_same_in_each_run() -> None:
    shown = set()
    for _ in range(2):
        with SandboxPool() as pool, pool.acquire() as session:
            code = "print(object(), [].append, (x for x in '1'), id({}), {'a', 'b', 'c'})"
            shown.add(session.step(code).stdout)
    assert len(shown) == 1
    assert "0x7f" in shown.pop()


def test_syntax_error_looks_like_pythons(session: Session) -> None:
    result = session.step("def f(:")
    assert result.error is not None
    ours = result.error.traceback.splitlines()
    theirs = run_python("def f(:").stderr.splitlines()
    assert ours[1:] == theirs[1:]
    assert ours[0] == '  File "<cell 1>", line 1'


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e9, "1"])
def test_invalid_timeout_raises(session: Session, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        session.step("1", timeout_s=timeout)
    assert session.step("1").status is StepStatus.OK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timeout_s": 0.0}, "limits.timeout_s: expected a positive float"),
        ({"timeout_s": float("nan")}, "limits.timeout_s: expected a positive float"),
        ({"memory_mib": -1}, "limits.memory_mib: expected a positive int"),
        ({"memory_mib": 1.5}, "limits.memory_mib: expected a positive int"),
        ({"steps": True}, "limits.steps: expected a positive int"),
        ({"niceness": 20}, "limits.niceness must be in"),
        ({"processes": 2}, "limits.processes must be at least 3"),
    ],
)
def test_limits_are_validated(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**change)  # type: ignore[arg-type]


def test_a_late_report_of_init_is_awaited(session: Session) -> None:
    init, interpreter = session.init_pid, session.pid
    os.kill(init, signal.SIGSTOP)
    os.kill(interpreter, signal.SIGKILL)
    later = threading.Timer(3 * session.limits.grace_s, os.kill, (init, signal.SIGCONT))
    later.start()
    result = session.step("1")
    assert (result.status, result.signal) == (StepStatus.SIGNAL, signal.SIGKILL), result


def test_cpu_limit_holds_for_the_code_and_not_for_init(session: Session) -> None:
    def limit(pid: int) -> str:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        return next(line for line in lines if line.startswith("Max cpu time")).split()[3]

    run_steps(session, ("import resource; resource.getrlimit(resource.RLIMIT_CPU)", "(600, 600)"))
    assert limit(session.pid) == "600"
    assert limit(session.init_pid) == "unlimited", "what it reaps must not end it"


def test_without_nsjail_nothing_runs() -> None:
    with pytest.raises(SandboxUnavailable, match="remedy"):
        SandboxPool(nsjail="/nonexistent/nsjail")
