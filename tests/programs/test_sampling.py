"""What a request asks of the sampler: counted, and said once; the run's own sampling is used."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentgrpo.programs.requests import FROZEN
from agentgrpo.types import Status
from tests.playing import CHAT, EOT, TOKENIZER
from tests.programs.test_play import ADD, alone, asking, played, rows_of, turn
from tests.rollout.stubs import StubEngine

Q = [{"role": "user", "content": "Q"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
WISHES: dict[str, Any] = {
    "temperature": 0.1, "top_p": 0.5, "seed": 3, "tools": [ADD], "response_format": FORM,
    "reasoning_effort": "low",
}  # fmt: skip


async def wishing(_: Any, o: Any) -> None:
    await o.ask(Q, **WISHES)


def test_ignored_sampling_options_are_counted_and_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    groups, engine = played(asking(wishing), lambda *_: turn("x"), n=2, temperature=0.7)
    stats = groups[0].rollouts[0].stats
    names = ("temperature", "top_p", "seed", "response_format", "reasoning_effort")
    assert [stats[f"unenforced_{name}"] for name in names] == [1.0] * 5
    for request in engine.requests:
        assert (request.options["temperature"], request.options["filters"]) == (0.7, {})
    said = capsys.readouterr().err
    told = "set reasoning_effort, response_format, seed, temperature, top_p, which is igno"
    assert said.count(told) == 1


OTHERS: dict[str, dict[str, Any]] = {
    "vllm": {
        "ignore_eos": True, "min_tokens": 3, "stop_token_ids": [2], "guided_json": SCHEMA,
        "skip_special_tokens": False, "continue_final_message": True, "priority": 1,
        "truncate_prompt_tokens": None, "cache_salt": "x", "return_token_ids": True,
    },
    "openrouter": {
        "provider": {"sort": "price"}, "models": ["a/b"], "transforms": [], "route": "fallback",
        "usage": {"include": True}, "plugins": [{"id": "web"}], "reasoning": {"effort": "low"},
    },
    "ollama": {"options": {"num_ctx": 9}, "keep_alive": "5m", "think": False, "format": "json"},
    "sglang": {"regex": "x+", "separate_reasoning": True, "no_stop_trim": True},
    "llama.cpp": {"cache_prompt": True, "n_predict": 9, "grammar": "root ::= 1", "mirostat": 2},
    "misspelled": {"max_token": 9},
    "hostile": {"\x1b[2J" + "x" * 99: 1, **{f"a{number:02d}": 1 for number in range(99)}},
}  # fmt: skip
"""Fields of other servers, by whose they are. None means that a field is not used."""


@pytest.mark.parametrize("server", OTHERS)
@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
def test_unknown_fields_are_accepted_and_reported_once(
    server: str, api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = OTHERS[server]

    async def use(client: Any, o: Any) -> None:
        body = {"input": "Q"} if api == "responses" else {"messages": Q, "max_tokens": 9}
        body |= {"model": "policy", **fields}
        for _ in range(2):
            await client.post(f"/{api}", body=body, cast_to=object)

    rollout = alone(asking(use), lambda *_: turn("x"))
    assert len(rollout.turns) == 2
    names = {n.removeprefix("unenforced_") for n in rollout.stats if n.startswith("unenforced_")}
    said = capsys.readouterr().err
    if server == "hostile":
        assert len(names) == 32 == max(map(len, names))
        assert "\x1b" not in said
        return
    own = {"reasoning"} if api == "responses" else set()
    assert names - {"reasoning_effort"} == {n for n in fields if fields[n] is not None} - own
    assert [said.count(f" {name},") for name in names] == [1] * len(names)


def test_evaluation_uses_its_own_sampling() -> None:
    play = {"temperature": 0.0, "filters": {"min_p": 0.1}}
    groups, engine = played(asking(wishing), lambda *_: turn("x"), play=play)
    (request,) = engine.requests
    assert (request.options["temperature"], request.options["filters"]) == (0.0, {"min_p": 0.1})
    assert groups[0].rollouts[0].stats["unenforced_temperature"] == 1


def test_requests_may_only_repeat_the_runs_template_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CHAT, "reads", lambda option: option != "unread")

    async def program(_: Any, o: Any) -> str:
        kwargs = {"enable_thinking": False}
        asked = {"chat_template_kwargs": {**kwargs, "unread": True}}
        await o.ask(Q, reasoning_effort="low", extra_body=asked)
        for other in ({"enable_thinking": True}, {**kwargs, "x": None}):
            with pytest.raises(openai.BadRequestError, match=r"expected rollout\.template_options"):
                await o.ask(Q, extra_body={"chat_template_kwargs": other})
        return "ok"

    options = {"enable_thinking": False, "reasoning_effort": "low"}
    rollout = alone(asking(program), lambda *_: turn("x"), template_options=options)
    assert (rollout.answer, len(rollout.turns)) == ("ok", 1)
    assert [name for name in rollout.stats if name.startswith("unenforced")] == [
        "unenforced_unread"
    ]


def test_frozen_turns_are_counted_and_not_recorded() -> None:
    """Also where its answer goes on in a conversation that is trained on."""

    async def program(client: Any, o: Any) -> str:
        first = (await o.ask(Q)).choices[0].message
        create = client.chat.completions.create
        aside = await create(model=FROZEN, messages=Q, temperature=0.2)
        said = aside.choices[0].message
        await o.ask([*Q, first, {"role": "user", "content": said.content}])
        await o.ask([*Q, said, {"role": "user", "content": "on"}])
        for _ in range(2):
            await create(model=FROZEN, messages=Q)
        with pytest.raises(openai.BadRequestError, match=f"max_turns turns of {FROZEN}"):
            await create(model=FROZEN, messages=Q)
        return "done"

    engine = StubEngine(TOKENIZER, lambda number, _: turn(f"said {number}"))
    rollout = alone(asking(program), engine, max_turns=3)
    sampled = [text for row in rows_of(rollout) for is_sampled, text in row if is_sampled]
    assert sorted(sampled) == [f"said {number}{EOT}" for number in (0, 2, 3)]
    assert rollout.stats["turns"] == len(rollout.turns) == 3
    assert (rollout.stats["frozen_turns"], rollout.status) == (3, Status.COMPLETED)
    frozen = engine.requests[1].options
    assert (frozen["temperature"], engine.requests[4].options["temperature"]) == (0.2, 1.0)
