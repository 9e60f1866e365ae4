"""Attacks on time, output, memory, processes and disk."""

import select

from agentgrpo.sandbox.hostile.case import (
    LIMITS,
    Skip,
    expect,
    needs_proc,
    on_pool,
    on_session,
    still_works,
    value_of,
)
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.result import StepStatus
from agentgrpo.sandbox.session import Session

OK, ERROR, TIMEOUT, KILLED = (
    StepStatus.OK,
    StepStatus.ERROR,
    StepStatus.TIMEOUT,
    StepStatus.TIMEOUT_KILLED,
)
MIB = 1 << 20


@on_session
def endless_loop(s: Session) -> None:
    """An endless loop is interrupted and keeps its state."""
    s.step("x = 1")
    expect(s.step("while True: pass", 0.2), TIMEOUT, lost=False)
    assert value_of(s, "x") == "1"


@on_session
def swallowed_interrupt(s: Session) -> None:
    """A loop that swallows the interrupt is stopped all the same."""
    code = "while True:\n try:\n  for _ in iter(int, 1): pass\n except BaseException: pass"
    expect(s.step(code, 0.2), KILLED, lost=True)


@on_session
def ignored_interrupt(s: Session) -> None:
    """Ignoring SIGINT ends in a kill."""
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    expect(s.step(code, 0.2), KILLED, lost=True)


@on_session
def all_signals_ignored(s: Session) -> None:
    """Ignoring every signal and sleeping ends in a kill."""
    code = (
        "import signal, time\n"
        "for n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(100)"
    )
    expect(s.step(code, 0.2), KILLED, lost=True)


@on_session
def blocked_signals(s: Session) -> None:
    """Blocking every signal ends in a kill."""
    code = (
        "import signal, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "time.sleep(100)"
    )
    expect(s.step(code, 0.2), KILLED, lost=True)


