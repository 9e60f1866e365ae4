"""Attacks on time, output, memory, processes and disk."""

import select
import signal

from agentgrpo.sandbox.hostile.case import (
    ERROR,
    GOES_ON,
    KILLED,
    LIMITS,
    OK,
    OOM,
    SIGNAL,
    TIMEOUT,
    Skip,
    Table,
    Test,
    a_proc,
    at_most,
    error,
    on_pool,
    refused,
    still_works,
)
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.result import StepResult, StepStatus
from agentgrpo.sandbox.session import Session

TOO_MUCH = StepStatus.OUTPUT_LIMIT
FILL = """
    n = 0
    try:
     f = open('{0}/f', 'wb')
     while True: n += f.write(b'x' * 65536); f.flush()
    except OSError as e: print(e.errno)
    try: f.close()
    except OSError: pass
    import os; os.unlink('{0}/f'); n"""


def out(text: str) -> Test:
    """Standard output is that."""
    return lambda result: result.stdout == text


def told(result: StepResult) -> bool:
    """Whether processes that the memory limit killed are counted."""
    if result.processes_left is None:
        raise Skip("no control group: memory is limited per process only")
    return result.oom_kills > 0


def signalled(session: Session) -> object:
    """Send the signal that the session waits for, between two steps, and wait for its output."""
    channels = session.channels
    assert channels is not None
    signal.pidfd_send_signal(channels.interpreter, signal.SIGUSR1)
    return select.select([channels.out], [], [], 10.0)[0]


row = Table(__name__).row
# fmt: off
row("An endless loop is interrupted and keeps its state",
    ("x = 1",), ("while True: pass", TIMEOUT, 0.2), ("x", "1"))
row("A loop that swallows the interrupt is stopped all the same",
    ("while True:\n try:\n  for _ in iter(int, 1): pass\n except BaseException: pass", KILLED, 0.2))
