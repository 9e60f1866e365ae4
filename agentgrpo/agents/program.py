"""A program of the user's as the agent: it asks the policy over HTTP, as any other server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from agentgrpo.actions import ReadCalls
from agentgrpo.agents.tagged_text import Shots, TextAgent
from agentgrpo.types import Task


@dataclass(kw_only=True, eq=False)
class ProgramAgent(TextAgent):
    """Each rollout is one run of a program that calls this process's endpoint.

    See docs/agent-programs.md.

    Args:
        pool: the sandbox; None where nothing runs in it.
        call_reader: from a parser's name to what reads the calls of a turn.
        env: what it is played in; one whose episodes play themselves (`plays`) is the program.
        command: the program and its arguments: ["python", "program.py"]. `python` is the session's.
        call: in its place, `module:function`, a coroutine function of this process: it is given
            the task, base_url, api_key and model, and returns the answer.
        files: files and folders that are copied to where the command runs.
        sandbox: "session": the command runs in a session, whose only network is the endpoint;
            "none": as the user who trains, isolated by nothing.
        timeout_s: seconds that it may take; then the rollout has timed out.
        parser: which of vLLM's tool parsers reads the calls of a turn, for requests with tools.
    """

    home = "answer"
    unread = (
        *("env.user", "rollout.deterministic", "rollout.history", "rollout.branching"),
        *("rollout.sampler", "rollout.max_response_tokens", "rollout.max_observation_tokens"),
        *("rollout.keep_observation", "rollout.max_tool_calls", "rollout.max_calls_of"),
        "rollout.max_malformed",
    )
    """Settings that only agents read which the trainer plays turn by turn."""
    pool: Any
    call_reader: Callable[[str], ReadCalls]
    env: Any = None
    command: Sequence[str] = ()
    call: str = ""
    files: Sequence[Path] = ()
    sandbox: Literal["session", "none"] = "session"
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    parser: str = "hermes"
    system_prompt: str | None = field(default=None, init=False)  # no options: nothing reads them
    shots: Shots = field(default=(), init=False)

    def __post_init__(self) -> None:
        plays = bool(getattr(self.env, "plays", False))
        if bool(self.command) + bool(self.call) + plays != 1:
            given = f"got {list(self.command)!r} and {self.call!r}"
            raise ValueError(
                f"command: expected neither it nor call, as the environment plays itself; {given}"
                if plays
                else f"command: either it or call must be given, {given}. Remedy where an extended "
                "config has a command: command = [] and files = []"
            )
        own = self.sandbox != "session"
        for name, value in (("files", self.files), ("sandbox", own)):
            if value and not self.command:
                raise ValueError(f"{name}: {getattr(self, name)!r} does nothing without command")
        if getattr(self.env, "hosts_programs", False):
            if self.call or own:
                key = "call" if self.call else "sandbox"
                raise ValueError(
                    f"{key}: expected a command in the session that is judged, got "
                    f"{getattr(self, key)!r}. Remedy: command and sandbox = 'session' "
                    "(docs/environments.md)"
                )
            self.env.require_python()
        for path in self.files:
            if not path.exists():
                place = "" if path.is_absolute() else f" in {Path.cwd()}"
                raise ValueError(f"files: {path}: no such file or directory{place}")
        self.read_calls = self.call_reader(self.parser)

    @staticmethod
    def asks_for_pool(options: Mapping[str, Any]) -> bool:
        """Whether a run with these options needs the sandbox."""
        return bool(options.get("command")) and options.get("sandbox", "session") == "session"

    def parse(self, text: str, task: Task) -> NoReturn:
        """Never called: what a turn means is the program's affair."""
        raise TypeError("a program reads its turns itself")
