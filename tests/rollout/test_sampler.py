"""Playing groups, with a scripted policy and world: every rollout against a plain re-enactment."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from agentgrpo.actions import InfrastructureError, Observation
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import BranchConfig, RolloutConfig
from agentgrpo.inspect.verify.tokens import rollout_faults
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout import transcript
from agentgrpo.rollout.engine_protocol import SamplerStats, request_seed
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.types import Completion, Group, Rollout, Status, Task
from tests.playing import CHAT, EOT, TOKENIZER, sampled, says, tasks
from tests.rollout.stubs import (
    Request,
    StubEngine,
    StubEnv,
    StubEpisode,
    Turn,
    answer_to,
    code_in,
)
from tests.tiny import NUMBERED, THINKING, make_tokenizer

AGENT = CodeAgent(system_prompt="S")
PATIENCE_S = 60  # only ever waited for by a sampler that is wrong


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def play(
    engine: StubEngine, env: StubEnv, *, num_tasks: int = 1, group_size: int = 1, **config: Any
) -> tuple[list[Group], SamplerStats]:
    config = {"max_turns": 3, "max_turn_tokens": 200, **config}
    return sampled(engine, AGENT, env, num_tasks, group_size, seed=5, **config)


def one(engine: StubEngine, env: StubEnv | None = None, **config: Any) -> Rollout:
    groups, _ = play(engine, env or StubEnv(), **config)
    return groups[0].rollouts[0]


def random_policy(rng: random.Random) -> Callable[[int, str], Turn]:
    """Turns of every kind, each with its number in it, so that no two are alike."""

    def policy(number: int, prompt: str) -> Turn:
        closing = rng.choice(["", EOT])
        text = rng.choice(
            [
                f"<code>print({number})</code>{closing}",
                f"so <code>\nfail {number}\n</code>{closing}",
                f"<code>{number} broken machine</code>" if rng.random() < 0.3 else f"{number}{EOT}",
                f"</code>{number}{EOT}",
                f"<code>{number}{EOT}",
                f"Answer: {number}{EOT}",
                f"{number}" + "long " * rng.randint(1, 12),
            ]
        )
        return Turn(text, steps=rng.randint(1, 5), cut=text.endswith("long "))

    return policy


def expected(task: Task, turns: Sequence[Request], limit: int, config: RolloutConfig) -> Any:
    """Status, answer and tokens of one rollout, played out alone and in order."""
    ids = encode(
        f"<|im_start|>system\nS{EOT}\n<|im_start|>user\n{task.messages[0]['content']}{EOT}\n"
        "<|im_start|>assistant\n"
    )
    for number, turn in enumerate(turns, 1):
        assert turn.prompt.tolist() == ids, "the engine was given something else than was recorded"
        assert turn.max_tokens == min(config.max_turn_tokens, limit - len(ids))
        ids = ids + turn.completion.token_ids.tolist()
        if turn.completion.finish_reason == "length":
            return Status.TRUNCATED_LENGTH, None, ids, number
        text = TOKENIZER.decode(turn.completion.token_ids)
        closed = text.endswith(EOT)
        text = text.removesuffix(EOT)
        code = code_in(text)
        if code is not None:
            answer = answer_to(code)
            if isinstance(answer, InfrastructureError):
                return Status.INFRA_ERROR, None, ids, number
            said = answer.text
        elif "<code>" in text or "</code>" in text:
            tag, other = ("<code>", "</code>") if "<code>" in text else ("</code>", "<code>")
            said = f"Error: {tag} without {other}"
        else:
            return (
                Status.COMPLETED,
                text.split("Answer:")[-1].strip() if "Answer:" in text else None,
                ids,
                number,
            )
        told = encode(
            ("" if closed else EOT) + f"\n<|im_start|>user\n{said}{EOT}\n<|im_start|>assistant\n"
        )
        if len(ids) + len(told) > limit:
            return Status.TRUNCATED_LENGTH, None, ids, number
        ids = ids + told
        if number == config.max_turns:
            return Status.TRUNCATED_TURNS, None, ids, number
        if len(ids) >= limit:
            return Status.TRUNCATED_LENGTH, None, ids, number
    raise AssertionError("the rollout ended before its time")


def check(groups: list[Group], engine: StubEngine, config: RolloutConfig, group_size: int) -> None:
    """Every rollout is what its own turns make of it; nothing is lost, shared or out of order."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    # a turn that the context cuts after a token or two looks like another; its prompt does not
    request_of = {
        (*r.prompt.tolist(), *r.completion.token_ids.tolist()): r for r in engine.requests
    }
    assert len(request_of) == len(engine.requests), "the test's turns must be unique"
    used = []
    for index, played in enumerate(rollouts):
        sampled = [s for s in played.segments if s.sampled]
        ends = np.cumsum([len(s.token_ids) for s in played.segments])
        turns = [
            request_of[tuple(played.token_ids[:end].tolist())]
            for end, s in zip(ends, played.segments, strict=True)
            if s.sampled
        ]
        used += turns
        # first turns are asked for in order: that fixes which rollout is which
        assert turns[0] is engine.requests[index]
        status, answer, ids, number = expected(
            groups[index // group_size].task, turns, engine.max_model_len, config
        )
        assert (played.status, played.answer) == (status, answer)
        assert played.token_ids.tolist() == ids
        assert played.stats["turns"] == len(turns) == number
        for segment, turn in zip(sampled, turns, strict=True):
            assert segment.logprobs is not None
            assert np.array_equal(segment.logprobs, turn.completion.logprobs)
        assert not played.segments[0].sampled
        assert not any(
            a.sampled and b.sampled
            for a, b in zip(played.segments, played.segments[1:], strict=False)
        )
    assert len({id(turn) for turn in used}) == len(used) == len(engine.requests)


@pytest.mark.parametrize("seed", range(30))
def test_many_interleavings_give_what_each_rollout_gives_alone(seed: int) -> None:
    rng = random.Random(seed)
    num_tasks, group_size = rng.randint(1, 5), rng.randint(1, 5)
    settings: dict[str, Any] = {
        "max_turns": rng.randint(1, 4),
        "max_turn_tokens": rng.randint(20, 60),
        "deterministic": rng.random() < 0.5,
        "max_observation_tokens": 200,
    }
    engine = StubEngine(TOKENIZER, random_policy(rng), max_model_len=rng.randint(120, 400), rng=rng)
    pauses = random.Random(seed)
    env = StubEnv(on_call=lambda code: time.sleep(pauses.choice([0, 0, 0, 0.001])))
    threads = rng.randint(1, 8)
    groups, stats = play(
        engine, env, num_tasks=num_tasks, group_size=group_size, threads=threads, **settings
    )
    assert [group.task.id for group in groups] == [f"t{i}" for i in range(num_tasks)]
    assert [len(group.rollouts) for group in groups] == [group_size] * num_tasks
    assert all(r.task is group.task for group in groups for r in group.rollouts)
    check(groups, engine, RolloutConfig(**settings), group_size)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert stats.total_sampled_tokens == sum(r.num_sampled for r in rollouts)
    assert stats.engine_steps == engine.steps
    assert stats.infra_failures == sum(r.status is Status.INFRA_ERROR for r in rollouts)
    assert len(env.executed) == sum(r.stats["tool_calls"] for r in rollouts)
    assert sum("fail" in code for code in env.executed) == sum(
        r.stats["tool_errors"] for r in rollouts
    )
    env.assert_all_closed_once()


def test_sampling_settings_reach_the_engine() -> None:
    engine = says(f"Answer: 1{EOT}")
    play(engine, StubEnv(), temperature=0.7, max_turn_tokens=9)
    assert engine.requests[0].max_tokens == 9
    assert engine.requests[0].options == {
        "temperature": 0.7,
        "seed": request_seed(5, 0, 0, 0, 0, "turn"),
        "top_logprobs": 0,
        "filters": {},
        "stop": ("</code>",),
        "stop_token_ids": (2,),
    }


def test_a_temperature_of_the_call_wins() -> None:
    engine = says(f"Answer: 1{EOT}")
    sampler = Sampler(cast(Any, engine), AGENT, StubEnv(), CHAT, RolloutConfig(temperature=0.7))
    sampler.play(tasks(1), 1, seed=0, temperature=0.0)
    assert engine.requests[0].options["temperature"] == 0.0
    assert engine.requests[0].options["seed"] is None, "greedy draws nothing"


FIRST = len(
    encode(f"<|im_start|>system\nS{EOT}\n<|im_start|>user\nQ0{EOT}\n<|im_start|>assistant\n")
)
CODE, TOLD = "<code>1</code>", f"{EOT}\n<|im_start|>user\nout of 1{EOT}\n<|im_start|>assistant\n"
AFTER_ONE_CALL = FIRST + len(encode(CODE + TOLD))


def test_a_prompt_that_leaves_no_room_is_refused_by_its_task_and_nothing_is_left_behind() -> None:
    engine, env = says("x", "x", max_model_len=FIRST + 1), StubEnv()
    sampler = Sampler(cast(Any, engine), AGENT, env, CHAT, RolloutConfig())
    long = Task(id="too long", messages=({"role": "user", "content": "Q" * 3},), spec={})
    with pytest.raises(ValueError, match=rf"{FIRST + 1} tokens .* 'too long', got {FIRST + 1}"):
        sampler.play([*tasks(1), long], 1, seed=0)
    assert not engine.running
    env.assert_all_closed_once()


class Bug(Exception):
    """Something that nobody expects."""


def raise_bug(*_: object) -> None:
    raise Bug


def failing(where: str) -> tuple[StubEngine, StubEnv]:
    """Four rollouts that all call a tool; one part of the loop has a bug."""
    engine = StubEngine(
        TOKENIZER, lambda number, _: Turn(f"<code>{number}</code>", steps=1 + number % 3)
    )
    env = StubEnv()
    if where == "tool":
        env.on_call = lambda code: raise_bug() if code == "1" else None
    elif where == "engine":
        engine.on_step = lambda step: raise_bug() if step == 2 else None
    elif where == "reset":
        env.on_reset = lambda task: raise_bug() if task.id == "t1" else None
    elif where == "finish":
        engine.policy = lambda number, _: Turn(f"Answer: {number}{EOT}", steps=1 + number % 3)
        env.on_finish = raise_bug
    return engine, env


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("where", ["tool", "engine", "reset", "finish"])
def test_a_bug_stops_the_run_and_leaves_nothing_behind(where: str, deterministic: bool) -> None:
    engine, env = failing(where)
    with pytest.raises(Bug if where == "engine" else UserCodeError):
        play(engine, env, num_tasks=2, group_size=2, deterministic=deterministic, max_turns=99)
    assert not engine.running
    assert env.running == 0
    env.assert_all_closed_once()


def test_worlds_are_closed_when_the_engine_cannot_drop_what_it_decodes() -> None:
    """One that schedules ahead waits for its device then, whose error comes there."""
    engine, env = failing("engine")
    engine.on_abort = raise_bug
    with pytest.raises(Bug):
        play(engine, env, num_tasks=2, group_size=2, max_turns=99)
    assert env.running == 0
    env.assert_all_closed_once()


def test_an_episode_that_does_not_close_keeps_no_other_open_and_is_not_the_error_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which error came first does not depend on who was still playing."""

    def close(self: StubEpisode) -> None:
        self.closed += 1
        if self is env.episodes[0] or self is env.episodes[2]:
            raise Bug("stuck")

    monkeypatch.setattr(StubEpisode, "close", close)
    engine, env = failing("engine")
    with pytest.raises(Bug) as caught:
        play(engine, env, group_size=4, max_turns=99)
    assert [re.sub(r" \(.*", "", note) for note in caught.value.__notes__] == [
        "and while it was ended: StubEpisode.close raised Bug: stuck"
    ] * 2
    env.assert_all_closed_once()


def test_no_more_rollouts_live_than_there_are_sessions() -> None:
    live: list[int] = []
    engine = StubEngine(TOKENIZER, lambda number, _: Turn(f"Answer: {number}{EOT}"))
    engine.on_step = lambda _: live.append(len(engine.running))
    env = StubEnv()
    task = Task(id="t", messages=({"role": "user", "content": "x"},), spec={})
    sampler = Sampler(cast(Any, engine), AGENT, env, CHAT, RolloutConfig(), max_live=3)
    groups, _ = sampler.play([task] * 4, 2, seed=5)
    assert max(live) == 3
    assert [r.answer for g in groups for r in g.rollouts] == [str(n) for n in range(8)]
    env.assert_all_closed_once()


def test_slow_tool_does_not_block_other_rollouts() -> None:
    """Rollout 0's tool answers only after rollout 1 has called its own and ended."""
    others_done = threading.Event()
    turns = ["<code>slow</code>", "<code>fast</code>", f"Answer: 1{EOT}", f"Answer: 0{EOT}"]
    engine = says(*turns)

    def policy(number: int, prompt: str) -> Turn:
        if number == 3:
            assert others_done.is_set()
        return Turn(turns[number])

    def on_call(code: str) -> None:
        if code == "slow":
            assert others_done.wait(PATIENCE_S), "the sampler waited for the slow tool"

    def on_step(step: int) -> None:
        if len(engine.requests) == 3:  # rollout 1's answer is decoded, only the slow tool is left
            others_done.set()

    engine.policy, engine.on_step = policy, on_step
    groups, _ = play(engine, StubEnv(on_call=on_call), group_size=2, deterministic=False)
    assert [r.answer for r in groups[0].rollouts] == ["0", "1"]


def recorded(seed: int, *, deterministic: bool) -> list[tuple[int, str, bytes]]:
    """The order in which turns are asked for, with tools as slow as `seed` makes them.

    In which order the engine hands out what ended in one step is a function of the seed too.
    """
    rng, delays = random.Random(0), random.Random(seed)
    env = StubEnv(on_call=lambda code: time.sleep(delays.choice([0, 0.002, 0.004])))
    engine = StubEngine(TOKENIZER, random_policy(rng), rng=random.Random(seed))
    if deterministic:
        engine.on_step = lambda step: None if env.running == 0 else raise_bug()
    play(engine, env, num_tasks=3, group_size=4, deterministic=deterministic, max_turns=4)
    return [(r.submitted_at, r.request_id, r.prompt.tobytes()) for r in engine.requests]


def test_deterministic_runs_repeat_whatever_the_tools_take() -> None:
    first = recorded(1, deterministic=True)
    assert len(first) > 20
    assert all(recorded(seed, deterministic=True) == first for seed in range(2, 6))


class Caching(StubEngine):
    """Serves all but the last three tokens of every prompt from its cache."""

    def step(self) -> list[Completion]:
        asked = {request.request_id: len(request.prompt) for request in self.requests}
        done = super().step()
        return [replace(one, num_cached_tokens=asked[one.request_id] - 3) for one in done]


def test_tokens_of_prompts_and_those_of_the_cache_are_counted() -> None:
    engine = Caching(TOKENIZER, lambda n, _: Turn(CODE if n < 3 else f"Answer: {n}{EOT}"))
    _, stats = play(engine, StubEnv(), group_size=3)
    prompts = [len(request.prompt) for request in engine.requests]
    assert len(prompts) == 6
    assert stats.prompt_tokens == sum(prompts)
    assert stats.cached_tokens == sum(prompts) - 3 * 6
    assert stats.retries == stats.infra_failures == 0


@pytest.mark.parametrize(
    ("template", "threshold", "drifts"),
    [
        (None, 1024, {"prompts_clean": 2}),
        (THINKING, 1024, {"prompts_realign": 2}),
        (THINKING, 5, {"prompts_fork": 2}),
    ],
    ids=["clean", "realign", "fork"],
)
def test_prompts_that_are_rendered_anew_are_followed_and_proven(
    template: str | None, threshold: int, drifts: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The engine gets the template's own rendering; what it sampled and still sees is trained."""
    monkeypatch.setattr(transcript, "FORK_FROM", threshold)
    tokenizer = make_tokenizer(template) if template else TOKENIZER
    turns = [f"<think>so</think><code>{n}</code>{EOT}" for n in range(2)] + [f"Answer: 1{EOT}"]
    engine = says(*turns, tokenizer=tokenizer)
    config = RolloutConfig(
        max_turns=3, max_turn_tokens=200, max_observation_tokens=200,
        history="render",
    )  # fmt: skip
    sampler = Sampler(cast(Any, engine), AGENT, StubEnv(), ChatTemplate(tokenizer), config)
    groups, _ = sampler.play(tasks(1), 1, seed=5)
    (rollout,) = groups[0].rollouts
    assert {k: v for k, v in rollout.stats.items() if k.startswith("prompts_")} == drifts
    assert list(rollout_faults(rollout)) == []
    messages = [*AGENT.messages(tasks(1)[0])]
    for request, said in zip(engine.requests, turns, strict=True):
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(request.prompt) == rendered
        answer = answer_to(code_in(said) or "")
        assert not isinstance(answer, InfrastructureError)
        messages += [
            {"role": "assistant", "content": said.removesuffix(EOT)},
            {"role": "user", "content": answer.text},
        ]
    sampled = [i for row in rollout.rows for s in row if s.sampled for i in s.token_ids.tolist()]
    replaced = [i for turn in rollout.turns for i in turn.replaced]
    assert len(sampled) + len(replaced) == len(encode("".join(turns)))
    assert len(rollout.rows) == 1 + drifts.get("prompts_fork", 0)
    assert bool(replaced) == ("prompts_realign" in drifts)


def test_template_that_numbers_messages_gets_their_count() -> None:
    """In a rollout, and in one that branches off it."""
    tokenizer = make_tokenizer(NUMBERED)
    turns = [f"<code>{n}</code>{EOT}" for n in range(2)] + [f"Answer: 1{EOT}"]

    def policy(number: int, prompt: str) -> Turn:
        return Turn(turns[prompt.count("<code>")])

    branching = BranchConfig(initial=1, probability=1.0, entropy_weight=0.0)
    config = RolloutConfig(max_turns=4, max_turn_tokens=99, group_size=2, branching=branching)
    engine = StubEngine(tokenizer, policy)
    sampler = Sampler(cast(Any, engine), AGENT, StubEnv(), ChatTemplate(tokenizer), config)
    groups, stats = sampler.play(tasks(1), 2, seed=5)
    assert stats.branches == 1
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    for rollout in groups[0].rollouts:
        text = tokenizer.decode(np.concatenate([s.token_ids for s in rollout.segments]))
        assert re.findall(r"<.im_start.>(\w+ ?\d*)", text) == [
            f"{role} {index}" if role != "assistant" else role
            for index, role in enumerate(roles, 1)
        ]


@pytest.mark.parametrize("threshold", [1024, 5], ids=["realign", "fork"])
@pytest.mark.parametrize("max_turns", [1, 3])
def test_span_reward_stays_with_the_rest_of_its_turn(
    threshold: int, max_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the turns that come in place of the thoughts it loses, nor beyond the last token."""
    monkeypatch.setattr(transcript, "FORK_FROM", threshold)
    tokenizer = make_tokenizer(THINKING)
    thought = "<think>" + "so " * 60 + "</think>"
    turns = [f"{thought}<code>{n}</code>{EOT}" for n in range(2)] + [f"Answer: 1{EOT}"]
    env = StubEnv(answer=lambda code: Observation(code, rewards={"step": 1.0 + float(code)}))
    engine = says(*turns, tokenizer=tokenizer)
    config = RolloutConfig(max_turns=max_turns, max_turn_tokens=400, history="render")
    sampler = Sampler(cast(Any, engine), AGENT, env, ChatTemplate(tokenizer), config)
    groups, _ = sampler.play(tasks(1), 1, seed=5)
    (rollout,) = groups[0].rollouts
    assert list(rollout_faults(rollout)) == []
    starts, at = [], 0
    for segment in rollout.all_segments:
        starts += [at] if segment.sampled else []
        at += len(segment.token_ids)
    assert [span.start for span in rollout.span_rewards] == starts[:2]
    for number, span in enumerate(rollout.span_rewards):
        assert span.value == 1.0 + number
        assert all(span.end <= start for start in starts[number + 1 :])


@pytest.mark.parametrize(
    ("room", "status", "turns", "is_shown"),
    [
        (-1, Status.TRUNCATED_LENGTH, 1, False),
        (0, Status.TRUNCATED_LENGTH, 1, True),
        (10, Status.COMPLETED, 2, True),
    ],
)
def test_a_prompt_that_is_rendered_anew_must_fit_too(
    room: int, status: Status, turns: int, is_shown: bool
) -> None:
    """As in the appended form: what fills it exactly is kept, what is one over is left out."""
    limit = AFTER_ONE_CALL - FIRST + room
    played = one(says(CODE, f"Answer: 7{EOT}"), history="render", max_response_tokens=limit)
    assert (played.status, played.stats["turns"]) == (status, turns)
    assert any(not s.sampled for s in played.segments[1:]) == is_shown
    assert len(played.token_ids) <= FIRST + limit


def test_a_rollouts_time_is_accounted_for_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks when it is read; the engine's steps read it twice each."""
    ticks = [0]

    def tick() -> float:
        ticks[0] += 1
        return float(ticks[0])

    monkeypatch.setattr(time, "perf_counter", tick)
    say = f"<code>print(1)</code>{EOT}"
    engine = says(Turn(say, steps=3), Turn(say, steps=20), Turn(f"Answer: 2{EOT}", steps=5))
    timings = one(engine).timings
    assert set(timings) == {"queue_s", "generate_s", "own_s", "tools_s", "finish_s"}
    assert timings["generate_s"] >= 2 * (3 + 20 + 5)
    assert timings["queue_s"] >= 1
    assert timings["tools_s"] >= 2
    assert timings["finish_s"] >= 1
    assert 2 * 28 < sum(timings.values()) <= ticks[0]
    whole = dict(timings)
    del whole["generate_s"]
    assert sum(whole.values()) < 30, "nothing is counted twice"
