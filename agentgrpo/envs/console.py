"""Python's interactive console in the sandbox, for the REPL agent.

`line_rewards` sets the reward of a line by its outcome; the reward goes to the tokens of that line
only (loss.span_credit). `submit_final_answer(value, ...)` ends the episode with str(value) as its
answer; several values are joined by ", ". It can be called once.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from agentgrpo.actions import (
    SUBMIT,
    Action,
    InfrastructureError,
    Observation,
    RunCode,
    is_submission,
)
from agentgrpo.envs.python import RESTARTED, SandboxEpisode, as_infra_error
from agentgrpo.sandbox import Console as Terminal
from agentgrpo.sandbox import HostTools, SandboxPool, Session, StepResult, StepStatus
from agentgrpo.types import Task

Outcome = Literal["ok", "error", "syntax", "timeout", "died"]
_DEFINE_SUBMIT = f"""def {SUBMIT}(value, *values, **named):
    values = (value, *values, *named.values())
    {SUBMIT}.answer = ", ".join(map(str, values))
    return values if len(values) > 1 else value"""


class ConsoleEnv:
    """Episodes whose actions are single lines typed at `>>> ` or `... `.

    Args:
        pool: source of sessions; the caller closes it.
        timeout_s: wall-clock limit of one line, in seconds.
        line_rewards: reward of a line by its outcome: ok, error (an exception), syntax (a syntax
            error), timeout, died (the interpreter ended). Omitted outcomes have no reward and are
            not recorded.
        host_tools: functions of this process that the code may call (sandbox.host_tools).
    """

    answers = ("lines",)

    def __init__(
        self,
        pool: SandboxPool,
        timeout_s: float,
        *,
        line_rewards: Mapping[Outcome, float] | None = None,
        host_tools: HostTools | None = None,
    ) -> None:
        self.pool, self.timeout_s = pool, timeout_s
        self.host_tools = host_tools
        self.line_rewards = dict(line_rewards or {})

    def reset(self, task: Task) -> ConsoleEpisode:
        return ConsoleEpisode(self)


class ConsoleEpisode(SandboxEpisode):
    """The console of one rollout."""

    restarted = RESTARTED
    """Note to the policy after a session was replaced."""

    def __init__(self, env: ConsoleEnv) -> None:
        super().__init__(env.pool, env.host_tools)
        self._env = env
        self._python: Session | None = None
        self._terminal: Terminal | None = None
        self._statement: list[str] = []

    def step(self, action: Action) -> Observation:
        """Type one line. The observation ends with the next prompt."""
        if not isinstance(action, RunCode):
            raise TypeError(f"env.kind = 'console': expected lines of code, got {action}")
        with as_infra_error():
            terminal = self._terminal or self._start()
            result = terminal.type(action.code, self._env.timeout_s)
        if result.step.status is StepStatus.INFRA_ERROR:
            raise InfrastructureError(result.step.detail)
        self._statement.append(action.code)
        outcome = outcome_of(result.step)
        rewards, counts = {}, {f"lines_{outcome}": 1.0, **self._used(result.step)}
        if outcome in self._env.line_rewards:
            rewards["line"] = self._env.line_rewards[outcome]
        text = result.output + terminal.prompt + self._diverged
        observation = Observation(text, rewards=rewards, counts=counts)
        observation = replace(observation, memory=result.step.host_calls or None)
        if result.step.more:
            return observation
        statement, self._statement = "\n".join(self._statement), []
        if not result.failed and is_submission(statement):
            return replace(
                observation, text=result.output, done=True, answer=self._submitted(result.output)
            )
        if result.step.state_lost:
            assert self._session is not None
            self._terminal, note = None, RESTARTED
            if self._session.warm_up().status is not StepStatus.OK:  # the session ended, too
                self.close()
                note = self.restarted
            observation = replace(observation, text=f"{result.output}{note}\n>>> ")
        return replace(observation, failed=result.failed)

    def _submitted(self, output: str) -> str:
        """The answer: str() of the submitted value, or the output if the policy redefined it."""
        assert self._python is not None
        result = self._python.step(f"{SUBMIT}.answer", self._env.timeout_s)
        if result.status is StepStatus.INFRA_ERROR:
            raise InfrastructureError(result.detail)
        if result.status is StepStatus.OK and result.value is not None:
            with suppress(SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
                # fails if the value was truncated, or if the policy redefined the function
                return str(ast.literal_eval(result.value))
        return output.rstrip("\n")

    def _start(self) -> Terminal:
        self._python = python = self._interpreter(self._session or self._begin())
        result = python.step(_DEFINE_SUBMIT)
        if result.status is not StepStatus.OK:
            raise InfrastructureError(f"a fresh session did not start: {result.detail}")
        self._terminal = Terminal(python)
        return self._terminal

    def _interpreter(self, session: Session) -> Session:
        return session

    def close(self) -> None:
        self._terminal = None
        super().close()


def outcome_of(step: StepResult) -> Outcome:
    """Classify the result of a line."""
    if step.status is StepStatus.OK:
        return "ok"
    if step.status is StepStatus.TIMEOUT:
        return "timeout"
    if step.status is StepStatus.ERROR:
        name = step.error.name if step.error else ""
        return "syntax" if name in ("SyntaxError", "IndentationError", "TabError") else "error"
    return "died" if step.state_lost else "error"
