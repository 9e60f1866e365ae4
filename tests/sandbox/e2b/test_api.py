"""The E2B API: what works after changing an import, and what raises."""

import asyncio
import contextlib
import io
import os
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from agentgrpo.sandbox import (
    AsyncSandbox,
    CommandExitException,
    Context,
    FileNotFoundException,
    InvalidArgumentException,
    Limits,
    NotEnoughSpaceException,
    NotFoundException,
    NotSupportedException,
    OutputMessage,
    Result,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxPool,
    TimeoutException,
)
from agentgrpo.sandbox.e2b import api
from agentgrpo.sandbox.e2b.commands import CommandHandle
from agentgrpo.sandbox.e2b.execution import CommandResult, ExecutionError
from agentgrpo.sandbox.isolation import guards
from tests.isolation import refuse_control_groups, within

pytestmark = pytest.mark.nsjail

LOCKED = """
import os
os.makedirs('top/a/empty'); os.makedirs('top/a/b/c/d'); os.makedirs('top/a/none/e')
os.mkdir('kept')
open('top/a/b/c/file', 'w').close()
os.symlink('/home/user/kept', 'top/a/link')
for name, mode in (('a/empty', 0o555), ('a/b/c/d', 0o555), ('a/b/c', 0o555), ('a/none', 0),
                   ('a', 0o111), ('', 0o555), ('../kept', 0o500)):
    os.chmod(f'top/{name}', mode)
"""


@pytest.fixture
def sandbox(pool: SandboxPool) -> Iterator[Sandbox]:
    with Sandbox.create(pool=pool, envs={"GREETING": GREETING}) as made:
        yield made


def needs_groups(sandbox: Sandbox) -> None:
    """Node.js maps far more than it uses: its address space cannot be limited to 128 MiB."""
    if sandbox._session.group is None:
        pytest.skip("Node.js needs a control group, or limits.memory_mib of 1024")


def start(sandbox: Sandbox, cmd: str, **options: Any) -> CommandHandle:
    handle = sandbox.commands.run(cmd, background=True, **options)
    assert isinstance(handle, CommandHandle)
    return handle


def roots() -> int:
    """Descriptors of this process for the root directories of sessions, which it sees as "/"."""
    fds = map(int, os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(f"/proc/self/fd/{fd}") == "/" for fd in fds)


BASH, JS = {"language": "bash"}, {"language": "js"}
ENVIRONMENT = "import os; os.environ.get('GREETING'), os.environ.get('CALL')"
GREETING = 'it\'s "quoted"; $x'
# code, options, and what comes: the text of its value, [what is printed], (name and text of the
# error), or the exception that is raised
CELLS: dict[str, list[tuple[str, dict[str, Any], Any]]] = {
    "state is kept": [("x = 1; print('hi')", {}, ["hi\n"]), ("x += 1; x", {}, "2")],
    "an error is returned": [("undefined", {}, ("NameError", "name 'undefined' is not defined"))],
    "environment of sandbox and call": [
        (ENVIRONMENT, {"envs": {"CALL": "'; import os #"}}, repr((GREETING, "'; import os #"))),
        (ENVIRONMENT, {}, repr((GREETING, None)))],
    "a timeout is raised and keeps state": [
        ("x = 1", {}, None), ("while True: pass", {"timeout": 0.2}, TimeoutException),
        ("x", {}, "1")],
    "invalid timeouts": [
        ("1", {"timeout": timeout}, InvalidArgumentException)
        for timeout in (-1, float("nan"), float("inf"))],
    "bash keeps variables and directory": [
        ("x=5; cd /tmp", BASH, None), ('echo "$x $PWD"', BASH, ["5 /tmp\n"])],
    "environment of a bash cell": [
        ('set -eu; echo "$GREETING $A"', {**BASH, "envs": {"A": GREETING, "GREETING": "b"}},
         [f"b {GREETING}\n"]),
        ('echo "$GREETING ${A-none}"', BASH, [GREETING + " none\n"]),
        ("env | grep -c ^GREETING=", BASH, ["1\n"])],
    "environment of a javascript cell": [
        ("process.env.GREETING + process.env.A", {**JS, "envs": {"A": "1", "GREETING": "b"}},
         "b1"),
        ("[process.env.GREETING.length, process.env.A]", JS, f"[ {len(GREETING)}, undefined ]")],
    "the status of bash is an error": [("false", BASH, ("ExitStatus", "1"))],
    "a timeout ends bash": [
        ("sleep 100", {**BASH, "timeout": 0.2}, TimeoutException), ("echo new", BASH, ["new\n"])],
    "javascript has values, state and promises": [
        ("const a = 1; a + 1", JS, "2"), ("a + 5", {"language": "javascript"}, "6"),
        ("new Promise((done) => setTimeout(() => done('late'), 20))", JS, "late"),
        ("import { sep, delimiter as d } from 'path'; sep + d", JS, "/:"),
        ("const x = await new Promise((done) => done(8))", JS, None), ("x", JS, "8"),
        ("throw new Error('no')", JS, ("Error", "no")),
        ("while (true);", {**JS, "timeout": 0.5}, TimeoutException),
        ("x", JS, "8")],
    "unknown languages and foreign contexts": [
        ("1", {"language": "cobol"}, NotSupportedException),
        ("1", {"context": Context("x", "python", "/")}, NotFoundException)],
}  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_run_code_returns_results_and_errors(sandbox: Sandbox, name: str) -> None:
    if JS in (options for _, options, _ in CELLS[name]):
        needs_groups(sandbox)
    for code, options, comes in CELLS[name]:
        if isinstance(comes, type):
            with pytest.raises(comes):
                sandbox.run_code(code, **options)
            continue
        execution = sandbox.run_code(code, **options)
        error = execution.error
        if isinstance(comes, tuple):
            assert error is not None
            assert (error.name, error.value) == comes
        else:
            assert error is None, execution
            assert comes in (None, execution.text, execution.logs.stdout), execution


