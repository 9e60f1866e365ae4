"""Bringing a fresh session to the state of another by repeating its steps."""

import pytest

from agentgrpo.sandbox import (
    AsyncSandbox,
    NotSupportedException,
    ReplayDiverged,
    Sandbox,
    SandboxPool,
    Session,
    StepStatus,
)
from agentgrpo.sandbox.history import HISTORY_BYTES, digest
from agentgrpo.sandbox.result import StepError, StepResult

pytestmark = pytest.mark.nsjail


def test_fork_has_variables_files_directory_environment_and_errors(pool: SandboxPool) -> None:
    with pool.acquire(env={"KEY": "value"}) as session:
        session.step("import os; os.mkdir('d'); os.chdir('d'); open('f', 'w').write('kept')")
        session.step("def f(n): return n + y")
        assert session.step("f(1)").status is StepStatus.ERROR
        session.step("y = 41; print(object())", env={"ONCE": "1"})
        session.step("import sys; sys.exit(3)")
        with pool.fork(session) as fork:
            shown = fork.step("f(1), os.getcwd(), open('f').read(), os.environ['KEY']")
            assert shown.value == "(42, '/home/user/d', 'kept', 'value')"
            fork.step("y = 0")
            with pool.fork(fork) as again:
                assert again.step("y").value == "0"
        assert session.step("y").value == "41"


@pytest.mark.parametrize(
    "code",
    ["import time; time.time_ns()", "import os; print(os.urandom(8))", "import uuid; uuid.uuid4()"],
)
def test_what_shows_something_else_is_found(pool: SandboxPool, code: str) -> None:
    with pool.acquire() as session:
        session.step("1")
        session.step(code)
        live = pool.metrics()["live"]
        with pytest.raises(ReplayDiverged, match="step 2 showed something else"):
            pool.fork(session)
        assert pool.metrics()["live"] == live


def test_an_interrupted_step_cannot_be_repeated(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        session.step("while True: pass", 0.1)
        with pytest.raises(ReplayDiverged, match="step 1 ended by timeout"):
            pool.fork(session)


def test_a_session_that_is_over_cannot_be_repeated(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        session.step("import os; os._exit(0)")
        with pytest.raises(ReplayDiverged):
            pool.fork(session)


def test_the_hash_sees_all_that_is_shown_and_no_addresses() -> None:
    def of(**shown: object) -> int:
        return digest(StepResult(**{"status": StepStatus.OK, "value": "1", **shown}))  # type: ignore[arg-type]

    assert of() == of(wall_s=3.0, cpu_s=1.0, processes_left=2, background="late")
    different = [
        of(),
        of(status=StepStatus.ERROR),
        of(value="2"),
        of(value=None),
        of(stdout="1"),
        of(stderr="1"),
        of(state_lost=True),
        of(more=True),
        of(error=StepError("E", "1", "")),
        of(error=StepError("E", "2", "")),
    ]
    assert len(set(different)) == len(different)
    assert of(value="<f at 0x7f00aa11bb22>") == of(value="<f at 0x7f00aa11bb23>")
    assert of(value="0x7f") != of(value="0x7e")


def test_sandbox_forks(pool: SandboxPool) -> None:
    with Sandbox.create(pool=pool, envs={"A": "b"}) as sandbox:
        sandbox.run_code("import os; x = 5")
        forks = sandbox.fork(2)
        for i, fork in enumerate(forks):
            assert fork.run_code(f"x += {i}; x, os.environ['A']").text == f"({5 + i}, 'b')"
            assert fork.sandbox_id != sandbox.sandbox_id
            fork.kill()
        sandbox.files.write("f", "1")
        with pytest.raises(NotSupportedException, match="fork"):
            sandbox.fork()


def test_async_sandbox_forks(pool: SandboxPool) -> None:
    import asyncio

    async def work() -> str | None:
        async with await AsyncSandbox.create(pool=pool) as sandbox:
            await sandbox.run_code("x = 5")
            (fork,) = await sandbox.fork()
            async with fork:
                return (await fork.run_code("x")).text

    assert asyncio.run(work()) == "5"


def test_stateless_runs_share_nothing(pool: SandboxPool) -> None:
    live = pool.metrics()["live"]
    assert pool.run("import os; x = 1; open('f', 'w').write('1')").value == "1"
    assert pool.run("import os; 'x' in dir(), os.listdir('.')").value == "(False, [])"
    assert pool.run("import os; os.environ['A']", env={"A": "b"}).value == "'b'"
    assert pool.run("while True: pass", 0.1).status.startswith(StepStatus.TIMEOUT)
    assert pool.run("import os; os._exit(0)").state_lost
    assert pool.metrics()["live"] == live


def test_a_listener_that_raises_is_not_called_again_and_its_step_is_known(session: Session) -> None:
    heard = []

    def fail(stream: int, data: bytes) -> None:
        heard.append(data)
        session.files().write("heard", "")
        raise RuntimeError("in the listener")

    code = "import os\nprint(1, flush=True)\nwhile not os.path.exists('heard'): pass\nprint(2)"
    with pytest.raises(RuntimeError):
        session.cell(code, listener=fail)
    assert (heard, session.history[-1].repeatable) == ([b"1\n"], True)
    assert session.step("6 * 7").value == "42"


def test_a_history_that_is_too_long_is_forgotten() -> None:
    with SandboxPool(min_idle=0, zygotes=1) as pool, pool.acquire() as session:
        for _ in range(40):
            session.step("#" * (1000 << 10))
        kept = sum(len(field) for step in session.history for field in step.fields or ())
        assert kept <= HISTORY_BYTES
        with pytest.raises(ReplayDiverged, match="forgotten"):
            pool.fork(session)
