"""Control groups of version 2, on a real v2 tree where there is one, with the kernel's own rules.

A machine that uses v1 has memory and pids there; on its v2 tree another controller stands in for
them, so that delegation, moving, attaching and clearing up are the kernel's, and only the limit
files are not.
"""

import errno
import os
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.sandbox import Limits, SandboxPool
from agentgrpo.sandbox.isolation import cgroup
from agentgrpo.sandbox.isolation.cgroup import Cgroups, CgroupsUnavailable
from agentgrpo.support import control_groups
from tests.isolation import run_python, within

pytestmark = pytest.mark.nsjail


def v2_root() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            return Path(line.split()[4])
    pytest.skip("no cgroup2 file system is mounted")


@pytest.fixture
def delegated() -> Iterator[tuple[Path, str]]:
    """A group of ours in the v2 tree, with a controller to hand on."""
    root = v2_root()
    there = (root / "cgroup.controllers").read_text().split()
    if not there or not os.access(root / "cgroup.subtree_control", os.W_OK):
        pytest.skip(f"{root} has no controller to hand on, or is not writable")
    before = (root / "cgroup.subtree_control").read_text().split()
    (root / "cgroup.subtree_control").write_text(f"+{there[0]}")
    own = root / f"agentgrpo-test-{os.getpid()}"
    own.mkdir()
    try:
        yield own, there[0]
    finally:
        cgroup._remove_tree(own)
        if there[0] not in before:
            (root / "cgroup.subtree_control").write_text(f"-{there[0]}")
    assert not own.exists()


STAND_INS = """
import os, sys
from pathlib import Path
from agentgrpo.sandbox import Limits, SandboxPool; from agentgrpo.sandbox.isolation import cgroup
own, controller = Path(sys.argv[1]), sys.argv[2]
(own / "cgroup.procs").write_text("0")
cgroup.mounted_groups = lambda: {"": own / os.path.relpath(
    next(l for l in open("/proc/self/cgroup") if l.startswith("0::"))[3:].strip(), "/" + own.name)}
cgroup.V2_CONTROLLERS = (controller,)
from agentgrpo.support.control_groups import Layout
cgroup.V2 = Layout("", "", "cgroup.events", "cgroup.stat", "cgroup.procs", False, "", ())
cgroup.ControlGroup.set_limits = lambda self, *limits: None
cgroup.ControlGroup.counts = lambda self: (0, 2)
"""


def run_in(own: Path, controller: str, code: str) -> list[str]:
    done = run_python(STAND_INS + textwrap.dedent(code), own, controller)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_session_runs_in_its_own_group(delegated: tuple[Path, str]) -> None:
    own, controller = delegated
    code = """
        def where(pid):
            return os.path.relpath(open(f"/proc/{pid}/cgroup").read().rpartition("0::")[2].strip(),
                                   "/" + own.name)
        for _ in range(2):  # the second pool finds this process in the leaf already
            with SandboxPool(min_idle=0, zygotes=1) as pool:
                print(where("self"), pool.describe()["memory_limit"].split(" per")[0])
                with pool.acquire() as a, pool.acquire() as b:
                    a.step("import os\\nif os.fork() == 0:\\n while True: pass")
                    for session in (a, b):
                        print(where(session.init_pid).count("/"), where(session.pid) ==
                              where(session.init_pid), session.group.counts()[1] == 0)
                    print(where(a.init_pid) == where(b.init_pid))
            print(sorted(path.name for path in own.iterdir() if path.is_dir()))
    """
    one = [
        "agentgrpo-host control group (v2)",
        "1 True False",
        "1 True False",
        "False",
        "['agentgrpo-host']",
    ]
    assert run_in(own, controller, code) == 2 * one


def test_missing_controllers_are_named(delegated: tuple[Path, str]) -> None:
    own, _ = delegated
    code = """
        cgroup.V2_CONTROLLERS = ("memory", "pids")
        try: cgroup.Cgroups(Limits())
        except cgroup.CgroupsUnavailable as error: print(error)
        print([path.name for path in own.iterdir() if path.is_dir()])
    """
    there = (own / "cgroup.controllers").read_text().split()
    if {"memory", "pids"} <= set(there):
        pytest.skip("this v2 tree has memory and pids")
    shown = run_in(own, "memory", code)
    assert shown == [f"{own} does not have the controllers memory and pids", "[]"]


def test_no_groups_without_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(cgroup, "mounted_groups", lambda: {"": tmp_path})
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CgroupsUnavailable, match="Permission denied"):
        Cgroups(Limits())


def test_missing_cgroup_file_system_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "mounted_groups", dict)
    with pytest.raises(CgroupsUnavailable, match="no cgroup file system"):
        Cgroups(Limits())


