"""Attack cases: their format, their runner, and the cases of `agentgrpo sandbox selftest`.

Most cases are rows: a name that states the property, then the steps of one session, each with code
and the expected result.
"""

import ast
import os
import platform
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepResult, StepStatus

LIMITS = Limits(
    timeout_s=10.0,
    grace_s=1.0,
    memory_mib=160,
    processes=40,
    home_mib=16,
    tmp_mib=16,
    shm_mib=8,
    inodes=512,
    output_max_mib=4,
)
"""Limits of the sessions under attack: small, so that cases reach them quickly."""
AT_ONCE = 4
"""Cases that run at the same time, each in its own session."""
OK, ERROR, EXIT, OOM = StepStatus.OK, StepStatus.ERROR, StepStatus.EXIT, StepStatus.OOM
TIMEOUT, KILLED, SIGNAL = StepStatus.TIMEOUT, StepStatus.TIMEOUT_KILLED, StepStatus.SIGNAL

Test = Callable[[StepResult], object]
Expected = str | Test | tuple[str | Test, ...] | None


class Skip(Exception):
    """The case does not apply to this machine; the message says why."""


class Step(NamedTuple):
    """One step of a row's session."""

    code: str | Callable[[Session], str]
    expected: Expected = None
    """Statuses: the step must end with one of them (ok if there is none). Texts: the value must be
    one of them. Functions: each must return true for the result. None: any result."""
    timeout_s: float | None = None
    env: dict[str, str] | None = None


ALIVE = Step("__import__('math').factorial(5)", "120")
"""A step that shows that the session still works."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack: a name that states the property, and the attack itself."""

    name: str
    group: str
    attack: Callable[[SandboxPool], None]
    alone: bool
    """Run without other cases at the same time: it tests the whole pool or loads the machine."""


CASES: list[Case] = []
RowStep = tuple[object, ...] | Callable[[Session], object]
"""The fields of a Step, or a check from the host."""


def table(module: str) -> Callable[..., None]:
    """Return the function that registers the rows of a module's group."""

    def row(
        name: str, *steps: RowStep, needs: Callable[[Session], None] | None = None,
        alone: bool = False,
    ) -> None:  # fmt: skip
        """Register a case. needs() raises Skip where the case does not apply."""

        def attack(pool: SandboxPool) -> None:
            with pool.acquire() as session:
                if needs is not None:
                    needs(session)
                run_steps(session, *steps)

        CASES.append(Case(name, module.rpartition(".")[2], attack, alone))

    return row


def run_steps(session: Session, *steps: RowStep) -> None:
    """Run the steps of a row in a session."""
    for step in steps:
        if isinstance(step, tuple):
            _run_step(session, Step(*step))  # type: ignore[arg-type]
        else:
            assert step(session), "the check from the host failed"


def _run_step(session: Session, step: Step) -> None:
    code = step.code(session) if callable(step.code) else step.code
    code = textwrap.dedent(code).strip("\n")
    expected = step.expected if isinstance(step.expected, tuple) else (step.expected,)
    limits = session.limits
    if TIMEOUT in expected and KILLED not in expected:
        # on a busy machine the interrupt may take longer than grace_s
        session.limits = replace(limits, grace_s=30.0)
    result = session.step(code, step.timeout_s, env=step.env)
    session.limits = limits
    if step.expected is not None:
        expect(result, *expected)


def run_cases(
    cases: Sequence[Case], pool: SandboxPool
) -> Iterator[tuple[Case, BaseException | None]]:
    """Run the cases, most in parallel; after each, the pool must still serve a session. Yields each
    case with None, Skip or its exception.
    """

    def error_of(case: Case) -> tuple[Case, BaseException | None]:
        try:
            case.attack(pool)
            with pool.acquire() as session:
                assert session.step("6 * 7").value == "42", "the pool is not usable afterwards"
        except Exception as error:
            return case, error
        return case, None

    with ThreadPoolExecutor(AT_ONCE) as workers:
        yield from workers.map(error_of, [case for case in cases if not case.alone])
    yield from map(error_of, [case for case in cases if case.alone])


def expect(result: StepResult, *expected: str | Test) -> StepResult:
    """Assert that a result is as expected (Step.expected), and return it."""
    statuses = [status for status in expected if isinstance(status, StepStatus)] or [OK]
    values = [v for v in expected if isinstance(v, str) and not isinstance(v, StepStatus)]
    assert result.status in statuses, f"expected {' or '.join(statuses)}, got {result}"
    assert not values or result.value in values, f"expected {' or '.join(values)}, got {result}"
    if result.status is not EXIT:  # sys.exit() keeps the session, os._exit() ends it
        lost = result.status not in (OK, ERROR, TIMEOUT)
        assert result.state_lost == lost, f"expected state_lost={lost}, got {result}"
    for test in expected:
        assert isinstance(test, str) or test(result), f"the check of the result failed: {result}"
    return result


