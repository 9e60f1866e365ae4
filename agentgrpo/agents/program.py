"""A user's own program as the agent: it calls the policy over HTTP, like any model server."""

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
    """Each rollout is one run of a program that sends requests to an endpoint of this process.

    See docs/agent-programs.md.

    Args:
        pool: the sandbox, or None if nothing runs in it.
        call_reader: from a parser's name to the engine's tool call parser.
        env: the environment. If its episodes play themselves (`plays`), it is the program.
        command: program and arguments: ["python", "program.py"]. `python` is that of the session.
        call: instead of a command, `module:function`: a coroutine function of this process, called
            with the task, base_url, api_key and model. It returns the answer.
        files: files and folders to copy to the command's working directory.
        sandbox: "session": the command runs in a session whose only network is the endpoint.
            "none": it runs without isolation, as the user who trains.
        timeout_s: time limit in seconds, after which the rollout has timed out.
        parser: vLLM's tool parser for requests with tools.
    """

    home = "answer"
    unread = (
        *("env.user", "rollout.deterministic", "rollout.history", "rollout.branching"),
        *("rollout.sampler", "rollout.max_response_tokens", "rollout.max_observation_tokens"),
        *("rollout.keep_observation", "rollout.max_tool_calls", "rollout.max_calls_of"),
        "rollout.max_malformed",
    )
    """Settings that apply only to agents whose turns the trainer plays."""
    pool: Any
    call_reader: Callable[[str], ReadCalls]
    env: Any = None
    command: Sequence[str] = ()
    call: str = ""
    files: Sequence[Path] = ()
    sandbox: Literal["session", "none"] = "session"
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    parser: str = "hermes"
    # fields of the base class that are no options here, since nothing reads them
    system_prompt: str | None = field(default=None, init=False)
    shots: Shots = field(default=(), init=False)

    def __post_init__(self) -> None:
        plays = bool(getattr(self.env, "plays", False))
        if bool(self.command) + bool(self.call) + plays != 1:
            got = f"got {list(self.command)!r} and {self.call!r}"
            raise ValueError(
                f"command: expected neither command nor call: the environment plays itself; {got}"
                if plays
                else f"command: expected either command or call, {got}. If an extended config sets "
                "a command, set command = [] and files = []"
            )
        is_unisolated = self.sandbox != "session"
        for name, is_set in (("files", bool(self.files)), ("sandbox", is_unisolated)):
            if is_set and not self.command:
                raise ValueError(f"{name}: {getattr(self, name)!r} does nothing without command")
        if getattr(self.env, "hosts_programs", False):
            if self.call or is_unisolated:
                key = "call" if self.call else "sandbox"
                raise ValueError(
                    f"{key}: expected a command in the session that is judged, got "
                    f"{getattr(self, key)!r}. Set command and sandbox = 'session' "
                    "(docs/environments.md)"
                )
            self.env.require_python()
        for path in self.files:
            if not path.exists():
                folder = "" if path.is_absolute() else f" in {Path.cwd()}"
                raise ValueError(f"files: {path}: no such file or directory{folder}")
        self.read_calls = self.call_reader(self.parser)

    @staticmethod
    def asks_for_pool(options: Mapping[str, Any]) -> bool:
        """Whether a run with these options needs the sandbox."""
        return bool(options.get("command")) and options.get("sandbox", "session") == "session"

    def parse(self, text: str, task: Task) -> NoReturn:
        raise TypeError("a program reads its turns itself")
