"""Sessions without namespaces: only on request, flagged in every result, and still bounded."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgrpo import _C
from agentgrpo.sandbox import (
    CommandResult,
    FileNotFoundException,
    Limits,
    NotSupportedException,
    Sandbox,
    SandboxPool,
    SandboxUnavailable,
    Session,
    StepStatus,
    Template,
)
from agentgrpo.sandbox.grading.grade import check_output, check_tests
from agentgrpo.sandbox.isolation.channels import process_tree
from agentgrpo.sandbox.isolation.jail import FIRST_UID
from agentgrpo.sandbox.isolation.no_namespaces import _is_open, reachable
from agentgrpo.sandbox.isolation.zygote import Rung
from agentgrpo.sandbox.session.listener import listener_in
from tests.isolation import gone, within

pytestmark = [
    pytest.mark.filterwarnings("ignore:sandbox degraded"),
    pytest.mark.skipif(
        os.geteuid() != 0 and _C.sandbox_landlock_version() == 0, reason="no root and no Landlock"
    ),
]


def make_pool(limits: Limits | None = None) -> SandboxPool:
    return SandboxPool(rungs=(), allow_degraded=True, min_idle=0, zygotes=1, limits=limits)


@pytest.fixture(scope="module")
def bare_pool() -> Iterator[SandboxPool]:
    with make_pool(Limits(timeout_s=5.0, grace_s=0.5, memory_mib=128, processes=32)) as made:
        yield made


@pytest.fixture
def bare(bare_pool: SandboxPool) -> Iterator[Session]:
    with bare_pool.acquire() as session:
        yield session


def test_every_result_is_degraded(bare: Session) -> None:
    codes = ("1", "1 / 0", "import sys; sys.exit()", "#" * (2 << 20), "import os; os._exit(0)")
    results = [bare.step(code) for code in (*codes, "1")]
    assert [r.status for r in results] == ["ok", "error", "exit", "error", "exit", "exit"]
    assert all(result.degraded for result in results)


def test_pool_warns_and_describes_the_degradation() -> None:
    with pytest.warns(UserWarning, match="sandbox degraded"):
        pool = make_pool()
    with pool:
        assert pool.describe()["rung"] == "bare"
        assert pool.describe()["degraded"] is True


def test_bare_rung_requires_allow_degraded() -> None:
    with pytest.raises(SandboxUnavailable):
        SandboxPool(rungs=())
    with pytest.raises(ValueError, match="allow_degraded"):
        SandboxPool(rungs=[Rung.BARE])


@pytest.mark.nsjail
def test_a_better_rung_is_preferred(pool: SandboxPool) -> None:
    with SandboxPool(allow_degraded=True, min_idle=0, zygotes=1) as allowed:
        assert allowed.describe()["rung"] == pool.describe()["rung"]
        assert not allowed.run("1").degraded


def test_files_commands_interpreters_and_grading_work(bare_pool: SandboxPool) -> None:
    """As on every rung; but for names that lead out of the one directory that it has."""
    with Sandbox.create(pool=bare_pool) as sandbox:
        sandbox.files.write("d/f", "text")
        seen = "import os; open('d/f').read(), os.environ['HOME'] == os.getcwd()"
        assert sandbox.run_code(seen).text == "('text', True)"
        assert sandbox.files.read("/home/user/d/f") == "text"
        assert [entry.name for entry in sandbox.files.list(depth=2)] == ["d", "f"]
        home = sandbox._session.places.home
        ran = sandbox.commands.run("pwd; echo $HOME $TMPDIR; id -u; cat d/f")
        assert isinstance(ran, CommandResult)
        shown = ran.stdout.split()
        assert shown[:3] == [home] * 3
        assert os.geteuid() != 0 or int(shown[3]) >= FIRST_UID
        assert shown[4] == "text"
        sandbox.run_code("import os; os.symlink('/etc/passwd', 'out'); os.symlink('..', 'up')")
        for name in ("/etc/passwd", "../x", f"{home}/../x", "/home/user/../../etc/passwd"):
            with pytest.raises(NotSupportedException, match="only its home"):
                sandbox.files.read(name)
        for name in ("out", "up/x"):
            with pytest.raises(FileNotFoundException):
                sandbox.files.read(name)
        sandbox.files.remove("d")
        assert not sandbox.files.exists("d")
        assert sandbox.run_code("echo $((6 * 7))", language="bash").logs.stdout == ["42\n"]
        context = sandbox.create_code_context()
        assert sandbox.run_code("6 * 7", context=context).text == "42"
        with pytest.raises(NotSupportedException, match="network"):
            listener_in(sandbox._session)
    assert check_output(bare_pool, "print(input())", "1", stdin="1").passed
    assert check_tests(bare_pool, "def f(x): return x + 1", "assert f(1) == 2").passed
    assert not check_tests(bare_pool, "def f(x): return x", "assert f(1) == 2").passed
    assert bare_pool.metrics()["live"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="others have no home that they may not enter")
def test_an_interpreter_in_a_private_home_works(tmp_path: Path) -> None:
    """As of most containers' root: what sessions need of it lies in a place of its own."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "pack.py").write_text("import json\nx = 42")
    (tmp_path / "site" / "pack.py").chmod(0o600)
    tmp_path.chmod(0o700)
    assert not _is_open(str(tmp_path / "site"))
    template = Template(site_dirs=(str(tmp_path / "site"),))
    options: dict[str, Any] = {"rungs": (), "allow_degraded": True, "min_idle": 0}
    with SandboxPool(template=template, **options) as pool, pool.acquire() as session:
        assert session.step("import pack, decimal, lzma; pack.x").value == "42"
        code = "subprocess.run([sys.executable, '-c', 'import ssl, sqlite3'])"
        assert "returncode=0" in (session.step(f"import subprocess, sys; {code}").value or "")
        refused = session.step(f"open({str(tmp_path / 'site' / 'pack.py')!r})").error
        assert refused is not None
        assert refused.name == "PermissionError"
    with pytest.raises(SandboxUnavailable, match="chmod o\\+x"):
        SandboxPool(template=Template(mounts=(str(tmp_path / "site"),)), **options).close()


