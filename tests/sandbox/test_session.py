"""What a step shows, and what stays from one step to the next."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentgrpo.sandbox import Limits, SandboxPool, SandboxUnavailable, Session, StepStatus
from agentgrpo.sandbox.hostile.lifecycle import pids

pytestmark = pytest.mark.nsjail


def test_last_expression_is_the_value(session: Session) -> None:
    result = session.step("x = 20\nx + 22")
    assert (result.status, result.value, result.stdout) == (StepStatus.OK, "42", "")


def test_statement_has_no_value(session: Session) -> None:
    assert session.step("x = 1").value is None
    assert session.step("None").value is None


def test_variables_imports_files_and_directory_persist(session: Session) -> None:
    session.step("import os\nx = 5\nos.makedirs('d')\nos.chdir('d')\nopen('f', 'w').write('kept')")
    assert session.step("x, os.getcwd(), open('f').read()").value == ("(5, '/home/user/d', 'kept')")


def test_functions_see_later_definitions(session: Session) -> None:
    session.step("def f(): return g()")
    session.step("def g(): return 7")
    assert session.step("f()").value == "7"


def test_streams_are_separate_and_exact(session: Session) -> None:
    result = session.step("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


def test_output_of_subprocesses_is_captured(session: Session) -> None:
    assert session.step("import os\nos.system('echo from a child')").stdout == "from a child\n"


def test_exception_has_name_value_and_a_traceback_of_user_code_only(session: Session) -> None:
    result = session.step("def f():\n    return 1 / 0\nf()")
    assert result.status is StepStatus.ERROR
    assert not result.state_lost
    assert result.error is not None
    assert (result.error.name, result.error.value) == ("ZeroDivisionError", "division by zero")
    assert result.error.traceback.splitlines()[:4] == [
        "Traceback (most recent call last):",
        '  File "<cell 1>", line 3, in <module>',
        "    f()",
        '  File "<cell 1>", line 2, in f',
    ]
    assert "repl.py" not in result.error.traceback


def test_syntax_error_looks_like_pythons(session: Session) -> None:
    result = session.step("def f(:")
    assert result.error is not None
    ours = result.error.traceback.splitlines()
    theirs = subprocess.run(
        [sys.executable, "-c", "def f(:"], capture_output=True, text=True, check=False
    ).stderr.splitlines()
    assert ours[1:] == theirs[1:]
    assert ours[0] == '  File "<cell 1>", line 1'


def test_timeout_interrupts_and_keeps_state(session: Session) -> None:
    session.step("x = 1")
    result = session.step("while True: pass", timeout_s=0.2)
    assert (result.status, result.state_lost) == (StepStatus.TIMEOUT, False)
    assert result.wall_s >= 0.2
    assert session.step("x").value == "1"


def test_sys_exit_keeps_state_but_is_not_ok(session: Session) -> None:
    session.step("x = 1")
    assert session.step("import sys; sys.exit(0)").status is StepStatus.EXIT
    assert session.step("x").value == "1"


def test_os_exit_zero_is_not_success(session: Session) -> None:
    result = session.step("print('before'); import os; os._exit(0)")
    assert (result.status, result.exit_code, result.state_lost) == (StepStatus.EXIT, 0, True)
    assert result.stdout == "before\n"
    again = session.step("1")
    assert (again.status, again.state_lost, again.value) == (StepStatus.EXIT, True, None)


def test_death_by_signal_is_reported(session: Session) -> None:
    result = session.step("import ctypes; ctypes.string_at(0)")
    assert (result.status, result.signal, result.state_lost) == (StepStatus.SIGNAL, 11, True)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e9, "1"])
def test_nonsense_timeout_is_refused(session: Session, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        session.step("1", timeout_s=timeout)
    assert session.step("1").status is StepStatus.OK


def test_sessions_do_not_see_each_other(pool: SandboxPool) -> None:
    with pool.acquire() as a, pool.acquire() as b:
        a.step("x = 1; open('/tmp/a', 'w').write('a'); open('/dev/shm/a', 'w').write('a')")
        seen = b.step("import os; 'x' in dir(), os.listdir('/tmp'), os.listdir('/dev/shm')")
        assert seen.value == "(False, [], [])"


def test_sessions_step_in_parallel_from_threads(pool: SandboxPool) -> None:
    answers: list[str | None] = [None] * 8

    def work(i: int) -> None:
        with pool.acquire() as session:
            session.step(f"x = {i}")
            answers[i] = session.step("x * x").value

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [str(i * i) for i in range(8)]


def test_closed_session_answers_that_it_is_closed(pool: SandboxPool) -> None:
    session = pool.acquire()
    session.close()
    session.close()
    assert session.step("1").state_lost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timeout_s": 0.0}, "limits.timeout_s must be positive"),
        ({"timeout_s": float("nan")}, "limits.timeout_s must be positive"),
        ({"memory_mib": -1}, "limits.memory_mib must be positive"),
        ({"memory_mib": 1.5}, "limits.memory_mib must be int"),
        ({"steps": True}, "limits.steps must be int"),
        ({"niceness": 20}, "limits.niceness must be in"),
        ({"processes": 2}, "limits.processes must be at least 3"),
    ],
)
def test_limits_are_validated(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**change)  # type: ignore[arg-type]


def test_a_session_starts_with_nothing_of_what_its_zygote_rehearsed(session: Session) -> None:
    shown = session.step("import linecache, sys; sorted(vars()), list(linecache.cache)")
    assert shown.stdout == shown.stderr == ""
    names = ["__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"]
    assert shown.value == str(([*names, "linecache", "sys"], ["<cell 1>"]))


def test_a_report_that_takes_long_is_waited_for(session: Session) -> None:
    init, interpreter = pids(session)
    os.kill(init, signal.SIGSTOP)
    os.kill(interpreter, signal.SIGKILL)
    later = threading.Timer(3 * session.limits.grace_s, os.kill, (init, signal.SIGCONT))
    later.start()
    result = session.step("1")
    assert (result.status, result.signal) == (StepStatus.SIGNAL, signal.SIGKILL), result


def test_limit_of_cpu_time_is_the_codes_and_not_its_inits(session: Session) -> None:
    def limit(pid: int) -> str:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        return next(line for line in lines if line.startswith("Max cpu time")).split()[3]

    assert session.step("import resource; resource.getrlimit(resource.RLIMIT_CPU)").value == (
        "(600, 600)"
    )
    assert limit(session.pid) == "600"
    assert limit(session.init_pid) == "unlimited", "what it reaps must not end it"


def test_without_nsjail_nothing_runs() -> None:
    with pytest.raises(SandboxUnavailable, match="remedy"):
        SandboxPool(nsjail="/nonexistent/nsjail")


def test_import_brings_in_none_of_the_heavy_parts() -> None:
    heavy = "{'torch', 'vllm', 'numpy', 'agentgrpo.engine.engine', 'agentgrpo.learn.learner'}"
    code = f"import sys, agentgrpo.sandbox; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
