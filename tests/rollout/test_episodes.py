"""What an episode may do to its rollout: end it, reward it, answer within a turn, wait, fail."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pytest

from agentgrpo.actions import (
    Action,
    CallTools,
    Finish,
    InfrastructureError,
    Message,
    Observation,
    RunCode,
    ToolCall,
)
from agentgrpo.agents.tagged_text import TextAgent
from agentgrpo.inspect.verify.tokens import rollout_faults
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.types import Rollout, SpanReward, Status, Task
from tests.playing import EOT, TOKENIZER, sampled, says, scripted, wrapped
from tests.rollout.stubs import StubEngine, StubEnv, Turn

T = TypeVar("T")
TASK = Task(id="t", messages=({"role": "user", "content": "Q"},), spec={})
PROMPT = f"<|im_start|>user\nQ{EOT}\n<|im_start|>assistant\n"
SAID = Observation("s")


@dataclass
class EchoAgent(TextAgent):
    """Every turn runs as code but one that starts with "!"; answers as `reply` says."""

    reply: Callable[[Observation], Sequence[Message] | str] = lambda o: o.text
    stop: tuple[str, ...] = ("\n",)
    begins: str = ""

    def prefill(self, task: Task) -> str:
        return self.begins

    def parse(self, text: str, task: Task) -> Action:
        if text.startswith("call"):
            return CallTools((ToolCall("a", {}), ToolCall("b", {})))
        return Finish(text[1:]) if text.startswith("!") else RunCode(text)

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        return self.reply(observation)


@dataclass
class World:
    """Answers with the prepared observations; gives `worth` in the end."""

    observations: list[Observation | Exception] = field(default_factory=list)
    worth: Mapping[str, float] | Exception = field(default_factory=dict)
    answers: list[str | None] = field(default_factory=list)
    begun: int = 0
    closed: int = 0

    def reset(self, task: Task) -> World:
        self.begun += 1
        return self

    def step(self, action: Action) -> Observation:
        return raised(self.observations.pop(0))

    def finish(self, answer: str | None) -> Mapping[str, float]:
        self.answers.append(answer)
        return raised(self.worth)

    def close(self) -> None:
        self.closed += 1


def raised(value: T | Exception) -> T:
    if isinstance(value, Exception):
        raise value
    return value


def play(world: Any, *turns: str, agent: EchoAgent | None = None, **config: Any) -> Rollout:
    config = {"max_observation_tokens": 9, **config}
    groups, _ = sampled(says(*turns), agent or EchoAgent(), world, [TASK], **config)
    return groups[0].rollouts[0]


def text(rollout: Rollout) -> str:
    return str(TOKENIZER.decode(rollout.token_ids))


def test_a_prefill_is_given_and_a_text_continues_the_same_message() -> None:
    world = World([Observation("2\n>>> ")])
    played = play(world, "1+1\n", f"!2{EOT}", agent=EchoAgent(begins=">>> "))
    assert text(played) == f"{PROMPT}>>> 1+1\n2\n>>> !2{EOT}"
    assert [s.sampled for s in played.segments] == [False, True, False, True]
    assert TOKENIZER.decode(played.segments[0].token_ids) == f"{PROMPT}>>> "


def test_a_text_has_nowhere_to_go_once_the_policy_closed_its_message() -> None:
    world = World([Observation("2")])
    played = play(world, f"1+1{EOT}")
    assert text(played) == f"{PROMPT}1+1{EOT}"
    assert played.status is Status.COMPLETED
    assert world.closed == 1


def test_observation_may_be_several_messages() -> None:
    def told(observation: Observation) -> list[Message]:
        return [{"role": "tool", "content": output} for output in observation.outputs]

    world = World([Observation("", outputs=("one", "x" * 12))])
    played = play(world, f"call{EOT}", f"!{EOT}", agent=EchoAgent(told))
    cut = "x" * 9  # no room for a note
    assert f"<|im_start|>tool\none{EOT}\n<|im_start|>tool\n{cut}{EOT}\n" in text(played)
    assert played.stats["tool_calls"] == 2


def test_an_episode_may_end_the_rollout_and_give_its_answer() -> None:
    world = World([Observation("never shown", done=True, answer="7")], worth={"world": 2.0})
    played = play(world, "submit(7)\n")
    assert (played.status, played.answer) == (Status.COMPLETED, "7")
    assert text(played) == f"{PROMPT}submit(7)\n"
    assert world.answers == ["7"]
    assert played.rewards == {"world": 2.0}


def test_rewards_of_steps_belong_to_the_turns_that_earned_them() -> None:
    steps = [
        Observation("a", rewards={"syntax": -0.3}),
        Observation("b", counts={"late": 2}),
        Observation("c", rewards={"syntax": -0.3, "luck": 1.0}, failed=True),
    ]
    played = play(World([*steps], worth={"luck": 0.5}), "one\n", "two\n", "three\n", "!x")
    starts = {text: start for start, text in zip(*spans(played), strict=True)}
    assert played.span_rewards == [
        SpanReward(starts["one\n"], starts["one\n"] + 4, "syntax", -0.3),
        SpanReward(starts["three\n"], starts["three\n"] + 6, "syntax", -0.3),
        SpanReward(starts["three\n"], starts["three\n"] + 6, "luck", 1.0),
    ]
    assert played.rewards == {"luck": 0.5}
    assert played.reward == pytest.approx(-0.3 - 0.3 + 1.0 + 0.5)
    assert (played.stats["late"], played.stats["tool_errors"]) == (2, 1)


def spans(rollout: Rollout) -> tuple[list[int], list[str]]:
    starts, at = [], 0
    for segment in rollout.segments:
        starts.append(at)
        at += len(segment.token_ids)
    return starts, [TOKENIZER.decode(s.token_ids) for s in rollout.segments]


@pytest.mark.parametrize("where", ["step", "finish"])
def test_a_broken_machine_leaves_no_reward(where: str) -> None:
    error = InfrastructureError("gone")
    world = (
        World([Observation("a", rewards={"x": 1.0}), error])
        if where == "step"
        else World([Observation("a", rewards={"x": 1.0})], worth=error)
    )
    played = play(world, "one\n", "two\n" if where == "step" else "!2")
    assert (played.status, played.error) == (Status.INFRA_ERROR, "gone")
    assert (played.rewards, played.span_rewards) == ({}, [])
    assert world.closed == 1


@pytest.mark.parametrize("left", [1, 9])
@pytest.mark.parametrize("where", ["tools", "messages", "prefill", "parse", "observe"])
def test_a_machine_that_fails_an_agent_breaks_its_rollout_alone(where: str, left: int) -> None:
    """An agent asks a server in one of its methods; at first that is away."""
    world, agent, away = World([SAID] * 9), EchoAgent(), [InfrastructureError("away")] * left
    asks = getattr(agent, where)
    setattr(agent, where, lambda *given: raised(away.pop()) if away else asks(*given))
    engine = scripted(lambda _, prompt: Turn(f"!{EOT}" if prompt.endswith("s") else "one\n"))
    groups, stats = sampled(engine, agent, world, [TASK], 2, max_retries=1)
    broken = [r.error for r in groups[0].rollouts if r.status is Status.INFRA_ERROR]
    assert broken == ["away"] * (2 if left == 9 else 0)
    assert stats.infra_failures == (4 if left == 9 else 1)
    assert world.closed == world.begun
    assert not [fault for r in groups[0].rollouts for fault in rollout_faults(r)]


@dataclass
class Slow:
    """64 episodes that meet: none is answered before all have asked."""

    expected: int
    arrived: int = 0
    closed: int = 0
    everyone: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self, task: Task) -> SlowEpisode:
        return SlowEpisode(self)


@dataclass
class SlowEpisode:
    world: Slow

    async def step(self, action: Action) -> Observation:
        self.world.arrived += 1
        if self.world.arrived == self.world.expected:
            self.world.everyone.set()
        await asyncio.wait_for(self.world.everyone.wait(), timeout=60)
        return Observation("met")

    async def finish(self, answer: str | None) -> Mapping[str, float]:
        return {"met": float(self.world.everyone.is_set())}

    async def close(self) -> None:
        self.world.closed += 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_S2_12_sixty_four_asynchronous_episodes_wait_together(deterministic: bool) -> None:
    world = Slow(expected=64)
    engine = StubEngine(TOKENIZER, lambda n, _: Turn("wait\n" if n < 64 else "!done"))
    groups, _ = sampled(
        engine, EchoAgent(), world, [TASK] * 8, 8, threads=1, deterministic=deterministic
    )
    rollouts = [r for group in groups for r in group.rollouts]
    assert [r.rewards for r in rollouts] == [{"met": 1.0}] * 64
    assert world.closed == 64


def test_asynchronous_episodes_of_all_steps_have_one_loop() -> None:
    """A judge's client, made at the first step, holds connections that are of its loop."""
    loops: list[asyncio.AbstractEventLoop] = []

    @dataclass
    class Connected(SlowEpisode):
        async def step(self, action: Action) -> Observation:
            loops.append(asyncio.get_running_loop())
            answered = loops[-1].create_future()
            loops[0].call_soon(answered.set_result, "told")
            return Observation(await answered)

    world = Slow(expected=9)
    world.reset = lambda task: Connected(world)  # type: ignore[method-assign]
    for closed in (1, 2):
        assert play(world, "x\n", "!done").status is Status.COMPLETED
        assert world.closed == closed
    assert len(loops) == 2


