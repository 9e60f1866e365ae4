"""Episodes in a directory of a session, with code steps and tools that run commands there."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from agentgrpo.actions import Action, CallTools, InfrastructureError, Observation
from agentgrpo.envs.python import PythonEpisode, as_infra_error
from agentgrpo.envs.tools import Tool, Toolset, calls_of, observation_of
from agentgrpo.sandbox import SandboxInfraError
from agentgrpo.sandbox.session.program import Program

MAX_OUTPUT = 6000  # a tool's result is the last MAX_OUTPUT bytes


class ShellEpisode(PythonEpisode):
    """Code steps and tool calls in any order. A subclass sets `directory` and adds a tool."""

    directory: str
    grep_options = ""
    """Options of grep that select the files for search()."""
    _env: Any
    _session: Any

    def step(self, action: Action) -> Observation:
        if not isinstance(action, CallTools):
            return super().step(action)
        if self._session is None:
            with as_infra_error():
                self._begin()
        return observation_of([self.toolset().call(call) for call in calls_of(action)])

    def functions(self) -> list[Callable[..., str]]:
        return [self.read, self.search, self.replace]

    def toolset(self) -> Toolset:
        return Toolset([Tool(function) for function in self.functions()])

    def _environment(self) -> Mapping[str, str]:
        environment: Mapping[str, str] = self._session.places.environment(self._pool.template)
        return environment

    def _shell(self, command: str) -> str:
        session, timeout_s = self._session, self._env.timeout_s
        try:
            program = Program(
                session.channels, ["/bin/bash", "-c", command], directory=self.directory,
                output_max=4 << 20, env=self._environment(),
            )  # fmt: skip
            with contextlib.closing(program):
                program.close_stdin()
                note = "" if program.wait(timeout_s) else f"\nstill running after {timeout_s:g} s"
                return program.stdout[-MAX_OUTPUT:].decode("utf-8", "replace") + note
        except SandboxInfraError as error:
            raise InfrastructureError(str(error)) from error

    def read(self, path: str, first: int = 1, last: int = 200) -> str:
        """Lines of a file of the repository, from the first to the last, with their numbers."""
        return self._shell(f"nl -ba -- {shlex.quote(path)} 2>&1 | sed -n {first},{last}p")

    def search(self, pattern: str) -> str:
        """Lines of the repository's files that match a pattern of grep -E."""
        command = f"grep -rnE {self.grep_options} -e {shlex.quote(pattern)} ."
        return self._shell(f"{command} |& head -60")

    def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that stands in a file of the repository exactly once."""
        path = os.path.join(self.directory, path)
        with contextlib.closing(self._session.files()) as files:
            text = files.read(path)
            if text.count(old) != 1:
                raise ValueError(f"the text stands there {text.count(old)} times")
            files.write(path, text.replace(old, new))
        return "replaced"
