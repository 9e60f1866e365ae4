"""Requests beside the task: probes of libraries, cut turns, errors as answers, names of models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.envs.answer import AnswerEnv
from agentgrpo.inspect.verify.status import status_faults
from agentgrpo.types import Rollout, Status, Task
from tests.given import a_config
from tests.playing import CHAT, EOT
from tests.programs.test_play import ADD, CALL, alone, asking, played, rows_of, sampler_of, turn

QUESTION = 'Ann has 3 "red" apples\nand buys 4 more at the market. How many\tapples has she now?'
HELLO = [{"role": "user", "content": "say hello"}]
BYE = {"role": "user", "content": "Is that so?"}


def playing(use: Callable[..., Any], says: Any, *, n: int = 1, **config: Any) -> list[Rollout]:
    """Rollouts of a task with a question of some length."""
    sampler, _ = sampler_of(asking(use), says, **config)
    task = Task(id="t", messages=({"role": "user", "content": QUESTION},), spec={})
    return list(sampler.play([task], n, seed=0)[0][0].rollouts)


def of_a_run(**limits: int) -> TrainConfig:
    """What verify reads of the run of playing()."""
    limits = {"max_turns": 9, "max_turn_tokens": 99, **limits}
    own = (f"rollout.{name}={value}" for name, value in limits.items())
    return a_config("agent.kind=program", "agent.options.call=x:y", *own)


def sampled(rollout: Rollout) -> list[list[str]]:
    return [
        [text.removesuffix(EOT) for is_sampled, text in row if is_sampled]
        for row in rows_of(rollout)
    ]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def said(o: Any, messages: list[Any], **more: Any) -> Any:
    return (await o.ask(messages, **more)).choices[0].message


def numbered(number: int, _: str) -> Any:
    return turn(f"said {number}")


def requests(*sent: Sequence[Any]) -> Callable[..., Any]:
    """A program of one request after another. A message is a text, or the number of a reply."""

    async def use(client: Any, o: Any) -> None:
        replies: list[Any] = []
        for contents in sent:
            texts = (QUESTION if content == "Q" else content for content in contents)
            messages = [replies[c] if isinstance(c, int) else user(c)[0] for c in texts]
            replies.append(await said(o, messages))

    return use


async def at_once(client: Any, o: Any) -> None:
    await asyncio.gather(said(o, user(o.task["question"])), *(said(o, HELLO) for _ in range(2)))


async def by_responses(client: Any, o: Any) -> None:
    await client.responses.create(model=o.model, input="Please say 'hello, world'")
    await said(o, user(o.task["question"]))


async def in_a_system_prompt(client: Any, o: Any) -> None:
    await said(o, HELLO)
    asked = f"You solve this: {o.task['question'].upper()}"
    await said(o, [{"role": "system", "content": asked}, {"role": "user", "content": "Begin."}])


async def sub_agent(client: Any, o: Any) -> None:
    """It is asked what the policy's call says."""
    await said(o, HELLO)
    messages = user(o.task["question"])
    call = (await said(o, messages, tools=[ADD])).tool_calls[0]
    await said(o, user(f"You research. {json.loads(call.function.arguments)['a']}"))


FILE = "Solve the problem in the file task.json."
before, between = requests(["Hi"], ["Q"]), requests(["Q"], ["Hi"], ["Q", 0, "Is that so?"])
PROBES: dict[str, tuple[Any, list[list[int]], int]] = {
    "before": (before, [[1]], 1),
    "between": (between, [[0, 2]], 1),
    "at once": (at_once, [[0]], 2),
    "of two turns": (requests(["Hi"], ["Hi", 0, "Is that so?"], ["Q"]), [[2]], 2),
    "by responses": (by_responses, [[1]], 1),
    "that the task follows": (requests(["Hi"], ["Hi", 0, "Q"]), [[0, 1]], 0),
    "task as JSON": (requests(["Hi"], [json.dumps({"question": QUESTION})]), [[1]], 1),
    "task in a system prompt": (in_a_system_prompt, [[1]], 1),
    "part of the task": (requests(["Hi"], [f"Shorten: {QUESTION.splitlines()[1]}"]), [[1]], 1),
    "task by a tool": (requests([FILE], [FILE, 0, "Q"]), [[0, 1]], 0),
    "a sub-agent": (sub_agent, [[1], [2]], 1),
    "no task at all": (requests(["Hi"], ["Hi", 0, "Is that so?"]), [[0, 1]], 0),
}
"""A program, the turns of each row that is trained on, and how many turns are not."""


