"""Attacks on the pool: killed processes, leftovers, failure reports."""

import os
import textwrap

from agentgrpo.sandbox.isolation.errors import SandboxException, SandboxInfraError
from agentgrpo.sandbox.session.interpreters import start_context
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.step_result import StepStatus
from tests.isolation import within
from tests.sandbox.attacks.checks import on_pool

LEAVES_NO_ROOM = {
    "every process is used up": """
        import os, signal
        os.system('for i in $(seq 100); do sleep 100 & done 2> /dev/null')
        while True:
         try:
          if os.fork() == 0: signal.pause()
         except OSError: break""",
    "every new process is killed": """
        import os
        if os.fork() == 0:
         me = os.getpid()
         while True:
          for pid in range(3, 300):
           try: pid == me or os.kill(pid, 9)
           except OSError: pass""",
    "no memory is left": """
        keep = []
        try:
         for _ in range(100_000): keep.append(bytearray(1 << 16))
        except MemoryError: pass""",
    "descriptors are in flight": """
        import socket
        keep = []
        try:
         while True:
          keep += socket.socketpair()
          for _ in range(4): socket.send_fds(keep[-2], [b'x'], [0] * 250)
        except OSError: pass""",
    "every file is used up": """
        try:
         for directory in ('/tmp', '/dev/shm', '.'):
          for n in range(10_000): open(f'{directory}/{n}', 'w').close()
        except OSError: pass""",
}


@on_pool
def no_room_for_programs(pool: SandboxPool) -> None:
    """A session that prevents programs from starting is not an infra_error."""
    for way, code in LEAVES_NO_ROOM.items():
        with pool.acquire() as session:
            seen = [session.step(textwrap.dedent(code), 5.0)]
            for _ in range(3):
                try:
                    with start_context(session, "bash", pool.template) as context:
                        seen.append(context.step("echo $((6 * 7))", 5.0))
                except SandboxInfraError:
                    raise
                except SandboxException:  # it says what keeps the program from starting
                    continue
            seen.append(session.step("1"))
        assert all(result.status is not StepStatus.INFRA_ERROR for result in seen), (way, seen)


@on_pool
def nothing_is_left(pool: SandboxPool) -> None:
    """Sessions leave neither descriptors nor control groups behind."""
    groups = pool._spawner.cgroups._all if pool._spawner.cgroups else []

    def held() -> int:
        """Once the background has refilled the pool, and but for the two of each control group."""
        assert within(lambda: pool.metrics()["idle"] == pool.min_idle)
        return len(os.listdir("/proc/self/fd")) - 2 * len(groups)

    pool.acquire().close()
    before, made = held(), len(groups)
    for _ in range(30):
        with pool.acquire() as session:
            session.step("1")
    assert within(lambda: held() == before), f"{held()} descriptors, before {before}"
    assert len(groups) < made + 30, "each session left its control group"
