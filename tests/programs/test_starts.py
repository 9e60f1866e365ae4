"""What happens before a program begins, and while the engine waits for one."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.envs.answer import AnswerEnv
from agentgrpo.envs.base import Episode
from agentgrpo.programs.launch import Process, Sandboxed
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.types import Status
from tests.playing import tasks
from tests.programs.test_play import asking, played, sampler_of, turn


async def asks(client: Any, o: Any) -> str:
    await o.ask([{"role": "user", "content": "Q"}])
    return "ok"


class Fails(AnswerEnv):
    """Its network is down for the first `times` of all resets."""

    def __init__(self, times: int) -> None:
        self.left = times

    def reset(self, task: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise ConnectionError("the environment's server is down")
        return super().reset(task)


@pytest.mark.parametrize(("times", "answers"), [(2, ["ok", "ok"]), (99, [None, None])])
def test_failing_reset_is_retried(times: int, answers: Any) -> None:
    groups, _ = played(asking(asks), lambda *_: turn("x"), n=2, env=Fails(times), max_retries=2)
    rollouts = groups[0].rollouts
    assert [r.answer for r in rollouts] == answers
    for rollout in rollouts:
        assert (rollout.status is Status.INFRA_ERROR) == (rollout.answer is None)
        assert rollout.answer or "server is down" in str(rollout.error)


def test_endless_reset_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("agentgrpo.support.user_calls.end_command", told.append)

    class Hangs(AnswerEnv):
        def reset(self, task: Any) -> Any:
            deadline = time.monotonic() + 20
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().reset(task)

    played(asking(asks), lambda *_: turn("x"), env=Hangs(), call_timeout_s=0.1)
    (said,) = told
    assert "Hangs.reset did not return within 0.1 s (task 't0', rollout 0" in said


class Counts(AnswerEnv):
    """Its episodes are counted when they are closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def reset(self, task: Any) -> Any:
        self.last = Closes(self.closed, task.id)
        return self.last


class Closes(Episode):
    def __init__(self, closed: list[str], task: str) -> None:
        self.closed, self.task = closed, task

    def step(self, action: Any) -> Any:
        raise AssertionError("nobody acts")

    def close(self) -> None:
        self.closed.append(self.task)


PROCESS = Process(["python", "x.py"], [])


def no_more(number: int) -> Callable[..., Any]:
    def popen(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return popen


@pytest.mark.parametrize("where", ["process", "session"])
def test_lack_of_resources_is_an_infrastructure_error(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("subprocess.Popen", no_more(errno.EMFILE))
    monkeypatch.setattr("agentgrpo.programs.launch.listener_in", no_more(errno.EMFILE))
    jails: Any = SimpleNamespace(acquire=nullcontext)
    session = Sandboxed(jails, ["python", "x.py"], [], 9.0)
    env = Counts()
    groups, _ = played(PROCESS if where == "process" else session, lambda *_: turn("x"), env=env)
    (rollout,) = groups[0].rollouts
    assert rollout.status is Status.INFRA_ERROR
    assert "Too many open files" in str(rollout.error)
    assert env.closed == ["t0"]


def test_program_that_cannot_be_executed_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("subprocess.Popen", no_more(errno.ENOEXEC))
    env = Counts()
    with pytest.raises(UserCodeError, match=r"did not start: .*Exec format error"):
        played(PROCESS, lambda *_: turn("x"), n=2, env=env)
    assert env.closed == ["t0", "t0"]


def test_engine_waits_for_busy_programs() -> None:
    async def program(client: Any, o: Any) -> str:
        await asyncio.sleep(0.5)
        return await asks(client, o)

    sampler, _ = sampler_of(asking(program), lambda *_: turn("x"))
    _, stats = sampler.play(tasks(1), 2, seed=0)
    assert 0.2 <= stats.idle_s <= stats.total_s - stats.decode_s
