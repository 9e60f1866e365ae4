"""Programs that ask a scripted engine through the real endpoint, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import openai
import pytest

from agentgrpo.actions import Reading
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.answer import AnswerEnv
from agentgrpo.envs.base import Environment
from agentgrpo.inspect.verify.tokens import rollout_faults
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.programs.launch import AsyncFunction, Launcher
from agentgrpo.programs.play import ProgramSampler
from agentgrpo.programs.session import TOO_LONG
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.types import Group, Rollout, Status, Task
from tests.models.test_templates import judge_of
from tests.playing import CHAT, EOT, TOKENIZER, scripted, tasks
from tests.rollout.stubs import StubEngine, Turn
from tests.tiny import CHATML, make_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1,  "b": 2.0}}</tool_call>'


def read_calls(text: str, tools: Any) -> Reading:
    """In the form of Hermes, arguments as the policy wrote them."""
    calls = []
    for part in text.split("<tool_call>")[1:]:
        inside = part.partition("</tool_call>")[0]
        try:
            name = json.loads(inside)["name"]
        except ValueError:
            continue
        calls.append((name, inside.partition('"arguments": ')[2][:-1]))
    return Reading(text.partition("<tool_call>")[0], tuple(calls), "<tool_call>" in text)


def played(
    program: Callable[..., Any] | Launcher,
    engine: StubEngine | Callable[[int, str], Turn],
    *,
    n: int = 1,
    num_tasks: int = 1,
    of: Sequence[Task] = (),
    timeout_s: float = 60.0,
    env: Environment | None = None,
    play: Mapping[str, Any] = MappingProxyType({}),
    **config: Any,
) -> tuple[list[Group], StubEngine]:
    """Groups of rollouts of a program."""
    sampler, engine = sampler_of(program, engine, timeout_s=timeout_s, env=env, **config)
    groups, _ = sampler.play(of or tasks(num_tasks), n, seed=0, **play)
    for group in groups:
        for rollout in group.rollouts:
            assert list(rollout_faults(rollout)) == []
    return groups, engine


def sampler_of(
    program: Callable[..., Any] | Launcher,
    engine: StubEngine | Callable[[int, str], Turn],
    *,
    timeout_s: float = 60.0,
    env: Environment | None = None,
    act_in_thoughts: bool = False,
    **config: Any,
) -> tuple[ProgramSampler, StubEngine]:
    """What plays a program, and its engine."""
    launcher: Any = program if hasattr(program, "start") else AsyncFunction(cast(Any, program))
    engine = engine if isinstance(engine, StubEngine) else scripted(engine)
    settings = {"max_turns": 9, "max_turn_tokens": 99, "max_retries": 0, **config}
    agent: Any = SimpleNamespace(
        read_calls=globals()["read_calls"], timeout_s=timeout_s, act_in_thoughts=act_in_thoughts
    )
    sampler = ProgramSampler(
        cast(Any, engine), agent, launcher, env or AnswerEnv(), CHAT, RolloutConfig(**settings),
        max_live=64,
    )  # fmt: skip
    return sampler, engine


def alone(program: Any, engine: Any, **config: Any) -> Rollout:
    ((rollout,),) = [group.rollouts for group in played(program, engine, **config)[0]]
    return rollout


def asking(use: Callable[[openai.AsyncOpenAI, Any], Any], **options: Any) -> Callable[..., Any]:
    """A program that uses one client."""

    async def program(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
        given = {"base_url": base_url, "api_key": api_key, **options}
        async with openai.AsyncOpenAI(**given) as client:

            async def ask(messages: list[Any], **more: Any) -> Any:
                return await client.chat.completions.create(model=model, messages=messages, **more)

            return await use(client, SimpleNamespace(ask=ask, task=task, model=model))

    return program


def turn(text: str) -> Turn:
    return Turn(text + EOT)


def rows_of(rollout: Rollout) -> list[list[tuple[bool, str]]]:
    return [[(s.sampled, TOKENIZER.decode(s.token_ids)) for s in row] for row in rollout.rows]


async def two_tools(_: Any, o: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": o.task["question"]}]
    for _ in range(3):
        (choice,) = (await o.ask(messages, tools=[ADD])).choices
        messages.append(o.form(choice.message) if hasattr(o, "form") else choice.message)
        calls = choice.message.tool_calls or ()
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in calls]
        if not calls:
            return str(choice.message.content)
    return "never"


def says_tools(number: int, prompt: str) -> Turn:
    said = prompt.count("<|im_start|>assistant")
    return turn(f"turn {number} {CALL}") if said < 3 else turn(" The answer is 3. ")


def rewritten(message: Any) -> Any:
    """As LangChain sends it back: arguments dumped anew, null for no content."""
    made = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
    for call in made.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    return {**made, "content": made.get("content") or None}


@pytest.mark.parametrize("form", [lambda m: m, rewritten])
def test_row_continues_however_a_client_sends_a_message_back(form: Any) -> None:
    """One row; each turn whole, as it was sampled; what is given between is the template's."""

    async def program(client: Any, o: Any) -> str:
        o.form = form
        return await two_tools(client, o)

    rollout = alone(asking(program), says_tools)
    (row,) = rows_of(rollout)
    sampled = [text for is_sampled, text in row if is_sampled]
    assert sampled == [
        f"turn 0 {CALL}{EOT}", f"turn 1 {CALL}{EOT}", f" The answer is 3. {EOT}",
    ]  # fmt: skip
    assert [text for is_sampled, text in row[1:] if not is_sampled] == [
        TOKENIZER.decode(CHAT.observation_ids([message], last_id=CHAT.end_of_turn_id, tools=True))
        for message in ({"role": "tool", "content": "3", "name": "add"},) * 2
    ]
    assert (rollout.answer, rollout.status) == (" The answer is 3. ", Status.COMPLETED)
    assert rollout.stats["tool_calls"] == 2
    assert len(rollout.turns) == rollout.stats["turns"] == 3


