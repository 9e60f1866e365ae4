"""What a request asks of the sampler: counted, and said once; the run's own sampling is used."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentgrpo.programs.requests import FROZEN
from agentgrpo.types import Status
from tests.playing import EOT, TOKENIZER
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


def test_what_bends_the_distribution_is_counted_in_training_and_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    groups, engine = played(asking(wishing), lambda *_: turn("x"), n=2, temperature=0.7)
    stats = groups[0].rollouts[0].stats
    names = ("temperature", "top_p", "seed", "response_format", "reasoning_effort")
    assert [stats[f"unenforced_{name}"] for name in names] == [1.0] * 5
    for request in engine.requests:
        assert (request.options["temperature"], request.options["filters"]) == (0.7, {})
    said = capsys.readouterr().err
    told = "ask for reasoning_effort, response_format, seed, temperature, top_p, which is not obey"
    assert said.count(told) == 1


def test_an_evaluation_is_sampled_as_its_own_settings_say() -> None:
    play = {"temperature": 0.0, "filters": {"min_p": 0.1}}
    groups, engine = played(asking(wishing), lambda *_: turn("x"), play=play)
    (request,) = engine.requests
    assert (request.options["temperature"], request.options["filters"]) == (0.0, {"min_p": 0.1})
    assert groups[0].rollouts[0].stats["unenforced_temperature"] == 1


def test_what_the_template_is_given_may_be_asked_for_and_nothing_else() -> None:
    async def program(_: Any, o: Any) -> str:
        kwargs = {"enable_thinking": False}
        await o.ask(Q, reasoning_effort="low", extra_body={"chat_template_kwargs": kwargs})
        for other in ({"enable_thinking": True}, {**kwargs, "x": None}):
            with pytest.raises(openai.BadRequestError, match=r"expected rollout\.template_options"):
                await o.ask(Q, extra_body={"chat_template_kwargs": other})
        return "ok"

    options = {"enable_thinking": False, "reasoning_effort": "low"}
    rollout = alone(asking(program), lambda *_: turn("x"), template_options=options)
    assert (rollout.answer, len(rollout.turns)) == ("ok", 1)
    assert not any(name.startswith("unenforced") for name in rollout.stats)


def test_what_is_asked_of_the_frozen_policy_is_counted_and_not_recorded() -> None:
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
        with pytest.raises(openai.BadRequestError, match=f"its 3 turns of {FROZEN}"):
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
