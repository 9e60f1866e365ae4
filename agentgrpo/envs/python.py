"""Interpreters in the sandbox. Each rollout has its own session, stateful or stateless.

Optional keys of a task's spec: `files`, {path: text}, is written into the session before the first
code; `expected_files`, {path: text}, is compared with the session's files at the end (reward
`files`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from agentgrpo.actions import Action, InfrastructureError, Observation, RunCode
from agentgrpo.envs.base import Episode
from agentgrpo.sandbox import (
    HostCall,
    HostTools,
    SandboxException,
    SandboxInfraError,
    SandboxPool,
    Session,
)
from agentgrpo.sandbox.isolation.images import Image
from agentgrpo.sandbox.isolation.jail import jail_places
from agentgrpo.sandbox.session.forks import Fork, fork
from agentgrpo.sandbox.session.interpreters import command_of, start_context
from agentgrpo.sandbox.session.step_result import StepError, StepResult, StepStatus
from agentgrpo.types import Task

MAX_CHARS = 20_000
"""Limit of each section of an observation. A longer one keeps its head and its tail."""
DIVERGED = "\n(the step that was repeated made other calls of functions of the host)"
RESTARTED = "(the interpreter was restarted: its variables are gone)"


@contextmanager
def as_infra_error() -> Iterator[None]:
    """Convert exceptions of the sandbox to InfrastructureError."""
    try:
        yield
    except SandboxException as error:
        raise InfrastructureError(str(error)) from error


class SandboxEpisode(Episode):
    """An episode that uses the sandbox: one session after another, and host functions."""

    def __init__(self, pool: SandboxPool, host_tools: HostTools | None) -> None:
        self._pool = pool
        self._host = None if host_tools is None else host_tools.begin()
        self._session: Session | None = None
        self._image: Image | None = None
        """The image from which _begin() starts a session. None: the pool's image."""
        self._cpu = 0.0
        self._diverged = ""
        """Note for a repeated step that made other host calls than the original step. It makes the
        observation differ, so that the branch is discarded."""

    def recall(self, memory: tuple[HostCall, ...] | None) -> None:
        """Make the next step return the host results of the step that it repeats."""
        if self._host is not None:
            self._host.replay_answers(memory or ())

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _begin(self) -> Session:
        self._session = session = self._pool.acquire(self._image, host=self._host)
        self._host, self._cpu = session.host, session.cpu_seconds()
        return session

    def _used(self, result: StepResult) -> dict[str, float]:
        """The resources that a step used, by their names in Rollout.stats (docs/rollouts.md)."""
        assert self._session is not None
        previous_cpu, self._cpu = self._cpu, self._session.cpu_seconds()
        calls = result.host_calls
        size = result.stdout_bytes + result.stderr_bytes + sum(call.size for call in calls)
        counts = {
            "sandbox_wall_s": result.wall_s,
            "sandbox_cpu_s": max(result.cpu_s, self._cpu - previous_cpu),
            "sandbox_bytes": float(size),
        }
        if self._host is None:
            return counts
        self._diverged = "" if self._host.replay_answers(None) else DIVERGED
        failed = sum(call.kind == "raised" for call in calls) + result.host_refused
        return counts | {
            "host_calls": float(len(calls)),
            "host_errors": float(failed),
            "host_s": sum(call.seconds for call in calls),
        }


class PythonEnv:
    """Episodes whose actions are code steps, in Python, bash or Node.js.

    Args:
        pool: source of sessions; the caller closes it.
        timeout_s: wall-clock limit of one step, in seconds.
        stateless: every step has a fresh session. Otherwise variables and files live as long as
            the rollout.
        host_tools: functions of this process that the code may call (sandbox.host_tools).
    """

    answers: tuple[str, ...] = ("code",)

    def __init__(
        self,
        pool: SandboxPool,
        timeout_s: float,
        *,
        stateless: bool = False,
        host_tools: HostTools | None = None,
    ) -> None:
        self.pool, self.timeout_s, self.host_tools = pool, timeout_s, host_tools
        self.stateless = stateless

    def require_language(self, language: str) -> None:
        """Check that sessions can run this language. Raises ValueError if not."""
        try:
            command_of(language, jail_places(self.pool.template), self.pool.limits)
        except SandboxException as error:
            raise ValueError(f"language: {error}") from error

    def reset(self, task: Task) -> PythonEpisode:
        """Make an episode. Its session starts with the first code, so some never need one."""
        return PythonEpisode(self, task)


