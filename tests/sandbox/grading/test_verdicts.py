"""Statuses after each process that can die, in each way.

infra_error only on evidence from outside of the session (docs/sandbox.md, "Whose failure").
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from agentgrpo.sandbox import (
    SandboxInfraError,
    SandboxNotFoundException,
    SandboxPool,
    Session,
    StepStatus,
)
from agentgrpo.sandbox.grading.grade import check_output, check_tests
from agentgrpo.sandbox.isolation.channels import children_of
from agentgrpo.sandbox.isolation.zygote import Rung
from agentgrpo.sandbox.selftest import LIMITS
from agentgrpo.sandbox.session.interpreters import start_context
from tests.isolation import gone, need_isolation, run_python, within

pytestmark = pytest.mark.nsjail
RUNGS = [Rung.ZYGOTE_USERNS, Rung.ZYGOTE_ROOT]
EXIT, SIGNAL, INFRA = StepStatus.EXIT, StepStatus.SIGNAL, StepStatus.INFRA_ERROR
KILLED = StepStatus.TIMEOUT_KILLED


def init(pool: SandboxPool, session: Session) -> None:
    os.kill(session.init_pid, signal.SIGKILL)


def interpreter(pool: SandboxPool, session: Session) -> None:
    os.kill(session.pid, signal.SIGKILL)


def nsjail_of(session: Session) -> int:
    """The nsjail that a session is in: the process of this one's children that it descends from."""
    above = session.init_pid
    while (parent := _parent(above)) != os.getpid():
        above = parent
    return above


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def nsjail(pool: SandboxPool, session: Session) -> None:
    os.kill(nsjail_of(session), signal.SIGKILL)


def zygote(pool: SandboxPool, session: Session) -> None:
    (jailed,) = children_of(nsjail_of(session))
    os.kill(jailed, signal.SIGKILL)


def descriptor(pool: SandboxPool, session: Session) -> None:
    assert session.channels is not None
    os.close(session.channels.status)
    session.channels._descriptors = tuple(
        fd for fd in session.channels._descriptors if fd != session.channels.status
    )


# fmt: off
FROM_OUTSIDE: list[tuple[Callable[[SandboxPool, Session], None], StepStatus]] = [
    (interpreter, SIGNAL), (init, SIGNAL), (nsjail, INFRA), (zygote, INFRA), (descriptor, INFRA),
]
FROM_INSIDE = {
    "exit": ("import os; os._exit(3)", EXIT),
    "signal": ("import os; os.kill(os.getpid(), 9)", SIGNAL),
    "crash": ("import ctypes; ctypes.string_at(0)", SIGNAL),
    "processor time": ("import resource as r; r.setrlimit(r.RLIMIT_CPU, (0, 0))\nwhile 1: pass",
                       SIGNAL),
    "all at once": ("import os\ntry: os.kill(-1, 9)\nfinally: os.kill(os.getpid(), 9)", SIGNAL),
    "stopped": ("import os; os.kill(os.getpid(), 19)", KILLED),
    "descriptors": ("import os; os.closerange(0, 99); os.kill(os.getpid(), 9)", SIGNAL),
}
# fmt: on


@pytest.fixture(params=RUNGS, ids=str)
def rung(request: pytest.FixtureRequest) -> Rung:
    chosen: Rung = request.param
    if chosen is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
        pytest.skip("zygote-root needs root")
    need_isolation(chosen)
    return chosen


def alone(rung: Rung) -> SandboxPool:
    return SandboxPool(limits=LIMITS, min_idle=0, zygotes=1, rungs=[rung])


@pytest.mark.parametrize("during", [False, True], ids=["between steps", "during a step"])
def test_statuses_after_kills_from_outside(rung: Rung, during: bool) -> None:
    for kill, wanted in FROM_OUTSIDE:
        if during and kill is descriptor:
            continue
        with alone(rung) as pool, pool.acquire() as session:
            session.step("1")
            if during:
                threading.Timer(0.2, kill, (pool, session)).start()
            else:
                kill(pool, session)
                assert kill is descriptor or gone(session.pid)
            result = session.step("import time; time.sleep(20)", 30.0)
            assert (result.status, result.state_lost) == (wanted, True), (kill, result)
            with pool.acquire() as other:
                assert other.step("6 * 7").value == "42", kill


