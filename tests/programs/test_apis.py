"""The protocols besides chat completions, by OpenAI's and Anthropic's own clients."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import openai.types.responses.response_create_params
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from agentgrpo.programs import anthropic as messages
from agentgrpo.programs import requests, responses
from agentgrpo.programs.anthropic import MESSAGES
from agentgrpo.programs.endpoint import APIS, server_sent_event
from agentgrpo.programs.messages import BadRequest, Call
from agentgrpo.programs.messages import Message as Said
from agentgrpo.programs.requests import Reply
from agentgrpo.programs.session import Session
from agentgrpo.types import Completion, Status
from tests.playing import CHAT, EOT, TOKENIZER, scripted
from tests.programs.test_conversations import completed
from tests.programs.test_play import ADD, CALL, alone, rows_of, says_tools, turn
from tests.rollout.stubs import StubEngine, Turn

FUNCTION: Any = ADD["function"]
FLAT: Any = {"type": "function", **FUNCTION, "strict": None}
BLOCK: Any = {"name": "add", "description": "Add.", "input_schema": FUNCTION["parameters"]}
ARGUMENTS = '{"a": 1,  "b": 2.0}'


def program(use: Callable[[Any], Any]) -> Callable[..., Any]:
    """One that has both clients."""

    async def play(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
        url = base_url.removesuffix("/v1")
        async with (
            openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as o,
            anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0) as a,
        ):
            return await use(
                SimpleNamespace(openai=o, anthropic=a, q=task["question"], key=api_key)
            )

    return play


def items(*, dumped: bool) -> Callable[[Any], Any]:
    """Responses, all items sent back: as they are, or by the helper of streams and dumped."""

    async def use(c: Any) -> str:
        sent: list[Any] = [{"role": "user", "content": c.q}]
        while True:
            asked = {"model": "policy", "input": sent, "tools": [FLAT]}
            if dumped:
                async with c.openai.responses.stream(**asked) as stream:
                    said = await stream.get_final_response()
                sent += [item.model_dump(exclude={"parsed_arguments"}) for item in said.output]
            else:
                said = await c.openai.responses.create(**asked)
                sent += said.output
            calls = [item for item in said.output if item.type == "function_call"]
            if not calls:
                return str(said.output_text)
            sent += [
                {"type": "function_call_output", "call_id": i.call_id, "output": "3"} for i in calls
            ]

    return use


def results(said: Any) -> list[Any]:
    calls = [block for block in said.content if block.type == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": c.id, "content": "3"} for c in calls]


def blocks(*, streamed: bool) -> Callable[[Any], Any]:
    """Anthropic's messages, plain or by the helper of streams."""

    async def use(c: Any) -> str:
        sent: list[Any] = [{"role": "user", "content": c.q}]
        while True:
            asked = {"model": "policy", "messages": sent, "tools": [BLOCK], "max_tokens": 99}
            if streamed:
                async with c.anthropic.messages.stream(**asked) as stream:
                    said = await stream.get_final_message()
            else:
                said = await c.anthropic.messages.create(**asked)
            sent.append({"role": "assistant", "content": said.content})
            assert said.stop_reason == ("tool_use" if results(said) else "end_turn")
            if not results(said):
                return str(said.content[0].text)
            sent.append({"role": "user", "content": results(said)})

    return use


