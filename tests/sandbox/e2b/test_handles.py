"""Handles never reach a process or descriptor that later got the same number."""

import contextlib
import fcntl
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from agentgrpo import _C
from agentgrpo.sandbox import (
    CommandExitException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxPool,
)
from agentgrpo.sandbox.e2b.commands import CommandHandle
from agentgrpo.sandbox.isolation.channels import Owned
from tests.isolation import gone, run_python, within
from tests.sandbox.e2b.test_api import start

pytestmark = pytest.mark.nsjail
SEED, THREADS, TURNS = 20261122, 4, 500


def refill(keep: list[int]) -> None:
    """Take every descriptor number that was set free, and some more."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    keep += [read, write]
    keep += [os.dup(write) for _ in range(30)]


def untouched(keep: list[int]) -> bool:
    """Whether nobody has written into what took the numbers; closes it."""
    try:
        os.read(keep[0], 1)
        return False
    except BlockingIOError:
        return True
    finally:
        for fd in keep:
            os.close(fd)


def test_a_finished_handle_cannot_reach_other_processes(pool: SandboxPool) -> None:
    with Sandbox.create(pool=pool) as sandbox, Sandbox.create(pool=pool) as other:
        handle = start(sandbox, "cat > /dev/null", stdin=True)
        sandbox.commands.close_stdin(handle.pid)
        handle.wait()
        keep: list[int] = []
        refill(keep)
        neighbour = start(other, "sleep 100")
        assert not handle.kill()
        with pytest.raises(SandboxNotFoundException):
            handle.send_stdin("written")
        assert untouched(keep)
        assert [info.pid for info in other.commands.list()] == [neighbour.pid]
        assert other.run_code("6 * 7").text == "42"
        assert handle.wait().exit_code == 0, "its result stays"


@pytest.mark.parametrize("end", ["kill", "timer", "the code itself"])
def test_files_of_a_dead_sandbox_raise(pool: SandboxPool, end: str) -> None:
    with Sandbox.create(pool=pool) as a:
        a.files.write("secret", "a's")
        if end == "kill":
            a.kill()
        elif end == "timer":
            a.set_timeout(0.01)
            assert within(lambda: not a.is_running())
        else:
            os.kill(a._session.init_pid, signal.SIGKILL)
            assert gone(a._session.pid)
        with Sandbox.create(pool=pool) as b:
            b.files.write("secret", "b's")
            calls: list[Callable[[], object]] = [
                lambda: a.files.read("secret"), lambda: a.files.write("planted", "x"),
                lambda: a.files.list("."), lambda: a.files.exists("secret"),
                lambda: a.files.make_dir("d"), lambda: a.files.remove("secret"),
                lambda: a.files.rename("secret", "x"), lambda: a.files.get_info("secret"),
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(SandboxNotFoundException):
                    call()
            assert [entry.name for entry in b.files.list(".")] == ["secret"]
            assert b.files.read("secret") == "b's"


def test_handles_of_a_dead_sandbox_reach_no_other_session(pool: SandboxPool) -> None:
    """Even a name that is resolved after the last process has gone stays in its own mounts."""
    with Sandbox.create(pool=pool) as a:
        a.files.write("f", "own")
        root = a.files._root
        with root.borrowed():
            os.kill(a._session.init_pid, signal.SIGKILL)
            assert gone(a._session.init_pid)
            with a.files._as_user():
                fd = _C.sandbox_open_in(root.directory, b"/home/user/f", os.O_RDONLY, 0)
            assert os.read(fd, 9) == b"own"
            os.close(fd)


def test_borrowed_descriptors_are_closed_by_the_last_borrower() -> None:
    with open(os.devnull) as null:  # a number that no thread of a pool takes meanwhile
        fd = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, 1000)
    owned = Owned(fd)
    with owned.borrowed():
        assert owned.borrow()
        owned.close()
        owned.close()
        assert not owned.borrow()
        os.fstat(fd)
        owned.give_back()
        os.fstat(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(SandboxNotFoundException), owned.borrowed():
        pass


def test_ended_background_commands_release_descriptors() -> None:
    with SandboxPool(min_idle=0, zygotes=1) as pool, Sandbox.create(pool=pool) as sandbox:
        sandbox.commands.run("true")
        before = len(os.listdir("/proc/self/fd"))
        for number in range(20):
            start(sandbox, "echo here; sleep 0.01")
            if number % 2:
                handle = start(sandbox, "echo there; sleep 100")
                assert handle.kill()
                with pytest.raises(CommandExitException) as ended:
                    handle.wait()
                assert (ended.value.exit_code, ended.value.stdout) in [(137, "there\n"), (137, "")]
        assert within(lambda: not sandbox.commands.list())
        assert within(lambda: len(os.listdir("/proc/self/fd")) <= before)
        for _ in range(3):
            sandbox.commands.run("head -c 1000000 /dev/zero")
        assert not sandbox.commands._running, "nor its output"


def test_a_step_within_a_step_of_the_same_session_is_refused(pool: SandboxPool) -> None:
    """By its own thread, which nothing would make wait: the session is not to blame."""
    refused: list[str] = []

    def again(_stream: int, _data: bytes) -> None:
        with pytest.raises(ValueError, match="already") as error:
            session.step("2")
        refused.append(str(error.value))

    with pool.acquire() as session:
        code = "print('x', flush=True); import time; time.sleep(0.1); 1"
        assert session.cell(code, listener=again).value == "1"
        assert session.step("5").value == "5"
    assert refused


def test_a_forked_child_does_not_wait_for_locks_of_the_parent() -> None:
    """Whoever holds a lock in the parent when it forks; each of them is found, and held."""
    code = """
        import gc, os, signal, sys, threading
        from agentgrpo.sandbox import Sandbox, SandboxException, SandboxPool
        from agentgrpo.sandbox.isolation.channels import Owned
        from agentgrpo.sandbox.session.console import Console
        kinds = type(threading.Lock()), type(threading.RLock())
        held, free = threading.Event(), threading.Event()
        def hold(locks):
            for lock in locks:
                lock.acquire()
            held.set()
            free.wait()
            for lock in locks:
                lock.release()
        with SandboxPool(min_idle=0, zygotes=1) as pool, pool.acquire() as session:
            with Sandbox.create(pool=pool) as sandbox:
                handle, console = sandbox.commands.run("cat", background=True), Console(session)
                sandbox.create_code_context(language="bash")
                of = [o for o in gc.get_objects() if isinstance(o, Owned) or
                      o in (pool, session, sandbox, sandbox.commands, handle.program)]
                seen = [v for o in of for v in gc.get_referents(o, getattr(o, "__dict__", 0))]
                owned = {id(v): v for v in seen if isinstance(v, kinds)}
                print(len(owned) > 9, flush=True)
                thread = threading.Thread(target=hold, args=([*owned.values()],))
                thread.start()
                held.wait()
                child = os.fork()
                if child == 0:
                    signal.alarm(10)
                    ending = (handle.kill, sandbox.commands.close, sandbox.files.close,
                              session.close, sandbox.kill, pool.close)
                    for end in ending:
                        assert not end()
                    refused = 0
                    for use in (lambda: session.step("1"), lambda: sandbox.run_code("1"),
                                lambda: sandbox.commands.run("true"), sandbox.commands.list,
                                lambda: sandbox.files.read("f"), lambda: sandbox.set_timeout(9),
                                lambda: console.type("1"),
                                lambda: pool.run("1"), handle.wait):
                        try:
                            use()
                        except SandboxException as error:
                            refused += "belongs to process" in str(error)
                    print(refused, len(Sandbox.list()), flush=True)
                    sys.exit()
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                free.set()
                thread.join()
                print(session.step("6 * 7").value, sandbox.run_code("6 * 7").text)
        """
    done = run_python(code)
    assert done.stdout.split() == ["True", "9", "0", "0", "42", "42"], done


def test_ctrl_c_does_not_wait_for_the_end_of_a_step() -> None:
    code = """
        import os, signal, sys, threading, time
        from agentgrpo.sandbox import SandboxPool
        with SandboxPool(min_idle=0, zygotes=1) as pool:
            def heard(session):
                wait = "print(1)\\nimport time; time.sleep(60)"
                session.cell(wait, 100, listener=lambda *_: time.sleep(1))
            for step in (lambda s: s.step("import time; time.sleep(60)", 100), heard):
                session = pool.acquire()
                try:
                    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                    step(session)
                except KeyboardInterrupt:
                    print("interrupted")
                session.close()
            print(pool.acquire().step("6 * 7").value)
        """
    started = time.monotonic()
    done = run_python(code)
    assert done.stdout.split() == [*["interrupted"] * 2, "42"], done
    assert time.monotonic() - started < 30


def test_create_kill_wait_read_and_send_can_interleave() -> None:
    """Each sandbox's file and output hold its own number: whatever else is read is another's.

    What took the numbers of the closed: pipes of this process, into which nothing may be written.
    """
    wrong: list[str] = []
    with SandboxPool(min_idle=2, max_live=4 * THREADS, zygotes=1) as pool:
        places: list[tuple[str, Sandbox, CommandHandle] | None] = [None] * (2 * THREADS)
        lock = threading.Lock()

        def create(dice: random.Random, at: int) -> None:
            name = f"{dice.random():.16f}"
            sandbox = Sandbox.create(pool=pool, envs={"NAME": name})
            sandbox.files.write("name", name)
            handle = start(sandbox, "cat; echo $NAME", stdin=True)
            with lock:
                before, places[at] = places[at], (name, sandbox, handle)
            if before is not None:
                before[1].kill()

        def act(dice: random.Random, name: str, sandbox: Sandbox, handle: CommandHandle) -> None:
            match dice.randrange(7):
                case 0:
                    sandbox.kill()
                case 1:
                    handle.kill()
                case 2:
                    handle.send_stdin(f"{name}\n")
                case 3:
                    with contextlib.suppress(CommandExitException):
                        sandbox.commands.close_stdin(handle.pid)
                        if set(handle.wait(timeout=5).stdout.split()) != {name}:
                            wrong.append("output")
                case 4:
                    if sandbox.files.read("name") != name:
                        wrong.append("file")
                case 5:
                    sandbox.set_timeout(dice.uniform(0.001, 0.02))
                case _:
                    keep: list[int] = []
                    refill(keep)
                    time.sleep(dice.uniform(0, 0.002))
                    if not untouched(keep):
                        wrong.append("a stray write")

        def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(TURNS):
                at = dice.randrange(len(places))
                place = places[at]
                try:
                    if place is None or dice.random() < 0.1:
                        create(dice, at)
                    else:
                        act(dice, *place)
                except SandboxException:  # it is over: that is what it should say
                    continue
                except BaseException as error:
                    wrong.append(repr(error))

        before = len(os.listdir("/proc/self/fd"))
        threads = [threading.Thread(target=work, args=(SEED + i,)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        for place in places:
            if place is not None:
                place[1].kill()
        groups = pool._spawner.cgroups
        most = before + 2 * (len(groups._all) if groups else 0) + 9 * 2
        assert within(lambda: len(os.listdir("/proc/self/fd")) <= most)