def test_statuses_after_ends_from_inside(rung: Rung) -> None:
    with alone(rung) as pool:
        for way, (code, wanted) in FROM_INSIDE.items():
            with pool.acquire() as session:
                result = session.step(code, 2.0 if way == "stopped" else 30.0)
                assert (result.status, result.state_lost) == (wanted, True), (way, result)


def test_files_after_a_machine_failure_raise_infra_error(rung: Rung) -> None:
    """Nobody may take a file that the machine has lost for one that the code did not write."""
    for kill, wanted in FROM_OUTSIDE:
        if kill in (descriptor, interpreter):
            continue
        with alone(rung) as pool, pool.acquire() as session:
            session.step("open('f', 'w').write('x')")
            files = session.files()
            assert files.read("f") == "x"
            kill(pool, session)
            assert gone(session.pid)
            assert gone(session.init_pid)
            raised = SandboxInfraError if wanted is INFRA else SandboxNotFoundException
            uses = (partial(files.read, "f"), partial(files.list, depth=2), session.files)
            for use in uses:
                with pytest.raises(raised):
                    use()


def test_statuses_of_another_interpreter(rung: Rung) -> None:
    for kill, wanted in FROM_OUTSIDE:
        if kill in (descriptor, interpreter):
            continue
        with alone(rung) as pool, pool.acquire() as session:
            context = start_context(session, "bash", pool.template)
            threading.Timer(0.2, kill, (pool, session)).start()
            assert context.step("sleep 20", 30.0).status is wanted, kill
            context.close()
    with alone(rung) as pool, pool.acquire() as session:
        context = start_context(session, "bash", pool.template)
        os.kill(context.pid, signal.SIGKILL)
        assert context.step("echo 1").status is SIGNAL
        assert session.step("6 * 7").value == "42", "its session goes on"
        context.close()


@pytest.mark.parametrize("kill", [zygote, nsjail, init])
def test_verdicts_after_kills_during_grading(kill: Callable[[SandboxPool, Session], None]) -> None:
    rung = Rung.ZYGOTE_USERNS
    need_isolation(rung)
    for check, code, wants in (
        (check_output, "import time; time.sleep(20)", ""),
        (check_tests, "import time\nf = time.sleep", "f(20)"),
    ):
        with alone(rung) as pool:

            def strike(pool: SandboxPool = pool) -> None:
                assert within(pool._copy_of_live)
                time.sleep(0.5)
                for session in pool._copy_of_live()[: 1 if kill is not init else 2]:
                    kill(pool, session)

            striker = threading.Thread(target=strike)
            striker.start()
            verdict = check(pool, code, wants, timeout_s=30.0)
            striker.join()
            wanted = (False, kill is not init)
            assert (verdict.passed, verdict.infra_error) == wanted, verdict


def test_missing_descriptors_are_an_infra_error() -> None:
    with SandboxPool(min_idle=0, zygotes=1) as pool:
        pool.acquire().close()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(map(int, os.listdir("/proc/self/fd")))
        try:
            for more in range(14):
                resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, before[1]))
                try:
                    session = pool.acquire()
                except SandboxInfraError:
                    continue
                assert session.step("1").status in (StepStatus.OK, INFRA)
                session.close()
            assert more == 13, "with enough of them it is well"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        with pool.acquire() as session:
            assert session.step("6 * 7").value == "42"


def test_time_of_a_stopped_host_does_not_count() -> None:
    code = """
        import os, signal, subprocess, sys
        from agentgrpo.sandbox import SandboxPool
        with SandboxPool(min_idle=0, zygotes=1) as pool, pool.acquire() as a:
            def stop():
                wake = f"import os, time; time.sleep(2); os.kill({os.getpid()}, 18)"
                subprocess.Popen([sys.executable, "-c", wake])
                os.kill(os.getpid(), signal.SIGSTOP)
            heard = lambda *_: stop()
            print(a.cell("print(1, flush=True)\\nimport time; time.sleep(0.2); 42", 1.0,
                         listener=heard).status)
        """
    done = run_python(code)
    assert done.stdout.split() == ["ok"], done.stderr
