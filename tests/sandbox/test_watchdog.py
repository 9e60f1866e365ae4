"""Memory where no control group may be made: all processes of a session count together."""

import errno
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgrpo.sandbox import (
    Limits,
    SandboxPool,
    Session,
    StepStatus,
    cgroup,
    spawner,
    watchdog,
)
from agentgrpo.sandbox.channels import process_tree
from agentgrpo.sandbox.hostile.case import within
from agentgrpo.sandbox.hostile.kernel import HOPS
from agentgrpo.sandbox.watchdog import (
    files_kib,
    private_kib,
    proportional_kib,
    socket_kib,
    unix_kib,
    used_kib,
    watches_kib,
)

pytestmark = pytest.mark.nsjail
MIB = 1 << 20


FILES = (
    "import os, time\nkeep = []\n"
    "for directory, mib in (('/tmp', 60), ('/dev/shm', 15), ('.', 60)):\n"
    " f = open(directory + '/f', 'wb'); keep.append(f); os.unlink(f.name)\n"
    " for _ in range(mib): f.write(bytes(1 << 20))\n"
    "time.sleep(60)"
)


@pytest.fixture(scope="module")
def groupless() -> Iterator[SandboxPool]:
    def refuse(*_: object) -> cgroup.Cgroups:
        raise cgroup.CgroupsUnavailable("refused by the test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawner, "Cgroups", refuse)
        pool = SandboxPool(limits=Limits(memory_mib=128, processes=32), min_idle=0, max_live=8)
    with pool:
        yield pool


def spread(children: int, mib: int) -> str:
    """Code that uses memory in several processes, none of which is over the limit by itself."""
    return (
        "import os, time\nread, write = os.pipe()\n"
        f"for _ in range({children}):\n"
        " if os.fork() == 0:\n"
        f"  x = bytearray({mib} << 20); x[::4096] = b'1' * len(x[::4096])\n"
        "  os.write(write, b'.'); time.sleep(60); os._exit(0)\n"
        f"for _ in range({children}): os.read(read, 1)\n"
    )


SHARED = (
    "import os, time\nx = bytearray(40 << 20); x[::4096] = b'1' * len(x[::4096])\n"
    "for _ in range(4):\n if os.fork() == 0:\n  time.sleep(60)"
)
UNIX_SOCKETS = (
    "import os, socket, time\nfor _ in range(4):\n if os.fork() == 0:\n"
    "  more = [socket.socketpair() for _ in range(60)]\n  time.sleep(60)\n"
)
TCP_BUFFERS = (
    "import socket, time\nserver = socket.create_server(('127.0.0.1', 0), backlog=200)\n"
    "keep = []; n = 0\nfor _ in range(120):\n"
    " a = socket.create_connection(server.getsockname()); b, _ = server.accept()\n"
    " a.setblocking(False); keep += [a, b]\n"
    " try:\n  while True: n += a.send(b'x' * 65536)\n"
    " except BlockingIOError: pass\n"
)
NO_MAIN_THREAD = (
    "import ctypes, os, threading, time\n"
    "def hold(): x = bytearray(40 << 20); x[::4096] = b'1' * len(x[::4096]); time.sleep(60)\n"
    "for _ in range(5):\n if os.fork() == 0:\n"
    "  threading.Thread(target=hold).start(); ctypes.CDLL(None).syscall(60, 0)\n"
)
SLOW_REAPER = (
    "import ctypes, os, time\nread, write = os.pipe()\nstop = time.monotonic() + 90\n"
    "if os.fork() == 0:\n"
    " ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER\n"
    " for _ in range(6):\n"
    "  if os.fork() == 0:\n"
    "   x = bytearray(40 << 20); x[::4096] = b'1' * len(x[::4096])\n"
    "   while time.monotonic() < stop:\n"
    "    try:\n     if os.fork() != 0: os._exit(0)\n"
    "    except OSError: time.sleep(0.001)\n"
    "   os._exit(0)\n"
    " while time.monotonic() < stop:\n"
    "  time.sleep(0.002)\n"
    "  try: os.waitpid(-1, os.WNOHANG)\n"
    "  except OSError: pass\n"
    " os._exit(0)\n"
    "os.close(write); os.read(read, 1)"
)
"""Zombies, of which the kernel says that they use nothing, cover up that memory moves."""

WAKER = (
    "import ctypes, os, signal, time\n"
    "class E(ctypes.Structure):\n"
    " _fields_ = [('v', ctypes.c_void_p), ('s', ctypes.c_int), ('n', ctypes.c_int), "
    "('x', ctypes.c_int * 12)]\n"
    "libc = ctypes.CDLL(None)\n"
    "if os.fork() == 0:\n"
    " signal.signal(signal.SIGCONT, lambda *_: os.kill(-1, signal.SIGCONT))\n"
    " e = E(None, int(signal.SIGCONT), 0); t = ctypes.c_void_p()\n"
    " assert libc.timer_create(1, ctypes.byref(e), ctypes.byref(t)) == 0\n"
    " libc.timer_settime(t, 0, (ctypes.c_long * 4)(0, 1_000_000, 0, 1_000_000), None)\n"
    " stop = time.monotonic() + 90\n"
    " while time.monotonic() < stop: time.sleep(0.001)\n"
    " os._exit(0)\n"
)
"""Continues every process of the session a thousand times a second, itself first."""


HOLDERS = HOPS.format(seconds=90, chains=6, mib=40)


@pytest.fixture
def slow_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine."""

    def slowly(pid: int) -> int | None:
        time.sleep(0.005)
        return private_kib(pid)

    monkeypatch.setattr(watchdog, "private_kib", slowly)


@pytest.mark.parametrize(
    "attack",
    [spread(8, 30), UNIX_SOCKETS, TCP_BUFFERS, NO_MAIN_THREAD],
    ids=["many processes", "unix sockets", "TCP buffers", "main threads that have ended"],
)
def test_memory_of_many_processes_counts_together(attack: str, groupless: SandboxPool) -> None:
    assert 4 * 120 * unix_kib() > 128 << 10
    with groupless.acquire() as session, groupless.acquire() as neighbour:
        result = session.step(attack + "time.sleep(30)", 30)
        assert (result.status, result.state_lost) == (StepStatus.OOM, True), result
        assert (result.max_memory_kib or 0) > 128 << 10
        assert "all processes together" in result.detail
        assert session.step("1").status is StepStatus.OOM
        assert neighbour.step("1").value == "1"


@pytest.mark.usefixtures("slow_look")
@pytest.mark.parametrize(
    "attack",
    [HOLDERS, SLOW_REAPER, WAKER + HOLDERS],
    ids=["it moves", "zombies cover it up", "what is stopped is woken"],
)
def test_memory_that_moves_from_process_to_process_is_seen(
    attack: str, groupless: SandboxPool
) -> None:
    with groupless.acquire() as session:
        result = session.step(attack, 120)
        assert result.status is StepStatus.OOM, result


def test_between_steps_too(groupless: SandboxPool) -> None:
    with groupless.acquire() as session:
        session.step("import os\nif os.fork() == 0:\n" + textwrap.indent(spread(8, 30), " "))
        assert within(lambda: not session.healthy())
        assert session.step("1").status is StepStatus.OOM


@pytest.mark.parametrize("code", [spread(3, 12), SHARED], ids=["little", "pages that forks share"])
def test_memory_below_the_limit_is_left_alone(
    code: str, groupless: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with groupless.acquire() as session:
        looks = 0

        def counting(init: int, enough_kib: int) -> int | None:
            nonlocal looks
            looks += init == session.init_pid
            return used_kib(init, enough_kib)

        assert session.step(code, 20).status is StepStatus.OK
        monkeypatch.setattr(watchdog, "used_kib", counting)
        assert within(lambda: looks >= 5)
        assert session.step("6 * 7").value == "42"
        assert 36 << 10 < (used_kib(session.init_pid, 0) or 0) < 100 << 10, "pages count once"


@pytest.mark.usefixtures("slow_look")
def test_memory_that_moves_below_the_limit_is_left_alone(groupless: SandboxPool) -> None:
    with groupless.acquire() as session:
        result = session.step(HOPS.format(seconds=0.5, chains=3, mib=20), 30)
        assert (result.status, result.value) == (StepStatus.OK, "b''")


def test_unix_sockets_count_as_if_they_were_full(groupless: SandboxPool) -> None:
    with groupless.acquire() as session, socket.socket(socket.AF_UNIX):
        assert socket_kib(os.getpid()) == 0, "the sockets of the machine are nobody's"
        code = "import socket; keep = [socket.socketpair() for _ in range(20)]"
        assert session.step(code).status is StepStatus.OK
        assert socket_kib(session.init_pid) == 40 * unix_kib()
    most = Path("/proc/sys/net/core/wmem_max")
    assert not most.exists() or unix_kib() == 2 * int(most.read_text()) >> 10


def test_orphans_and_children_of_threads_are_found(groupless: SandboxPool) -> None:
    code = (
        "import os, threading, time\n"
        "def far():\n if os.fork() == 0:\n  if os.fork() == 0: time.sleep(60)\n"
        "  time.sleep(60)\n time.sleep(60)\n"
        "threading.Thread(target=far, daemon=True).start()\n"
        "if os.fork() == 0:\n if os.fork() == 0: time.sleep(60)\n os._exit(0)\n"
    )
    with groupless.acquire() as session:
        session.step(code)  # init, interpreter, 2, a zombie, an orphan
        assert within(lambda: len(process_tree(session.init_pid)) == 6)


def test_a_measure_counts_only_if_no_process_came_or_went(monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getpid()
    trees = [[me], [me], [me], [me, me]]
    monkeypatch.setattr(watchdog, "process_tree", lambda _: trees.pop(0))
    assert used_kib(me, 1 << 40) is not None
    assert used_kib(me, 1 << 40) is None


def test_what_keeps_from_being_counted_is_ended(
    groupless: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with groupless.acquire() as session:
        with monkeypatch.context() as patch:
            patch.setattr(watchdog, "used_kib", lambda *_: None)
            result = session.step("import time; time.sleep(20)", 30)
        assert (result.status, result.state_lost) == (StepStatus.OOM, True), result
        assert "counted" in result.detail
        assert result.max_memory_kib is None


def test_a_host_without_descriptors_goes_on_watching(
    groupless: SandboxPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def none_left(*_: object) -> list[int]:
        nonlocal looks
        looks += 1
        raise OSError(errno.EMFILE, "Too many open files")

    with groupless.acquire() as session:
        with monkeypatch.context() as patch:
            patch.setattr(watchdog, "process_tree", none_left)
            assert within(lambda: looks >= 3), "it looks no more"
            patch.undo()
            patch.setattr(socket, "socketpair", none_left)
            with pytest.raises(OSError, match="Too many"), session.held():
                pass
        assert "Too many open files" in caplog.text
        assert session.step("1 + 1").value == "2"
        result = session.step(f"{spread(8, 30)}time.sleep(15)", 20)
        assert result.status is StepStatus.OOM, "it still watches"


def states(session: Session) -> set[str]:
    """Of all processes of a session but its init, as ps shows them."""
    pids = process_tree(session.init_pid)[1:]
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def test_nothing_runs_while_a_session_is_held(groupless: SandboxPool) -> None:
    with groupless.acquire() as session:
        session.step("import os\nif os.fork() == 0:\n while True: pass")
        assert "R" in states(session)
        with session.held() as held:
            assert held
            assert within(lambda: states(session) == {"T"})  # once each has had the processor
            time.sleep(0.05)
            assert states(session) == {"T"}
        assert session.step("1 + 1").value == "2"
        assert states(session) <= {"R", "S"}
    with session.held() as held:
        assert not held, "it is over"


def test_proportional_memory_is_what_the_kernel_says() -> None:
    code = (
        "x = bytearray(50 << 20); x[::4096] = b'1' * len(x[::4096]); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 50 << 10 <= (proportional_kib(process.pid) or 0) < 80 << 10
        process.kill()
    assert proportional_kib(process.pid) is None
    assert process_tree(os.getpid())[0] == os.getpid()


def test_watching_ends_with_the_pool(groupless: SandboxPool) -> None:
    assert groupless._watchdog is not None
    assert groupless._watchdog._thread.is_alive()
    assert "watchdog" in groupless.describe()["memory_limit"]


def test_with_control_groups_nothing_is_watched(pool: SandboxPool, session: Session) -> None:
    if pool._spawner.cgroups is None:
        pytest.skip("no control groups here")
    assert pool._watchdog is None
    assert session.step("1").processes_left == 0


def test_files_are_memory_too(groupless: SandboxPool) -> None:
    """Deleted ones that are open as well."""
    with groupless.acquire() as session:
        session.step("open('/tmp/f', 'wb').write(bytes(20 << 20))")
        assert 20 << 10 <= files_kib(session.init_pid) < 21 << 10
        result = session.step(FILES, 30)
        assert (result.status, result.state_lost) == (StepStatus.OOM, True), result


def test_no_directory_is_larger_than_the_memory() -> None:
    assert Limits(memory_mib=50).private_mib == (50, 50, 16)


def test_watches_of_an_epoll_are_memory_too(groupless: SandboxPool) -> None:
    code = (
        "import os, select\neps = [select.epoll() for _ in range(100)]\n"
        "files = [os.eventfd(0) for _ in range(120)]\n"
        "for e in eps:\n for f in files: e.register(f)"
    )
    with groupless.acquire() as session:
        before = used_kib(session.init_pid, 0) or 0
        assert session.step(code).status is StepStatus.OK
        assert watches_kib(session.pid) == 12_000 * 224 >> 10
        assert (used_kib(session.init_pid, 0) or 0) - before >= 12_000 * 224 >> 10


WATCHES = (
    "import ctypes, os, select, threading, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "def fill():\n"
    " global keep\n"
    " keep = [select.epoll() for _ in range(100)], [os.eventfd(0) for _ in range(120)]\n"
    " for e in keep[0]:\n"
    "  for f in keep[1]: e.register(f)\n"
)
THREAD = "threading.Thread(target=lambda: ({0}, fill(), time.sleep(60)), daemon=True).start()\n"
HIDDEN = {
    "by not being dumpable": "libc.prctl(4, 0, 0, 0, 0); fill()",
    "behind a main thread that has ended": (
        f"if os.fork() == 0:\n {THREAD.format('time.sleep(0.5)')} libc.syscall(60, 0)"
    ),
    "in descriptors of a thread's own": THREAD.format("libc.syscall(436, 500, 501, 2)"),
    "in a thread that was made with descriptors of its own": (
        "libc.syscall(56, 0x10000 | 0x800 | 0x100, 0, 0, 0, 0) == -1 and fill()"
    ),
}


@pytest.mark.parametrize("how", HIDDEN)
def test_watches_cannot_be_hidden(groupless: SandboxPool, how: str) -> None:
    with groupless.acquire() as session:
        session.step(WATCHES + HIDDEN[how])

        def counted() -> int:
            return sum(filter(None, map(watches_kib, process_tree(session.init_pid)[1:])))

        assert within(lambda: counted() == 12_000 * 224 >> 10), counted()


def test_zombies_hide_nothing(groupless: SandboxPool) -> None:
    with groupless.acquire() as session:
        code = "import os, time\nif os.fork() == 0: os._exit(0)\ntime.sleep(1)"
        assert session.step(code).status is StepStatus.OK
        assert None not in map(watches_kib, process_tree(session.init_pid)[1:])
        assert session.healthy()


def test_connections_that_nobody_has_accepted_are_memory_too(groupless: SandboxPool) -> None:
    """They need no descriptors: those that made them have closed theirs."""
    code = (
        "import socket\nkeep = []\nfor i in range(100):\n"
        " keep.append(socket.create_server((f'127.0.0.{i + 1}', 0), backlog=4096))\n"
        " for _ in range(4000):\n"
        "  socket.create_connection(keep[-1].getsockname()).close()"
    )
    with groupless.acquire() as session:
        result = session.step(code, 100)
        assert (result.status, result.state_lost) == (StepStatus.OOM, True), result
    with groupless.acquire() as session:  # what is remembered of closed ones is little
        code = (
            "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
            "for _ in range(2000):\n"
            " a = socket.create_connection(server.getsockname()); b, _ = server.accept()\n"
            " a.close(); b.close()"
        )
        assert session.step(code, 30).status is StepStatus.OK
        assert socket_kib(session.init_pid) < 1000
