"""What happens before a program begins, and while the engine waits for one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentgrpo.envs.answer import AnswerEnv
from agentgrpo.programs.launch import Process
from agentgrpo.rollout.decoder import Watch
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
def test_a_reset_that_fails_is_made_again_and_never_waited_for(times: int, answers: Any) -> None:
    groups, _ = played(asking(asks), lambda *_: turn("x"), n=2, env=Fails(times), max_retries=2)
    rollouts = groups[0].rollouts
    assert [r.answer for r in rollouts] == answers
    for rollout in rollouts:
        assert (rollout.status is Status.INFRA_ERROR) == (rollout.answer is None)
        assert rollout.answer or "server is down" in str(rollout.error)


def test_a_reset_that_does_not_come_back_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("agentgrpo.usercode.ends", [told.append])

    class Hangs(AnswerEnv):
        def reset(self, task: Any) -> Any:
            deadline = time.monotonic() + 20
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().reset(task)

    played(asking(asks), lambda *_: turn("x"), env=Hangs(), call_timeout_s=0.1)
    (said,) = told
    assert "Hangs.reset has not come back after 0.1 s (task 't0', rollout 0" in said


def test_a_program_that_cannot_be_started_was_broken_by_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    def popen(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    class Counts(AnswerEnv):
        def reset(self, task: Any) -> Any:
            episode = super().reset(task)
            monkeypatch.setattr(episode, "close", lambda: closed.append(task.id), raising=False)
            return episode

    monkeypatch.setattr("subprocess.Popen", popen)
    groups, _ = played(Process(["python", "x.py"], [], {}), lambda *_: turn("x"), env=Counts())
    (rollout,) = groups[0].rollouts
    assert rollout.status is Status.INFRA_ERROR
    assert "temporarily unavailable" in str(rollout.error)
    assert closed == ["t0"]


def test_the_engine_waits_for_programs_that_work() -> None:
    async def program(client: Any, o: Any) -> str:
        await asyncio.sleep(0.3)
        return await asks(client, o)

    sampler, _ = sampler_of(asking(program), lambda *_: turn("x"))
    _, stats = sampler.play(tasks(1), 2, seed=0)
    assert 0.3 <= stats.idle_s <= stats.total_s - stats.decode_s


@pytest.mark.parametrize("deterministic", [False, "cpu"])
def test_more_tasks_come_while_programs_run_but_not_where_all_is_repeatable(
    deterministic: Any,
) -> None:
    class More(Watch):
        left = 2

        def more(self) -> Any:
            self.left -= 1
            return (tasks(1), 7 + self.left) if self.left >= 0 else None

    groups, engine = played(
        asking(asks), lambda *_: turn("x"), play={"watch": More()}, deterministic=deterministic
    )
    assert len(groups) == (1 if deterministic else 3)
    assert len({request.options["seed"] for request in engine.requests}) == len(groups)
