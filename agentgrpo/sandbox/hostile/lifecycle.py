"""Attacks on the pool: what dies, what is left over, who notices."""

import os
import signal

from agentgrpo.sandbox.channels import pid_of
from agentgrpo.sandbox.errors import SandboxBusy
from agentgrpo.sandbox.hostile.case import SIGNAL, expect, on_pool, still_works, within
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.result import StepStatus
from agentgrpo.sandbox.session import Session


def pids(session: Session) -> tuple[int, int]:
    """Init and interpreter of a live session, as the machine numbers them."""
    channels = session.channels
    assert channels is not None
    return pid_of(channels.init), pid_of(channels.interpreter)


def _ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def gone(pid: int) -> bool:
    """Whether the process ends soon."""
    return within(lambda: _ended(pid))


@on_pool
def close_leaves_no_process(pool: SandboxPool) -> None:
    """Closing a session ends everything that it started."""
    session = pool.acquire()
    code = "import os\nfor _ in range(5):\n if os.fork() == 0:\n  while True: pass"
    session.step(code)
    started = pids(session)
    session.close()
    assert all(gone(pid) for pid in started)


@on_pool
def interpreter_killed_from_outside(pool: SandboxPool) -> None:
    """An interpreter killed by the machine is reported as killed."""
    with pool.acquire() as session:
        os.kill(pids(session)[1], signal.SIGKILL)
        expect(session.step("1"), SIGNAL, lambda result: result.signal == signal.SIGKILL)


@on_pool
def init_killed_from_outside(pool: SandboxPool) -> None:
    """A session whose init is killed by the machine is an infrastructure error, not a result."""
    with pool.acquire() as session:
        init, interpreter = pids(session)
        os.kill(init, signal.SIGKILL)
        assert gone(interpreter)
        expect(session.step("1"), StepStatus.INFRA_ERROR)


@on_pool
def crash_does_not_reach_neighbours(pool: SandboxPool) -> None:
    """A session that crashes leaves its neighbours alone."""
    with pool.acquire() as a, pool.acquire() as b:
        b.step("x = 7")
        a.step("import ctypes; ctypes.string_at(0)")
        assert b.step("x").value == "7"


@on_pool
def use_after_close(pool: SandboxPool) -> None:
    """A closed session answers that it is over, and may be closed again."""
    session = pool.acquire()
    session.close()
    session.close()
    assert session.step("1").state_lost


@on_pool
def too_many_sessions(pool: SandboxPool) -> None:
    """More sessions than allowed wait, and are told so."""
    held = [pool.acquire() for _ in range(pool.max_live)]
    try:
        pool.acquire(timeout_s=0.05)
    except SandboxBusy:
        pass
    else:
        raise AssertionError("one session more than max_live was handed out")
    finally:
        for session in held:
            session.close()
    with pool.acquire() as session:
        still_works(session)


@on_pool
def nothing_is_left(pool: SandboxPool) -> None:
    """Sessions leave no descriptors behind."""

    def held() -> int:
        """Once the background has refilled the pool, and but for the two of each control group."""
        assert within(lambda: pool.metrics()["idle"] == pool.min_idle)
        groups = pool._spawner.cgroups
        return len(os.listdir("/proc/self/fd")) - (2 * len(groups._all) if groups else 0)

    pool.acquire().close()
    before = held()
    for _ in range(30):
        with pool.acquire() as session:
            session.step("1")
    assert within(lambda: held() == before), f"{held()} descriptors, before {before}"
