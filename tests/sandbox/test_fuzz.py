"""Whatever is passed to the sandbox, what comes back is a value, a SandboxException with a reason,
or ValueError or TypeError for the argument. AGENTGRPO_FUZZ=COUNT plays more inputs than 10,000.
"""

import io
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import pytest

from agentgrpo.sandbox import (
    Console,
    HostBudget,
    HostTools,
    Limits,
    Sandbox,
    SandboxException,
    SandboxPool,
    Session,
    Template,
    build_template,
    find_template,
)
from agentgrpo.sandbox.e2b.commands import CommandHandle, Commands
from agentgrpo.sandbox.grading.grade import check_all, check_output, check_tests
from agentgrpo.sandbox.inside.wire import encode
from agentgrpo.sandbox.session.files import Files
from agentgrpo.sandbox.session.step_result import StepStatus

pytestmark = pytest.mark.nsjail


def tell(*values: Any, **named: Any) -> Any:
    """What sessions may call: it gets data, whatever they send."""
    try:
        assert len(json.dumps([values, named], allow_nan=False)) < 64 << 10
    except (ValueError, TypeError, AssertionError) as error:
        unlike.append(error)
    return list(values)


unlike: list[Exception] = []
"""What the function was called with that it may not be."""
HOST = HostTools([tell], budget=HostBudget(calls=10**6, seconds=10**6, total_kib=10**6))


class CallersOwn(Exception):
    """What a listener raises comes back as it is."""


def raises_its_own(*_: object) -> None:
    raise CallersOwn


COUNT = int(os.environ.get("AGENTGRPO_FUZZ", "10000"))
TEXTS = ("", "x", "a b", "\ud800", "\udcff", "\ud83d\ude00", "é\N{SNOWMAN}", "a\0b", "\n",
         "\x0b\u2028",
         "..", "/", ".", "~", "-", "a/" * 1500, "a/" * 2100, "n" * 300, "/proc/self/mem",
         "/dev/zero",
         "/etc/passwd", "d/e/f", "link", "fifo", "/proc/1/root", "x" * 200_000, "%s{}",
         "None")  # fmt: skip
NUMBERS = (0, 1, 2, -1, 3, 0.05, 1e9, 1e300, float("inf"), float("nan"), 2**31, 2**63, 2**64,
           -(2**70),
           10**5000, True, 0.001)  # fmt: skip
OTHERS: tuple[Any, ...] = (
          None, b"", b"\xff\0", [], {}, {"a": "b"}, {"A": "\ud800"}, {"=": "x"}, {1: 2},
          ("x",), object(), io.StringIO("text"), io.BytesIO(b"\xff" * 99),
          raises_its_own)  # fmt: skip
CODES = ("1", "print('\\ud800')", "'\\ud800'", "\ud800", "\0", "1 / 0", "(" * 300, "(" * 9999,
         "raise StopIteration", "raise SystemExit", "raise KeyboardInterrupt", "x = 'a' * 10**6; x",
         "import os; os.makedirs('d/\\udcff', exist_ok=True)", "import os; os.mkfifo('fifo')",
         "import os; os.symlink('/etc/shadow', 'link')",
         "import os; os.utime('x', (2**60, -2**60))",
         "class R:\n def __repr__(s): return '\\ud800' * 3\nR()", "print('a' * 10**6)",
         "10 ** 4000",
         "class E(Exception):\n def __str__(s): return 1\nraise E", "\x0b",
         "import os; os.close(1)",
         "class H:\n _repr_html_ = _repr_png_ = lambda s: '\\ud800'\nH()", "\t\f1", "f(", "'",
         "import os\np = os.getcwd()\nfor _ in range(1500):\n os.mkdir('d'); os.chdir('d')\n"
         "os.chdir(p)", "import os; os._exit(3)", "import threading, os\n"
         "threading.Timer(0.001, os._exit, (0,)).start()")  # fmt: skip
COMMANDS = ("true", "echo '", "cat", "exit 3", "kill -9 $$", "printf '\\377'", "\ud800", "a\0", "",
            "echo \udcff", "head -c 99999 /dev/zero", "cd /nowhere", "cat fifo & true")  # fmt: skip


