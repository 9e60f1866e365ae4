"""Attacks on host functions: other names, other data, at other times."""

from functools import cache
from typing import Any

from agentgrpo.sandbox.selftest import (
    ALIVE,
    ERROR,
    OK,
    TIMEOUT,
    expect,
    require_proc,
    run_steps,
    table,
)
from agentgrpo.sandbox.session.host_tools import HostBudget, HostTools
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepResult
from tests.sandbox.attacks.checks import on_pool
from tests.sandbox.attacks.on_protocol import BROKEN, FORGE

reached: list[Any] = []
"""What functions have been called with that nobody may call, or may not call so."""


def echo(value: Any) -> Any:
    """The value."""
    return value


def counted(number: int) -> int:
    """A number; the one function that is offered beside echo."""
    if type(number) is not int:
        reached.append(number)
    return number


def unlisted(*values: Any) -> None:
    """Never offered."""
    reached.append(values)


@cache
def tools() -> HostTools:
    """Made when a row asks: they need pydantic, and `sandbox doctor` nothing."""
    budget = HostBudget(calls_per_step=20, argument_kib=8)
    return HostTools([echo, counted], budget=budget, cached="no")


def offered(session: Session) -> bool:
    """A step of a row: the session has the functions."""
    return session.attach_host_tools(tools().begin()).status is OK


def safe(_: object = None) -> bool:
    """Nothing was called that may not be."""
    return not reached


def few(result: StepResult) -> bool:
    """The budget of calls of a step holds."""
    return len(result.host_calls) <= 20


CALL = FORGE + (
    "import json\n"
    "def told(name, data, number=3): return frame(number, b'call', name, data)\n"
    "def ask(name, data='[[],{}]'):\n"
    " os.write(4, told(name.encode('utf-8', 'surrogatepass'),\n"
    "  data if isinstance(data, bytes) else data.encode('utf-8', 'surrogatepass')))\n"
    " time.sleep(9)"
)
NAMES = (
    "unlisted", "ECHO", "echo ", "echo.__globals__", "__import__", "eval", "os.system", "", "\0",
    "echo\0", "__class__", "by_name", "agentgrpo.sandbox.hostile.host:unlisted", "x" * 9000,
    "\udc80",
)  # fmt: skip
DATA = (
    "", "null", "[]", "[[]]", "[{},[]]", "[[],{},[]]", "[[1],{}]x", "[[NaN],{}]", "[[Infinity],{}]",
    "[[1e999],{}]", "[[" + "9" * 5000 + "],{}]", "[" * 5000, b"\xff", b"\x80\x04N.",
    '[["' + "x" * 9000 + '"],{}]', '[["object",0],{}]\0', '["call","__import__"]',
)  # fmt: skip


@on_pool
def other_names(pool: SandboxPool) -> None:
    """A forged call of another name reaches no host function and ends the session."""
    for name in NAMES:
        with pool.acquire() as session:
            run_steps(session, offered, (CALL,), (f"ask({name!r})", BROKEN), safe)


@on_pool
def other_data(pool: SandboxPool) -> None:
    """A forged call whose arguments are not JSON is not made and ends the session."""
    for data in DATA:
        with pool.acquire() as session:
            run_steps(session, offered, (CALL,), (f"ask('counted', {data!r})", BROKEN), safe)


@on_pool
def other_frames(pool: SandboxPool) -> None:
    """Calls with too few or too many fields, to another step, or two at once end the session."""
    for sent in (
        "frame(3, b'call')", "frame(3, b'call', b'echo')",
        "frame(3, b'call', b'echo', b'[[1],{}]', b'')", "frame(9, b'call', b'echo', b'[[1],{}]')",
        "told(b'echo', b'[[1],{}]') * 2", "told(b'echo', b'[[1],{}]') + b'x'",
        "frame(3, b'Call', b'echo', b'[[1],{}]')", "told(b'echo', b'x' * (1 << 24))",
    ):  # fmt: skip
        with pool.acquire() as session:
            run_steps(
                session, offered, (CALL,), (f"os.write(4, {sent}); time.sleep(9)", BROKEN), safe
            )