def value_of(session: Session, code: str) -> str:
    """Run code that must succeed, and return the value of its last expression."""
    result = expect(session.step(code), OK)
    assert result.value is not None, f"no value: {result}"
    return result.value


def require_proc(session: Session) -> None:
    """Skip the case where sessions have no /proc (see spawner.NO_PROC)."""
    if value_of(session, "import os; os.path.exists('/proc/self')") == "False":
        raise Skip("sessions have no /proc on this machine")


def at_most(limit: int) -> Test:
    """A check that the value, if any, is a number of at most limit."""
    return lambda result: int(result.value or 0) <= limit


def refused(attempts: Sequence[str], before: str = "", errors: str = "OSError") -> tuple[str, str]:
    """A step in which each of these expressions must raise one of the errors."""
    return (
        f"{before}\ngot = []\nfor attempt in {list(attempts)!r}:\n"
        f" try: got.append((attempt, eval(attempt)))\n except {errors}: pass\ngot",
        "[]",
    )


# --- cases of `agentgrpo sandbox selftest` ---

LIBC = (
    "import ctypes, errno, os\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "def call(n, *a):\n"
    " ctypes.set_errno(0)\n"
    " r = libc.syscall(ctypes.c_long(n), *[ctypes.c_long(x) if isinstance(x, int) else x"
    " for x in a])\n"
    " return r if r >= 0 else errno.errorcode[ctypes.get_errno()]\n"
)


HOST_PATHS = ["/etc/shadow", "/etc/ssh", "/root/.ssh", "/home/user/../../root/.bashrc", "/var/log",
               "/var/run/docker.sock", "/run", "/sys", "/boot", "/proc/sys", "/proc/kallsyms",
               "/proc/cmdline", "/proc/1/root/etc/shadow", os.path.expanduser("~/.netrc"),
               os.path.abspath(__file__ + "/../../../setup.py")]  # fmt: skip


READ_ONLY = ["/usr/x", "/usr/bin/python3", "/etc/passwd", "/etc/x", "/x", "/dev/x", "/proc/x",
             "/sandbox/x", "/sandbox/guest/repl.py", "/sandbox/_C.so", "/home/x"]  # fmt: skip


def denied(calls: str) -> tuple[str, str]:
    """A step in which each of these system calls ("name: number, arguments; ...") must fail."""
    named = {name.strip(): rest for name, rest in (c.split(":", 1) for c in calls.split(";"))}
    code = "".join(f"got[{name!r}] = call({rest.strip()})\n" for name, rest in named.items())
    refusals = ("ENOSYS", "EPERM", "EACCES")
    return f"{LIBC}got = {{}}\n{code}{{k: v for k, v in got.items() if v not in {refusals}}}", "{}"


def require_x86(_: Session) -> None:
    """Skip the case on other machines: it has the system call numbers of x86-64."""
    if platform.machine() != "x86_64":
        raise Skip("the numbers of these system calls are those of x86-64")