def test_call_ids_have_mistrals_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = judge_of("mistral_v3")
    monkeypatch.setitem(globals(), "CHAT", judge.chat)
    says = [f"{CALL}{CALL}</s>", f"{CALL}</s>", "It is 3.</s>"]
    engine = StubEngine(judge.tokenizer, lambda number, _: Turn(says[number]))
    rollout = alone(asking(two_tools), engine)
    assert (rollout.answer, len(rollout.rows)) == ("It is 3.", 1)
    shown = "".join(judge.tokenizer.decode(s.token_ids) for s in rollout.segments)
    assert len(set(re.findall(r'"call_id": "([a-z0-9]{9})"', shown))) == 3


@pytest.mark.parametrize("given", ["", "corp.example", "*"])
def test_program_in_this_process_bypasses_the_proxy(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", given)
    monkeypatch.setenv("no_proxy", "")
    rollout = alone(asking(two_tools, max_retries=0), lambda *_: turn("fine"))
    assert rollout.answer == "fine"
    hosts = os.environ["no_proxy"]
    assert hosts == os.environ["NO_PROXY"]
    assert hosts.startswith(given)
    assert (hosts == "*") == (given == "*")  # "*" among others says nothing to urllib


def test_stream_equals_the_plain_response() -> None:
    async def program(client: Any, o: Any) -> str:
        messages = [{"role": "user", "content": "Q"}]
        plain = (await o.ask(messages, tools=[ADD])).choices[0].message
        calls: list[Any] = []
        text = ""
        options = {"include_usage": True}
        async for chunk in await o.ask(messages, tools=[ADD], stream=True, stream_options=options):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
        assert text == plain.content == "think "
        (mine,), (given,) = calls, plain.tool_calls
        assert mine.function == given.function.model_copy() or (
            (mine.function.name, mine.function.arguments)
            == (given.function.name, given.function.arguments)
        )
        assert mine.id != given.id
        assert chunk.usage.completion_tokens == len(TOKENIZER.encode(f"think {CALL}{EOT}"))
        return "same"

    rollout = alone(asking(program), lambda number, prompt: turn(f"think {CALL}"))
    assert rollout.answer == "same"
    assert len(rollout.rows) == 2


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("whole", [False, True])
def test_call_in_a_thought_is_ignored(
    whole: bool, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thoughts are given apart from what is said, and the conversation stays one row."""
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    chat = ChatTemplate(make_tokenizer(template)) if opened else CHAT
    monkeypatch.setitem(globals(), "CHAT", chat)
    begun = "" if opened else "<think>"
    turns = [f"{begun}3? {CALL}</think>\n\n{CALL}", f"{begun}3</think>\n4", f"{begun}5"]
    calls = [2, 0, 0] if whole else [1, 0, 0]
    said = [None, turns[1], turns[2]] if whole else [None, "4", ""]
    thoughts = [None] * 3 if whole else [f"3? {CALL}", "3", "5"]

    async def program(client: Any, o: Any) -> str:
        messages: list[Any] = [{"role": "user", "content": "Q"}]
        for number in range(3):
            message = (await o.ask(messages, tools=[ADD])).choices[0].message
            assert len(message.tool_calls or ()) == calls[number]
            assert message.reasoning_content == thoughts[number]
            assert message.content in (said[number], begun) or number == 0
            kept = message.model_dump(exclude={"reasoning_content"} if number else None)
            results = [
                {"role": "tool", "tool_call_id": made.id, "content": "3"}
                for made in message.tool_calls or ()
            ]
            messages += [kept, *(results or [{"role": "user", "content": "more"}])]
        async for chunk in await o.ask(messages, tools=[ADD], stream=True):
            for choice in chunk.choices:
                thought = getattr(choice.delta, "reasoning_content", None)
                assert thought in (None, "6")
        return str(message.content)

    rollout = alone(
        asking(program),
        lambda number, _: turn([*turns, f"{begun}6</think>7"][number]),
        act_in_thoughts=whole,
        max_turn_tokens=300,
    )
    assert rollout.answer == said[2]
    assert len(rollout.rows) == 1


def test_turn_truncated_by_the_request_continues_and_by_the_run_does_not() -> None:
    async def program(client: Any, o: Any) -> str:
        messages: list[Any] = [{"role": "user", "content": "Q"}]
        for most in (3, None):
            said = await o.ask(messages, max_tokens=most)
            assert said.choices[0].finish_reason == "length"
            messages += [said.choices[0].message, {"role": "user", "content": "more"}]
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await o.ask(messages)
        assert caught.value.code == "context_length_exceeded"
        assert "rollout.max_turn_tokens" in str(caught.value)
        return "cut"

    rollout = alone(asking(program), lambda *_: turn("a long tale " * 9), max_turn_tokens=20)
    assert [(t.sampled_tokens, t.asked_tokens) for t in rollout.turns] == [(3, 3), (20, 20)]
    assert rollout.status is Status.TRUNCATED_LENGTH
    assert len(rollout.rows) == 1


def test_retry_after_a_refusal_gets_its_own_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenAI's client counts its retries of a 429 as of any failure."""
    monkeypatch.setattr("agentgrpo.programs.session.MAX_PENDING", 2)

    async def program(client: Any, o: Any) -> str:
        asked = [o.ask([{"role": "user", "content": "Q"}]) for _ in range(5)]
        said = await asyncio.gather(*asked)
        return str(len({one.id for one in said}))

    rollout = alone(asking(program, max_retries=9), lambda *_: Turn(f"x{EOT}", steps=3))
    assert (rollout.answer, len(rollout.turns)) == ("5", 5)


def test_undelivered_turn_is_in_no_row() -> None:
    async def program(client: Any, o: Any) -> str:
        await o.ask([{"role": "user", "content": "first"}])
        quick = client.with_options(timeout=1.5, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            await quick.chat.completions.create(
                model=o.model, messages=[{"role": "user", "content": "Q"}]
            )
        return "gone"

    engine = scripted(
        lambda number, _: Turn(f"said {number}{EOT}", steps=1 + 40 * number),
        on_step=lambda _: __import__("time").sleep(0.1),
    )
    rollout = alone(asking(program), engine)
    assert rows_of(rollout) == [[(False, rows_of(rollout)[0][0][1]), (True, f"said 0{EOT}")]]
    assert rollout.stats["undelivered"] == 1
    assert not engine.running


def test_turns_of_disconnected_clients_count() -> None:
    """Or who asks and hangs up, again and again, has the engine sample without end."""
    ends: list[str] = []

    async def program(client: Any, o: Any) -> str:
        quick = client.with_options(timeout=1.0, max_retries=0)
        for _ in range(4):
            try:
                await quick.chat.completions.create(
                    model=o.model, messages=[{"role": "user", "content": "Q"}]
                )
            except openai.APITimeoutError:
                ends.append("left")
            except openai.BadRequestError as error:
                ends.append(str(error.code))
        return "gone"

    engine = scripted(
        lambda number, _: Turn(f"said{EOT}", steps=400), on_step=lambda _: time.sleep(0.02)
    )
    rollout = alone(asking(program), engine, max_turns=2)
    assert ends == ["left", "left", TOO_LONG, TOO_LONG]
    assert rollout.stats["undelivered"] == 2


class Stopping(StubEngine):
    """Its turns end with the string that was to stop them."""

    def step(self) -> list[Any]:
        return [replace(done, stop_reason="END") for done in super().step()]


def test_stop_string_is_sampled_and_not_delivered() -> None:
    async def program(client: Any, o: Any) -> str:
        messages: list[Any] = [{"role": "user", "content": "Q"}]
        said = (await o.ask(messages, stop="END")).choices[0].message
        assert said.content == "so far "
        await o.ask([*messages, said, {"role": "user", "content": "on"}], stop=["END"])
        return "ok"

    engine = Stopping(TOKENIZER, lambda *_: Turn("so far END"))
    rollout = alone(asking(program), engine)
    assert [request.options["stop"] for request in engine.requests] == [("END",)] * 2
    ((_, first, between, _),) = rows_of(rollout)
    assert first == (True, "so far END")
    assert between[1].startswith(EOT)
    assert rollout.answer == "ok"


def test_each_rollout_has_its_own_session_and_seeds() -> None:
    async def program(client: Any, o: Any) -> str:
        await o.ask([{"role": "user", "content": o.task["question"]}])
        return str(o.task["question"])

    groups, engine = played(asking(program), lambda *_: turn("x"), n=3, num_tasks=2)
    assert [[r.answer for r in group.rollouts] for group in groups] == [["Q0"] * 3, ["Q1"] * 3]
    assert len({request.options["seed"] for request in engine.requests}) == 6
    again = played(asking(program), lambda *_: turn("x"), n=3, num_tasks=2)[1]
    seeds = [sorted(r.options["seed"] for r in e.requests) for e in (engine, again)]
    assert seeds[0] == seeds[1]


def test_failing_program_is_scored_and_failure_of_all_ends_the_run() -> None:
    async def program(client: Any, o: Any) -> str:
        said = (await o.ask([{"role": "user", "content": "Q"}])).choices[0].message.content
        return str(json.loads(said))

    def engine(number: int, _: str) -> Turn:
        return turn("no json" if number == 0 else "7")

    groups, _ = played(asking(program), engine, n=4)
    rollouts = groups[0].rollouts
    assert sorted(r.answer or "" for r in rollouts) == ["", "7", "7", "7"]
    assert all(r.status is Status.COMPLETED for r in rollouts)
    assert sum(r.stats.get("program_failed", 0) for r in rollouts) == 1
    with pytest.raises(UserCodeError, match=r"JSONDecodeError.*test_play\.py:\d+"):
        played(asking(program), lambda *_: turn("no json"), n=4)


def test_refusal_is_reported_if_a_program_has_no_other_request() -> None:
    async def program(client: Any, o: Any) -> str:
        with contextlib.suppress(openai.BadRequestError):
            await o.ask([{"role": "user", "content": "Q"}], n=2)
        return "fallback"

    rollout = alone(asking(program), lambda *_: turn("x"))
    assert rollout.status is Status.INFRA_ERROR
    assert rollout.error is not None
    assert re.search(r"is trained on\. its last request was refused: n: .*2", rollout.error)


def test_slow_program_times_out() -> None:
    async def program(client: Any, o: Any) -> None:
        await o.ask([{"role": "user", "content": "Q"}])
        await asyncio.sleep(99)

    rollout = alone(asking(program), lambda *_: turn("x"), timeout_s=5.0)
    assert (rollout.status, len(rollout.turns)) == (Status.TIMED_OUT, 1)


def test_program_that_cannot_start_ends_the_run_with_its_traceback() -> None:
    async def program(task: Any, **_: Any) -> None:
        raise ModuleNotFoundError("No module named 'mine'")

    with pytest.raises(UserCodeError, match=r"No module named 'mine'.*test_play\.py:\d+"):
        played(program, lambda *_: turn("x"), n=3, max_retries=1)


def test_only_the_too_long_request_is_refused() -> None:
    async def program(client: Any, o: Any) -> str:
        for size in (2000, 99_000):  # by its tokens, by its characters
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await o.ask([{"role": "user", "content": "x" * size}])
        return str((await o.ask([{"role": "user", "content": "x"}])).choices[0].message.content)

    rollout = alone(asking(program), scripted(lambda *_: turn("short"), max_model_len=1000))
    assert (rollout.answer, rollout.status) == ("short", Status.COMPLETED)

    async def gives_up(client: Any, o: Any) -> None:
        await o.ask([{"role": "user", "content": "x"}])
        await o.ask([{"role": "user", "content": "x" * 2000}])

    rollout = alone(asking(gives_up), scripted(lambda *_: turn("x"), max_model_len=1000))
    assert (rollout.status, rollout.stats.get("program_failed")) == (Status.TRUNCATED_LENGTH, None)


def test_broken_tool_schema_makes_a_malformed_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(text: str, tools: Any) -> Reading:
        raise ValueError(tools)

    monkeypatch.setitem(globals(), "read_calls", raises)

    async def program(client: Any, o: Any) -> str:
        said = await o.ask([{"role": "user", "content": "Q"}], tools=[ADD])
        return str(said.choices[0].message.content)

    rollout = alone(asking(program), lambda *_: turn("x"))
    assert (rollout.answer, rollout.stats["malformed"], len(rollout.rows)) == ("x", 1, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_concurrent_equal_requests_are_separate_turns(stream: bool) -> None:
    async def program(client: Any, o: Any) -> str:
        async def one(_: int) -> None:
            said = await o.ask([{"role": "user", "content": "Q"}], stream=stream)
            if stream:
                assert [part async for part in said]

        ended = await asyncio.gather(*map(one, range(9)), return_exceptions=True)
        return str(sum(isinstance(one, Exception) for one in ended))

    rollout = alone(asking(program), lambda *_: Turn(f"x{EOT}", steps=3), max_turns=3)
    assert (rollout.answer, len(rollout.turns)) == ("6", 3)
    assert rollout.status is Status.TRUNCATED_TURNS
