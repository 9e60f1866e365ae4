"""Shell commands in a session, in the shape of E2B's ``sandbox.commands``."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentgrpo.sandbox.e2b.execution import CommandExitException, CommandResult
from agentgrpo.sandbox.isolation.channels import Channels
from agentgrpo.sandbox.isolation.errors import (
    NotFoundException,
    NotSupportedException,
    SandboxInfraError,
    SandboxNotFoundException,
    TimeoutException,
)
from agentgrpo.sandbox.isolation.guards import ProcessBound, as_bytes, wraps_os_errors
from agentgrpo.sandbox.isolation.template import check_environment
from agentgrpo.sandbox.session.program import Listener, Program

DEFAULT_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A running command."""

    pid: int
    cmd: str
    """The text passed to run()."""
    cwd: str
    args: list[str]
    """The arguments of bash."""
    envs: dict[str, str]
    """The variables passed to run(), without those of the sandbox."""
    tag: str | None = None
    """E2B's tag of a template's start command; always None, because there is no such command."""


@wraps_os_errors
class CommandHandle(ProcessBound):
    """A command in the background. wait() reads its output."""

    def __init__(self, program: Program, info: ProcessInfo) -> None:
        self.program, self._info = program, info

    @property
    def pid(self) -> int:
        return self._info.pid

    def wait(
        self,
        on_stdout: Listener | None = None,
        on_stderr: Listener | None = None,
        *,
        timeout: float | None = None,
    ) -> CommandResult:
        """Wait until the command ends.

        Raises:
            CommandExitException: its exit code is not 0.
            TimeoutException: it ran for timeout seconds and was killed.
            SandboxNotFoundException: the sandbox was killed before the command's end was read.
            SandboxInfraError: the machine failed.
        """
        program = self.program
        if not program.wait(timeout, on_stdout, on_stderr):
            program.kill()
            program.wait(5.0)
            program.close()
            raise TimeoutException(f"command {self._info.cmd!r} ran for {timeout:g} s")
        assert program.exit_code is not None
        if program.machine_failed:
            raise SandboxInfraError(program.machine_failed)
        error = program.error or (f"killed by signal {program.signal}" if program.signal else None)
        result = CommandResult(
            program.stdout.decode("utf-8", "replace"),
            program.stderr.decode("utf-8", "replace"),
            program.exit_code,
            error,
        )
        if result.exit_code != 0:
            raise CommandExitException(result)
        return result

    def kill(self) -> bool:
        """Kill the command. False if it had ended. Its output is kept for wait()."""
        return end(self.program)

    def send_stdin(self, data: str) -> None:
        self.program.send_stdin(as_bytes(data))


def end(program: Program) -> bool:
    """Kill a program and read its output, which closes its descriptors. False if it had ended."""
    killed = program.kill()
    with contextlib.suppress(SandboxNotFoundException):  # it was closed
        program.wait(KILL_TIMEOUT_S)
    return killed


@wraps_os_errors
class Commands(ProcessBound):
    """The commands of a session. channels() returns its descriptors or raises if it has ended. A
    command is killed after output_max bytes of output.
    """

    def __init__(
        self, channels: Callable[[], Channels], env: Mapping[str, str], output_max: int
    ) -> None:
        self._channels, self._env, self._output_max = channels, env, output_max
        self._lock = threading.Lock()
        self._running: dict[Program, ProcessInfo] = {}

    def run(
        self,
        cmd: str,
        background: bool = False,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: Listener | None = None,
        on_stderr: Listener | None = None,
        stdin: bool = False,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> "CommandResult | CommandHandle":
        """Run cmd in bash. Waits for its end; with background it returns a CommandHandle.

        Raises:
            CommandExitException, TimeoutException: as CommandHandle.wait().
            NotSupportedException: another user than "user"; a session has one user.
        """
        if user not in (None, "user"):
            raise NotSupportedException(f"user: expected 'user', got {user!r}")
        check_environment("envs", envs or {})
        directory = cwd or self._channels().places.home
        self.list()  # forget ended commands: their pids may be reused
        args, envs = ["-c", cmd], dict(envs or {})
        program = Program(
            self._channels(),
            ["/bin/bash", *args],
            env={**self._env, **envs},
            directory=directory,
            output_max=self._output_max,
        )
        if not stdin:
            program.close_stdin()
        info = ProcessInfo(program.pid, cmd, directory, args, envs)
        with self._lock:
            self._running[program] = info
        handle = CommandHandle(program, info)
        if background:
            return handle
        try:
            return handle.wait(on_stdout, on_stderr, timeout=timeout or None)
        finally:
            self.list()

    def list(self) -> list[ProcessInfo]:
        with self._lock:
            ended = [program for program in self._running if program.ended()]
            for program in ended:
                del self._running[program]
            infos = [*self._running.values()]
        for program in ended:
            end(program)
        return infos

    def _find(self, pid: int) -> tuple[Program, ProcessInfo]:
        self.list()
        with self._lock:
            for program, info in self._running.items():
                if info.pid == pid:
                    return program, info
        raise NotFoundException(f"no command with pid {pid} is running")

    def kill(self, pid: int) -> bool:
        """Kill a command. False if none with this pid is running."""
        with contextlib.suppress(NotFoundException):
            return end(self._find(pid)[0])
        return False

    def send_stdin(self, pid: int, data: str) -> None:
        """Write to the standard input of a command that was started with stdin=True."""
        self._find(pid)[0].send_stdin(as_bytes(data))

    def close_stdin(self, pid: int) -> None:
        self._find(pid)[0].close_stdin()

    def connect(self, pid: int) -> CommandHandle:
        return CommandHandle(*self._find(pid))

    def kill_all(self) -> bool:
        """Kill every command, without waiting. False if there was none."""
        with self._lock:
            killed = [program.kill() for program in self._running]
        return any(killed)

    def close(self) -> None:
        """Kill all commands and close their descriptors."""
        with self._lock:
            programs = [*self._running]
            self._running.clear()
        for program in programs:
            program.close()