class Fuzz:
    """Plays calls of every public function with arguments from the lists above."""

    def __init__(self, pool: SandboxPool, seed: int) -> None:
        self.pool, self.rng, self.played = pool, random.Random(seed), Counter[str]()
        self.sandbox = Sandbox.create(pool=pool)
        self.session = pool.acquire(host=HOST.begin())
        self.console = Console(self.session)
        self.handles: list[Any] = []

    def any(self, *likely: Any) -> Any:
        """An argument: mostly one that is likely, else of any kind."""
        kinds = (likely, likely, TEXTS, NUMBERS, OTHERS) if likely else (TEXTS, NUMBERS, OTHERS)
        return self.rng.choice(self.rng.choice(kinds))

    def some(self, **options: Callable[[], Any]) -> dict[str, Any]:
        """Some of these keyword arguments."""
        return {name: make() for name, make in options.items() if self.rng.random() < 0.3}

    def forge(self) -> None:
        """Code that writes frames like a call's to the host, or calls in odd ways."""
        rng = self.rng
        name = rng.choice((b"tell", b"tell", b"untold", b"__import__", b"tell\0", b""))
        data = bytearray(
            rng.choice((b"[[1],{}]", b'[["x",[1.5,{"a":null}]],{"b":true}]', b"[[],{}]"))
        )
        for _ in range(rng.choice((0, 0, 1, 3))):
            data[rng.randrange(len(data))] = rng.choice(b'[]{},:"01x\xff\0e.')
        fields = rng.choice(
            ([b"call", name, bytes(data)],) * 6 + ([b"call"], [b"call", b"", b"", b""])
        )
        frame = bytearray(encode(rng.choice((self.session._sent + 1,) * 5 + (7,)), fields))
        if rng.random() < 0.2:
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        code = rng.choice((
            f"import os; os.write(4, {bytes(frame)!r}); len(os.read(3, 9999))",
            f"import os; os.write(4, {bytes(frame)!r})",
            "tell(1, [2.5, {'a': None}], b=True)", "tell(object())", "tell(10**99)",
            "tell('\\ud800')",
            "import threading\nfor _ in range(9): threading.Thread(target=tell, args=(1,)).start()",
            "import os\nif os.fork() == 0: tell(1)", "while True: tell(1)", "tell(tell)",
        ))  # fmt: skip
        result = self.session.step(code, timeout_s=0.2)
        assert result.status is not StepStatus.INFRA_ERROR, result
        assert not unlike

    def refresh(self) -> None:
        """New ones for those that have ended."""
        if not self.sandbox.is_running():
            self.sandbox.kill()
            self.sandbox, self.handles = Sandbox.create(pool=self.pool), []
        if not (self.session.alive and self.session.healthy()):
            self.session.close()
            self.session = self.pool.acquire(host=HOST.begin())

    def moves(self) -> list[tuple[int, Any, Callable[[], Any]]]:
        """How often a function is called, it, and a call of it."""
        a, files, commands = self.any, self.sandbox.files, self.sandbox.commands
        sandbox, session, pool = self.sandbox, self.session, self.pool
        path, code = partial(a, *TEXTS), partial(a, *CODES)
        timeout, env = partial(a, 0.02, 0.1, 1), partial(a, {"A": "b"}, {})
        handle = self.rng.choice(self.handles) if self.handles else None
        cmd: dict[str, Callable[[], Any]] = {"envs": env, "user": a, "cwd": path, "stdin": a}
        listeners: dict[str, Callable[[], Any]] = {"on_stdout": partial(a, len), "on_stderr": a}
        return [
            (90, Files.read, lambda: files.read(path(), **self.some(format=lambda: a("bytes")))),
            (90, Files.write, lambda: files.write(path(), a("x", b"y"))),
            (20, Files.write_files, lambda: files.write_files(a([{"path": path(),
                "data": a("x")}]))),
            (60, Files.list, lambda: files.list(path(), **self.some(depth=lambda: a(1, 2, 9999)))),
            (60, Files.get_info, lambda: files.get_info(path())),
            (60, Files.exists, lambda: files.exists(path())),
            (30, Files.remove, lambda: files.remove(path())),
            (30, Files.rename, lambda: files.rename(path(), path())),
            (30, Files.make_dir, lambda: files.make_dir(path())),
            (2, Files.watch_dir, lambda: files.watch_dir(path())),
            (1, Files.close, files.close),
            (4, Commands.run, lambda: commands.run(a(*COMMANDS), timeout=a(0.05), **self.some(
                **{**cmd, **listeners, "background": a}))),
            (6, Commands.run, lambda: self.handles.append(
                commands.run(a(*COMMANDS), background=True, **self.some(**cmd)))),
            (9, Commands.list, commands.list),
            (1, Commands.kill_all, commands.kill_all),
            (9, Commands.kill, lambda: commands.kill(a(3, 4))),
            (9, Commands.send_stdin, lambda: commands.send_stdin(a(3, 4), a("x"))),
            (9, Commands.close_stdin, lambda: commands.close_stdin(a(3, 4))),
            (9, Commands.connect, lambda: commands.connect(a(3, 4))),
            (1, Commands.close, commands.close),
            (4, CommandHandle.wait, lambda: handle and handle.wait(timeout=a(0.02))),
            (4, CommandHandle.kill, lambda: handle and handle.kill()),
            (4, CommandHandle.send_stdin, lambda: handle and handle.send_stdin(a("x"))),
            (70, Sandbox.run_code, lambda: sandbox.run_code(code(), **self.some(
                timeout=timeout, envs=env, context=a, on_result=a, on_error=a, **listeners))),
            (2, Sandbox.create, lambda: Sandbox.create(pool=pool, **self.some(
                envs=env, metadata=a, timeout=timeout, secure=a, template=a, image=a)).kill()),
            (9, Sandbox.list, Sandbox.list),
            (9, Sandbox.connect, lambda: Sandbox.connect(a(sandbox.sandbox_id), a(9, 99))),
            (1, Sandbox.create_code_context, lambda: sandbox.create_code_context(
                **self.some(cwd=path, language=lambda: a("python")))),
            (9, Sandbox.list_code_contexts, sandbox.list_code_contexts),
            (9, Sandbox.remove_code_context, lambda: sandbox.remove_code_context(a())),
            (9, Sandbox.restart_code_context, lambda: sandbox.restart_code_context(a())),
            (9, Sandbox.set_timeout, lambda: sandbox.set_timeout(a(9, 99))),
            (9, Sandbox.is_running, sandbox.is_running),
            (9, Sandbox.get_info, sandbox.get_info),
            (9, Sandbox.create_snapshot, lambda: sandbox.create_snapshot(a(None))),
            (1, Sandbox.kill, sandbox.kill),
            (70, Session.step, lambda: session.step(code(), **self.some(timeout_s=timeout,
                env=env))),
            (9, Session.evaluate, lambda: session.evaluate(code())),
            (30, Session.cell, lambda: session.cell(code(), **self.some(
                timeout_s=timeout, env=env, listener=a))),
            (2, Session.attach_host_tools, lambda: session.attach_host_tools(a(HOST.begin()))),
            (40, Fuzz.forge, self.forge),
            (20, Session.ask, lambda: session.ask([a(b"[]", b"x" * 10**6)], timeout())),
            (20, Session.push, lambda: session.push(code(), timeout())),
            (9, Session.make_console, session.make_console),
            (9, Session.set_env, lambda: session.set_env(env())),
            (9, Session.interrupt, session.interrupt),
            (9, Session.warm_up, lambda: session.warm_up(timeout())),
            (9, Session.files, lambda: session.files().close()),
            (9, Session.snapshot, lambda: session.snapshot(a(None))),
            (1, Session.close, session.close),
            (2, SandboxPool.acquire, lambda: pool.acquire(timeout(), env=env()).close()),
            (9, SandboxPool.acquire, lambda: pool.acquire(a("base"), 0.1).close()),
            (2, SandboxPool.run, lambda: pool.run(code(), **self.some(timeout_s=timeout, env=env))),
            (9, SandboxPool.metrics, pool.metrics),
            (9, SandboxPool.describe, pool.describe),
            (20, Console.type, lambda: self.console.type(code(), timeout())),
            (2, check_output, lambda: check_output(pool, code(), a("x"), stdin=a("x"),
                timeout_s=1)),
            (1, check_tests, lambda: check_tests(pool, code(), a("f(1)", "assert f"), timeout_s=1)),
            (1, check_all, lambda: check_all(pool, code(), a([("x", "y")]), timeout_s=1)),
            (9, find_template, lambda: find_template(a("python"))),
            (3, build_template, lambda: build_template(a("ü", "a b"), env=env())),
            (9, Limits, lambda: Limits(**{a("steps", "cpus"): a()})),
            (9, Template, lambda: Template(
                **{a("env", "mounts", "python", "site_dirs", "image"): a()})),
        ]  # fmt: skip

    def play(self, count: int) -> None:
        """So many calls; an exception that may not come goes through."""
        for _ in range(count):
            self.refresh()
            moves = self.moves()
            (_, function, move) = self.rng.choices(moves, [often for often, *_ in moves])[0]
            name = f"{function.__module__}.{function.__qualname__}"
            told = ""
            try:
                move()
            except SandboxException as error:
                told = str(error)
            except (ValueError, TypeError, AttributeError, LookupError, CallersOwn):
                pass  # as Python says of an argument that is of no use
            assert told.encode() or not told, "it can be printed"
            self.played[name] += 1

    def close(self) -> None:
        """End what lives."""
        self.session.close()
        self.sandbox.kill()


