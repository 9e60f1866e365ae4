"""How a program of the user's runs: in a session of the sandbox, as a process, or in this process.

It finds the endpoint where every client looks (OPENAI_BASE_URL and so on), its task as JSON in the
file that AGENTGRPO_TASK names and on standard input, and ends by exiting. Its answer is what it
wrote to `answer.txt`, else the last line of its standard output, else nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgrpo.actions import InfrastructureError, as_json
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config.read import load_callable
from agentgrpo.programs import in_session
from agentgrpo.programs.endpoint import Endpoint
from agentgrpo.programs.requests import MODEL
from agentgrpo.programs.session import Session
from agentgrpo.sandbox import SandboxException, SandboxInfraError, SandboxPool, Template
from agentgrpo.sandbox.isolation.errors import SandboxNotFoundException
from agentgrpo.sandbox.session.listener import PORT, listener_in
from agentgrpo.sandbox.session.program import Program
from agentgrpo.sandbox.session.step_result import StepStatus
from agentgrpo.support.user_calls import describe_error, error_location, event_loop, print_stderr
from agentgrpo.types import Task

QUIET = {
    "ANONYMIZED_TELEMETRY": "False",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
"""What keeps clients from calling out, where the user's environment does not say otherwise."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy")
TASK_FILE, ANSWER_FILE = "task.json", "answer.txt"
FOLDER = "/installed-agent"
"""Of a program in a container image, as Harbor names it; no verdict takes its files."""
TAIL = 2000
"""Characters of a program's errors that are kept."""
PYTHON = ("python", "python3")
MOST = 1 << 20
"""Bytes of an answer or of output that are read, from the end."""
UNREADABLE = "wrote no answer that can be read"
NOT_FOUND = ("126", "127")
"""Exit codes of a shell and of env that could not start a command."""
RAISED = re.compile(
    r"Traceback \(most recent call last\)|^(Syntax|Indentation|Tab)Error: "
    r"|^\S+: (can't open file|No module named|Error while finding module) ", re.MULTILINE,
)  # fmt: skip
"""What Python says when nothing has caught an exception, or when it cannot begin."""
NO_ROOM = ("MemoryError", "BlockingIOError")
"""Exceptions of the session's limits."""
SHORT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
"""Errors of a start for which the machine has no process, thread, descriptor, memory or disk."""
STARTS = 4
"""Sessions that begin at once: a zygote answers within seconds, but not hundreds who ask it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    answer: str | None
    failed: str = ""
    """What went wrong, if something did: the end of its traceback."""
    error: BaseException | None = None
    """Where it was raised in this process."""
    program_fault: bool = False
    """It failed of itself: an exception of Python's that nothing caught, or a start that failed. A
    signal, a limit or an answer that cannot be read may be what the policy's code has done."""


def launcher_of(agent: ProgramAgent) -> Launcher | None:
    """What starts the program that an agent names; None: the environment's episodes are it."""
    if agent.call:
        function = load_callable(agent.call, key="agent.options.call")
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"agent.options.call: {agent.call!r} must be an async def function")
        return Awaited(function)
    if not agent.command:
        return None
    program = agent.command[0]
    if agent.sandbox == "none":
        if "/" not in program and program not in PYTHON and not shutil.which(program):
            raise ValueError(f"agent.options.command: there is no program {program!r}")
        print_stderr('programs run as you, isolated by nothing (agent.options.sandbox = "none")')
        return Process(agent.command, agent.files)
    if getattr(agent.env, "hosts_programs", False):
        return Hosted(agent.pool, agent.command, agent.files, agent.timeout_s)
    script = [*agent.command[1:2]]
    if program in PYTHON and (not script or (script[0][:1] == "-" and script[0] != "-m")):
        raise ValueError(
            "agent.options.command: after `python` expected a file or -m, got "
            f"{list(agent.command)!r}: it is the session's own interpreter, which has no options"
        )
    if agent.pool.degraded:
        raise ValueError(
            "agent.options.sandbox: without namespaces (sandbox.allow_degraded) a session has no "
            'network of its own; use sandbox = "none" or call'
        )
    return Sandboxed(agent.pool, agent.command, agent.files, agent.timeout_s)


def task_json(task: Task) -> dict[str, Any]:
    """What a program is told: never the task's spec, which holds the solution."""
    messages = [dict(message) for message in task.messages]
    asked = [m["content"] for m in messages if m["role"] == "user"]
    return {"id": task.id, "messages": messages, "question": asked[-1] if asked else ""}