def has_no_privileges(result: StepResult) -> bool:
    """Whether /proc/self/status shows no capabilities, no_new_privs, and a seccomp filter."""
    status = ast.literal_eval(result.value or "")
    capabilities = [int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
    return (*capabilities, status["NoNewPrivs"], status["Seccomp"]) == (*[0] * 5, "1\n", "2\n")


row = table(__name__)
# fmt: off
row("Code has no capabilities, cannot gain privileges, and runs under a seccomp filter",
    ("dict(l.split(':\\t') for l in open('/proc/self/status') if ':\\t' in l)", has_no_privileges),
    needs=require_proc)
row("Files of the host are not visible",
    (f"import os; [p for p in {HOST_PATHS!r} if os.path.exists(p)]", "[]"))
row("Only the session's own processes are visible",  # none where there is no /proc
    ("import os; sorted(int(p) for p in os.listdir('/proc') if p.isdigit())", ("[1, 2]", "[]")))
row("No namespace can be made or entered", denied("""
    unshare user: 272, 0x10000000; unshare mount: 272, 0x20000; unshare pid: 272, 0x20000000;
    unshare net: 272, 0x40000000; clone user: 56, 0x10000011, 0, 0, 0, 0;
    clone mount: 56, 0x20011, 0, 0, 0, 0; clone pid: 56, 0x20000011, 0, 0, 0, 0;
    clone net: 56, 0x40000011, 0, 0, 0, 0; clone3: 435, ctypes.create_string_buffer(88), 88;
    setns: 308, 0, 0"""), needs=require_x86)
row("Nothing can be mounted, unmounted or remounted, by old or new system calls", denied("""
    mount: 165, b'tmpfs', b'/tmp', b'tmpfs', 0, 0; remount rw: 165, 0, b'/usr', 0, 0x1020, 0;
    umount: 166, b'/home/user', 2; pivot_root: 155, b'/tmp', b'/tmp'; chroot: 161, b'/tmp';
    open_tree: 428, -100, b'/', 1; move_mount: 429, -100, b'/', -100, b'/tmp', 0;
    fsopen: 430, b'tmpfs', 0; fsmount: 432, 0, 0, 0; fspick: 433, -100, b'/', 0;
    mount_setattr: 442, -100, b'/usr', 0, ctypes.create_string_buffer(32), 32;
    statmount: 457, 0, 0, 0, 0; open_tree_attr: 467, -100, b'/', 1, 0, 0"""), needs=require_x86)
row("No process can be traced or read, and no descriptor taken from it", denied("""
    ptrace attach: 101, 16, 1, 0, 0; ptrace traceme: 101, 0, 0, 0, 0;
    process_vm_readv: 310, 1, 0, 0, 0, 0, 0; process_vm_writev: 311, 1, 0, 0, 0, 0, 0;
    pidfd_getfd: 438, 0, 0, 0; kcmp: 312, 1, 2, 0, 0, 0;
    process_madvise: 440, 0, 0, 0, 0, 0"""), needs=require_x86)
row("No network is reachable: addresses, names, the cloud's metadata service", refused(
    ["socket.create_connection(('1.1.1.1', 80), timeout=1)",
     "socket.create_connection(('169.254.169.254', 80), timeout=1)",
     "socket.create_connection(('10.0.0.1', 22), timeout=1)",
     "socket.create_connection(('2606:4700:4700::1111', 80), timeout=1)",
     "socket.create_connection(('example.com', 80), timeout=1)",
     "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))"],
    "import socket"))
row("Set-user-id programs and set*id calls gain nothing",
    refused(["os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.setresuid(0, 0, 0)",
             "os.seteuid(0)"], "import os, subprocess; me = os.getuid()"),
    ("""
    for cmd in ('su -c id', 'passwd -S root', 'newgrp root'):
     out = subprocess.run(cmd, shell=True, capture_output=True, text=True).stdout
     if 'uid=0' in out: got.append(cmd)
    got, os.getuid() == me, me != 0""", "([], True, True)"))
row("Everything except home, /tmp and /dev/shm is read-only", (f"""
    import os, sys
    got = []
    def chmod(p): os.chmod(p, 0o777); os.stat(p).st_mode & 0o777 == 0o777 or 1 / 0  # seems
    for p in {READ_ONLY!r} + [os.__file__, sys.executable]:
     for go in (lambda: open(p, 'a'), lambda: os.unlink(p), lambda: chmod(p)):
      try: go(); got.append(p)
      except (OSError, ZeroDivisionError): pass
    got""", "[]"))
row("No other directory is writable", ("""
    import os
    got = []
    for top in os.listdir('/'):
     if top == 'proc': continue
     for d, dirs, _ in os.walk('/' + top):
      if d.count('/') > 4: dirs.clear()
      if os.access(d, os.W_OK): got.append(d)
    sorted(got)""", "['/dev/shm', '/home/user', '/tmp']", 60.0))
row("PID 1 cannot be killed or stopped from inside",
    ("import os\nfor n in (9, 15, 19, 2, 11): os.kill(1, n)", OK), ALIVE)
row("A growing list ends that session or raises MemoryError",
    ("x = []\nwhile True: x.append(bytearray(1 << 20))",
     (OOM, ERROR, lambda result: result.error is None or result.error.name == "MemoryError")))
row("The number of files is limited", ("""
    n = 0
    try:
     for n in range(10_000): open(f'/tmp/{n}', 'w').close()
    except OSError as e: pass
    n""", at_most(LIMITS.inodes)))
row("A fork bomb ends at the limit of processes or memory, or at the deadline",
    ("import os\nwhile True:\n try: os.fork()\n except OSError: pass",
     (TIMEOUT, KILLED, OOM, SIGNAL), 0.5), alone=True)
row("Descriptors are limited, and the session still works",
    ("x = []\ntry:\n while True: x.append(open('/dev/null'))\nexcept OSError: pass\nlen(x)",
     at_most(LIMITS.open_files)), ("x.clear()",), ALIVE)
# fmt: on
