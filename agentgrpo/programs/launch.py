"""Run a user's program: in a sandbox session, as a process, or in this process.

The program gets the endpoint in the usual environment variables (OPENAI_BASE_URL and so on) and its
task as JSON on standard input and in the file AGENTGRPO_TASK. It ends by exiting. Its answer is the
content of `answer.txt`, else the last line of its standard output, else none.
"""

from __future__ import annotations

import asyncio
import contextlib
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

NO_TELEMETRY = {
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
"""Defaults that stop clients from sending telemetry. The user's environment overrides them."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy")
TASK_FILE, ANSWER_FILE = "task.json", "answer.txt"
IMAGE_FOLDER = "/installed-agent"
"""Folder of a program in a container image, as in Harbor. Verdicts ignore its files."""
TAIL = 2000
"""Characters of a program's error output that messages contain."""
PYTHON = ("python", "python3")
MAX_BYTES = 1 << 20
"""How many bytes of an answer or of output are read, from the end."""
UNREADABLE = "wrote no answer that can be read"
NOT_FOUND = ("126", "127")
"""Exit codes of a shell or of env if the command could not be started."""
RAISED = re.compile(
    r"Traceback \(most recent call last\)|^(Syntax|Indentation|Tab)Error: "
    r"|^\S+: (can't open file|No module named|Error while finding module) ", re.MULTILINE,
)  # fmt: skip
"""Python's output after an uncaught exception, or if it could not start the program."""
NO_ROOM = ("MemoryError", "BlockingIOError")
"""Exceptions caused by the session's limits."""
OUT_OF_RESOURCES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
"""Errors of a start because processes, threads, descriptors, memory or disk have run out."""
MAX_STARTS = 4
"""Sessions that start at the same time. A zygote needs seconds for hundreds of requests."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    answer: str | None
    failed: str = ""
    """The failure, with the end of its traceback; "": none."""
    error: BaseException | None = None
    """The exception, if it was raised in this process."""
    program_fault: bool = False
    """Whether the program itself is at fault: an uncaught Python exception, or a failed start. The
    policy's code may cause a signal, an exceeded limit or an unreadable answer."""


def launcher_of(agent: ProgramAgent) -> Launcher | None:
    """Make the launcher of an agent's program. None: the environment's episodes run themselves."""
    if agent.call:
        function = load_callable(agent.call, key="agent.options.call")
        if not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"agent.options.call: expected an async def function, got {agent.call!r}"
            )
        return AsyncFunction(function)
    if not agent.command:
        return None
    program = agent.command[0]
    if agent.sandbox == "none":
        if "/" not in program and program not in PYTHON and not shutil.which(program):
            raise ValueError(f"agent.options.command: program {program!r} not found")
        print_stderr(
            'warning: programs run as your user, not isolated (agent.options.sandbox = "none")'
        )
        return Process(agent.command, agent.files)
    if getattr(agent.env, "hosts_programs", False):
        return Hosted(agent.pool, agent.command, agent.files, agent.timeout_s)
    script = [*agent.command[1:2]]
    if program in PYTHON and (not script or (script[0][:1] == "-" and script[0] != "-m")):
        raise ValueError(
            "agent.options.command: expected a file or -m after `python`, got "
            f"{list(agent.command)!r}. It is the session's interpreter, which takes no options"
        )
    if agent.pool.degraded:
        raise ValueError(
            "agent.options.sandbox: expected namespaces, which give a session its own network, "
            'got a degraded sandbox (sandbox.allow_degraded). Set sandbox = "none" or call'
        )
    return Sandboxed(agent.pool, agent.command, agent.files, agent.timeout_s)


def task_json(task: Task) -> dict[str, Any]:
    """The task for a program, without its spec, which contains the solution."""
    messages = [dict(message) for message in task.messages]
    questions = [m["content"] for m in messages if m["role"] == "user"]
    return {"id": task.id, "messages": messages, "question": questions[-1] if questions else ""}


def variables(url: str, key: str) -> dict[str, str]:
    """Environment variables that point clients to the endpoint, without a proxy."""
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
    """The variables in a session. Its address is fixed, and its listener ignores the key."""
    task = {"AGENTGRPO_TASK": f"/home/user/{TASK_FILE}"}
    return {**variables(f"http://127.0.0.1:{PORT}", key), **task}