@on_session
def interrupt_handler_left_behind(s: Session) -> None:
    """A SIGINT handler left by one step does not protect the next."""
    s.step("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    expect(s.step("while True: pass", 0.2), TIMEOUT, lost=False)


@on_session
def long_sleep(s: Session) -> None:
    """A sleep is interrupted."""
    expect(s.step("import time; time.sleep(100)", 0.2), TIMEOUT, lost=False)


@on_session
def exponential_regex(s: Session) -> None:
    """An exponential regular expression is interrupted."""
    expect(s.step("import re; re.match(r'(a+)+$', 'a' * 64 + 'b')", 0.2), TIMEOUT, lost=False)
    still_works(s)


@on_session
def huge_power(s: Session) -> None:
    """A huge integer computation ends by interrupt, kill or memory, never later."""
    expect(s.step("10 ** (10 ** 9)", 0.2), TIMEOUT, KILLED, StepStatus.OOM, ERROR)


@on_session
def stops_itself(s: Session) -> None:
    """SIGSTOP to itself ends in a kill."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    expect(s.step(code, 0.2), KILLED, lost=True)


@on_session
def trace_function(s: Session) -> None:
    """A trace function that makes everything slow does not outlive the interrupt."""
    expect(
        s.step(
            "import sys\nsys.settrace(lambda *a: [0 for _ in range(10**9)])\n(lambda: 1)()", 0.2
        ),
        TIMEOUT,
        KILLED,
    )


@on_session
def endless_repr(s: Session) -> None:
    """A __repr__ that never returns is interrupted."""
    code = "class E:\n def __repr__(self):\n  while True: pass\nE()"
    expect(s.step(code, 0.2), TIMEOUT, lost=False)
    still_works(s)


@on_session
def endless_str_of_error(s: Session) -> None:
    """An exception whose __str__ never returns is interrupted."""
    code = "class E(Exception):\n def __str__(self):\n  while True: pass\nraise E"
    expect(s.step(code, 0.2), TIMEOUT, lost=False)
    still_works(s)


@on_session
def alarm_between_steps(s: Session) -> None:
    """An alarm set for after the step ends that session and nothing else."""
    s.step("import signal; signal.setitimer(signal.ITIMER_REAL, 0.01)")
    expect(s.step("import time; time.sleep(0.2)"), StepStatus.SIGNAL, OK)


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


@on_session
def endless_output(s: Session) -> None:
    """Endless output is cut and the session killed."""
    result = expect(s.step("while True: print('x' * 1000)"), StepStatus.OUTPUT_LIMIT, lost=True)
    assert result.truncated
    assert len(result.stdout) <= (LIMITS.output_kib << 10) + 100


@on_session
def endless_errors(s: Session) -> None:
    """Endless output to stderr is cut and the session killed."""
    code = "import sys\nwhile True: sys.stderr.write('x' * 1000)"
    expect(s.step(code), StepStatus.OUTPUT_LIMIT, lost=True)


@on_session
def endless_output_of_child(s: Session) -> None:
    """Endless output of a child process is cut and the session killed."""
    expect(s.step("import os; os.system('yes')"), StepStatus.OUTPUT_LIMIT, lost=True)


@on_session
def long_output(s: Session) -> None:
    """One megabyte is ok: first and last part are kept, the total is exact."""
    result = expect(s.step("print('a' + 'x' * 999_998 + 'b')"), OK)
    assert (result.stdout_bytes, result.truncated) == (1_000_001, True)
    assert result.stdout.startswith("ax")
    assert result.stdout.endswith("xb\n")


@on_session
def output_over_a_pipe_buffer(s: Session) -> None:
    """200 kB, more than a pipe holds, do not block."""
    assert expect(s.step("print('x' * 200_000)"), OK).stdout_bytes == 200_001


@on_session
def binary_output(s: Session) -> None:
    """Bytes that are no text arrive with replacement characters."""
    result = expect(s.step("import sys; n = sys.stdout.buffer.write(bytes(range(256)))"), OK)
    assert result.stdout_bytes == 256
    assert result.stdout.startswith("\0\1\2")


@on_session
def lone_surrogate(s: Session) -> None:
    """A lone surrogate shows as Python's own error."""
    error = expect(s.step(r"print('\ud800')"), ERROR).error
    assert error is not None
    assert error.name == "UnicodeEncodeError"


@on_session
def surrogate_in_code(s: Session) -> None:
    """Code that is no valid text is an error of the code."""
    expect(s.step("x = '\ud800'"), OK, ERROR)
    still_works(s)


@on_session
def null_in_code(s: Session) -> None:
    """A NUL in the code is an error of the code."""
    expect(s.step("x = 1\0"), ERROR, lost=False)


@on_session
def no_stdout(s: Session) -> None:
    """A session that throws its stdout away goes on."""
    s.step("import sys; sys.stdout = sys.stderr = None")
    still_works(s)


@on_session
def closed_stdout(s: Session) -> None:
    """A session that closes its stdout goes on."""
    s.step("import sys; sys.stdout.close()")
    still_works(s)


@on_session
def device_files_of_streams(s: Session) -> None:
    """/dev/stdout and /dev/stderr can be opened."""
    needs_proc(s)
    result = s.step("import os; os.system('echo a > /dev/stdout; echo b | tee /dev/stderr')")
    assert (result.stdout, result.stderr) == ("a\nb\n", "b\n"), result


@on_session
def late_output(s: Session) -> None:
    """Output of a thread after the end of its step is background, not the next step's."""
    s.step(
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"
    )
    channels = s.channels
    assert channels is not None
    select.select([channels.out], [], [], 10.0)
    result = expect(s.step("print('mine')"), OK)
    assert (result.stdout, result.background) == ("mine\n", "late\n"), result


@on_session
def control_characters(s: Session) -> None:
    """Escape sequences, carriage returns and NULs arrive as written."""
    text = "\x1b[31mred\x1b[0m\rover\0\b"
    assert s.step(f"print({text!r}, end='')").stdout == text


@on_session
def list_bomb(s: Session) -> None:
    """A growing list ends that session or raises MemoryError."""
    result = expect(
        s.step("x = []\nwhile True: x.append(bytearray(1 << 20))"), StepStatus.OOM, ERROR
    )
    assert result.error is None or result.error.name == "MemoryError"


@on_session
def one_huge_object(s: Session) -> None:
    """A 2 GB bytearray ends that session or raises MemoryError."""
    expect(
        s.step("x = bytearray(2 << 30); x[::4096] = b'1' * len(x[::4096])"), StepStatus.OOM, ERROR
    )


@on_session
def children_bomb(s: Session) -> None:
    """Many small children together meet the memory limit, and the host is told."""
    code = (
        "import os\nfilled, write = os.pipe(); hold, end = os.pipe()\n"
        "for _ in range(12):\n"
        " if os.fork() == 0:\n"
        "  os.close(end); x = bytearray(40 << 20); x[::4096] = b'1' * len(x[::4096])\n"
        "  os.close(write); os.read(hold, 1); os._exit(0)\n"
        "os.close(write); os.read(filled, 1); os.close(end)  # each is full or dead by now"
    )
    result = expect(s.step(code), OK, StepStatus.OOM)
    if result.processes_left is None:
        raise Skip("no control group: memory is limited per process only")
    assert result.oom_kills > 0, result


@on_session
def shared_memory_bomb(s: Session) -> None:
    """Files in /dev/shm, /tmp and home are bounded."""
    for directory, limit in (("/dev/shm", LIMITS.shm_mib), ("/tmp", LIMITS.tmp_mib), (".", 16)):
        code = (
            f"n = 0\ntry:\n f = open('{directory}/f', 'wb')\n"
            " while True: n += f.write(b'x' * 65536); f.flush()\n"
            "except OSError as e: print(e.errno)\n"
            "try: f.close()\nexcept OSError: pass\n"
            f"import os; os.unlink('{directory}/f'); n"
        )
        assert int(value_of(s, code)) <= limit * MIB


@on_session
def inode_bomb(s: Session) -> None:
    """The number of files is bounded."""
    code = (
        "n = 0\ntry:\n for n in range(10_000): open(f'/tmp/{n}', 'w').close()\n"
        "except OSError as e: pass\nn"
    )
    assert int(value_of(s, code)) <= LIMITS.inodes


@on_session
def sparse_file(s: Session) -> None:
    """A sparse file of many gigabytes cannot be made."""
    result = s.step("f = open('f', 'wb'); f.truncate(100 << 30)")
    assert expect(result, ERROR, StepStatus.SIGNAL).error is not None


@on_session
def fork_bomb(s: Session) -> None:
    """A fork bomb meets the limit of processes or memory; at the latest its deadline ends it."""
    code = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    expect(s.step(code, 0.5), TIMEOUT, KILLED, StepStatus.OOM)


@on_session
def shell_fork_bomb(s: Session) -> None:
    """The shell's fork bomb does not outlive its session."""
    s.step("import os; os.system(': () { : | : & }; : 2> /dev/null')", 0.5)


@on_session
def thread_bomb(s: Session) -> None:
    """Threads are bounded like processes, and the session goes on."""
    code = (
        "import threading\nlock = threading.Lock(); lock.acquire(); n = 0\n"
        "try:\n while True: threading.Thread(target=lock.acquire, daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nn"
    )
    assert int(value_of(s, code)) <= LIMITS.processes


@on_session
def zombies(s: Session) -> None:
    """Orphans are reaped: 200 double forks leave nothing behind."""
    code = (
        "import os\nfor _ in range(200):\n"
        " if (p := os.fork()) == 0:\n"
        "  if os.fork() == 0: os._exit(0)\n"
        "  os._exit(0)\n os.waitpid(p, 0)\n"
        "import time; stop = time.monotonic() + 5; many = 99\n"
        "while many > 4 and time.monotonic() < stop:\n"
        " many = len([p for p in os.listdir('/proc') if p.isdigit()])\n"
        "many"
    )
    assert int(value_of(s, code)) <= 4


@on_session
def descriptor_bomb(s: Session) -> None:
    """Descriptors are bounded, and the session goes on."""
    code = "x = []\ntry:\n while True: x.append(open('/dev/null'))\nexcept OSError: pass\nlen(x)"
    assert int(value_of(s, code)) <= LIMITS.open_files
    s.step("x.clear()")
    still_works(s)


@on_session
def recursion(s: Session) -> None:
    """Unbounded recursion is an error of the code."""
    expect(s.step("def f(): f()\nf()"), ERROR, lost=False)
    still_works(s)


@on_session
def deep_recursion_in_c(s: Session) -> None:
    """A stack overflow kills only the interpreter that has it."""
    code = "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()"
    expect(s.step(code, 2.0), StepStatus.SIGNAL, StepStatus.OOM, ERROR, TIMEOUT, KILLED)


@on_session
def deeply_nested_code(s: Session) -> None:
    """Code nested too deep for the parser is an error of the code."""
    expect(s.step("(" * 100_000), ERROR, StepStatus.SIGNAL)


@on_session
def large_code(s: Session) -> None:
    """Code over the size limit is refused as the code's error."""
    error = expect(s.step("#" * ((LIMITS.code_kib << 10) + 1)), ERROR, lost=False).error
    assert error is not None
    assert error.name == "CodeTooLong"
    still_works(s)


@on_session
def large_value(s: Session) -> None:
    """The text of a huge value is clipped."""
    assert len(value_of(s, "'x' * 10_000_000")) <= LIMITS.value_kib << 10


@on_session
def large_error(s: Session) -> None:
    """The text of a huge exception is clipped and the session goes on."""
    error = expect(s.step("raise ValueError('x' * 10**7)"), ERROR, lost=False).error
    assert error is not None
    assert len(error.value) + len(error.traceback) < 20_000
    still_works(s)


@on_session
def raised_limits(s: Session) -> None:
    """Resource limits cannot be raised."""
    code = (
        "import resource as r\ngot = []\n"
        "for k in (r.RLIMIT_NOFILE, r.RLIMIT_NPROC, r.RLIMIT_FSIZE, r.RLIMIT_CPU):\n"
        " soft, hard = r.getrlimit(k)\n"
        " try: r.setrlimit(k, (hard + 1, hard + 1)); got.append(k)\n"
        " except (ValueError, OSError): pass\ngot"
    )
    assert value_of(s, code) == "[]"


@on_session
def nicer_to_itself(s: Session) -> None:
    """The priority cannot be raised."""
    expect(s.step("import os; os.nice(-10)"), ERROR)