class TestRunCode:
    def test_execution_count_and_listeners(self, sandbox: Sandbox) -> None:
        results: list[Result] = []
        errors: list[ExecutionError] = []
        code = "40 + 2"
        execution = sandbox.run_code(code, on_result=results.append, on_error=errors.append)
        assert (execution.execution_count, execution.error, errors) == (1, None, [])
        assert [result.text for result in results] == ["42"]
        execution = sandbox.run_code("undefined", on_error=errors.append)
        assert (execution.execution_count, errors) == (2, [execution.error])

    def test_a_kill_ends_the_code_that_runs(self, pool: SandboxPool) -> None:
        sandbox = Sandbox(pool=pool)
        threading.Timer(0.2, sandbox.kill).start()
        with pytest.raises(TimeoutException, match="sandbox was killed while the request was in"):
            sandbox.run_code("import time; time.sleep(100)")

    def test_default_contexts_are_listed_and_started_when_used(self, sandbox: Sandbox) -> None:
        listed = {context.language: context for context in sandbox.list_code_contexts()}
        assert {*listed} == {"python", "bash", "javascript"}
        assert sandbox.run_code("echo 7", context=listed["bash"]).logs.stdout == ["7\n"]
        sandbox.run_code("x = 5", language="bash")
        sandbox.restart_code_context("bash")
        assert sandbox.run_code("echo $x-", language="bash").logs.stdout == ["-\n"]
        sandbox.run_code("x = 5")
        sandbox.restart_code_context("python")
        assert sandbox.run_code("'x' in dir()").text == "False"
        sandbox.remove_code_context("python")
        assert sandbox.run_code("1 + 1").text == "2", "it is started when it is used"

    def test_output_is_streamed_while_the_code_runs(self, sandbox: Sandbox) -> None:
        seen: list[tuple[str, bool]] = []

        def on_output(message: OutputMessage) -> None:
            seen.append((message.line, message.error))
            sandbox.files.write(f"heard{message.line.strip()}", "")

        sandbox.run_code(
            "import os, sys, time\nfor i in range(3):\n print(i)\n"
            " while not os.path.exists(f'heard{i}'): time.sleep(0.01)\n"
            "n = sys.stderr.write('e')",
            on_stdout=on_output,
            on_stderr=on_output,
        )
        assert seen == [("0\n", False), ("1\n", False), ("2\n", False), ("e", True)]

    def test_javascript_timeout_keeps_state(self, pool: SandboxPool) -> None:
        patient = replace(pool.limits, grace_s=30)  # on a busy machine Node.js takes its time
        with (
            SandboxPool(limits=patient, max_live=1, min_idle=0, zygotes=1) as own,
            Sandbox.create(pool=own) as sandbox,
        ):
            needs_groups(sandbox)
            sandbox.run_code("const a = 7", language="js")
            for endless in ("while (true) {}", "new Promise(() => {})"):
                with pytest.raises(TimeoutException):
                    sandbox.run_code(endless, language="js", timeout=0.3)
                assert sandbox.run_code("a", language="js").text == "7"

    def test_contexts_have_separate_state_and_shared_files(self, sandbox: Sandbox) -> None:
        held = roots()
        context = sandbox.create_code_context(language="python", cwd="/tmp")
        sandbox.run_code("y = 1; open('f', 'w').write('shared')", context=context)
        assert sandbox.run_code("'y' in dir(), open('/tmp/f').read()").text == "(False, 'shared')"
        sandbox.restart_code_context(context)
        assert sandbox.run_code("'y' in dir()", context=context).text == "False"
        assert sandbox.run_code("import os; os._exit(1)", context=context).error is not None
        assert sandbox.run_code("1").text == "1", "a context that dies leaves the sandbox alive"
        sandbox.remove_code_context(context.id)
        assert roots() == held, "its start let go of the session's root"
        with pytest.raises(NotFoundException):
            sandbox.run_code("1", context=context)


ENDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "output": ("print('x' * (5 << 20))", {}, "over 4 MiB of output"),
    "memory": ("b'x' * (1 << 33)", {}, "over 128 MiB of memory"),
    "os._exit": ("import os; os._exit(3)", {}, "exit code 3"),
    "a signal": ("import os; os.kill(os.getpid(), 11)", {}, "SIGSEGV"),
    "a forged answer": ("import os; os.write(4, b'x' * 99)", {}, "broke the protocol"),
    "no reaction to the interrupt": (
        "import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass", {"timeout": 0.2},
        "after the interrupt"),
    "the end of bash": ("exit 3", BASH, "exit code 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("new_context", [False, True])
def test_files_and_commands_outlive_an_interpreter(
    sandbox: Sandbox, name: str, new_context: bool
) -> None:
    code, options, message = ENDS[name]
    if name == "memory" and sandbox._session.group is None:
        pytest.skip("without a control group it is a MemoryError")
    language = options.get("language", "python")
    if new_context:
        context = sandbox.create_code_context(language=language)
    else:
        (context,) = (one for one in sandbox.list_code_contexts() if one.id == language)
    options = {key: value for key, value in options.items() if key != "language"}
    sandbox.files.write("kept", "1")
    sleeper = start(sandbox, "sleep 100")
    sandbox.run_code("x=5", context=context)
    errors: list[ExecutionError] = []
    if name == "no reaction to the interrupt":
        with pytest.raises(TimeoutException, match=f"{message}.*files are kept"):
            sandbox.run_code(code, context=context, **options)
    else:
        done = sandbox.run_code(code, context=context, on_error=errors.append, **options)
        assert done.error is not None
        assert (done.error.name, errors) == ("ContextRestarting", [done.error])
        assert message in done.error.value
        assert "files are kept" in done.error.value
    assert sandbox.is_running()
    state = (
        "echo ${x-none} $(cat kept)"
        if language == "bash"
        else "print('x' in dir(), open('kept').read())"
    )
    printed = "none 1\n" if language == "bash" else "False 1\n"
    assert sandbox.run_code(state, context=context).logs.stdout == [printed]
    assert sandbox.files.read("kept") == "1"
    assert [info.pid for info in sandbox.commands.list()] == [sleeper.pid]


def test_the_sandbox_ends_with_its_session(pool: SandboxPool) -> None:
    live = pool.metrics()["live"]
    with Sandbox(pool=pool) as sandbox:
        threading.Timer(0.2, os.kill, (sandbox._session.init_pid, 9)).start()
        done = sandbox.run_code("import time; time.sleep(100)")
        assert done.error is not None
        assert done.error.name == "signal"
        assert pool.metrics()["live"] == live, "its place is free"
        with pytest.raises(SandboxNotFoundException):
            sandbox.run_code("1")


def test_a_sandbox_over_its_memory_without_a_control_group_keeps_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_control_groups(monkeypatch)
    limits = Limits(timeout_s=60, memory_mib=192)
    with SandboxPool(limits=limits, min_idle=0, zygotes=1) as own, Sandbox(pool=own) as sandbox:
        sandbox.files.write("kept", "1")
        start(sandbox, "sleep 100")
        child = "x = bytearray(b'x') * (90 << 20); time.sleep(100)"
        code = f"import os, time\nfor i in range(3):\n if not os.fork(): {child}\ntime.sleep(100)"
        error = sandbox.run_code(code).error
        assert error is not None
        assert error.name == "ContextRestarting"
        assert "over 192 MiB of memory, all processes together" in error.value
        assert sandbox.run_code("open('kept').read()").text == "1"
        assert sandbox.commands.list() == []


# command, options, and what comes: what is printed, or the exception and what it says
COMMANDS: dict[str, list[tuple[str, dict[str, Any], Any]]] = {
    "directory": [("echo out; pwd", {"cwd": "/tmp"}, "out\n/tmp\n")],
    "exit code": [("echo before; exit 3", {}, (CommandExitException, "exit code 3"))],
    "environment": [('echo "$GREETING$A"', {"envs": {"A": "'"}}, f"{GREETING}'\n")],
    "reading without stdin ends at once": [("cat", {}, "")],
    "endless output is killed": [("yes", {}, (CommandExitException, "too much output"))],
    "arguments that cannot be passed raise": [
        ("echo \0", {}, (InvalidArgumentException, "NUL")),
        ("x" * 500_000, {}, (InvalidArgumentException, "bytes")),
        ("true", {"envs": {"A=B": "1"}}, (InvalidArgumentException, "A=B")),
        ("id", {"user": "root"}, (NotSupportedException, "root")), ("echo ok", {}, "ok\n")],
    "no more privileges than code": [
        ("grep -E 'CapEff|Seccomp:|NoNewPrivs' /proc/self/status", {},
         f"CapEff:\t{0:016}\nNoNewPrivs:\t1\nSeccomp:\t2\n"),
        ("unshare -U true", {}, (CommandExitException, "exit code 1"))],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_command_returns_output_and_exit_code(sandbox: Sandbox, name: str) -> None:
    for cmd, options, comes in COMMANDS[name]:
        if isinstance(comes, str):
            result = sandbox.commands.run(cmd, **options)
            assert isinstance(result, CommandResult)
            assert (result.stdout, result.exit_code) == (comes, 0)
        else:
            with pytest.raises(comes[0], match=comes[1]):
                sandbox.commands.run(cmd, **options)


class TestCommands:
    def test_output_of_a_failed_command_is_kept(self, sandbox: Sandbox) -> None:
        with pytest.raises(CommandExitException) as caught:
            sandbox.commands.run("echo out; echo err >&2; exit 3")
        error = caught.value
        assert (error.exit_code, error.stdout, error.stderr) == (3, "out\n", "err\n")

    def test_timeout_kills_the_command(self, sandbox: Sandbox) -> None:
        with pytest.raises(TimeoutException):
            sandbox.commands.run("sleep 100", timeout=0.2)
        assert sandbox.commands.list() == []

    def test_stdin_list_and_kill(self, sandbox: Sandbox) -> None:
        handle = start(sandbox, "cat", stdin=True, envs={"A": "1"})
        (info,) = sandbox.commands.list()
        assert (info.pid, info.cmd, info.cwd) == (handle.pid, "cat", "/home/user")
        assert (info.args, info.envs, info.tag) == (["-c", "cat"], {"A": "1"}, None)
        sandbox.commands.send_stdin(handle.pid, "hello")
        sandbox.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "hello"
        sleeper = start(sandbox, "sleep 100")
        assert sandbox.commands.kill(sleeper.pid)
        with pytest.raises(CommandExitException, match="signal 9"):
            sleeper.wait()
        assert not sandbox.commands.kill(sleeper.pid)

    def test_large_output_and_listeners(self, sandbox: Sandbox) -> None:
        pieces: list[str] = []
        cmd = "head -c 1000000 /dev/zero | tr '\\0' x"
        result = sandbox.commands.run(cmd, on_stdout=pieces.append)
        assert isinstance(result, CommandResult)
        assert result.stdout == "x" * 1_000_000 == "".join(pieces)


class TestFiles:
    def test_write_read_and_code_sees_it(self, sandbox: Sandbox) -> None:
        info = sandbox.files.write("a/b/c.txt", "täxt")
        assert info.path == "/home/user/a/b/c.txt"
        assert sandbox.files.read("a/b/c.txt") == "täxt"
        assert sandbox.files.read("a/b/c.txt", format="bytes") == "täxt".encode()
        assert sandbox.run_code("open('a/b/c.txt', 'a').write('!')").text == "1"
        assert sandbox.files.read("/home/user/a/b/c.txt") == "täxt!"

    def test_list_info_rename_remove(self, sandbox: Sandbox) -> None:
        sandbox.files.write_files([{"path": "d/x", "data": "1"}, {"path": "d/y", "data": b"22"}])
        assert [(e.name, e.size) for e in sandbox.files.list("d")] == [("x", 1), ("y", 2)]
        assert [e.name for e in sandbox.files.list(".", depth=2)] == ["d", "x", "y"]
        sandbox.files.rename("d/x", "z")
        assert not sandbox.files.exists("d/x")
        assert sandbox.files.get_info("z").size == 1
        sandbox.files.remove("d")
        assert [e.name for e in sandbox.files.list()] == ["z"]
        assert sandbox.files.make_dir("e/f")
        assert not sandbox.files.make_dir("e/f")

    def test_read_only_directories_are_removed(self, sandbox: Sandbox) -> None:
        sandbox.run_code(LOCKED)
        sandbox.files.remove("top")
        assert [entry.name for entry in sandbox.files.list()] == ["kept"]
        assert sandbox.files.get_info("kept").mode == 0o500

    def test_missing_files_raise(self, sandbox: Sandbox) -> None:
        for act in (sandbox.files.read, sandbox.files.remove, sandbox.files.get_info):
            with pytest.raises(FileNotFoundException):
                act("nothing")

    @pytest.mark.parametrize(
        "target",
        ["/etc/shadow", "../../etc/shadow", "/proc/1/root/etc/shadow", "/proc/self/root/etc/shadow",
         "/root", "loop", "/dev/zero", "/proc/self/environ", "fifo"],
    )  # fmt: skip
    def test_links_do_not_lead_out(self, sandbox: Sandbox, target: str) -> None:
        sandbox.run_code(f"import os; os.mkfifo('fifo'); os.symlink({target!r}, 'link')")
        sandbox.run_code("os.symlink('loop', 'loop')")
        with pytest.raises(SandboxException):
            sandbox.files.read("link")

    def test_writing_through_a_link_stays_inside(self, sandbox: Sandbox) -> None:
        sandbox.run_code("import os; os.symlink('/tmp/inside', 'link')")
        sandbox.files.write("link", "x")
        assert sandbox.run_code("open('/tmp/inside').read()").text == "x"
        sandbox.run_code("os.symlink('/etc/passwd', 'outside')")
        with pytest.raises(SandboxException):
            sandbox.files.write("outside", "x")

    def test_removing_a_link_keeps_its_target(self, sandbox: Sandbox) -> None:
        sandbox.run_code("import os; os.mkdir('t'); open('t/f', 'w'); os.symlink('t', 'link')")
        sandbox.files.remove("link")
        assert sandbox.files.exists("t/f")

    def test_file_sizes_are_limited(self, sandbox: Sandbox) -> None:
        """By the largest directory of a session, 64 MiB here."""
        size = 40 << 20
        for data in (b"x" * size, "x" * size, io.BytesIO(b"x" * size), io.StringIO("x" * size)):
            sandbox.files.write("big", data)
            assert sandbox.files.get_info("big").size == size
            assert sandbox.files.read("big", format="bytes") == b"x" * size
        sandbox.files.remove("big")
        for more in (b"x" * (65 << 20), io.BytesIO(b"x" * (65 << 20))):
            with pytest.raises(NotEnoughSpaceException, match=f"more than {64 << 20} bytes"):
                sandbox.files.write("big", more)
        sandbox.files._size_max = 1 << 20
        sandbox.run_code("f = open('sparse', 'wb'); f.truncate(2 << 20)")
        with pytest.raises(InvalidArgumentException, match="larger"):
            sandbox.files.read("sparse")

    def test_a_full_file_system_raises(self, sandbox: Sandbox) -> None:
        for i in range(4):
            code = f"with open('f{i}', 'wb') as f:\n for _ in range(240): f.write(x)"
            sandbox.run_code(f"x = b'x' * 65536\n{code}")
        with pytest.raises(NotEnoughSpaceException):
            sandbox.files.write("one more", b"x" * (15 << 20))

    @pytest.mark.parametrize("path", ["", "a\0b", "."])
    def test_invalid_paths_raise(self, sandbox: Sandbox, path: str) -> None:
        with pytest.raises(SandboxException):
            sandbox.files.remove(path)


class TestLifecycle:
    def test_use_after_kill_raises(self, sandbox: Sandbox) -> None:
        assert sandbox.is_running()
        assert sandbox.kill()
        assert not sandbox.kill()
        assert not sandbox.is_running()
        with pytest.raises(SandboxNotFoundException):
            sandbox.run_code("1")
        with pytest.raises(SandboxNotFoundException):
            sandbox.commands.run("true")

    def test_timeout_ends_the_sandbox(self, sandbox: Sandbox) -> None:
        sandbox.set_timeout(0.05)
        assert sandbox._timer is not None
        sandbox._timer.join()
        for act in (lambda: sandbox.run_code("1"), lambda: sandbox.set_timeout(9)):
            with pytest.raises(SandboxNotFoundException):
                act()

    def test_get_info_has_template_and_metadata(self, pool: SandboxPool) -> None:
        with Sandbox.create(pool=pool, metadata={"run": "7"}, timeout=60) as made:
            info = made.get_info()
            assert (info.sandbox_id, info.metadata) == (made.sandbox_id, {"run": "7"})
            assert 59 <= info.end_at - info.started_at <= 61

    def test_features_of_the_cloud_are_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(NotSupportedException):
            Sandbox.create(allow_internet_access=True)
        for refused in (lambda: sandbox.pty, lambda: sandbox.files.watch_dir(".")):
            with pytest.raises(NotSupportedException):
                refused()
        for name in ("pause", "beta_pause", "resume", "get_host", "get_metrics",
                     "upload_url", "download_url"):  # fmt: skip
            with pytest.raises(NotSupportedException, match=name):
                getattr(sandbox, name)(80)
        with pytest.raises(SandboxException, match="the session has no image"):
            sandbox.create_snapshot()

    def test_list_and_connect(self, pool: SandboxPool, sandbox: Sandbox) -> None:
        with Sandbox(pool=pool, metadata={"a": "b"}) as other:
            ids = {info.sandbox_id: info for info in Sandbox.list()}
            assert {sandbox.sandbox_id, other.sandbox_id} <= ids.keys()
            assert ids[other.sandbox_id].metadata == {"a": "b"}
            pages = Sandbox.list()
            paged = (pages.has_next, len(pages.next_items()), pages.has_next)
            assert paged == (True, len(pages), False)
            assert Sandbox.connect(other.sandbox_id, timeout=99) is other
            assert 90 < other.get_info().end_at - time.time() < 100
        assert other.sandbox_id not in {info.sandbox_id for info in Sandbox.list()}
        for gone in (other.sandbox_id, "nothing"):
            with pytest.raises(SandboxNotFoundException, match=gone):
                Sandbox.connect(gone)
        with pytest.raises(InvalidArgumentException, match=r"AsyncSandbox\.create"):
            AsyncSandbox()

    def test_list_works_while_others_are_created(
        self, pool: SandboxPool, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def running(one: Sandbox) -> bool:
            api._live[uuid.uuid4().hex] = one  # as by another thread
            return True

        monkeypatch.setattr(Sandbox, "is_running", running)
        assert sandbox.sandbox_id in [info.sandbox_id for info in Sandbox.list()]

    def test_connection_arguments_are_ignored_with_one_warning(
        self, pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(guards, "_warned", [])
        cloud: dict[str, Any] = dict.fromkeys(guards.CONNECTION, "x")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Sandbox.create(pool=pool, api_key=None) as sandbox:
                assert caught == []
                Sandbox(pool=pool, api_key="e2b_1", domain="e2b.dev").kill()
                Sandbox.list(**cloud)
                assert Sandbox.connect(sandbox.sandbox_id, **cloud) is sandbox
                assert sandbox.run_code("1 + 1", **cloud).text == "2"
                sandbox.files.write("f", "x", **cloud)
                assert sandbox.files.read("f", **cloud) == "x"
                start(sandbox, "echo 1", **cloud).wait()
                sandbox.set_timeout(60, **cloud)
                assert sandbox.kill(**cloud)
        assert [str(one.message).partition(":")[0] for one in caught] == ["api_key, domain"]
        assert caught[0].filename == __file__

    def test_a_listener_uses_the_sandbox_while_another_thread_kills_it(
        self, sandbox: Sandbox
    ) -> None:
        listed: list[int] = []

        def on_output(_: OutputMessage) -> None:
            threading.Thread(target=sandbox.kill).start()
            while not sandbox._closed:
                time.sleep(0.001)
            listed.append(len(sandbox.list_code_contexts()))

        def run() -> None:
            with contextlib.suppress(TimeoutException):
                sandbox.run_code("import time; print(1); time.sleep(100)", on_stdout=on_output)

        threading.Thread(target=run, daemon=True).start()
        assert within(lambda: listed == [3], 60)

    def test_async_has_all_methods(self, pool: SandboxPool) -> None:
        async def work() -> None:
            async with await AsyncSandbox.create(pool=pool) as sandbox:
                context = await sandbox.create_code_context(language="bash")
                assert (await sandbox.list_code_contexts())[-1] == context
                await sandbox.remove_code_context(context)
                assert (await sandbox.get_info()).sandbox_id == sandbox.sandbox_id
                with pytest.raises(NotSupportedException):
                    await sandbox.pause()

        asyncio.run(work())
        public = {name for name in dir(Sandbox) if not name.startswith("_")}
        assert {name for name in public if isinstance(vars(Sandbox).get(name), classmethod)} <= {
            *vars(AsyncSandbox)
        }

    def test_all_async_results_are_awaitable(self, pool: SandboxPool) -> None:
        """What is returned, listened to and found waits in threads as well."""
        ticks: list[int] = []
        heard: list[str] = []

        async def tick() -> None:
            while True:
                ticks.append(1)
                await asyncio.sleep(0.02)

        async def hear(said: object) -> None:
            await asyncio.sleep(0)
            heard.append(getattr(said, "line", str(said)))

        async def fail(_: object) -> None:
            raise KeyError("theirs")

        async def work() -> None:
            ticking = asyncio.create_task(tick())
            async with await AsyncSandbox.create(pool=pool) as sandbox:
                command = await sandbox.commands.run("sleep 0.5; echo done", background=True)
                await sandbox.files.write("f", "kept")
                assert await sandbox.files.read("f") == "kept"
                before = len(ticks)
                assert (await command.wait(on_stdout=hear)).stdout == "done\n"
                assert len(ticks) - before > 5
                await sandbox.run_code("print(1)", on_stdout=hear)
                with pytest.raises(KeyError, match="theirs"):
                    await sandbox.commands.run("echo x", on_stdout=fail)
                again = await AsyncSandbox.connect(sandbox.sandbox_id)
                other = await again.commands.run("sleep 9", background=True)
                assert other.pid in [one.pid for one in await again.commands.list()]
                assert await (await sandbox.commands.connect(other.pid)).kill()
                pages = AsyncSandbox.list()
                assert sandbox.sandbox_id in [i.sandbox_id for i in await pages.next_items()]
                assert not pages.has_next
            ticking.cancel()

        asyncio.run(work())
        assert heard == ["done\n", "1\n"]

    def test_cancellation_leaves_nothing_behind(self) -> None:
        async def work(pool: SandboxPool) -> None:
            for _ in range(5):
                making = asyncio.create_task(AsyncSandbox.create(pool=pool))
                await asyncio.sleep(0)
                making.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await making
            async with await AsyncSandbox.create(pool=pool) as sandbox:
                for code in ("x = 1\nimport time; time.sleep(100)", "while True: pass"):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(sandbox.run_code(code, timeout=100), 0.5)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(sandbox.commands.run("sleep 100", timeout=0), 0.5)
                began = time.monotonic()
                while await sandbox.commands.list():
                    await asyncio.sleep(0.05)
                assert (await sandbox.run_code("x")).text == "1"
                assert time.monotonic() - began < 30

        with SandboxPool(min_idle=0, zygotes=1) as pool:
            asyncio.run(work(pool))
            assert within(lambda: pool.metrics()["live"] == 0)