@pytest.mark.parametrize("hidden", [("step",), ("step", "finish"), ("step", "finish", "close")])
def test_what_a_wrapper_hides_is_a_coroutine_is_awaited(hidden: tuple[str, ...]) -> None:
    world = Slow(expected=1)
    episode = SlowEpisode(world)
    for name in hidden:
        setattr(episode, name, wrapped(getattr(episode, name)))
    world.reset = lambda task: episode  # type: ignore[method-assign]
    assert play(world, "x\n", "!done").rewards == {"met": 1.0}
    assert world.closed == 1


def test_S2_12_sixty_four_blocking_episodes_wait_together() -> None:
    """None answers before all have been asked; the sampler has the threads for it."""
    meeting = threading.Barrier(64)

    def meet(code: str) -> None:
        meeting.wait(60)

    worlds = StubEnv(on_call=meet)
    engine = StubEngine(TOKENIZER, lambda n, _: Turn("wait\n" if n < 64 else "!done"))
    groups, _ = sampled(engine, EchoAgent(), worlds, [TASK] * 8, 8)
    assert [r.status for group in groups for r in group.rollouts] == [Status.COMPLETED] * 64


@dataclass
class Acting(EchoAgent):
    """Whose every turn is this action."""

    action: Any = None

    def parse(self, text: str, task: Task) -> Action:
        return cast(Action, self.action)


