"""Pools: admission, prewarming, deaths of zygotes and of the whole trainer."""

import dataclasses
import operator
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.sandbox import (
    Limits,
    SandboxBusy,
    SandboxException,
    SandboxPool,
    StepStatus,
    Template,
)
from agentgrpo.sandbox.isolation.cgroup import OWNER, ControlGroup, owner_name, stale_of
from agentgrpo.sandbox.isolation.channels import children_of
from agentgrpo.sandbox.isolation.errors import TemplateUnavailable
from agentgrpo.sandbox.isolation.zygote import remove_stale_scratch
from agentgrpo.support.control_groups import V2, mounted_groups
from tests.isolation import gone, within

pytestmark = pytest.mark.nsjail


def test_idle_sessions_are_started_in_the_background() -> None:
    with SandboxPool(min_idle=3, max_live=4) as pool:
        assert within(lambda: pool.metrics()["idle"] == 3), "three idle sessions"
        with pool.acquire() as session:
            assert session.step("1").value == "1"
        assert pool.metrics()["from_idle"] == 1
        assert within(lambda: pool.metrics()["idle"] == 3), "the pool to fill up again"


def test_a_dead_idle_session_is_not_returned() -> None:
    with SandboxPool(min_idle=1, max_live=2) as pool:
        assert within(lambda: pool.metrics()["idle"] == 1), "an idle session"
        init = pool._idle[0].init_pid
        os.kill(init, signal.SIGKILL)
        assert gone(init)
        with pool.acquire() as session:
            assert session.step("1").value == "1"


def test_waiting_acquire_gets_the_place_of_a_closed_session() -> None:
    with SandboxPool(max_live=1, min_idle=0) as pool:
        first = pool.acquire()
        with pytest.raises(SandboxBusy, match="max_live"):
            pool.acquire(timeout_s=0.05)

        def close_when_asked() -> None:
            within(lambda: pool.metrics()["waited"] == 2)
            first.close()

        threading.Thread(target=close_when_asked).start()
        with pool.acquire(timeout_s=30) as second:
            assert second.step("1").value == "1"
        assert pool.metrics()["waited"] == 2


def test_session_that_ends_by_itself_frees_its_place() -> None:
    with SandboxPool(max_live=1, min_idle=0) as pool:
        pool.acquire().step("import os; os._exit(0)")
        pool.acquire(timeout_s=5).close()


def traces_of_zygotes(groups: int = 0) -> tuple[int, int, int]:
    """Descriptors, children (zombies too) and scratch directories of this process; two descriptors
    of each control group aside.
    """
    scratch = Path(tempfile.gettempdir()).glob(f"{owner_name(os.getpid())}.*")
    fds = len(os.listdir("/proc/self/fd")) - 2 * groups
    return fds, len(children_of(os.getpid())), len([*scratch])


def has_ended(zygote: Any) -> bool:
    return within(lambda: not zygote.answers())


def test_dead_zygotes_leave_nothing_behind() -> None:
    with SandboxPool(min_idle=0, zygotes=1) as pool, pool.acquire() as session:

        def traces() -> tuple[int, int, int]:
            groups = pool._spawner.cgroups
            return traces_of_zygotes(len(groups._all) if groups is not None else 0)

        pool.acquire().close()
        most = traces()
        for _ in range(3):
            zygote = pool._spawner._zygotes[0]
            os.kill(zygote.pid, signal.SIGKILL)
            assert has_ended(zygote)
            pool.acquire().close()  # threads of earlier tests open a file now and then
            assert within(lambda: all(map(operator.le, traces(), most))), (traces(), most)
        assert pool.metrics()["zygote_restarts"] == 3
        assert session.step("1").status is StepStatus.INFRA_ERROR


def test_acquire_raises_when_the_pool_closes() -> None:
    pool = SandboxPool(min_idle=0, zygotes=1, max_live=1)
    pool.acquire()
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(pool.acquire, 60.0) for _ in range(3)]
        assert within(lambda: pool.metrics()["waited"] == 3), "them to wait"
        pool.close()
        told = [str(one.exception(timeout=10)) for one in waiting]
    assert told == ["the pool is closed"] * 3
    with pytest.raises(SandboxException, match="closed"):
        pool._spawner.spawn()
    assert pool.metrics()["live"] == 0


