"""Attacks on the time and the output of a step: endless, too much, or not what it seems."""

import select
import signal

from agentgrpo.sandbox.selftest import (
    ALIVE,
    ERROR,
    KILLED,
    LIMITS,
    OK,
    OOM,
    SIGNAL,
    TIMEOUT,
    Test,
    require_proc,
    table,
)
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepStatus

TOO_MUCH = StepStatus.OUTPUT_LIMIT


def error(name: str) -> Test:
    """The code raised that."""
    return lambda result: result.error is not None and result.error.name == name


def out(text: str) -> Test:
    """Standard output is that."""
    return lambda result: result.stdout == text


def signalled(session: Session) -> object:
    """Send the signal that the session waits for, between two steps, and wait for its output."""
    channels = session.channels
    assert channels is not None
    signal.pidfd_send_signal(channels.interpreter, signal.SIGUSR1)
    return select.select([channels.out], [], [], 10.0)[0]


row = table(__name__)
# fmt: off
row("An endless loop is interrupted and keeps its state",
    ("x = 1",), ("while True: pass", TIMEOUT, 0.2), ("x", "1"))
row("A loop that swallows the interrupt is stopped",
    ("while True:\n try:\n  for _ in iter(int, 1): pass\n except BaseException: pass", KILLED, 0.2))
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
    ("import re; re.match(r'(a+)+$', 'a' * 64 + 'b')", TIMEOUT, 0.2), ALIVE)
row("A huge integer computation ends by interrupt, kill or memory, never later",
    ("10 ** (10 ** 9)", (TIMEOUT, KILLED, OOM, ERROR), 0.2))
row("A slow trace function ends with the interrupt",
    ("import sys\nsys.settrace(lambda *a: [0 for _ in range(10**9)])\n(lambda: 1)()",
     (TIMEOUT, KILLED), 0.2))
row("A __repr__ that never returns is interrupted",
    ("class E:\n def __repr__(self):\n  while True: pass\nE()", TIMEOUT, 0.2), ALIVE)
row("An exception whose __str__ never returns is interrupted",
    ("class E(Exception):\n def __str__(self):\n  while True: pass\nraise E", TIMEOUT, 0.2),
    ALIVE)
row("An alarm after the step ends only that session",
    ("import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)",),
    ("import time; time.sleep(0.2)", (SIGNAL, OK)))
row("Endless output is cut and the session killed", ("while True: print('x' * 1000)", (TOO_MUCH,
    lambda result: result.truncated and len(result.stdout) <= (LIMITS.output_kib << 10) + 100)))
row("Endless output of a child process is cut and the session killed",
    ("import os; os.system('yes')", TOO_MUCH))
row("One megabyte is ok: first and last part are kept, the total is exact",
    ("print('a' + 'x' * 999_998 + 'b')", lambda result: (result.stdout_bytes, result.truncated,
     result.stdout[:2], result.stdout[-3:]) == (1_000_001, True, "ax", "xb\n")))
row("Undecodable bytes arrive as replacement characters",
    ("import sys; n = sys.stdout.buffer.write(bytes(range(256)))",
     lambda result: (result.stdout_bytes, result.stdout[:3]) == (256, "\0\1\2")))
row("A lone surrogate raises Python's own error",
    (r"print('\ud800')", (ERROR, error("UnicodeEncodeError"))))
row("Code with a lone surrogate is an error of the code", ("x = '\ud800'", (OK, ERROR)), ALIVE)
row("A NUL in the code is an error of the code", ("x = 1\0", ERROR))
row("A session that closes its stdout still works", ("import sys; sys.stdout.close()",), ALIVE)
row("/dev/stdout and /dev/stderr can be opened",
    ("import os; os.system('echo a > /dev/stdout; echo b | tee /dev/stderr')",
     (out("a\nb\n"), lambda result: result.stderr == "b\n")), needs=require_proc)
row("Output of a thread after the end of its step is background, not the next step's", ("""
    import signal, threading
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    def late(): signal.sigwait([signal.SIGUSR1]); print('late')
    threading.Thread(target=late).start()""",), signalled,
    ("print('mine')", (out("mine\n"), lambda result: result.background == "late\n")))
row("Escape sequences, carriage returns and NULs arrive as written",
    (r"print('\x1b[31mred\x1b[0m\rover\0\b', end='')", out("\x1b[31mred\x1b[0m\rover\0\b")))
row("Unbounded recursion is an error of the code", ("def f(): f()\nf()", ERROR), ALIVE)
row("Code nested too deep for the parser is an error of the code", ("(" * 100_000, (ERROR, SIGNAL)))
row("Code over the size limit is an error of the code",
    ("#" * ((LIMITS.code_kib << 10) + 1), (ERROR, error("CodeTooLong"))), ALIVE)
row("The text of a huge value is clipped",
    ("'x' * 10_000_000", lambda result: 0 < len(result.value or "") <= LIMITS.value_kib << 10))
row("The text of a huge exception is clipped, and the session still works",
    ("raise ValueError('x' * 10**7)", (ERROR, lambda result: result.error is not None and
     len(result.error.value) + len(result.error.traceback) < 20_000)), ALIVE)
# fmt: on