def last_line(text: str) -> str | None:
    """The last line that is not empty."""
    last = text.replace("\r", "\n").rstrip().rpartition("\n")[2].strip()
    return last or None


# --- in this process


class AsyncFunction:
    """An async function of the user. All its calls in a run share one event loop, to which clients
    bind their connections.
    """

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def start(self, task: Task, session: Session, endpoint: Endpoint, episode: Any) -> Running:
        """Call it: function(task, base_url=..., api_key=..., model=...)."""
        return _ProgramTask(self._await_function(task, session, endpoint))

    async def _await_function(self, task: Task, session: Session, endpoint: Endpoint) -> Outcome:
        kwargs = {"base_url": f"{endpoint.url}/v1", "api_key": session.key, "model": MODEL}
        try:
            answer = await self._function(task_json(task), **kwargs)
        except InfrastructureError:
            raise
        except asyncio.CancelledError as error:
            return Outcome(None, "was cancelled", error, program_fault=True)
        except BaseException as error:
            where = error_location(error, self._function)
            message = f"{describe_error(error)}{f' (at {where})' if where else ''}"
            return Outcome(None, message, error, program_fault=True)
        return Outcome(_as_answer(answer))


def _as_answer(answer: Any) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    try:
        return json.dumps(as_json(answer), ensure_ascii=False)
    except ValueError:
        return str(answer)


class _ProgramTask:
    def __init__(self, work: Coroutine[Any, Any, Outcome]) -> None:
        self._loop = event_loop("programs")
        self.outcome: Future[Outcome] = asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        self.outcome.cancel()


# --- as a process of the user's own


class Process:
    """A command as a process of the current user, in its own directory. It is not isolated."""

    def __init__(self, command: Sequence[str], files: Sequence[Path]) -> None:
        self._command, self._files = command, files

    def start(self, task: Task, session: Session, endpoint: Endpoint, episode: Any) -> Running:
        return _Thread(lambda run: self._run(run, task, session, endpoint))

    def _run(self, run: _Thread, task: Task, session: Session, endpoint: Endpoint) -> Outcome:
        # Output goes to files, since processes that the program leaves behind may hold a pipe open
        # for ever. The files have no name, so the program cannot touch them.
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(
                prefix="agentgrpo-program-", ignore_cleanup_errors=True
            )
            directory = Path(stack.enter_context(folder))
            for name, path in (entry for file in self._files for entry in _files_in(file)):
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, directory / name)
            task_text = json.dumps(task_json(task), ensure_ascii=False)
            (directory / TASK_FILE).write_text(task_text, encoding="utf-8")
            inherited = {k: v for k, v in os.environ.items() if k.lower() not in PROXIES}
            env = {
                **NO_TELEMETRY, **inherited, **variables(endpoint.url, session.key),
                "AGENTGRPO_TASK": str(directory / TASK_FILE),
            }  # fmt: skip
            head = [sys.executable] if self._command[0] in PYTHON else self._command[:1]
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            task_in = stack.enter_context(open(directory / TASK_FILE, "rb"))
            try:
                process = subprocess.Popen(
                    [*head, *self._command[1:]], cwd=directory, env=env, start_new_session=True,
                    stdin=task_in, stdout=out, stderr=err,
                )  # fmt: skip
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    raise
                return Outcome(None, f"did not start: {error}", program_fault=True)

            def end() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            run.set_stop(end)
            code = process.wait()
            end()  # kills processes that the program left behind
            answer = _answer_at(directory / ANSWER_FILE)
            result, problem = answer or (last_line(_tail(out.fileno())), "")
            reason = "SIGKILL, possibly because the machine ran out of memory"
            return _exit_outcome(
                str(code), _tail(err.fileno()), result, problem, reason if code == -9 else ""
            )


def _answer_at(path: Path) -> tuple[str | None, str] | None:
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
    """Read the end of an open file without moving the file position of its writers."""
    data = os.pread(file, MAX_BYTES, max(0, os.fstat(file).st_size - MAX_BYTES))
    return data.decode("utf-8", "replace")