@on_pool
def without_tools(pool: SandboxPool) -> None:
    """A session without host functions cannot call any."""
    with pool.acquire() as session:
        run_steps(session, (CALL,), ("'echo' in globals()", "False"))
        forged = "os.write(4, told(b'echo', b'[[1],{}]', 3)); time.sleep(9)"
        expect(session.step(forged), BROKEN)


row = table(__name__)
# fmt: off
row("The closure of a host function gives no access to others", offered, ("""
    import gc, sys
    found = [v for c in echo.__closure__ for v in [c.cell_contents] if hasattr(v, 'call')]
    got = []
    for name in ('unlisted', '__import__'):
     try: got.append(found[0].function(name, '')(1))
     except RuntimeError: pass
    got""", BROKEN), safe)
row("A storm of refused calls ends the session", offered, ("""
    while True:
     try: echo('x' * 8000)
     except RuntimeError: pass""", (BROKEN, few, lambda result: result.host_refused <= 1001)))
row("Threads cannot call after the step", offered, ("""
    import threading, time
    got = []
    def go():
     time.sleep(0.2)
     for n in range(9):
      try: got.append(echo(n))
      except RuntimeError as error: got.append('no')
    thread = threading.Thread(target=go); thread.start()""", (OK, few)),
    ("import time; time.sleep(0.01); 1", "1"), ("thread.join()",), ("len(got)", "9"), ALIVE)
row("Threads can call at the same time, and each gets its own answer", offered, ("""
    import threading
    got, threads = {}, []
    def go(n): got[n] = echo(n)
    for n in range(16):
     threads.append(threading.Thread(target=go, args=(n,)))
     try: threads[-1].start()
     except RuntimeError: break  # whose user's processes are counted together
    [t.join() for t in threads if t.ident]
    got == {n: n for n in range(sum(t.ident is not None for t in threads))}""", "True"), ALIVE)
row("A fork cannot call, and does not disturb a call of its parent", offered, ("""
    import os
    read, write = os.pipe()
    if (p := os.fork()) == 0:
     try: os.write(write, repr(echo('child')).encode())
     except RuntimeError: os.write(write, b'refused')
     os._exit(0)
    os.waitpid(p, 0)
    os.read(read, 99), echo('parent')""", "(b'refused', 'parent')"), ALIVE)
row("A subprocess cannot call", offered,
    ("import subprocess, sys; r = subprocess.run(['ls', '/proc/self/fd'], close_fds=False)",
     lambda result: result.stdout.split() == ["0", "1", "2", "3"]), safe, needs=require_proc)
row("A forged call of an offered function is checked and counted like a call", offered,
    (CALL,), ("os.write(4, told(b'counted', b'[[5],{}]')); os.read(3, 999)",
              (BROKEN, lambda result: [call.answer for call in result.host_calls] == [(b"5",)])),
    safe)
row("A frame queued for the next step ends the session", offered, (CALL,),
    ("os.write(4, told(b'unlisted', b'[[],{}]', 4))",), ("1", BROKEN), safe)
row("An interrupt during a call keeps the state and the channel intact", offered,
    ("import time\nx = 7\nwhile True: echo(x) if x < 9 else 0; x += 1; time.sleep(0)",
     TIMEOUT, 0.2), ("echo(x >= 7)", "True"), ALIVE)
row("Replacing the functions of a call gives no access", offered, ("""
    import builtins, json, os
    def bad(*a, **k): raise RuntimeError('replaced')
    for n in ('type', 'len', 'isinstance', 'zip', 'getattr', 'vars'): setattr(builtins, n, bad)
    json.loads = json.dumps = os.getpid = bad
    json.JSONEncoder.encode = bad""",), ("echo('x')", (OK, ERROR)), ALIVE, safe)
# fmt: on
