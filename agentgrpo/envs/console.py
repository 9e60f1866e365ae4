"""Python's interactive console in the sandbox: what answers the REPL agent, line by line.

A line is worth what `line_rewards` says of how it ended, credited to the tokens of that line alone
(loss.span_credit). `submit_final_answer(value, ...)` ends the episode with str(value) as its
answer, of several joined by ", "; it can be called once.
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
_DEFINE = f"""def {SUBMIT}(value, *values, **named):
    values = (value, *values, *named.values())
    {SUBMIT}.answer = ", ".join(map(str, values))
    return values if len(values) > 1 else value"""


class ConsoleEnv:
    """Episodes whose actions are single lines typed at `>>> ` or `... `.

    Args:
        pool: where sessions come from; the caller closes it.
        timeout_s: wall-clock seconds of one line.
        line_rewards: what a line is worth by its outcome: ok, error (an exception), syntax (a
            syntax error), timeout, died (the interpreter ended). Outcomes left out are worth
            nothing and leave no record.
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
    """One rollout's terminal."""

    restarted = RESTARTED
    """What the policy reads of a session that was replaced."""

    def __init__(self, env: ConsoleEnv) -> None:
        super().__init__(env.pool, env.host_tools)
        self._env = env
        self._python: Session | None = None
        self._terminal: Terminal | None = None
        self._statement: list[str] = []

    def step(self, action: Action) -> Observation:
        """Type one line; what is shown ends with the next prompt."""
        if not isinstance(action, RunCode):
            raise TypeError(f"the console takes lines of code, got {action}")
        with as_infra_error():
            terminal = self._terminal or self._start()
            typed = terminal.type(action.code, self._env.timeout_s)
        if typed.step.status is StepStatus.INFRA_ERROR:
            raise InfrastructureError(typed.step.detail)
        self._statement.append(action.code)
        outcome = outcome_of(typed.step)
        rewards, counts = {}, {f"lines_{outcome}": 1.0, **self._used(typed.step)}
        if outcome in self._env.line_rewards:
            rewards["line"] = self._env.line_rewards[outcome]
        shown = typed.shown + terminal.prompt + self._diverged
        told = Observation(shown, rewards=rewards, counts=counts)
        told = replace(told, memory=typed.step.host_calls or None)
        if typed.step.more:
            return told
        statement, self._statement = "\n".join(self._statement), []
        if not typed.failed and is_submission(statement):
            return replace(told, text=typed.shown, done=True, answer=self._submitted(typed.shown))
        if typed.step.state_lost:
            assert self._session is not None
            self._terminal, note = None, RESTARTED
            if self._session.warm_up().status is not StepStatus.OK:  # it has ended, too
                self.close()
                note = self.restarted
            told = replace(told, text=f"{typed.shown}{note}\n>>> ")
        return replace(told, failed=typed.failed)

    def _submitted(self, shown: str) -> str:
        """The answer: str() of what was submitted; what was shown if the policy redefined it."""
        assert self._python is not None
        told = self._python.step(f"{SUBMIT}.answer", self._env.timeout_s)
        if told.status is StepStatus.INFRA_ERROR:
            raise InfrastructureError(told.detail)
        if told.status is StepStatus.OK and told.value is not None:
            with suppress(SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
                # not where it was cut, or is none: the policy may have redefined it
                return str(ast.literal_eval(told.value))
        return shown.rstrip("\n")

    def _start(self) -> Terminal:
        self._python = python = self._interpreter(self._session or self._begin())
        defined = python.step(_DEFINE)
        if defined.status is not StepStatus.OK:
            raise InfrastructureError(f"a fresh session did not start: {defined.detail}")
        self._terminal = Terminal(python)
        return self._terminal

    def _interpreter(self, session: Session) -> Session:
        """The Python of a fresh session that is typed at."""
        return session

    def close(self) -> None:
        self._terminal = None
        super().close()


def outcome_of(step: StepResult) -> Outcome:
    """How a line ended."""
    if step.status is StepStatus.OK:
        return "ok"
    if step.status is StepStatus.TIMEOUT:
        return "timeout"
    if step.status is StepStatus.ERROR:
        name = step.error.name if step.error else ""
        return "syntax" if name in ("SyntaxError", "IndentationError", "TabError") else "error"
    return "died" if step.state_lost else "error"