# --- in the sandbox


class Sandboxed:
    """A command in a sandbox session, whose only network is the endpoint on its loopback."""

    folder = ""
    """Folder of its files; "": the home directory."""

    def __init__(
        self, pool: SandboxPool, command: Sequence[str], files: Sequence[Path], timeout_s: float
    ) -> None:
        self._pool = pool
        self._timeout_s, self._starts = timeout_s, threading.Semaphore(MAX_STARTS)
        paths = {name: path for file in files for name, path in _files_in(file)}
        self._files = {name: path.read_bytes() for name, path in paths.items()}
        self._programs = [name for name, path in paths.items() if os.access(path, os.X_OK)]
        arguments = f"{list(command)!r}, {self._programs!r}, {TASK_FILE!r}, {PYTHON!r}"
        self._code = f"{Path(in_session.__file__).read_text()}\n\nmain({arguments})\n"
        """Code of the step that runs the command. The step's value is the exit code."""

    def start(self, task: Task, session: Session, endpoint: Endpoint, episode: Any) -> Running:
        return _Thread(lambda run: self._run(run, task, session, endpoint, episode))

    def _prepare_session(
        self, jail: Any, task: Task, session: Session, endpoint: Endpoint, stack: ExitStack
    ) -> None:
        """Connect a session to the endpoint until `stack` closes; write the files and the task."""
        server = endpoint.listen(listener_in(jail), session).result()
        stack.callback(endpoint.stop_listening, server)
        with contextlib.closing(jail.files()) as files:
            for name, data in self._files.items():
                files.write(self.folder + name, data)
            files.write(self.folder + TASK_FILE, json.dumps(task_json(task), ensure_ascii=False))

    def _run(
        self, run: _Thread, task: Task, session: Session, endpoint: Endpoint, episode: Any
    ) -> Outcome:
        with ExitStack() as stack:
            with self._starts:
                jail = stack.enter_context(self._pool.acquire())
                self._prepare_session(jail, task, session, endpoint, stack)
            run.set_stop(jail.close)
            env = {**NO_TELEMETRY, **self._pool.template.env, **session_variables(session.key)}
            result = jail.step(self._code, self._timeout_s, env=env)
            answer = None if result.state_lost else _answer_in(jail)
        if result.status is StepStatus.INFRA_ERROR:
            raise InfrastructureError(result.detail)
        answer_text, problem = answer or (last_line(result.stdout), "")
        is_out_of_memory = result.oom_kills or "MemoryError" in f"{result.error}{result.stderr}"
        reason = f"it needs more than sandbox.memory_mib = {self._pool.limits.memory_mib}"
        reason = reason if is_out_of_memory or result.status is StepStatus.OOM else ""
        if result.error is not None:  # command not found, or no memory or process left
            message = f"{result.error.name}: {result.error.value} {reason}".strip()
            return Outcome(answer_text, message, program_fault=result.error.name not in NO_ROOM)
        if result.status is not StepStatus.OK:
            if result.status is StepStatus.OUTPUT_LIMIT:  # the last line of the output is lost
                answer_text = None
            message = f"{result.status}: {result.detail} {reason} {result.stderr[-TAIL:]}".strip()
            return Outcome(answer_text, message)
        return _exit_outcome(result.value or "0", result.stderr, answer_text, problem, reason)