def variables(url: str, key: str) -> dict[str, str]:
    """How every client finds the endpoint, and by no proxy."""
    return {
        "NO_PROXY": "*",
        "no_proxy": "*",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": MODEL,
    }


def session_variables(key: str) -> dict[str, str]:
    """The same in a session, whose address is always one; its listener takes any key."""
    task = {"AGENTGRPO_TASK": f"/home/user/{TASK_FILE}"}
    return {**variables(f"http://127.0.0.1:{PORT}", key), **task}


def last_line(text: str) -> str | None:
    """The last one that is not empty."""
    last = text.replace("\r", "\n").rstrip().rpartition("\n")[2].strip()
    return last or None


# --- in this process


class Awaited:
    """A coroutine function of the user's; all of a run are on one event loop.

    Clients keep their connections to a loop, so it is the same one for the whole run.
    """

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def start(self, task: Task, session: Session, endpoint: Endpoint) -> Running:
        """Call it: function(task, base_url=..., api_key=..., model=...)."""
        return _Coroutine(self._play(task, session, endpoint))

    async def _play(self, task: Task, session: Session, endpoint: Endpoint) -> Outcome:
        given = {"base_url": f"{endpoint.url}/v1", "api_key": session.key, "model": MODEL}
        try:
            answer = await self._function(task_json(task), **given)
        except InfrastructureError:
            raise
        except asyncio.CancelledError as error:
            return Outcome(None, "was cancelled", error, program_fault=True)
        except BaseException as error:
            where = error_location(error, self._function)
            said = f"{describe_error(error)}{f' (at {where})' if where else ''}"
            return Outcome(None, said, error, program_fault=True)
        return Outcome(_as_answer(answer))


def _as_answer(answer: Any) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    try:
        return json.dumps(as_json(answer), ensure_ascii=False)
    except ValueError:
        return str(answer)


class _Coroutine:
    def __init__(self, work: Coroutine[Any, Any, Outcome]) -> None:
        self._loop = event_loop("programs")
        self.outcome: Future[Outcome] = asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        self.outcome.cancel()


# --- as a process of the user's own