USES = {
    "items": items(dumped=False), "items dumped": items(dumped=True),
    "blocks": blocks(streamed=False), "blocks streamed": blocks(streamed=True),
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_conversation_continues_with_every_protocol(use: Any) -> None:
    """One row; each turn whole, as it was sampled; what is given between is the template's."""
    rollout = alone(program(use), says_tools)
    (row,) = rows_of(rollout)
    assert [text for is_sampled, text in row if is_sampled] == [
        f"turn 0 {CALL}{EOT}", f"turn 1 {CALL}{EOT}", f" The answer is 3. {EOT}",
    ]  # fmt: skip
    told = {"role": "tool", "content": "3", "name": "add"}
    assert [text for is_sampled, text in row[1:] if not is_sampled] == [
        TOKENIZER.decode(CHAT.observation_ids([told], last_id=CHAT.end_of_turn_id, tools=True))
    ] * 2
    assert (rollout.answer, rollout.status) == (" The answer is 3. ", Status.COMPLETED)
    assert (rollout.stats["tool_calls"], rollout.stats["turns"]) == (2, 3)


def reply(message: Said, *, finish: str = "stop", stopped: str | None = None) -> Reply:
    turn: Completion = completed(
        CHAT.prompt_ids([{"role": "user", "content": "Q"}]), CHAT.text_ids("xyz")
    )
    return Reply(
        id="7-1", message=message, finish_reason=finish, turn=replace(turn, stop_reason=stopped),
        created=5,
    )  # fmt: skip


CALLS = (Call("c1", "f", ARGUMENTS), Call("c2", "g", "{}"))
REPLIES = [
    reply(Said("assistant", " said \n")),
    reply(Said("assistant"), finish="length"),
    reply(Said("assistant", "cut"), stopped="END"),
    reply(Said("assistant", "", CALLS), finish="tool_calls"),
    reply(Said("assistant", "é", CALLS[:1]), finish="tool_calls"),
]
TYPES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/responses": (Response, ResponseStreamEvent),
    "/v1/messages": (Message, RawMessageStreamEvent),
}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("said", REPLIES, ids=range(len(REPLIES)))
def test_responses_and_events_match_the_clients_types(path: str, said: Reply) -> None:
    api, (one, event) = APIS[path], TYPES[path]
    pydantic.TypeAdapter(one).validate_python(api.to_json(said), strict=True)
    events: Any = api.to_stream(said, True)
    for data in events:
        assert data == "[DONE]" or pydantic.TypeAdapter(event).validate_python(data, strict=True)
        head, _, body = server_sent_event(data).rpartition("data: ")
        assert body.endswith("\n\n")
        assert head == (f"event: {data['type']}\n" if "type" in data else "")
    if path in ("/v1/responses", "/v1/messages"):  # an answer without words is one, too
        parts = api.to_json(said)["output" if path == "/v1/responses" else "content"]
        calls = len(said.message.calls)
        words = bool(said.message.content) or not calls
        assert len(parts) == words + calls
    if path == "/v1/chat/completions":  # or litellm takes thoughts out of what is said
        assert api.to_json(said)["choices"][0]["message"]["reasoning_content"] is None
    if path == "/v1/responses":
        last: Any = list(api.to_stream(said, False))[-1]
        assert last["response"] == api.to_json(said)
        assert last["type"] == f"response.{last['response']['status']}"
    if path == "/v1/messages":
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        other = "stop_sequence" if said.turn.stop_reason else "end_turn"
        told = api.to_json(said)
        assert told["stop_reason"] == reasons.get(said.finish_reason, other)
        assert told["stop_sequence"] == said.turn.stop_reason


HEADERS = {"betas", "workspace_id"}
"""Which the client's types have among the parameters."""


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (requests.ChatBody,
         openai.types.chat.completion_create_params.CompletionCreateParamsStreaming),
        (responses.ResponsesBody,
         openai.types.responses.response_create_params.ResponseCreateParamsStreaming),
        (messages.MessagesBody,
         anthropic.types.message_create_params.MessageCreateParamsStreaming),
        (messages.MessagesBody,
         anthropic.types.beta.message_create_params.MessageCreateParamsStreaming),
    ],
    ids=["chat", "responses", "messages", "beta messages"],
)  # fmt: skip
def test_every_client_parameter_is_classified(body: Any, params: Any) -> None:
    """Read, counted, refused, or without effect on the answer: exactly one of these."""
    classes = requests.OVERRIDES, requests.IGNORED, requests.REFUSED
    counts = Counter(name for names in classes for name in {*names} - {*body.model_fields})
    assert set(counts.values()) == {1}
    known = {*counts, *body.model_fields}
    assert (params.__required_keys__ | params.__optional_keys__) - HEADERS - known == set()