class PythonEpisode(SandboxEpisode):
    """The interpreters of one rollout."""

    directory: str | None = None  # start directory of bash and Node.js; None: the home directory
    restarted = RESTARTED

    def __init__(self, env: PythonEnv, task: Task) -> None:
        super().__init__(env.pool, env.host_tools)
        self._env, self._task, self._spec = env, task, task.spec
        self._contexts: dict[str, Session] = {}

    def step(self, action: Action) -> Observation:
        """Run the code. A session that died is replaced, with a note to the policy."""
        if not isinstance(action, RunCode):
            raise TypeError(f"env.kind = 'python': expected code, got {action}")
        result = self._run(action)
        if result.status == "infra_error":
            raise InfrastructureError(render(result))
        counts = self._used(result)
        text = render(result) + self._diverged
        if result.state_lost and not self._env.stateless:
            text += f"\n{self.restarted}"
        if self._env.stateless or (result.state_lost and action.language not in self._contexts):
            self.close()
        elif result.state_lost:
            self._contexts.pop(action.language).close()
        return Observation(
            text, failed=result.status != "ok", counts=counts, memory=result.host_calls or None
        )

    def snapshot(self) -> Fork | None:
        """Copy a session of an image, if only shell commands have run in it."""
        if self._session is None or self._contexts or self._env.stateless:
            return None
        with as_infra_error():
            return fork(self._session, self._pool)

    def resume(self, copy: Fork) -> bool:
        previous_image, self._image = self._image, copy.image
        try:
            with as_infra_error():
                if copy.restore(self._begin()):
                    return True
        finally:
            self._image = previous_image  # a session that replaces this one starts from it
        self.close()
        return False

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`files`: 1.0 if all `expected_files` of the task's spec have the expected content."""
        expected: Mapping[str, str] = self._spec.get("expected_files", {})
        if not expected:
            return {}
        contents = {path: self.read(path) for path in expected} if self._session else {}
        return {"files": float(contents == dict(expected))}

    def read(self, path: str) -> str | None:
        if self._session is None:
            return None
        try:
            with closing(self._session.files()) as files:
                return files.read(path)
        except SandboxInfraError as error:
            raise InfrastructureError(str(error)) from error
        except SandboxException:  # missing, a directory, too large, the session has ended, ...
            return None

    def _run(self, action: RunCode) -> StepResult:
        if self._session is None:
            with as_infra_error():
                self._upload(self._begin(), self._spec.get("files", {}))
        assert self._session is not None
        try:
            session = self._interpreter(self._session, action.language)
        except SandboxInfraError as error:
            raise InfrastructureError(str(error)) from error
        except SandboxException as error:  # the policy's processes used up the session's limits
            probe = self._session.step("")
            error_of_start = StepError(type(error).__name__, str(error), "")
            return (
                probe
                if probe.status != "ok"
                else StepResult(status=StepStatus.ERROR, error=error_of_start)
            )
        return session.step(action.code, timeout_s=self._env.timeout_s)

    def _upload(self, session: Session, files: Mapping[str, str]) -> None:
        if files:
            with closing(session.files()) as writer:
                for path, content in files.items():
                    writer.write(path, content)

    def _interpreter(self, session: Session, language: str) -> Session:
        if language == ("bash" if session.places.image else "python"):
            return session
        if language not in self._contexts:
            self._contexts[language] = start_context(
                session, language, self._pool.template, directory=self.directory
            )
        return self._contexts[language]

    def close(self) -> None:
        for context in self._contexts.values():
            context.close()
        self._contexts = {}
        super().close()


def render(result: StepResult) -> str:
    """Format a step's output as in a terminal, without the traceback's frames."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n"), result.value or ""]
    timed_out = result.status in ("timeout", "timeout_killed")
    if result.error is not None and not timed_out:
        parts.append(f"{result.error.name}: {result.error.value}".rstrip(": "))
    elif result.status != "ok":
        parts.append(f"Error: {result.status.replace('_', ' ')}")
    sections = [head_and_tail(text, MAX_CHARS) for text in parts if text]
    return "\n".join(sections) or "(no output)"


def head_and_tail(text: str, max_chars: int) -> str:
    r"""Shorten a text to max_chars by removing its middle, with a note.

    >>> head_and_tail("abcdefgh", 4)
    'ab\n... 4 characters left out ...\ngh'
    """
    if len(text) <= max_chars:
        return text
    tail = max_chars // 2
    head, left_out = max_chars - tail, len(text) - max_chars
    return f"{text[:head]}\n... {left_out} characters left out ...\n{text[-tail:]}"
