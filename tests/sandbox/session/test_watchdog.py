"""The watchdog: without control groups, all processes of a session count together."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgrpo._C import sandbox_tree_kib
from agentgrpo.sandbox import Limits, SandboxPool, Session, StepStatus
from agentgrpo.sandbox.isolation.channels import process_tree
from agentgrpo.sandbox.session import watchdog
from agentgrpo.sandbox.session.watchdog import SOCKET_KIB, files_kib, sockets_kib, used_kib
from tests.isolation import refuse_control_groups, within
from tests.sandbox.attacks.kernel import HOPS

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
    with pytest.MonkeyPatch.context() as patch:
        refuse_control_groups(patch)
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
COMING = (
    "import os, subprocess, time\nx = b'1' * (64 << 20); stop = time.monotonic() + 2\n"
    "def come():\n"
    " if (pid := os.fork()) == 0: y = b'1' * (1 << 20); os._exit(0)\n"
    " return pid\n"
    "came = [come() for _ in range(4)]\n"
    "while time.monotonic() < stop: os.waitpid(came.pop(0), 0); came.append(come())\n"
    "while time.monotonic() < stop + 2: subprocess.run(['/bin/true'])\n"
)
UNIX_SOCKETS = (
    "import os, socket, time\nfor _ in range(4):\n if os.fork() == 0:\n"
    "  more = [socket.socketpair() for _ in range(60)]\n  time.sleep(60)\n"
)
TCP_BUFFERS = (
    "import os, socket, time\nserver = socket.create_server(('127.0.0.1', 0), backlog=200)\n"
    "keep = [os.fork()]; n = 0\nfor _ in range(110):\n"
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
HOLDERS = HOPS.format(seconds=20, chains=6, mib=40)


@pytest.mark.parametrize(
    "attack",
    [spread(8, 30), UNIX_SOCKETS, TCP_BUFFERS, NO_MAIN_THREAD],
    ids=["many processes", "unix sockets", "TCP buffers", "ended main threads"],
)
def test_memory_of_many_processes_counts_together(attack: str, groupless: SandboxPool) -> None:
    with groupless.acquire() as session, groupless.acquire() as neighbour:
        result = session.step(attack + "\ntime.sleep(30)", 90)
        assert (result.status, result.state_lost) == (StepStatus.OOM, True), result
        assert "all processes together" in result.detail
        assert session.step("1").status is StepStatus.OOM
        assert neighbour.step("1").value == "1"


def test_moving_memory_is_counted_while_the_trainer_computes(groupless: SandboxPool) -> None:
    """Each read of a file in Python would wait for the lock that the other thread holds."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        with groupless.acquire() as session:
            assert session.step(HOLDERS, 60).status is StepStatus.OOM
    finally:
        done.set()
        thread.join()


def test_memory_is_checked_between_steps(groupless: SandboxPool) -> None:
    with groupless.acquire() as session:
        session.step("import os\nif os.fork() == 0:\n" + textwrap.indent(spread(8, 30), " "))
        assert within(lambda: not session.healthy())
        assert session.step("1").status is StepStatus.OOM