def test_closed_pool_raises_and_leaves_no_process() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = SandboxPool(min_idle=2)
    session = pool.acquire()
    started = session.init_pid, session.pid
    pool.close()
    pool.close()
    assert all(gone(pid) for pid in started)
    assert session.step("1").state_lost
    with pytest.raises(SandboxException, match="closed"):
        pool.acquire()
    assert within(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_environment_of_a_session_is_private() -> None:
    with SandboxPool(min_idle=0, zygotes=1) as pool:
        with pool.acquire(env={"SECRET": "s3cr3t"}) as session:
            assert session.step("import os; os.environ['SECRET']").value == "'s3cr3t'"
        with pool.acquire() as session:
            assert session.step("import os; 'SECRET' in os.environ").value == "False"
        with pytest.raises(ValueError, match="A=B"):
            pool.acquire(env={"A=B": "1"})


def test_stateless_runs_share_nothing(pool: SandboxPool) -> None:
    live = pool.metrics()["live"]
    assert pool.run("import os; x = 1; open('f', 'w').write('1')").value == "1"
    assert pool.run("import os; 'x' in dir(), os.listdir('.')").value == "(False, [])"
    assert pool.run("import os; os.environ['A']", env={"A": "b"}).value == "'b'"
    assert pool.run("while True: pass", 0.1).status.startswith(StepStatus.TIMEOUT)
    assert pool.run("import os; os._exit(0)").state_lost
    assert pool.metrics()["live"] == live


def test_session_time_and_steps_are_limited() -> None:
    with SandboxPool(limits=Limits(steps=2), min_idle=0) as pool, pool.acquire() as session:
        assert [session.step("1").status for _ in range(3)] == ["ok", "ok", "timeout_killed"]
    with SandboxPool(limits=Limits(session_s=0.5), min_idle=0) as pool, pool.acquire() as session:
        result = session.step("while True: pass", 60)
        assert result.status in (StepStatus.TIMEOUT, StepStatus.TIMEOUT_KILLED)
        assert session.step("1").status is StepStatus.TIMEOUT_KILLED


def test_session_time_ends_between_steps() -> None:
    limits = Limits(session_s=0.5)
    with SandboxPool(limits=limits, min_idle=1, max_live=2, zygotes=1) as pool:
        sessions = [pool.acquire(), pool.acquire()]
        sessions[0].step("import os\nif os.fork() == 0:\n while True: pass")
        assert gone(sessions[0].pid)
        assert within(lambda: pool.metrics()["live"] == 0), "their places to be free"
        for session in sessions:
            result = session.step("1")
            assert (result.status, result.detail) == ("timeout_killed", "the session lived 0.5 s")
        assert within(lambda: pool.metrics()["idle"] == 1), "an idle session"
        with pool.acquire() as fresh:
            assert fresh.step("6 * 7").value == "42", "those that wait have not begun"


def test_template_packages_and_preload(tmp_path: Path) -> None:
    (tmp_path / "site" / "pack").mkdir(parents=True)
    (tmp_path / "site" / "pack" / "__init__.py").write_text("import os\nPID = os.getpid()\n")
    site = str(tmp_path / "site")
    (tmp_path / "tool.py").write_text("secret = 1")
    if os.geteuid() == 0:
        tmp_path.chmod(0o700)
    template = Template(site_dirs=(site,), preload=("pack",), env={"KEY": "value"})
    with SandboxPool(template=template, min_idle=0) as pool, pool.acquire() as session:
        shown = session.step("import os, pack; pack.PID != os.getpid(), os.environ['KEY']")
        assert shown.value == "(True, 'value')"
        assert session.step(f"import os; os.path.exists({str(tmp_path / 'tool.py')!r})").value == (
            "False"
        )
        assert session.step(f"open({site!r} + '/x', 'w')").status is StepStatus.ERROR


def test_preload_that_fails_or_starts_threads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ImportError('missing piece')")
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()"
    )
    tmp_path.chmod(0o755)
    for name, message in (("bad", "missing piece"), ("threads", "threads running")):
        template = Template(site_dirs=(str(tmp_path),), preload=(name,))
        with pytest.raises(TemplateUnavailable, match=message) as failed:
            SandboxPool(template=template, min_idle=0)
        assert str(failed.value).count("Traceback") == 1, "tried once, not on every rung"


