"""A Python interpreter in the sandbox: each rollout has its own session, whose state persists."""

from __future__ import annotations

from collections.abc import Mapping

from agentgrpo.agents.base import Action, RunCode
from agentgrpo.envs.base import InfrastructureError, Observation
from agentgrpo.sandbox import SandboxException, SandboxPool, Session, StepResult
from agentgrpo.types import Task


class PythonEnv:
    """Episodes whose actions are code steps.

    Args:
        pool: where sessions come from; the caller closes it.
        timeout_s: wall-clock seconds of one step.
        stateless: a session for each step instead of one for each rollout.
    """

    def __init__(self, pool: SandboxPool, timeout_s: float, *, stateless: bool = False) -> None:
        self._pool, self._timeout_s, self._stateless = pool, timeout_s, stateless

    def reset(self, task: Task) -> PythonEpisode:
        """An episode without a session yet: most rollouts that never run code need none."""
        return PythonEpisode(self._pool, self._timeout_s, stateless=self._stateless)


class PythonEpisode:
    """One rollout's interpreter."""

    def __init__(self, pool: SandboxPool, timeout_s: float, *, stateless: bool = False) -> None:
        self._pool, self._timeout_s, self._stateless = pool, timeout_s, stateless
        self._session: Session | None = None

    def step(self, action: Action) -> Observation:
        """Run the code; a session that died is replaced, and the policy is told so."""
        assert isinstance(action, RunCode), action
        fresh = self._session is None
        result = self._run(action.code)
        if result.status == "infra_error" and fresh:  # no state is lost by another try
            self.close()
            result = self._run(action.code)
        if result.status == "infra_error":
            raise InfrastructureError(render(result))
        text = render(result)
        if result.state_lost and not self._stateless:
            self.close()
            text += "\n(the interpreter was restarted: its variables are gone)"
        return Observation(text, failed=result.status != "ok")

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """Nothing: what an answer is worth is for the reward to say."""
        return {}

    def _run(self, code: str) -> StepResult:
        try:
            if self._stateless:
                return self._pool.run(code, timeout_s=self._timeout_s)
            if self._session is None:
                self._session = self._pool.acquire()
            return self._session.step(code, timeout_s=self._timeout_s)
        except SandboxException as error:
            raise InfrastructureError(str(error)) from error

    def fork(self) -> PythonEpisode:
        """Another episode whose interpreter is in the state of this one's.

        Raises:
            ReplayDiverged: the steps so far cannot be repeated (sandbox/history.py).
        """
        other = PythonEpisode(self._pool, self._timeout_s, stateless=self._stateless)
        if self._session is not None:
            other._session = self._pool.fork(self._session)
        return other

    def close(self) -> None:
        """End the session, if there is one."""
        if self._session is not None:
            self._session.close()
            self._session = None


def render(result: StepResult) -> str:
    """What a person at a terminal would have seen, without the traceback's frames."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n"), result.value or ""]
    if result.error is not None:
        parts.append(f"{result.error.name}: {result.error.value}".rstrip(": "))
    elif result.status != "ok":
        parts.append(f"Error: {result.status.replace('_', ' ')}")
    return "\n".join(part for part in parts if part) or "(no output)"