CHATS, RESPONSES, BLOCKS = APIS
GOOD: dict[str, dict[str, Any]] = {
    CHATS: {"model": "policy", "messages": [{"role": "user", "content": "Q"}]},
    RESPONSES: {"model": "policy", "input": "Q"},
    BLOCKS: {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "Q"}]},
}
IMAGE = [{"role": "user", "content": [{"type": "image"}]}]
NAMED = {"type": "function", "function": {"name": "sub"}}
WRONG: list[tuple[str, str, Any, str]] = [
    (CHATS, "model", 9, "expected a valid string, got 9"),
    (CHATS, "messages", [], "at least 1 item"),
    (CHATS, "messages[0].role", [{"role": "alien", "content": "x"}], "expected 'system'"),
    (CHATS, "messages[0].content", IMAGE, "only text is understood, got [{'type': 'image'}]"),
    (CHATS, "n", 2, "expected 1, got 2"),
    (CHATS, "max_tokens", 0, "greater than or equal to 1, got 0"),
    (CHATS, "temperature", 2.1, "less than or equal to 2, got 2.1"),
    (CHATS, "temperature", 10**400, "expected a valid number"),
    (CHATS, "logprobs", True, "is not offered"),
    (CHATS, "modalities[1]", ["text", "audio"], "expected 'text', got 'audio'"),
    (CHATS, "tool_choice", NAMED, "none of the tools is 'sub'"),
    (RESPONSES, "input", [], "at least 1 item"),
    (RESPONSES, "input[0].type", [{"type": "image"}], "got 'image'"),
    (RESPONSES, "input[0].role", [{"role": "x"}], "expected 'system'"),
    (RESPONSES, "input[0]", [{"content": "x"}], "a message has a role"),
    (RESPONSES, "input[0]", [{"type": "function_call"}], "a function_call has a name"),
    (RESPONSES, "max_output_tokens", 0, "greater than or equal to 1"),
    (RESPONSES, "previous_response_id", "resp_9", "is not offered"),
    (RESPONSES, "background", True, "is not offered"),
    (RESPONSES, "include", ["message.output_text.logprobs"], "is not offered"),
    (BLOCKS, "messages", [{"role": "assistant", "content": "x"}], "begin an answer is not offered"),
    (BLOCKS, "messages[0].content[0].type", IMAGE, "expected 'text'"),
    (BLOCKS, "messages[0]", [{"role": "user", "content": [{"type": "tool_use"}]}],
     "user has no block of type tool_use"),
    (BLOCKS, "tools[0].type", [{"type": "bash_1"}], "expected 'custom'"),
    (BLOCKS, "tool_choice.type", {"type": []}, "expected 'auto'"),
    (BLOCKS, "tool_choice", {"type": "tool", "name": "x"}, "none of the tools is 'x'"),
    (BLOCKS, "thread", {"type": "create"}, "is not offered"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "param", "value", "said"), WRONG)
def test_invalid_request_names_the_field(path: str, param: str, value: Any, said: str) -> None:
    name = re.split(r"[.\[]", param)[0]
    with pytest.raises(BadRequest) as caught:
        APIS[path].read({**GOOD[path], name: value})
    told = str(caught.value)
    assert said in told
    assert caught.value.param == param
    assert told.startswith(f"{param}: ")


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    (CHATS, {"n": 2}, 400, "n: expected #, got #"),
    (CHATS, {"user": "x" * (9 << 20)}, 413, "a request may have # MiB"),
    (RESPONSES, {"previous_response_id": "resp_9"}, 400, "is not offered"),
    ("/v1/embeddings", {}, 404, "POST /v#/embeddings is not offered"),
    (BLOCKS, {"stop_sequences": [1]}, 400, "stop_sequences[#]: expected a valid string, got #"),
    (BLOCKS, {"messages": [{"role": "user", "content": "x" * 4000}]}, 400, "prompt is too long"),
    ("/v1/messages/batches", {}, 404, "POST /v#/messages/batches is not offered"),
]
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def test_errors_have_the_protocols_format_and_end_nothing() -> None:
    async def use(c: Any) -> str:
        for path, wrong, status, said in BAD:
            client = c.anthropic if path.startswith("/v1/messages") else c.openai
            error = (anthropic if client is c.anthropic else openai).APIStatusError
            at = path if client is c.anthropic else path.removeprefix("/v1")
            with pytest.raises(error) as caught:
                await client.post(at, body={**GOOD.get(path, {}), **wrong}, cast_to=object)
            assert caught.value.status_code == status, (path, wrong)
            told = caught.value.body
            if client is c.anthropic:
                assert (told["type"], told["error"]["type"]) == ("error", KINDS[status])
                told = told["error"]
            elif status == 400:
                assert [told["param"]] == [*wrong]
            assert said in told["message"], told
        for package, client in ((openai, c.openai), (anthropic, c.anthropic)):
            path = BLOCKS if package is anthropic else "/responses"
            with pytest.raises(package.AuthenticationError, match="of no rollout"):
                await client.with_options(api_key="sk-no").post(path, body={}, cast_to=object)
        one = await c.openai.responses.create(**GOOD[RESPONSES], store=False)
        return str(one.output_text)

    rollout = alone(program(use), scripted(lambda *_: turn("fine"), max_model_len=2000))
    assert (rollout.answer, len(rollout.turns)) == ("fine", 1)