class Process:
    """A command, as the user who trains, in a directory of its own. Nothing isolates it."""

    def __init__(self, command: Sequence[str], files: Sequence[Path]) -> None:
        self._command, self._files = command, files

    def start(self, task: Task, session: Session, endpoint: Endpoint) -> Running:
        return _Run(lambda run: self._play(run, task, session, endpoint))

    def _play(self, run: _Run, task: Task, session: Session, endpoint: Endpoint) -> Outcome:
        """Its output goes to files: what it leaves running may hold a pipe for ever. They have no
        name, so that nothing the program does to its folder is done to them.
        """
        with ExitStack() as held:
            folder = tempfile.TemporaryDirectory(
                prefix="agentgrpo-program-", ignore_cleanup_errors=True
            )
            place = Path(held.enter_context(folder))
            for path in self._files:
                if path.is_dir():
                    shutil.copytree(path, place / path.name, dirs_exist_ok=True)
                else:
                    shutil.copy(path, place / path.name)
            told = json.dumps(task_json(task), ensure_ascii=False)
            (place / TASK_FILE).write_text(told, encoding="utf-8")
            kept = {k: v for k, v in os.environ.items() if k.lower() not in PROXIES}
            env = {
                **QUIET, **kept, **variables(endpoint.url, session.key),
                "AGENTGRPO_TASK": str(place / TASK_FILE),
            }  # fmt: skip
            head = [sys.executable] if self._command[0] in PYTHON else self._command[:1]
            out, err = (held.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            task_in = held.enter_context(open(place / TASK_FILE, "rb"))
            try:
                process = subprocess.Popen(
                    [*head, *self._command[1:]], cwd=place, env=env, start_new_session=True,
                    stdin=task_in, stdout=out, stderr=err,
                )  # fmt: skip
            except OSError as error:
                if error.errno in SHORT:
                    raise
                return Outcome(None, f"did not start: {error}", program_fault=True)

            def end() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            run.ends_by(end)
            code = process.wait()
            end()  # what it has left behind
            answer = _answer_at(place / ANSWER_FILE)
            said, wrong = answer or (last_line(_tail(out.fileno())), "")
            why = "SIGKILL; the kernel sends it where the machine has no memory left"
            return _exited(str(code), _tail(err.fileno()), said, wrong, why if code == -9 else "")


def _answer_at(path: Path) -> tuple[str | None, str] | None:
    """As _answer_in(), of a file here."""
    if not os.path.lexists(path):
        return None
    try:
        if not path.is_file():
            return None, f"{UNREADABLE}: {ANSWER_FILE} is no regular file"
        with path.open("rb") as file:
            return _tail(file.fileno()), ""
    except OSError as error:
        return None, f"{UNREADABLE}: {error.strerror}"


def _tail(file: int) -> str:
    """The end of an open file, as text; where its writers stand is not moved."""
    read = os.pread(file, MOST, max(0, os.fstat(file).st_size - MOST))
    return read.decode("utf-8", "replace")


# --- in the sandbox


class Sandboxed:
    """A command in a session: no network but the endpoint, which it finds on its own loopback."""

    folder = ""
    """Where its files are; "": at home."""

    def __init__(
        self, pool: SandboxPool, command: Sequence[str], files: Sequence[Path], timeout_s: float
    ) -> None:
        self._pool = pool
        self._timeout_s, self._starts = timeout_s, threading.Semaphore(STARTS)
        inside = {name: path for of in files for name, path in _inside(of)}
        self._files = {name: path.read_bytes() for name, path in inside.items()}
        self._programs = [name for name, path in inside.items() if os.access(path, os.X_OK)]
        given = f"{list(command)!r}, {self._programs!r}, {TASK_FILE!r}, {PYTHON!r}"
        self._code = f"{Path(in_session.__file__).read_text()}\n\nmain({given})\n"
        """Of a step that runs the command; its value is the exit code."""

    def start(self, task: Task, session: Session, endpoint: Endpoint) -> Running:
        return _Run(lambda run: self._play(run, task, session, endpoint))

    def _equip(
        self, jail: Any, task: Task, session: Session, endpoint: Endpoint, held: ExitStack
    ) -> None:
        """Give a session the endpoint, as long as `held` is, the files and the task."""
        server = endpoint.listen(listener_in(jail), session).result()
        held.callback(endpoint.hang_up, server)
        with contextlib.closing(jail.files()) as files:
            for name, data in self._files.items():
                files.write(self.folder + name, data)
            files.write(self.folder + TASK_FILE, json.dumps(task_json(task), ensure_ascii=False))

    def _play(self, run: _Run, task: Task, session: Session, endpoint: Endpoint) -> Outcome:
        with ExitStack() as held:
            with self._starts:
                jail = held.enter_context(self._pool.acquire())
                self._equip(jail, task, session, endpoint, held)
            run.ends_by(jail.close)
            env = {**QUIET, **self._pool.template.env, **session_variables(session.key)}
            done = jail.step(self._code, self._timeout_s, env=env)
            answer = None if done.state_lost else _answer_in(jail)
        if done.status is StepStatus.INFRA_ERROR:
            raise InfrastructureError(done.detail)
        said, wrong = answer or (last_line(done.stdout), "")
        full = done.oom_kills or "MemoryError" in f"{done.error}{done.stderr}"
        why = f"it needs more than sandbox.memory_mib = {self._pool.limits.memory_mib}"
        why = why if full or done.status is StepStatus.OOM else ""
        if done.error is not None:  # nothing of that name, or no room for a process
            told = f"{done.error.name}: {done.error.value} {why}".strip()
            return Outcome(said, told, program_fault=done.error.name not in NO_ROOM)
        if done.status is not StepStatus.OK:
            if done.status is StepStatus.OUTPUT_LIMIT:  # what was printed last is not known
                said = None
            told = f"{done.status}: {done.detail} {why} {done.stderr[-TAIL:]}".strip()
            return Outcome(said, told)
        return _exited(done.value or "0", done.stderr, said, wrong, why)


class Hosted(Sandboxed):
    """A command in the session of an episode, which judges what it changes there: an image's, whose
    programs run it. It starts in the image's working directory; its files are in FOLDER.
    """

    folder = f"{FOLDER}/"
    _begin: Any = None

    def __init__(
        self, pool: SandboxPool, command: Sequence[str], files: Sequence[Path], timeout_s: float
    ) -> None:
        super().__init__(pool, command, files, timeout_s)
        copied = {path.name for path in files}
        words = ["python3" if command[0] in PYTHON else command[0], *command[1:]]
        paths = [os.path.normpath(word) for word in words]
        self._words = [
            self.folder + path if path.partition("/")[0] in copied else word
            for word, path in zip(words, paths, strict=True)
        ]

    def of(self, episode: Any) -> Hosted:
        """What starts the program in this episode."""
        launcher = copy.copy(self)
        launcher._begin = episode.begin
        return launcher

    def _play(self, run: _Run, task: Task, session: Session, endpoint: Endpoint) -> Outcome:
        with ExitStack() as held:
            with self._starts:
                jail = self._begin()
                self._equip(jail, task, session, endpoint, held)
            env = {**QUIET, **jail.places.environment(Template()), **session_variables(session.key)}
            env["AGENTGRPO_TASK"] = self.folder + TASK_FILE
            executable = [self.folder + name for name in self._programs]
            line = f"{shlex.join(['chmod', '+x', *executable])}; " * bool(executable)
            line += f"exec {shlex.join(self._words)} < {env['AGENTGRPO_TASK']}"
            program = Program(
                jail.channels, ["/bin/bash", "-c", line], env=env, directory=jail.places.home,
                output_max=4 << 20,
            )  # fmt: skip
            held.callback(program.close)
            run.ends_by(program.kill)
            program.wait(None)
        if program.machine_failed:
            raise InfrastructureError(program.machine_failed)
        stdout, stderr = (
            bytes(out).decode("utf-8", "replace") for out in (program.stdout, program.stderr)
        )
        if program.error:
            return Outcome(None, program.error)
        code = program.exit_code if program.signal is None else -program.signal
        why = "SIGKILL; its session has environment.memory_mb" if code == -9 else ""
        return _exited(str(code), stderr, last_line(stdout), "", why)


def _answer_in(jail: Any) -> tuple[str | None, str] | None:
    """What a program has written as its answer, and what is wrong with the file; None: it has not.

    The file is untrusted: a pipe, a folder or a link to nowhere is the program's doing.
    """
    with contextlib.closing(jail.files()) as files:
        try:
            return (files.read(ANSWER_FILE), "") if files.exists(ANSWER_FILE) else None
        except (SandboxInfraError, SandboxNotFoundException):
            raise
        except SandboxException as error:
            return None, f"{UNREADABLE}: {error}"


def _exited(code: str, stderr: str, answer: str | None, wrong: str, why: str) -> Outcome:
    """The end of a program; a code below 0 is a signal's. `wrong`: with its answer."""
    if code == "0":
        return Outcome(answer, wrong)
    stderr = stderr.strip()
    last = stderr.rpartition("\n")[2]
    own = code in NOT_FOUND or (RAISED.search(stderr) and not last.startswith(NO_ROOM))
    told = f"exited with {code}{why and f' ({why})'}: {stderr[-TAIL:]}"
    return Outcome(answer, told, program_fault=code.isdecimal() and bool(own))


def _inside(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [(path.name, path)]
    inside = sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return [(str(Path(path.name) / p.relative_to(path)), p) for p in inside]


class _Run:
    """A program, on a thread that waits for it."""

    def __init__(self, play: Callable[[_Run], Outcome]) -> None:
        self.outcome: Future[Outcome] = Future()
        self._stopped = False
        self._end: Callable[[], object] = lambda: None
        try:
            threading.Thread(target=self._run, args=(play,), name="program", daemon=True).start()
        except RuntimeError as error:  # no thread is to be had
            raise InfrastructureError(str(error)) from error

    def _run(self, play: Callable[[_Run], Outcome]) -> None:
        try:
            self.outcome.set_result(play(self))
        except (SandboxException, OSError) as error:  # no descriptor is left, for one
            if self._stopped:
                self.outcome.set_result(Outcome(None, "stopped"))
            else:
                self.outcome.set_exception(InfrastructureError(str(error)))
        except BaseException as error:
            self.outcome.set_exception(error)

    def ends_by(self, end: Callable[[], object]) -> None:
        self._end = end
        if self._stopped:
            end()

    def stop(self) -> None:
        self._stopped = True
        self._end()


Running = _Coroutine | _Run
"""A program that runs: it has its `outcome`, a Future, and is ended by stop()."""
Launcher = Awaited | Process | Sandboxed
"""Starts programs."""