@pytest.mark.parametrize("name", PROBES)
def test_probe_conversations_are_served_and_not_trained_on(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use, rows, aside = PROBES[name]

    def says(number: int, prompt: str) -> Any:
        call = (
            CALL.replace('"a": 1', '"a": "Oslo"') if number == 1 and name == "a sub-agent" else ""
        )
        return turn(f"said {number}{call}")

    (rollout,) = playing(use, says, max_turns=2)
    texts = [[int(text.split()[1][0]) for text in row] for row in sampled(rollout)]
    if name == "at once":
        texts, rows = [[len(row) for row in texts]], [[1]]
    assert texts == rows
    assert rollout.status is Status.COMPLETED
    assert len(rollout.turns) == rollout.stats["turns"] == sum(map(len, rows))
    assert rollout.stats.get("probe_turns", 0) == aside
    assert len(rollout.extra.get("probes", ())) == (aside if name != "of two turns" else 1)
    assert list(status_faults(rollout, of_a_run(max_turns=2))) == []
    told = capsys.readouterr().err
    assert told.count("conversations without the task's text are not trained on") == bool(aside)
    assert told.count("programs do not send the task's text") == (name == "no task at all")


def test_rollout_with_only_probes_has_no_trained_request() -> None:
    count = iter(range(9))

    async def use(client: Any, o: Any) -> str:
        number = next(count)
        await said(o, HELLO)
        if number == 0:
            await said(o, user(o.task["question"]))
            done.set()
            return "asked"
        await done.wait()
        await asyncio.sleep(1)
        return "4"

    done = asyncio.Event()
    first, second = playing(use, numbered, n=2)
    assert (first.status, first.answer, len(first.turns)) == (Status.COMPLETED, "asked", 1)
    assert (second.status, second.answer) == (Status.INFRA_ERROR, None)
    assert second.error is not None
    assert "ended without a request that is trained on" in second.error


def test_truncated_turn_ends_only_its_conversation() -> None:
    async def use(client: Any, o: Any) -> str:
        messages = user(o.task["question"])
        for probe in (HELLO, messages):
            cut = await o.ask(probe)
            assert cut.choices[0].finish_reason == "length"
            with pytest.raises(openai.BadRequestError, match=r"rollout\.max_turn_tokens"):
                await o.ask([*probe, cut.choices[0].message, BYE])
        return str((await said(o, [*messages, BYE])).content)

    def says(number: int, prompt: str) -> Any:
        return turn("so" if "Is that so?" in prompt else "a long tale " * 9)

    (rollout,) = playing(use, says, max_turn_tokens=20)
    assert (rollout.answer, rollout.status, len(rollout.rows)) == ("so", Status.COMPLETED, 2)
    assert rollout.stats["probe_turns"] == 1
    config = of_a_run(max_turn_tokens=20)
    assert list(status_faults(rollout, config)) == []
    assert rollout.turns[0].sampled_tokens == 20
    rollout.turns.reverse()  # as if it were the last
    assert any("cut at its budget" in fault for fault in status_faults(rollout, config))


FAULTS: list[tuple[dict[str, float], list[str], str]] = [
    ({"probe_turns": 10.0}, ["x"], "10 probe turns with 0 tokens, more than its limits"),
    ({"probe_turns": 1.0, "probe_tokens": 999.0}, ["x"], "1 probe turns with 999 tokens"),
    ({"probe_turns": 1.0}, [], "1 probe turns in 0 probe conversations"),
    ({}, ["x"], "0 probe turns in 1 probe conversations"),
]


@pytest.mark.parametrize(("stats", "probes", "fault"), FAULTS)
def test_verify_accepts_recorded_probes(
    stats: dict[str, float], probes: list[str], fault: str
) -> None:
    (rollout,) = playing(between, numbered, max_turns=9)
    for name in ("probe_turns", "probe_tokens"):
        del rollout.stats[name]
    rollout.stats |= stats
    rollout.extra = {"probes": probes} if probes else {}
    config = of_a_run()
    assert any(fault in found for found in status_faults(rollout, config))


async def refused(o: Any, **more: Any) -> Any:
    try:
        return await o.ask(user(o.task["question"]), **more)
    except openai.APIStatusError as error:
        return error


FORMS: dict[str, Callable[[Any], str]] = {
    "the exception": str,
    "its repr": repr,
    "its message": lambda error: error.body["message"],
    "its body": lambda error: json.dumps(error.body),
    "the response": lambda error: error.response.text,
    "cut": lambda error: f"Sorry, an error: {str(error)[:120]}",
    "in capitals": lambda error: str(error).upper(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", ["turns", "n"])
def test_endpoint_error_is_not_an_answer_and_has_no_number(form: str, wrong: str) -> None:
    async def use(client: Any, o: Any) -> str:
        await refused(o)
        error = await refused(o, **({"n": 48} if wrong == "n" else {}))
        assert not any(c.isdigit() for c in error.response.text), error.response.text
        return FORMS[form](error)

    (rollout,) = playing(use, numbered, max_turns=1)
    assert (rollout.answer, rollout.stats["error_answers"]) == (None, 1)


def test_answer_after_an_error_counts() -> None:
    async def use(client: Any, o: Any) -> str:
        await refused(o, n=2)
        await refused(o)
        return "n: it is 7, expected as the model's maximum"

    (rollout,) = playing(use, numbered)
    assert rollout.answer == "n: it is 7, expected as the model's maximum"
    assert "error_answers" not in rollout.stats


def test_every_model_name_is_served_and_the_first_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def use(client: Any, o: Any) -> str:
        for model in ("gpt-4o", "claude-5", "policy:frozen", "openai/policy:frozen"):
            asked = {"messages": user(o.task["question"]), "model": model}
            await client.chat.completions.create(**asked)
            await client.responses.create(model=model, input=o.task["question"])
        return "done"

    (rollout,) = playing(use, numbered)
    assert (rollout.answer, len(rollout.turns), rollout.stats["frozen_turns"]) == ("done", 4, 4)
    told = capsys.readouterr().err
    assert told.count("the policy also serves the model name 'gpt-4o'") == 1
    assert "claude" not in told


def test_reasoning_options_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(client: Any, o: Any) -> None:
        asked: Any = {"model": o.model, "input": o.task["question"], "include": []}
        await client.responses.create(**asked, reasoning={"summary": None})
        await client.responses.create(**asked, reasoning={"summary": "auto"})
        asked |= {"include": ["reasoning.encrypted_content"]}
        await client.responses.create(**asked, reasoning={"generate_summary": "concise"})

    (rollout,) = playing(use, numbered)
    counts = [rollout.stats[f"unenforced_{name}"] for name in ("reasoning_summary", "include")]
    assert counts == [2, 1]
    assert "set include, reasoning_summary, which is ignored" in capsys.readouterr().err


@pytest.mark.parametrize("named", [False, True])
def test_tools_missing_from_the_prompt_are_rejected(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    prompt_ids = CHAT.prompt_ids
    monkeypatch.setattr(CHAT, "prompt_ids", lambda messages, tools: prompt_ids(messages))

    async def use(client: Any, o: Any) -> str:
        head = [{"role": "system", "content": "You have the tool `add`."}] if named else []
        messages = [*head, *user(o.task["question"])]
        if named:
            return str((await said(o, messages, tools=[ADD])).content)
        with pytest.raises(openai.BadRequestError, match=r"does not show tools .'add' is not in"):
            await o.ask(messages, tools=[ADD])
        await said(o, messages)
        return "refused"

    (rollout,) = playing(use, numbered)
    assert (rollout.answer, len(rollout.turns)) == ("said 0" if named else "refused", 1)


class Plays(AnswerEnv):
    """Its episodes have prompts of their own."""

    plays = True


def test_self_playing_environment_has_no_probes() -> None:
    (rollout,) = playing(before, numbered, env=Plays())
    assert (len(rollout.turns), rollout.extra) == (2, {})


def test_short_question_is_matched_as_a_whole() -> None:
    async def use(client: Any, o: Any) -> None:
        await said(o, HELLO)
        await said(o, user(f"Solve {o.task['question']}!"))

    rollout = alone(asking(use), numbered)
    assert (sampled(rollout), rollout.stats["probe_turns"]) == ([["said 1"]], 1)
    groups, _ = played(asking(use), numbered, n=2)
    assert all(len(r.turns) == 1 for r in groups[0].rollouts)