@pytest.mark.parametrize(
    ("world", "agent", "message"),
    [
        (
            World([cast(Any, "hi")]),
            EchoAgent(),
            "World.step gave a wrong result: expected an Observation, got 'hi'",
        ),
        (
            World([Observation(cast(Any, 3))]),
            EchoAgent(),
            "World.step gave .*: expected a text, got 3",
        ),
        (
            World([Observation("s", rewards={"a": math.nan})]),
            EchoAgent(),
            r"World.step gave .*: expected \{name: finite number\}, got \{'a': nan\}",
        ),
        *(
            (
                World([Observation("s", counts={name: 7})]),
                EchoAgent(),
                f"World.step gave .*: counts: '{name}' is a name of the run's metrics",
            )
            for name in ("reward", "turns", "log/mine")
        ),
        (
            World([Observation("s", done=True, answer=cast(Any, 42))]),
            EchoAgent(),
            "World.step gave .*: answer: expected a text or None, got 42",
        ),
        (
            World(),
            Acting(action=Finish(cast(Any, 42))),
            "Acting.parse gave .*: answer: expected a text or None, got 42",
        ),
        (
            World([SAID], cast(Any, 1.0)),
            EchoAgent(),
            r"World.finish gave .*: expected \{name: finite n.*1\.0",
        ),
        (World(), Acting(), "Acting.parse gave .*: expected an action of actions.py, got None"),
        (
            World([SAID]),
            EchoAgent(cast(Any, lambda o: None)),
            "EchoAgent.observe gave .*text or mess",
        ),
    ],
)
def test_invalid_result_names_the_users_class(world: World, agent: EchoAgent, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        play(world, "x\n", "!done", agent=agent)
    assert world.closed == 1


def test_error_of_an_environment_names_the_task() -> None:
    message = (
        r"^World\.step raised ZeroDivisionError \(task 't', rollout 0, at .*test_episodes.py:\d+\)$"
    )
    with pytest.raises(UserCodeError, match=message):
        play(World([ZeroDivisionError()]), "x\n")


class Async:
    """A World whose methods are coroutines."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def step(self, action: Action) -> Observation:
        return self.world.step(action)

    async def finish(self, answer: str | None) -> Mapping[str, float]:
        return self.world.finish(answer)

    async def close(self) -> None:
        self.world.close()


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
@pytest.mark.parametrize("where", ["reset", "step", "finish"])
@pytest.mark.parametrize("error", [ConnectionRefusedError("by peer"), TimeoutError("over 5 s")])
def test_a_network_that_fails_is_the_machines_fault_however_the_environment_is_made(
    error: OSError, where: str, kind: str
) -> None:
    """Played again once, then left out, and said with its name and line."""
    world = World([error, error] if where == "step" else [SAID] * 4)
    world.worth = error if where == "finish" else {}

    class Env:
        def reset(self, task: Task) -> Any:
            return raised(error) if where == "reset" else Async(world) if kind[0] == "a" else world

    turns = ["x\n", "!done"] if where == "finish" else ["x\n"]
    groups, stats = sampled(says(*turns * 2), EchoAgent(), Env(), [TASK], max_retries=1)
    (rollout,) = groups[0].rollouts
    assert (rollout.status, stats.retries, stats.infra_failures) == (Status.INFRA_ERROR, 1, 2)
    said = rf"\w+\.{where} raised {type(error).__name__}: {error} \(task 't', rollout 0, at .*py:\d"
    assert re.match(said, rollout.error or ""), rollout.error
    assert world.closed == (0 if where == "reset" else 2)


@pytest.mark.parametrize("kind", ["blocking", "asynchronous", "a coroutine in a wrapper"])
def test_a_step_that_never_returns_is_left_to_itself(kind: str) -> None:
    """Its rollout is played again, on the one thread too; who has its episode closes it."""
    back, closed = threading.Event(), threading.Event()
    began: list[float] = []

    class Hangs(World):
        def step(self, action: Action) -> Observation:
            began.append(0.0)
            if len(began) == 1:
                assert back.wait(60)
            return SAID

        def close(self) -> None:
            World.close(self)
            if self.closed == 2:
                closed.set()

    class HangsAsync(Async):
        async def step(self, action: Action) -> Observation:
            began.append(0.0)
            if len(began) == 1:
                await asyncio.Event().wait()
            return SAID

    def reset(task: Task) -> Any:
        episode: Any = HangsAsync(world) if kind[0] == "a" else world
        if "wrapper" in kind:
            episode.step = wrapped(episode.step)
        return episode

    world = Hangs()
    world.reset = reset  # type: ignore[method-assign]
    engine = says("x\n", "x\n", "!done")
    config: dict[str, Any] = {"max_retries": 1, "call_timeout_s": 5.0}
    groups, stats = sampled(engine, EchoAgent(), world, [TASK], threads=1, **config)
    (rollout,) = groups[0].rollouts
    assert (rollout.status, stats.retries) == (Status.COMPLETED, 1)
    back.set()
    assert closed.wait(60), "once by itself, once by who had it"