@pytest.mark.parametrize(
    "code",
    [spread(3, 12), SHARED, COMING],
    ids=["little", "pages that forks share", "forks_and_ends"],
)
def test_a_session_below_the_limit_is_not_killed(
    code: str, groupless: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with groupless.acquire() as session:
        looks = 0

        def counting(one: Session, enough_kib: int) -> int:
            nonlocal looks
            looks += one is session
            return used_kib(one, enough_kib)

        assert session.step(code, 20).status is StepStatus.OK
        monkeypatch.setattr(watchdog, "used_kib", counting)
        assert within(lambda: looks >= 5)
        assert session.step("6 * 7").value == "42"
        assert 36 << 10 < used_kib(session, 0) < 128 << 10, "pages count once"


def test_processes_are_stopped_before_the_final_count(
    groupless: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come and go could count twice."""
    looks: list[bool] = []

    def is_stopped(session: Session) -> bool:
        stats = [Path(f"/proc/{p}/stat").read_text() for p in process_tree(session.init_pid)]
        return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}

    def over_unless_stopped(session: Session, _: int) -> int:
        looks.append(len(looks) % 2 == 1 and within(lambda: is_stopped(session)))
        return 0 if looks[-1] else 1 << 30

    with groupless.acquire() as session:
        session.step("import subprocess; child = subprocess.Popen(['sleep', '60'])")
        monkeypatch.setattr(watchdog, "used_kib", over_unless_stopped)
        assert within(lambda: looks.count(True) >= 3)
        assert session.step("child.poll() is None").value == "True"


def test_sockets_count_as_if_they_were_full(groupless: SandboxPool) -> None:
    """More than what one holds."""
    held = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0)); a = socket.socket()\n"
        "a.connect(server.getsockname()); b, _ = server.accept(); a.settimeout(1); n = 0\n"
        "try:\n while True: n += a.send(b'x' * 65536)\n"
        "except TimeoutError: pass\n"
        "c, d = socket.socketpair(); c.setblocking(False); m = 0\n"
        "try:\n while True: m += c.send(b'x' * 4096)\n"
        "except BlockingIOError: pass\n"
        "max(n, m) >> 10"
    )
    with groupless.acquire() as session:
        before = sockets_kib(session.pid)
        assert 200 < int(session.step(held, 20).value or 0) < SOCKET_KIB
        assert sockets_kib(session.pid) - before == 5 * SOCKET_KIB


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


def test_a_session_that_cannot_be_counted_is_killed(
    groupless: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    with groupless.acquire() as session:
        with monkeypatch.context() as patch:
            patch.setattr(watchdog, "files_kib", refuse)
            result = session.step("import time; time.sleep(20)", 30)
        assert (result.status, result.state_lost) == (StepStatus.OOM, True), result
        assert "counted" in result.detail


def test_without_free_memory_the_largest_session_is_killed(
    groupless: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with groupless.acquire() as small, groupless.acquire() as large:
        large.step("x = b'x' * (20 << 20)")
        with monkeypatch.context() as patch:
            patch.setattr(watchdog, "available", lambda: 0.01 if large.healthy() else 0.5)
            assert within(lambda: not large.healthy())
        result = large.step("1")
        assert (result.status, "no memory left" in result.detail) == (StepStatus.OOM, True)
        assert small.step("1").value == "1"
    assert 0 < watchdog.available() < 1
    monkeypatch.setattr(watchdog, "memory_bounds", lambda: [(1000, 990)])
    assert watchdog.available() == 0.01


def test_watching_continues_without_free_descriptors(
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
        assert "Too many open files" in caplog.text
        assert session.step("1 + 1").value == "2"
        result = session.step(f"{spread(8, 30)}time.sleep(15)", 20)
        assert result.status is StepStatus.OOM, "it still watches"


def test_available_memory_is_read_from_the_kernel() -> None:
    code = (
        "x = bytearray(50 << 20); x[::4096] = b'1' * len(x[::4096]); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for enough in (0, 1 << 30):
            assert 50 << 10 <= sandbox_tree_kib(process.pid, 1, enough) < 80 << 10
        process.kill()
    assert sandbox_tree_kib(process.pid, 1, 0) == 0
    assert process_tree(os.getpid())[0] == os.getpid()


def test_no_watchdog_with_control_groups(pool: SandboxPool, session: Session) -> None:
    if pool._spawner.cgroups is None:
        pytest.skip("no control groups here")
    assert pool._watchdog is None
    assert session.step("1").processes_left == 0


def test_files_count_as_memory(groupless: SandboxPool) -> None:
    """Deleted ones that are open as well."""
    with groupless.acquire() as session:
        session.step("open('/tmp/f', 'wb').write(bytes(20 << 20))")
        assert 20 << 10 <= files_kib(session.pid) < 21 << 10
        result = session.step(FILES, 30)
        assert (result.status, result.state_lost) == (StepStatus.OOM, True), result


def test_no_directory_is_larger_than_the_memory() -> None:
    assert Limits(memory_mib=50).private_mib == (50, 50, 16)


def test_unaccepted_connections_count_as_memory(groupless: SandboxPool) -> None:
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
        assert sockets_kib(session.pid) < 10 * SOCKET_KIB


def test_niceness_holds_after_setsid(groupless: SandboxPool) -> None:
    code = "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(60)"
    with groupless.acquire() as session:
        session.step(code)
        pids = process_tree(session.init_pid)[1:]
        groups = [Path(f"/proc/{pid}/autogroup") for pid in pids]
        if not groups[0].exists():
            pytest.skip("no autogroups in this kernel")
        assert within(lambda: all(group.read_text().endswith(" nice 5\n") for group in groups))
