"""User ids of sessions: not those of the machine, and not shared."""

import os
import resource
from pathlib import Path

import pytest

from agentgrpo.sandbox import SandboxPool, SandboxUnavailable
from agentgrpo.sandbox.isolation import jail
from agentgrpo.sandbox.isolation.jail import JAIL_ID, has_own_ids
from agentgrpo.sandbox.isolation.zygote import LADDER, Rung, Zygote
from tests.isolation import need_isolation, run_python
from tests.sandbox.isolation.test_degraded import make_pool

pytestmark = pytest.mark.nsjail


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users to give away")
@pytest.mark.parametrize("rung", LADDER)
def test_each_session_of_root_has_its_own_user_id(rung: Rung) -> None:
    with SandboxPool(min_idle=0, zygotes=2, rungs=[rung]) as pool:
        sessions = [pool.acquire() for _ in range(6)]
        users = [os.stat(f"/proc/{session.pid}").st_uid for session in sessions]
        assert len(set(users)) == 6, "those of two zygotes too"
        for session in sessions:
            session.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users to give away")
@pytest.mark.parametrize("rung", LADDER)
def test_a_session_with_a_user_id_of_the_machine_is_refused(
    rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Zygote, "_next_uid", lambda self: JAIL_ID)
    with pytest.raises(SandboxUnavailable, match=f"it runs as user {JAIL_ID}"):
        SandboxPool(min_idle=0, zygotes=1, rungs=[rung]).close()


@pytest.mark.parametrize(
    ("root", "spans", "own"),
    [
        (True, "0 0 4294967295\n", True),
        (False, "0 0 4294967295\n", False),
        (True, "0 100000 65536\n", False),
        (True, "0 0 1000\n1610612736 5 268435456\n", True),
        (True, "0 0 1610612737\n", False),
        (True, "1610612737 0 268435456\n", False),
    ],
)
def test_has_own_ids_reads_the_uid_map(
    root: bool, spans: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    read = Path.read_text  # of a watchdog's thread too
    monkeypatch.setattr(
        Path, "read_text", lambda path: spans if path.name == "uid_map" else read(path)
    )
    assert has_own_ids() is own


@pytest.mark.parametrize("rung", LADDER)
def test_sessions_do_not_inherit_the_umask(rung: Rung) -> None:
    if rung is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
        pytest.skip("zygote-root needs root")
    need_isolation(rung)
    before = os.umask(0o077)
    try:
        with SandboxPool(min_idle=0, zygotes=1, rungs=[rung]) as pool, pool.acquire() as session:
            told = session.step("import os; open('f', 'w'); oct(os.stat('f').st_mode)")
    finally:
        os.umask(before)
    assert told.value == "'0o100644'"


HARD = {"CORE": 0, "FSIZE": 1 << 26, "CPU": 1000, "AS": 1 << 33, "NOFILE": 512, "STACK": 1 << 20}
LIMITED = """
import resource, sys
from agentgrpo.sandbox import SandboxPool
kind, most = getattr(resource, f"RLIMIT_{sys.argv[1]}"), int(sys.argv[2])
resource.setrlimit(kind, (most, most))
with SandboxPool(min_idle=0, zygotes=1) as pool:
    with pool.acquire() as session:
        print(session.step(f"import resource; resource.getrlimit({kind})[1] <= {most}").value)
"""


@pytest.mark.parametrize("kind", HARD)
def test_sessions_start_under_low_hard_limits(kind: str) -> None:
    if kind == "CORE" and jail._core_pattern().startswith("|"):
        pytest.skip("this machine starts a program for each crash at a limit of 0")
    done = run_python(LIMITED, kind, HARD[kind])
    assert done.stdout == "True\n", done.stderr


def test_core_pattern_pipe_with_hard_limit_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "_core_pattern", lambda: "|/usr/share/apport/apport %p\n")
    SandboxPool(min_idle=0, zygotes=1).close()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, 0))
    with pytest.raises(SandboxUnavailable, match=r"core_pattern; remedy: ulimit -S"):
        SandboxPool(min_idle=0, zygotes=1).close()
    with pytest.warns(UserWarning, match="degraded"):
        make_pool().close()  # promises nothing of the kind