def v1_groups(pool: SandboxPool) -> Cgroups:
    groups = pool._spawner.cgroups
    if groups is None or groups.version == 2 or "cpu" not in groups._parents:
        pytest.skip("no writable v1 cpu hierarchy")
    return groups


def throttled(stat: Path) -> bool:
    return "nr_throttled 0\n" not in stat.read_text()


def test_processors_are_limited_per_pool_and_per_session() -> None:
    limits = Limits(cpus=0.05)
    with SandboxPool(limits=limits, all_cpus=0.1, min_idle=0, zygotes=1) as pool:
        groups = v1_groups(pool)
        assert pool.describe()["processors"] == "0.1 for all sessions, 0.05 for each"
        together = groups._parents["cpu"]
        assert (together / "cpu.cfs_quota_us").read_text() == "10000\n"
        with pool.acquire() as one, pool.acquire() as other, pool.acquire() as third:
            for session in (one, other, third):
                assert session.group is not None
                own = session.group._directories["cpu"]
                assert own.parent == together
                members = set(map(int, (own / "cgroup.procs").read_text().split()))
                assert {session.init_pid, session.pid} == members
                session.step("import os\nif os.fork() == 0:\n while True: pass")
            for group in (together, own):
                assert within(partial(throttled, group / "cpu.stat"))
    with SandboxPool(min_idle=0, zygotes=1) as pool:
        assert v1_groups(pool).all_cpus == (os.cpu_count() or 1) / 2, "half of the machine"


@pytest.mark.parametrize(("niceness", "shares"), [(1, 5120), (5, 1024), (19, 269)])
def test_niceness_sets_the_weight_of_the_pool(niceness: int, shares: int, tmp_path: Path) -> None:
    limits = Limits(niceness=niceness)
    for name in ("cpu.max", "cpu.weight"):
        (tmp_path / name).touch()
    v2: Any = SimpleNamespace(
        version=2,
        _layout=control_groups.V2,
        all_cpus=1,
        _limits=limits,
        _parents={},
        cpu_missing="",
    )
    Cgroups._limit_processors(v2, tmp_path)
    assert (tmp_path / "cpu.weight").read_text() == str(500 // niceness)
    with SandboxPool(limits=limits, min_idle=0, zygotes=1) as pool:
        assert (v1_groups(pool)._parents["cpu"] / "cpu.shares").read_text() == f"{shares}\n"


@pytest.mark.parametrize("file", ["cpu.cfs_period_us", "cpu.cfs_quota_us"])
def test_memory_is_limited_without_a_cpu_controller(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cgroup._write

    def refusing(path: Path, value: object) -> None:
        if path.name == file and "/cpu" in str(path):
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        write(path, value)

    with SandboxPool(min_idle=0, zygotes=1) as pool:
        v1_groups(pool)
    monkeypatch.setattr(cgroup, "_write", refusing)
    with SandboxPool(min_idle=0, zygotes=1) as pool, pool.acquire() as session:
        told = pool.describe()
        assert f"{file}: Invalid argument" in str(told["processors"])
        assert str(told["processors"]).startswith("niceness; ")
        assert told["memory_limit"] == "control group (v1) per session"
        assert session.group is not None
        assert session.step("6 * 7").value == "42"


def test_a_smaller_quota_of_the_parent_group_is_accepted() -> None:
    """A container's quota of processors: no group beneath may have more."""
    parent = control_groups.mounted_groups().get("cpu")
    if parent is None or not os.access(parent, os.W_OK):
        pytest.skip("no writable v1 cpu hierarchy")
    own = parent / f"agentgrpo-test-{os.getpid()}"
    own.mkdir()
    try:
        (own / "cpu.cfs_quota_us").write_text("50000")
        code = (
            "import sys\nopen(sys.argv[1], 'w').write('0')\n"
            "from agentgrpo.sandbox import SandboxPool\n"
            "with SandboxPool(min_idle=0, zygotes=1) as pool: print(pool.describe())"
        )
        done = run_python(code, own / "cgroup.procs")
        assert "'memory_limit': 'control group (v1) per session'" in done.stdout, done
    finally:
        cgroup._remove_tree(own)


@pytest.mark.parametrize("wrong", [{"cpus": 0.005}, {"processes": 5_000_000}])
def test_limits_that_the_kernel_rejects_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"limits.{next(iter(wrong))} must be"):
        Limits(**wrong)
    most = Limits(cpus=1e9, processes=1 << 22, memory_mib=10**9)
    with SandboxPool(limits=most, min_idle=0, zygotes=1) as pool:
        groups = pool._spawner.cgroups
        assert groups is None or groups.version == 2 or not groups.cpu_missing