def test_aborted_request_is_reported_in_a_stream() -> None:
    async def use(c: Any) -> str:
        with pytest.raises(openai.APIError, match="aborted a request"):
            async for _ in await c.openai.responses.create(**GOOD[RESPONSES], stream=True):
                pass
        with pytest.raises(anthropic.APIError, match="aborted a request"):
            async for _ in await c.anthropic.messages.create(**GOOD[BLOCKS], stream=True):
                pass
        return "told"

    rollout = alone(program(use), lambda *_: Turn(f"x{EOT}", finish_reason="abort"))
    assert rollout.status is Status.INFRA_ERROR


def test_endpoint_bug_is_a_500_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def use(c: Any) -> str:
        def fail(*_: Any) -> Any:
            raise TypeError("unhashable")

        with monkeypatch.context() as patch:
            patch.setattr(Session, "_temperature_of", fail)
            for _ in range(2):
                with pytest.raises(openai.InternalServerError) as one:
                    await c.openai.responses.create(**GOOD[RESPONSES])
            with pytest.raises(anthropic.InternalServerError) as two:
                await c.anthropic.messages.create(**GOOD[BLOCKS])
        told: Any = one.value.body, two.value.body
        assert (told[0]["type"], told[1]["error"]["type"]) == ("server_error", "api_error")
        assert "/v#/responses: TypeError: unhashable" in told[0]["message"]
        return str((await c.openai.responses.create(**GOOD[RESPONSES])).output_text)

    rollout = alone(program(use), lambda *_: turn("fine"))
    assert (rollout.answer, rollout.status, len(rollout.turns)) == ("fine", Status.COMPLETED, 1)
    assert capfd.readouterr().err.count("Traceback") == 2  # once for each route


def test_call_without_an_anthropic_form_is_text() -> None:
    bad = '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'

    async def use(c: Any) -> str:
        said = await c.anthropic.messages.create(**GOOD[BLOCKS] | {"max_tokens": 99}, tools=[BLOCK])
        return str(said.content[0].text)

    rollout = alone(program(use), lambda *_: turn(bad))
    assert (rollout.answer, rollout.stats["malformed"]) == (bad, 1)


def test_models_are_listed_and_system_prompt_is_rendered() -> None:
    async def use(c: Any) -> str:
        asked = {"messages": GOOD[BLOCKS]["messages"], "model": "policy", "system": "s"}
        await c.anthropic.messages.create(**asked, max_tokens=9)
        for client in (c.openai, c.anthropic):
            assert [model.id async for model in client.models.list()] == ["policy"]
        return "ok"

    rollout = alone(program(use), lambda *_: turn("x"))
    ((shown, _),) = rows_of(rollout)
    assert shown[1] == TOKENIZER.decode(
        CHAT.prompt_ids([{"role": "system", "content": "s"}, {"role": "user", "content": "Q"}])
    )
    assert (rollout.answer, len(rollout.turns)) == ("ok", 1)


def test_sampling_options_are_counted_and_tools_and_stops_apply() -> None:
    async def use(c: Any) -> None:
        schema = {"type": "object", "properties": {}}
        await c.openai.responses.create(
            **GOOD[RESPONSES], tools=[FLAT], tool_choice="required", temperature=0.5,
            reasoning={"effort": "low"}, truncation="auto", max_tool_calls=1,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        )  # fmt: skip
        await c.anthropic.messages.create(
            **GOOD[BLOCKS], tools=[BLOCK], tool_choice={"type": "any"}, stop_sequences=["END"],
            extra_body={"temperature": 0.1, "thinking": {"type": "adaptive"}},
            output_config={"effort": "low"},
        )  # fmt: skip
        off = {"type": "disabled"}  # as it is
        await c.anthropic.messages.create(**GOOD[BLOCKS], extra_body={"thinking": off})

    engine = StubEngine(TOKENIZER, lambda *_: turn("x"))
    rollout = alone(program(use), engine)
    both, one = ("tool_choice", "temperature", "reasoning_effort"), ("truncation", "thinking")
    counted = {**dict.fromkeys(both, 2), **dict.fromkeys(one, 1), "response_format": 1}
    stats = {name: n for name, n in rollout.stats.items() if name.startswith("unenforced")}
    assert stats == {f"unenforced_{name}": n for name, n in counted.items()}
    assert [request.options["stop"] for request in engine.requests] == [(), ("END",), ()]
    none = {**GOOD[BLOCKS], "tools": [BLOCK], "tool_choice": {"type": "none"}}
    assert MESSAGES.read(none).tools == ()
