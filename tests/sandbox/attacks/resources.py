"""Attacks on time, output, memory, processes and disk."""

from agentgrpo.sandbox.selftest import (
    ALIVE,
    ERROR,
    KILLED,
    LIMITS,
    OK,
    OOM,
    SIGNAL,
    TIMEOUT,
    Skip,
    at_most,
    refused,
    run_steps,
    table,
)
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.step_result import StepResult
from tests.sandbox.attacks.checks import on_pool

FILL = """
    n = 0
    try:
     f = open('{0}/f', 'wb')
     while True: n += f.write(b'x' * 65536); f.flush()
    except OSError as e: print(e.errno)
    try: f.close()
    except OSError: pass
    import os; os.unlink('{0}/f'); n"""


def told(result: StepResult) -> bool:
    """Whether processes that the memory limit killed are counted."""
    if result.processes_left is None:
        raise Skip("no control group: memory is limited per process only")
    return result.oom_kills > 0


row = table(__name__)
# fmt: off
row("SIGSTOP to itself ends in a kill",
    ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", KILLED, 0.2))
row("A 2 GB bytearray ends that session or raises MemoryError",
    ("x = bytearray(2 << 30); x[::4096] = b'1' * len(x[::4096])", (OOM, ERROR)))
row("Many small children together reach the memory limit, and the host counts them", ("""
    import os
    filled, write = os.pipe(); hold, end = os.pipe()
    for _ in range(12):
     if os.fork() == 0:
      os.close(end); x = bytearray(40 << 20); x[::4096] = b'1' * len(x[::4096])
      os.close(write); os.read(hold, 1); os._exit(0)
    os.close(write); os.read(filled, 1); os.close(end)  # each is full or dead by now
    """, (OK, OOM, told), 60.0))
row("Files in /dev/shm, /tmp and home are limited",
    *((FILL.format(directory), at_most(mib << 20)) for directory, mib in
      (("/dev/shm", LIMITS.shm_mib), ("/tmp", LIMITS.tmp_mib), (".", LIMITS.home_mib))))
row("A sparse file of many gigabytes cannot be made",
    ("f = open('f', 'wb'); f.truncate(100 << 30)", (ERROR, lambda r: r.error is not None)))
row("The shell's fork bomb ends with its session",
    ("import os; os.system(': () { : | : & }; : 2> /dev/null')", None, 0.5), alone=True)
row("Threads are limited like processes: no more start, or the watchdog ends the session", ("""
    import threading
    lock = threading.Lock(); lock.acquire(); n = 0
    try:
     while True: threading.Thread(target=lock.acquire, daemon=True).start(); n += 1
    except RuntimeError: pass
    n""", (OK, SIGNAL, at_most(LIMITS.processes), lambda r: r.degraded or r.status is OK)))
row("Orphans are reaped: 200 double forks leave nothing behind", ("""
    import os
    for _ in range(200):
     if (p := os.fork()) == 0:
      if os.fork() == 0: os._exit(0)
      os._exit(0)
     os.waitpid(p, 0)
    import time; stop = time.monotonic() + 5; many = 99
    while many > 4 and time.monotonic() < stop:
     many = len([p for p in os.listdir('/proc') if p.isdigit()])
    many""", at_most(4), 60.0))
row("A stack overflow kills only its own interpreter",
    ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
     (SIGNAL, OOM, ERROR, TIMEOUT, KILLED), 2.0))
row("Resource limits cannot be raised", refused(
    [f"r.setrlimit(r.RLIMIT_{k}, [r.getrlimit(r.RLIMIT_{k})[1] + 1] * 2)"
     for k in ("NOFILE", "NPROC", "FSIZE", "CPU")],
    "import resource as r", "(ValueError, OSError)"))
row("The priority cannot be raised", ("import os; os.nice(-10)", ERROR))
# fmt: on


@on_pool
def busy_neighbours(pool: SandboxPool) -> None:
    """Sessions that burn CPU do not stop another from answering."""
    busy = [pool.acquire() for _ in range(4)]
    try:
        for session in busy:
            session.step("import os\nif os.fork() == 0:\n while True: pass")
        with pool.acquire() as other:
            run_steps(other, ALIVE)
    finally:
        for session in busy:
            session.close()