@pytest.fixture
def fuzz() -> Iterator[Fuzz]:
    limits = Limits(timeout_s=1.0, memory_mib=256, processes=32, open_files=128, grace_s=0.1)
    with SandboxPool(limits=limits, max_live=8, min_idle=2, zygotes=1) as pool:
        playing = Fuzz(pool, seed=18)
        yield playing
        playing.close()


INTERNAL = {"begin", "expire", "end_by", "healthy", "seconds_left",
            "cpu_seconds"}  # fmt: skip
"""Of Session, for the pool and the watchdog."""


def test_random_calls_raise_only_documented_exceptions(
    fuzz: Fuzz, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTGRPO_TEMPLATES", str(tmp_path))
    fuzz.play(COUNT)
    named = {function.__qualname__ for _, function, _ in fuzz.moves()}
    for owner in (Sandbox, Files, Commands, CommandHandle, Session, Console):
        for name, member in vars(owner).items():
            if isinstance(member, (FunctionType, classmethod)) and not name.startswith("_"):
                assert f"{owner.__name__}.{name}" in named or name in INTERNAL, name
    if COUNT >= 10_000:
        assert len(fuzz.played) == len(named), "every one was called"
    with fuzz.pool.acquire() as session:
        assert session.step("1").status is StepStatus.OK, "the pool is well after it"