row("Ignoring SIGINT ends in a kill",
    ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", KILLED, 0.2))
row("Ignoring every signal and sleeping ends in a kill", ("""
    import signal, time
    for n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)
    time.sleep(100)""", KILLED, 0.2))
row("Blocking every signal ends in a kill", ("""
    import signal, time
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(100)""", KILLED, 0.2))
row("A SIGINT handler left by one step does not protect the next",
    ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",),
    ("while True: pass", TIMEOUT, 0.2))
row("A sleep is interrupted", ("import time; time.sleep(100)", TIMEOUT, 0.2))
row("An exponential regular expression is interrupted",
    ("import re; re.match(r'(a+)+$', 'a' * 64 + 'b')", TIMEOUT, 0.2), GOES_ON)
row("A huge integer computation ends by interrupt, kill or memory, never later",
    ("10 ** (10 ** 9)", (TIMEOUT, KILLED, OOM, ERROR), 0.2))
row("SIGSTOP to itself ends in a kill",
    ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", KILLED, 0.2))
row("A trace function that makes everything slow does not outlive the interrupt",
    ("import sys\nsys.settrace(lambda *a: [0 for _ in range(10**9)])\n(lambda: 1)()",
     (TIMEOUT, KILLED), 0.2))
row("A __repr__ that never returns is interrupted",
    ("class E:\n def __repr__(self):\n  while True: pass\nE()", TIMEOUT, 0.2), GOES_ON)
row("An exception whose __str__ never returns is interrupted",
    ("class E(Exception):\n def __str__(self):\n  while True: pass\nraise E", TIMEOUT, 0.2),
    GOES_ON)
row("An alarm set for after the step ends that session and nothing else",
    ("import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)",),
    ("import time; time.sleep(0.2)", (SIGNAL, OK)))
row("Endless output is cut and the session killed", ("while True: print('x' * 1000)", (TOO_MUCH,
    lambda result: result.truncated and len(result.stdout) <= (LIMITS.output_kib << 10) + 100)))
row("Endless output to stderr is cut and the session killed",
    ("import sys\nwhile True: sys.stderr.write('x' * 1000)", TOO_MUCH))
row("Endless output of a child process is cut and the session killed",
    ("import os; os.system('yes')", TOO_MUCH))
row("One megabyte is ok: first and last part are kept, the total is exact",
    ("print('a' + 'x' * 999_998 + 'b')", lambda result: (result.stdout_bytes, result.truncated,
     result.stdout[:2], result.stdout[-3:]) == (1_000_001, True, "ax", "xb\n")))
row("200 kB, more than a pipe holds, do not block",
    ("print('x' * 200_000)", lambda result: result.stdout_bytes == 200_001))
row("Bytes that are no text arrive with replacement characters",
    ("import sys; n = sys.stdout.buffer.write(bytes(range(256)))",
     lambda result: (result.stdout_bytes, result.stdout[:3]) == (256, "\0\1\2")))
row("A lone surrogate shows as Python's own error",
    (r"print('\ud800')", (ERROR, error("UnicodeEncodeError"))))
row("Code that is no valid text is an error of the code", ("x = '\ud800'", (OK, ERROR)), GOES_ON)
row("A NUL in the code is an error of the code", ("x = 1\0", ERROR))
row("A session that throws its stdout away goes on",
    ("import sys; sys.stdout = sys.stderr = None",), GOES_ON)
row("A session that closes its stdout goes on", ("import sys; sys.stdout.close()",), GOES_ON)
row("/dev/stdout and /dev/stderr can be opened",
    ("import os; os.system('echo a > /dev/stdout; echo b | tee /dev/stderr')",
     (out("a\nb\n"), lambda result: result.stderr == "b\n")), needs=a_proc)
row("Output of a thread after the end of its step is background, not the next step's", ("""
    import signal, threading
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    def late(): signal.sigwait([signal.SIGUSR1]); print('late')
    threading.Thread(target=late).start()""",), signalled,
    ("print('mine')", (out("mine\n"), lambda result: result.background == "late\n")))
row("Escape sequences, carriage returns and NULs arrive as written",
    (r"print('\x1b[31mred\x1b[0m\rover\0\b', end='')", out("\x1b[31mred\x1b[0m\rover\0\b")))
row("A growing list ends that session or raises MemoryError",
    ("x = []\nwhile True: x.append(bytearray(1 << 20))",
     (OOM, ERROR, lambda result: result.error is None or result.error.name == "MemoryError")))
row("A 2 GB bytearray ends that session or raises MemoryError",
    ("x = bytearray(2 << 30); x[::4096] = b'1' * len(x[::4096])", (OOM, ERROR)))
row("Many small children together meet the memory limit, and the host is told", ("""
    import os
    filled, write = os.pipe(); hold, end = os.pipe()
    for _ in range(12):
     if os.fork() == 0:
      os.close(end); x = bytearray(40 << 20); x[::4096] = b'1' * len(x[::4096])
      os.close(write); os.read(hold, 1); os._exit(0)
    os.close(write); os.read(filled, 1); os.close(end)  # each is full or dead by now
    """, (OK, OOM, told)))
row("Files in /dev/shm, /tmp and home are bounded",
    *((FILL.format(directory), at_most(mib << 20)) for directory, mib in
      (("/dev/shm", LIMITS.shm_mib), ("/tmp", LIMITS.tmp_mib), (".", LIMITS.home_mib))))
row("The number of files is bounded", ("""
    n = 0
    try:
     for n in range(10_000): open(f'/tmp/{n}', 'w').close()
    except OSError as e: pass
    n""", at_most(LIMITS.inodes)))
row("A sparse file of many gigabytes cannot be made",
    ("f = open('f', 'wb'); f.truncate(100 << 30)", (ERROR, lambda r: r.error is not None)))
row("A fork bomb meets the limit of processes or memory; at the latest its deadline ends it",
    ("import os\nwhile True:\n try: os.fork()\n except OSError: pass",
     (TIMEOUT, KILLED, OOM), 0.5), alone=True)
row("The shell's fork bomb does not outlive its session",
    ("import os; os.system(': () { : | : & }; : 2> /dev/null')", None, 0.5), alone=True)
row("Threads are bounded like processes, and the session goes on", ("""
    import threading
    lock = threading.Lock(); lock.acquire(); n = 0
    try:
     while True: threading.Thread(target=lock.acquire, daemon=True).start(); n += 1
    except RuntimeError: pass
    n""", at_most(LIMITS.processes)))
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
    many""", at_most(4)))
row("Descriptors are bounded, and the session goes on",
    ("x = []\ntry:\n while True: x.append(open('/dev/null'))\nexcept OSError: pass\nlen(x)",
     at_most(LIMITS.open_files)), ("x.clear()",), GOES_ON)
row("Unbounded recursion is an error of the code", ("def f(): f()\nf()", ERROR), GOES_ON)
row("A stack overflow kills only the interpreter that has it",
    ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
     (SIGNAL, OOM, ERROR, TIMEOUT, KILLED), 2.0))
row("Code nested too deep for the parser is an error of the code", ("(" * 100_000, (ERROR, SIGNAL)))
row("Code over the size limit is refused as the code's error",
    ("#" * ((LIMITS.code_kib << 10) + 1), (ERROR, error("CodeTooLong"))), GOES_ON)
row("The text of a huge value is clipped",
    ("'x' * 10_000_000", lambda result: 0 < len(result.value or "") <= LIMITS.value_kib << 10))
row("The text of a huge exception is clipped and the session goes on",
    ("raise ValueError('x' * 10**7)", (ERROR, lambda result: result.error is not None and
     len(result.error.value) + len(result.error.traceback) < 20_000)), GOES_ON)
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
            still_works(other)
    finally:
        for session in busy:
            session.close()