@pytest.mark.skipif(_C.sandbox_landlock_version() == 0, reason="no Landlock in this kernel")
def test_files_of_the_machine_cannot_be_opened(bare: Session) -> None:
    code = (
        "import os\ngot = []\n"
        f"for p in ('/etc/passwd', '/etc/shadow', '/root', '/tmp', '/home', '/proc', '/', '/var',\n"
        f"          '/proc/{os.getpid()}/environ', '/proc/{os.getpid()}/mem', {__file__!r},\n"
        "          '/dev/shm', '/dev/zero', '/sys', '/run'):\n"
        " for go in (os.listdir, lambda p: open(p).read(1), lambda p: open(p, 'r+b'),\n"
        "            lambda p: open(p + '/x', 'w'), os.unlink):\n"
        "  try: go(p); got.append(p)\n"
        "  except OSError: pass\ngot"
    )
    assert bare.step(code).value == "[]"


def test_files_of_other_sessions_cannot_be_opened(bare_pool: SandboxPool) -> None:
    with bare_pool.acquire() as a, bare_pool.acquire() as b:
        home = a.step("import os; open('secret', 'w').write('s'); os.getcwd()").value
        assert home is not None
        for attempt in (f"open({home} + '/secret').read()", f"open({home} + '/x', 'w')"):
            error = b.step(attempt).error
            assert error is not None
            assert error.name == "PermissionError"


def test_other_processes_and_sockets_cannot_be_reached(
    bare_pool: SandboxPool, bare: Session
) -> None:
    with bare_pool.acquire() as other:
        victim = other.pid
        code = (
            "import os, signal, socket, resource, fcntl\ngot = []\n"
            f"for p in ({victim}, {os.getpid()}, {bare.init_pid}):\n"
            " for go in (lambda: os.kill(p, 9), lambda: os.killpg(p, 9),\n"
            "            lambda: signal.pidfd_send_signal(os.pidfd_open(p), 9),\n"
            "            lambda: os.setpriority(os.PRIO_PROCESS, p, 19),\n"
            "            lambda: os.sched_setaffinity(p, {0}),\n"
            "            lambda: resource.prlimit(p, resource.RLIMIT_NOFILE),\n"
            "            lambda: fcntl.fcntl(0, fcntl.F_SETOWN, p)):\n"
            "  try: go(); got.append(p)\n"
            "  except OSError: pass\n"
            "for go in (socket.socket, lambda: socket.socket(socket.AF_UNIX)):\n"
            " try: go(); got.append(go)\n"
            " except OSError: pass\ngot"
        )
        assert bare.step(code).value == "[]"
        assert other.step("1").value == "1"


def test_close_leaves_nothing(bare_pool: SandboxPool) -> None:
    session = bare_pool.acquire()
    home = session.step("import os; os.getcwd()").value
    code = "import os\nfor _ in range(4):\n if os.fork() == 0:\n  if os.fork() == 0: os.fork()\n"
    session.step(code + "  while 1: pass")
    assert within(lambda: len(process_tree(session.init_pid)) > 8)
    tree = process_tree(session.init_pid)
    session.close()
    assert all(gone(pid) for pid in tree)
    assert home is not None
    assert not os.path.exists(home.strip("'"))