class Hosted(Sandboxed):
    """A command in an episode's session of a container image, whose changes the episode scores.

    It starts in the image's working directory with the image's programs. Its files are in
    IMAGE_FOLDER.
    """

    folder = f"{IMAGE_FOLDER}/"

    def __init__(
        self, pool: SandboxPool, command: Sequence[str], files: Sequence[Path], timeout_s: float
    ) -> None:
        super().__init__(pool, command, files, timeout_s)
        copied_names = {path.name for path in files}
        command_words = ["python3" if command[0] in PYTHON else command[0], *command[1:]]
        paths = [os.path.normpath(word) for word in command_words]
        self._command = [
            self.folder + path if path.partition("/")[0] in copied_names else word
            for word, path in zip(command_words, paths, strict=True)
        ]

    def _run(
        self, run: _Thread, task: Task, session: Session, endpoint: Endpoint, episode: Any
    ) -> Outcome:
        with ExitStack() as stack:
            with self._starts:
                jail = episode.begin()
                self._prepare_session(jail, task, session, endpoint, stack)
            env = {
                **NO_TELEMETRY,
                **jail.places.environment(Template()),
                **session_variables(session.key),
            }
            env["AGENTGRPO_TASK"] = self.folder + TASK_FILE
            executable = [self.folder + name for name in self._programs]
            command_line = f"{shlex.join(['chmod', '+x', *executable])}; " * bool(executable)
            command_line += f"exec {shlex.join(self._command)} < {env['AGENTGRPO_TASK']}"
            program = Program(
                jail.channels, ["/bin/bash", "-c", command_line], env=env,
                directory=jail.places.home, output_max=4 << 20,
            )  # fmt: skip
            stack.callback(program.close)
            run.set_stop(program.kill)
            program.wait(None)
        if program.machine_failed:
            raise InfrastructureError(program.machine_failed)
        stdout, stderr = (
            bytes(out).decode("utf-8", "replace") for out in (program.stdout, program.stderr)
        )
        if program.error:
            return Outcome(None, program.error)
        code = program.exit_code if program.signal is None else -program.signal
        reason = "SIGKILL; its session has environment.memory_mb" if code == -9 else ""
        return _exit_outcome(str(code), stderr, last_line(stdout), "", reason)


def _answer_in(jail: Any) -> tuple[str | None, str] | None:
    """Read the program's answer file. Returns its text and a problem, or None without a file.

    The file is untrusted: it may be a pipe, a directory or a dangling link.
    """
    with contextlib.closing(jail.files()) as files:
        try:
            return (files.read(ANSWER_FILE), "") if files.exists(ANSWER_FILE) else None
        except (SandboxInfraError, SandboxNotFoundException):
            raise
        except SandboxException as error:
            return None, f"{UNREADABLE}: {error}"


def _exit_outcome(code: str, stderr: str, answer: str | None, problem: str, reason: str) -> Outcome:
    """Make the outcome of a program that exited. A negative code is a signal.

    `problem`: of its answer file. `reason`: likely cause of a bad code.
    """
    if code == "0":
        return Outcome(answer, problem)
    stderr = stderr.strip()
    last = stderr.rpartition("\n")[2]
    own_fault = code in NOT_FOUND or (RAISED.search(stderr) and not last.startswith(NO_ROOM))
    message = f"exited with {code}{reason and f' ({reason})'}: {stderr[-TAIL:]}"
    return Outcome(answer, message, program_fault=code.isdecimal() and bool(own_fault))


def _files_in(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [(path.name, path)]
    files = sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return [(str(Path(path.name) / p.relative_to(path)), p) for p in files]


class _Thread:
    def __init__(self, run_program: Callable[[_Thread], Outcome]) -> None:
        self.outcome: Future[Outcome] = Future()
        self._stopped = False
        self._stop_program: Callable[[], object] = lambda: None
        try:
            threading.Thread(
                target=self._run, args=(run_program,), name="program", daemon=True
            ).start()
        except RuntimeError as error:  # the process cannot start another thread
            raise InfrastructureError(str(error)) from error

    def _run(self, run_program: Callable[[_Thread], Outcome]) -> None:
        try:
            self.outcome.set_result(run_program(self))
        except (SandboxException, OSError) as error:  # for example, no descriptor is left
            if self._stopped:
                self.outcome.set_result(Outcome(None, "stopped"))
            else:
                self.outcome.set_exception(InfrastructureError(str(error)))
        except BaseException as error:
            self.outcome.set_exception(error)

    def set_stop(self, end: Callable[[], object]) -> None:
        self._stop_program = end
        if self._stopped:
            end()

    def stop(self) -> None:
        self._stopped = True
        self._stop_program()


Running = _ProgramTask | _Thread
"""A running program: `outcome` is a Future, and stop() ends it."""
Launcher = AsyncFunction | Process | Sandboxed
"""Starts a program for each rollout."""