def test_modules_are_preloaded_in_the_environment_of_the_template(tmp_path: Path) -> None:
    """What they start, they start by their variables: the error names who started it."""
    (tmp_path / "worker.py").write_text("import time\ndef work(): time.sleep(9)")
    (tmp_path / "library.py").write_text(
        "import os, threading, worker\nSEEN = dict(os.environ)\n"
        "if os.environ.get('QUIET') != '1': threading.Thread(target=worker.work).start()"
    )
    tmp_path.chmod(0o755)
    template = Template(site_dirs=(str(tmp_path),), preload=("library",), env={"QUIET": "1"})
    with SandboxPool(template=template, min_idle=0) as pool, pool.acquire() as session:
        seen = session.step("import library, os\nos.environ.items() <= library.SEEN.items()")
        assert seen.value == "True"
    template = dataclasses.replace(template, preload=("json", "library"), env={})
    with pytest.raises(TemplateUnavailable, match=r"'library' left threads .*of \['worker'\]"):
        SandboxPool(template=template, min_idle=0)


@pytest.mark.parametrize("stopped", [False, True], ids=["it runs", "its zygotes are stopped"])
def test_killed_trainer_leaves_no_process(tmp_path: Path, stopped: bool) -> None:
    code = textwrap.dedent(
        f"""
        import os, time
        from agentgrpo.sandbox import SandboxPool
        from agentgrpo.sandbox.isolation.channels import children_of
        pool = SandboxPool(min_idle=0)
        found = [zygote.pid for zygote in pool._spawner._zygotes]
        for _ in range(3):
            session = pool.acquire()
            session.step("import os\\nif os.fork() == 0:\\n while True: pass")
            found += session.init_pid, session.pid
        for zygote in pool._spawner._zygotes if {stopped} else ():
            os.kill(children_of(zygote.pid)[0], 19)
            os.kill(zygote.pid, 19)
        open({str(tmp_path / "pids")!r}, "w").write(" ".join(map(str, found)))
        print("ready", flush=True)
        time.sleep(100)
        """
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    left = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(left) == 8
    assert all(gone(pid) for pid in left)
    SandboxPool(min_idle=0, zygotes=1).close()  # the next one clears up
    parents = {tmp_path, *mounted_groups().values()}
    traces = [path for p in parents for path in p.glob(f"{OWNER}.*.{trainer.pid}.*")]
    assert not [path for path in traces if path.parent != tmp_path], traces


def test_leftovers_of_a_killed_process_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        ended = subprocess.Popen(["/bin/true"])
        ended.wait()
        stale = Path(directory, f"{owner_name(ended.pid)}123.abc")
        stale.mkdir()
        foreign = Path(directory, f"{OWNER}.not-a-number")
        foreign.mkdir()
        with SandboxPool(min_idle=0, zygotes=1) as pool:
            mine = [p for p in Path(directory).iterdir() if str(os.getpid()) in p.name]
            remove_stale_scratch()
            assert not stale.exists()
            assert foreign.exists()
            assert mine
            assert all(p.exists() for p in mine)
            pool.acquire().close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes process namespaces everywhere")
def test_directories_of_another_container_are_not_removed(tmp_path: Path) -> None:
    """It shares the directory, and its process numbers mean nothing outside of its namespace."""
    code = (
        "import os, sys, tempfile\nfrom agentgrpo.sandbox.isolation.cgroup import owner_name\n"
        "os.mkdir(f'{sys.argv[1]}/{owner_name(os.getpid())}.x'); print(flush=True); input()"
    )
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, sys.path))}
    other = subprocess.Popen(
        [*unshare, str(tmp_path)], env=environment, stdin=subprocess.PIPE, stdout=-1
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"\n"
    assert len(list(tmp_path.iterdir())) == 1
    assert not list(stale_of(tmp_path))
    other.communicate(b"\n")


def test_cgroup_v2_uses_the_files_of_v2(tmp_path: Path) -> None:
    names = ("memory.max", "pids.max", "cpu.max", "memory.events", "pids.current", "cgroup.procs")
    for name in names:  # and no memory.swap.max: a kernel without swap has none
        (tmp_path / name).write_text("max")
    group = ControlGroup(dict.fromkeys(("memory", "pids", "cpu"), tmp_path), V2)
    group.set_limits(Limits(memory_mib=1), 0.5)
    wrote = {name: (tmp_path / name).read_text() for name in ("memory.max", "pids.max", "cpu.max")}
    assert wrote == {"memory.max": "1048576", "pids.max": "64", "cpu.max": "50000 100000"}
    assert not (tmp_path / "memory.swap.max").exists()
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "pids.current").write_text("5\n")
    assert group.counts() == (2, 5)
    with group.attaching() as fds:
        assert len(fds) == 1
    group.close()