def test_host_kills_the_group_when_the_zygote_is_starved(bare: Session) -> None:
    """Or the trainer's end, which is the zygote's, would leave it: SIGSTOP is a storm of forks."""
    bare.step("import os\nfor _ in range(4):\n if os.fork() == 0:\n  while 1: pass")
    tree = process_tree(bare.init_pid)
    zygote = int(Path(f"/proc/{bare.init_pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(zygote, signal.SIGSTOP)
    try:
        bare.end_by(StepStatus.SIGNAL, "as the watchdog does")
        assert within(lambda: all(gone(pid) for pid in tree))
    finally:
        os.kill(zygote, signal.SIGCONT)


def test_orphans_end_with_the_interpreter(bare: Session) -> None:
    bare.step("import os\nfor _ in range(4):\n if os.fork() == 0:\n  while 1: pass")
    tree = process_tree(bare.init_pid)
    assert bare.step("os._exit(0)").status is StepStatus.EXIT
    assert all(gone(pid) for pid in tree)


def test_deep_directories_are_removed(bare_pool: SandboxPool) -> None:
    with bare_pool.acquire() as session:
        home = session.step("import os; os.getcwd()").value
        session.step("for _ in range(1200): os.mkdir('d'); os.chdir('d')")
    assert home is not None
    assert not os.path.exists(home.strip("'"))


def test_config_keys_reach_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentgrpo.config import SandboxConfig
    from agentgrpo.train import prepare

    given: dict[str, object] = {}
    monkeypatch.setattr(prepare, "SandboxPool", lambda **options: given.update(options))
    prepare.open_sandbox(SandboxConfig(allow_degraded=True, max_live=7))
    assert (given["allow_degraded"], given["max_live"]) == (True, 7)
    prepare.open_sandbox(SandboxConfig())
    assert given["allow_degraded"] is False


@pytest.mark.parametrize("victim", ["trainer", "init"])
def test_no_process_outlives_a_killed_trainer_or_init(victim: str) -> None:
    code = (
        "import time, warnings\nwarnings.simplefilter('ignore')\n"
        "from agentgrpo.sandbox import SandboxPool\n"
        "pool = SandboxPool(rungs=(), allow_degraded=True, min_idle=0)\n"
        "s = pool.acquire()\n"
        "s.step('import os\\nif os.fork() == 0:\\n os.setsid()\\n while 1: 0')\n"
        "from agentgrpo.sandbox.isolation.channels import process_tree\n"
        "print(*process_tree(s.init_pid), flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        tree = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(tree) == 3
        os.kill(owner.pid if victim == "trainer" else tree[0], signal.SIGKILL)
        assert all(gone(pid) for pid in tree)
        owner.kill()


def test_socketpairs_reach_no_process_outside(bare: Session) -> None:
    """A datagram socket would: it sends to any address."""
    code = (
        "import os, socket\n"
        "def refused(kind, way):\n"
        " try: a, b = socket.socketpair(socket.AF_UNIX, kind); way(a)\n"
        " except OSError as error: return error.errno\n"
        "ways = [lambda a: a.sendto(b'x', path), lambda a: a.connect(path),\n"
        " lambda a: a.bind('s')]\n"
        "kinds = [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, 3]\n"
    )
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX, 2) as outside:
        os.chmod(place, 0o755)
        path = f"{place}/socket"
        outside.bind(path)
        os.chmod(path, 0o666)
        outside.setblocking(False)
        result = bare.step(f"path = {path!r}\n{code}[refused(k, w) for k in kinds for w in ways]")
        assert result.error is None, result
        with pytest.raises(BlockingIOError):
            outside.recv(1)
    pair = "a, b = socket.socketpair(); a.send(b'hi'); b.recv(2)"
    assert bare.step(f"import socket; {pair}").value == "b'hi'"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sessions are other users")
@pytest.mark.parametrize("package_first", [True, False])
def test_site_dirs_can_contain_this_package(tmp_path: Path, package_first: bool) -> None:
    """Of a home that only root may enter."""
    tmp_path.chmod(0o700)
    package = tmp_path / "site" / "package"
    package.mkdir(parents=True)
    (package / "file").write_text("x")
    paths = [str(package), str(package / "file"), str(tmp_path / "site")]
    copies = [reachable(path) for path in (paths if package_first else paths[::-1])]
    assert sum(map(os.path.isfile, copies)) == 1
    assert _is_open(copies[0])
