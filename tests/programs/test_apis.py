"""The protocols besides chat completions, by OpenAI's and Anthropic's own clients."""

from __future__ import annotations

import itertools
import json
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
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from agentgrpo.programs import anthropic as messages
from agentgrpo.programs import completions, requests, responses
from agentgrpo.programs.anthropic import MESSAGES
from agentgrpo.programs.endpoint import APIS, framed
from agentgrpo.programs.messages import Call
from agentgrpo.programs.messages import Message as Said
from agentgrpo.programs.requests import Reply
from agentgrpo.programs.session import Session
from agentgrpo.types import Completion, Status
from tests.models.test_templates import judge_of
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


async def items(c: Any) -> str:
    """Responses, all items sent back."""
    sent: list[Any] = [{"role": "user", "content": c.q}]
    while True:
        said = await c.openai.responses.create(model="policy", input=sent, tools=[FLAT])
        sent += said.output
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return str(said.output_text)
        sent += [
            {"type": "function_call_output", "call_id": i.call_id, "output": "3"} for i in calls
        ]


async def dumped(c: Any) -> str:
    """Responses by the helper of streams, its items dumped."""
    sent: list[Any] = [{"role": "user", "content": c.q}]
    while True:
        async with c.openai.responses.stream(model="policy", input=sent, tools=[FLAT]) as stream:
            said = await stream.get_final_response()
        sent += [item.model_dump(exclude={"parsed_arguments"}) for item in said.output]
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return str(said.output_text)
        sent += [
            {"type": "function_call_output", "call_id": i.call_id, "output": "3"} for i in calls
        ]


async def previous(c: Any) -> str:
    """Responses, gone on from by their ids."""
    new: Any = c.q
    last = None
    while True:
        said = await c.openai.responses.create(
            model="policy", input=new, tools=[FLAT], previous_response_id=last
        )
        last = said.id
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return str(said.output_text)
        new = [{"type": "function_call_output", "call_id": i.call_id, "output": "3"} for i in calls]


def results(said: Any) -> list[Any]:
    calls = [block for block in said.content if block.type == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": c.id, "content": "3"} for c in calls]


async def blocks(c: Any) -> str:
    """Anthropic's messages."""
    sent: list[Any] = [{"role": "user", "content": c.q}]
    while True:
        said = await c.anthropic.messages.create(
            model="policy", messages=sent, tools=[BLOCK], max_tokens=99
        )
        sent.append({"role": "assistant", "content": said.content})
        if not results(said):
            assert said.stop_reason == "end_turn"
            return str(said.content[0].text)
        assert said.stop_reason == "tool_use"
        sent.append({"role": "user", "content": results(said)})


async def streamed(c: Any) -> str:
    """Anthropic's, by the helper of streams."""
    sent: list[Any] = [{"role": "user", "content": c.q}]
    while True:
        async with c.anthropic.messages.stream(
            model="policy", messages=sent, tools=[BLOCK], max_tokens=99
        ) as stream:
            said = await stream.get_final_message()
        sent.append({"role": "assistant", "content": said.content})
        if not results(said):
            return str(said.content[0].text)
        sent.append({"role": "user", "content": results(said)})


async def thread(c: Any) -> str:
    """Anthropic's threads: tools once, then only what is new."""
    sent, more = [{"role": "user", "content": c.q}], {"tools": [BLOCK]}
    held = {"type": "create"}
    while True:
        said = await c.anthropic.beta.messages.create(
            model="policy", messages=sent, max_tokens=99, extra_body={"thread": held}, **more
        )
        if not results(said):
            return str(said.content[0].text)
        sent, more = [{"role": "user", "content": results(said)}], {}
        held = {"type": "continue", "previous_message_id": said.id}


async def mixed(c: Any) -> str:
    """Each turn by another protocol."""
    sent: list[Any] = [{"role": "user", "content": c.q}]
    chat = await c.openai.chat.completions.create(model="policy", messages=sent, tools=[ADD])
    first = chat.choices[0].message
    (call,) = first.tool_calls
    told = {"type": "function_call", "call_id": call.id, **call.function.model_dump()}
    back = {"type": "function_call_output", "call_id": call.id, "output": "3"}
    history = [*sent, {"role": "assistant", "content": first.content}, told, back]
    second = await c.openai.responses.create(model="policy", input=history, tools=[FLAT])
    text, other = second.output

    def use(one: Any, name: str) -> Any:
        given = {"type": "tool_use", "id": name, "name": "add", "input": json.loads(one.arguments)}
        return {"type": "tool_result", "tool_use_id": name, "content": "3"}, given

    (one, a), (two, b) = use(call.function, call.id), use(other, other.call_id)
    text_1 = {"type": "text", "text": first.content}
    text_2 = {"type": "text", "text": text.content[0].text}
    last = await c.anthropic.messages.create(
        model="policy", max_tokens=99, tools=[BLOCK],
        messages=[
            *sent,
            {"role": "assistant", "content": [text_1, a]}, {"role": "user", "content": [one]},
            {"role": "assistant", "content": [text_2, b]}, {"role": "user", "content": [two]},
        ],
    )  # fmt: skip
    return str(last.content[0].text)


USES = [items, dumped, previous, blocks, streamed, thread, mixed]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_conversation_goes_on_by_every_protocol(use: Any) -> None:
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


def test_text_goes_on_where_it_holds_all_that_was_sampled() -> None:
    texts: list[str] = []

    async def use(c: Any) -> str:
        async def ask(text: str, **more: Any) -> str:
            texts.append(text)
            said = await c.openai.completions.create(model="policy", prompt=text, **more)
            if more.get("stream"):
                return "".join([chunk.choices[0].text async for chunk in said])
            return str(said.choices[0].text)

        head = f"<|im_start|>user\n{c.q}{EOT}\n<|im_start|>assistant\n"
        first = await ask(head, max_tokens=99)
        more = f"{head}{first}{EOT}\n<|im_start|>user\non{EOT}\n<|im_start|>assistant\n"
        second = await ask(more, stream=True, max_tokens=3)
        await ask(more + second, max_tokens=99)  # goes on within the turn, which was cut
        await ask(f"{head}{first}\n")  # without what closed it
        return first + second

    rollout = alone(program(use), lambda number, _: turn(f"{number} one two three four"))
    cut = TOKENIZER.decode(TOKENIZER.encode("1 one two three four")[:3])
    assert rollout.answer == f"0 one two three four{cut}"
    going, other = sorted(rows_of(rollout), key=len, reverse=True)
    assert [text for is_sampled, text in going if is_sampled] == [
        f"0 one two three four{EOT}", cut, f"2 one two three four{EOT}",
    ]  # fmt: skip
    assert "".join(text for _, text in going) == texts[2] + f"2 one two three four{EOT}"
    assert [is_sampled for is_sampled, _ in other] == [False, True]
    assert [t.asked_tokens for t in rollout.turns] == [99, 3, 99, 16]


@pytest.mark.parametrize(
    ("name", "said", "tokens", "offsets"),
    [  # the tokenizer of the tests has one for each byte
        ("", "é\U0001f600k", [*"\ufffd" * 6, "k"], [0, 0, 1, 1, 1, 1, 2]),
        ("mistral_v3", "The answer is 3", [" The", " answer", " is", " ", "3"], [0, 3, 10, 13, 14]),
        ("qwen3", " The answer", [" The", " answer"], [0, 4]),
    ],
)
def test_the_tokens_of_an_answer_are_its_bytes(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str, tokens: list[str], offsets: list[int]
) -> None:
    chat = judge_of(name).chat if name else CHAT
    monkeypatch.setattr("tests.programs.test_play.CHAT", chat)
    end = chat.tokenizer.decode(chat.end_of_turn_id)
    texts: list[str] = []
    listed: list[Any] = []

    async def use(c: Any) -> None:
        chats = {"model": "policy", "messages": [{"role": "user", "content": "Q"}]}
        one = (await c.openai.chat.completions.create(**chats, logprobs=True)).choices[0]
        listed.extend(one.logprobs.content)
        two = (await c.openai.completions.create(**GOOD["completions"], logprobs=0)).choices[0]
        assert two.logprobs.tokens == [*tokens, end] == [token.token for token in listed]
        assert two.logprobs.text_offset == [*offsets, len(said)]
        texts.extend([one.message.content, two.text])

    alone(program(use), StubEngine(chat.tokenizer, lambda *_: Turn(said + end)))
    assert texts == [said, said]
    assert bytes(b for t in listed for b in t.bytes).decode().lstrip() == f"{said}{end}".lstrip()


def reply(message: Said, *, finish: str = "stop", stopped: str | None = None) -> Reply:
    turn: Completion = completed(
        CHAT.prompt_ids([{"role": "user", "content": "Q"}]), CHAT.text_ids("xyz")
    )
    return Reply(
        id="7-1", message=message, finish_reason=finish, turn=replace(turn, stop_reason=stopped),
        created=5, tokens=tuple(b"x" for _ in turn.token_ids),
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
    "/v1/completions": (TextCompletion, TextCompletion),
}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("said", REPLIES, ids=range(len(REPLIES)))
def test_answers_and_events_are_of_the_clients_types(path: str, said: Reply) -> None:
    api, (one, event) = APIS[path], TYPES[path]
    if path == "/v1/completions":  # which has no tools
        said = replace(said, message=Said("assistant", "x"), finish_reason="stop")
    pydantic.TypeAdapter(one).validate_python(api.whole(said), strict=True)
    events: Any = api.events(said, True)
    for data in events:
        assert data == "[DONE]" or pydantic.TypeAdapter(event).validate_python(data, strict=True)
        head, _, body = framed(data).rpartition("data: ")
        assert body.endswith("\n\n")
        assert head == (f"event: {data['type']}\n" if "type" in data else "")
    if path in ("/v1/responses", "/v1/messages"):  # an answer without words is one, too
        parts = api.whole(said)["output" if path == "/v1/responses" else "content"]
        calls = len(said.message.calls)
        words = bool(said.message.content) or not calls
        assert len(parts) == words + calls
    if path == "/v1/chat/completions":  # or litellm takes thoughts out of what is said
        assert api.whole(said)["choices"][0]["message"]["reasoning_content"] is None
    if path == "/v1/responses":
        last: Any = list(api.events(said, False))[-1]
        assert last["response"] == api.whole(said)
        assert last["type"] == f"response.{last['response']['status']}"
    if path == "/v1/messages":
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        other = "stop_sequence" if said.turn.stop_reason else "end_turn"
        told = api.whole(said)
        assert told["stop_reason"] == reasons.get(said.finish_reason, other)
        assert told["stop_sequence"] == said.turn.stop_reason


HEADERS = {"betas", "workspace_id"}
"""Which the client's types have among the parameters."""


@pytest.mark.parametrize(
    ("api", "params"),
    [
        (requests, openai.types.chat.completion_create_params.CompletionCreateParamsStreaming),
        (responses, openai.types.responses.response_create_params.ResponseCreateParamsStreaming),
        (completions, openai.types.completion_create_params.CompletionCreateParamsStreaming),
        (messages, anthropic.types.message_create_params.MessageCreateParamsStreaming),
        (messages, anthropic.types.beta.message_create_params.MessageCreateParamsStreaming),
    ],
    ids=["chat", "responses", "completions", "messages", "beta messages"],
)
def test_every_parameter_that_a_client_has_is_of_one_class(api: Any, params: Any) -> None:
    """Read, refused, counted, or nothing that an answer depends on: none is met by surprise."""
    known = (params.__required_keys__ | params.__optional_keys__) - HEADERS
    assert known - api.KNOWN == set()
    classes = (getattr(api, name, ()) for name in ("SAME", "BENT", "READ", "UNHEARD", "REFUSED"))
    counts = Counter(itertools.chain(*classes))
    assert {*counts} == api.KNOWN
    assert [name for name, count in counts.items() if count > 1] == []


BAD: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    ("responses", {"input": []}, 400, "input: expected text or a list of at least one", "input"),
    ("responses", {"input": [3]}, 400, "input[0]: expected an object", "input[0]"),
    ("responses", {"input": [{"type": "image"}]}, 400, "'image' is not offered", "input[0].type"),
    ("responses", {"input": [{"role": "x"}]}, 400, "expected one of", "input[0].role"),
    ("responses", {"max_output_tokens": 0}, 400, "max_output_tokens: expected a whole",
     "max_output_tokens"),
    ("responses", {"tools": [{"type": "web_search"}]}, 400, "only functions", "tools[0].type"),
    ("responses", {"previous_response_id": "resp_9"}, 400, "'resp_9' not found",
     "previous_response_id"),
    ("responses", {"background": True}, 400, "background: is not offered", "background"),
    ("responses", {"moderation": {"model": "m"}}, 400, "is not offered", "moderation"),
    ("responses", {"reasoning": "low"}, 400, "reasoning: expected an object", "reasoning"),
    ("responses", {"top_logprobs": 2}, 400, "top_logprobs: expected 0", "top_logprobs"),
    ("responses", {"bananas": 1}, 400, "bananas: there is no such parameter", "bananas"),
    ("responses", {"model": "gpt-9"}, 404, "model: there is 'policy'", "model"),
    ("completions", {"prompt": ["a", "b"]}, 400, "prompt: expected one text", "prompt"),
    ("completions", {"echo": True}, 400, "echo: is not offered", "echo"),
    ("completions", {"logprobs": 5}, 400, "logprobs: expected 0", "logprobs"),
    ("completions", {"n": 2}, 400, "n: one answer per request", "n"),
    ("embeddings", {}, 404, "POST /v1/embeddings is not offered", None),
    ("messages", {"messages": []}, 400, "messages: expected at least one", None),
    ("messages", {"messages": [{"role": "assistant", "content": "x"}]}, 400, "not offered", None),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
     "messages[0].content[0]: only text is understood", None),
    ("messages", {"max_tokens": None}, 400, "max_tokens: must be given", None),
    ("messages", {"stop_sequences": "x"}, 400, "stop_sequences: expected a list", None),
    ("messages", {"stop_sequences": [1]}, 400, "stop_sequences: expected texts", None),
    ("messages", {"tools": [{"type": "bash_1"}]}, 400, "tools[0].type: only tools", None),
    ("messages", {"tool_choice": {"type": "x"}}, 400, "tool_choice.type: expected auto", None),
    ("messages", {"tool_choice": {"type": []}}, 400, "tool_choice.type: expected auto", None),
    ("messages", {"tool_choice": {"type": {}}}, 400, "tool_choice.type: expected auto", None),
    ("messages", {"tool_choice": {"type": "tool", "name": "x"}}, 400, "none of the tools", None),
    ("messages", {"container": "c"}, 400, "container: is not offered", None),
    ("messages", {"thread": {"type": "continue", "previous_message_id": "msg_9"}}, 404,
     "no thread that ends with 'msg_9'", None),
    ("messages", {"messages": [{"role": "user", "content": "x" * 4000}]}, 400,
     "prompt is too long", None),
    ("messages", {"model": "claude"}, 404, "model: there is 'policy'", None),
    ("messages/batches", {}, 404, "POST /v1/messages/batches is not offered", None),
]  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "responses": {"model": "policy", "input": "Q"},
    "completions": {"model": "policy", "prompt": "Q"},
    "messages": {
        "model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "Q"}]
    },
}  # fmt: skip
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def test_errors_have_the_form_of_their_protocol() -> None:
    async def use(c: Any) -> str:
        for path, wrong, status, said, param in BAD:
            client = c.anthropic if path.startswith("messages") else c.openai
            error = (anthropic if client is c.anthropic else openai).APIStatusError
            body = {**GOOD.get(path, {}), **wrong}
            at = f"/v1/{path}" if client is c.anthropic else f"/{path}"
            with pytest.raises(error) as caught:
                await client.post(at, body=body, cast_to=object)
            assert caught.value.status_code == status, (path, wrong)
            told = caught.value.body
            if client is c.anthropic:
                assert (told["type"], told["error"]["type"]) == ("error", KINDS[status])
                told = told["error"]
            else:
                assert told["param"] == param
            assert said in told["message"], told
        with pytest.raises(anthropic.AuthenticationError):
            await c.anthropic.with_options(api_key="sk-no").messages.create(**GOOD["messages"])
        held = {"type": "continue", "previous_message_id": "msg_9"}
        with pytest.raises(anthropic.NotFoundError) as lost:
            await c.anthropic.messages.create(**GOOD["messages"], extra_body={"thread": held})
        assert lost.value.error_code == "thread_not_found"
        one = await c.openai.responses.create(**GOOD["responses"], store=False)
        with pytest.raises(openai.BadRequestError, match="not to be stored"):
            await c.openai.responses.create(**GOOD["responses"], previous_response_id=one.id)
        return str(one.output_text)

    rollout = alone(program(use), scripted(lambda *_: turn("fine"), max_model_len=2000))
    assert (rollout.answer, len(rollout.turns)) == ("fine", 1)


def test_what_the_engine_gives_up_is_told_in_a_stream() -> None:
    async def use(c: Any) -> str:
        with pytest.raises(openai.APIError, match="gave a request up"):
            async for _ in await c.openai.responses.create(**GOOD["responses"], stream=True):
                pass
        with pytest.raises(anthropic.APIError, match="gave a request up"):
            async for _ in await c.anthropic.messages.create(**GOOD["messages"], stream=True):
                pass
        return "told"

    rollout = alone(program(use), lambda *_: Turn(f"x{EOT}", finish_reason="abort"))
    assert rollout.status is Status.INFRA_ERROR


def test_a_fault_of_ours_is_a_500_in_the_form_of_its_protocol_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def use(c: Any) -> str:
        def fail(*_: Any) -> Any:
            raise TypeError("unhashable")

        with monkeypatch.context() as patch:
            patch.setattr(Session, "_sampling", fail)
            for _ in range(2):
                with pytest.raises(openai.InternalServerError) as one:
                    await c.openai.responses.create(**GOOD["responses"])
            with pytest.raises(anthropic.InternalServerError) as two:
                await c.anthropic.messages.create(**GOOD["messages"])
        told: Any = one.value.body, two.value.body
        assert (told[0]["type"], told[1]["error"]["type"]) == ("server_error", "api_error")
        assert "/v1/responses: TypeError: unhashable" in told[0]["message"]
        return str((await c.openai.responses.create(**GOOD["responses"])).output_text)

    rollout = alone(program(use), lambda *_: turn("fine"))
    assert (rollout.answer, rollout.status, len(rollout.turns)) == ("fine", Status.COMPLETED, 1)
    assert capfd.readouterr().err.count("Traceback") == 2  # once for each route


def test_a_call_that_anthropic_has_no_form_for_is_text() -> None:
    bad = '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'

    async def use(c: Any) -> str:
        said = await c.anthropic.messages.create(
            **GOOD["messages"] | {"max_tokens": 99}, tools=[BLOCK]
        )
        return str(said.content[0].text)

    rollout = alone(program(use), lambda *_: turn(bad))
    assert (rollout.answer, rollout.stats["malformed"]) == (bad, 1)


def test_tokens_are_counted_and_models_listed() -> None:
    async def use(c: Any) -> str:
        asked = {"messages": GOOD["messages"]["messages"], "model": "policy", "system": "s"}
        count = await c.anthropic.messages.count_tokens(**asked)
        said = await c.anthropic.messages.create(**asked, max_tokens=9)
        assert said.usage.input_tokens == count.input_tokens
        for client in (c.openai, c.anthropic):
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
        return "ok"

    rollout = alone(program(use), lambda *_: turn("x"))
    ((shown, _),) = rows_of(rollout)
    assert shown[1] == TOKENIZER.decode(
        CHAT.prompt_ids([{"role": "system", "content": "s"}, {"role": "user", "content": "Q"}])
    )
    assert (rollout.answer, len(rollout.turns)) == ("ok", 1)


def test_what_bends_is_counted_and_tools_and_stops_are_obeyed() -> None:
    async def use(c: Any) -> None:
        schema = {"type": "object", "properties": {}}
        await c.openai.responses.create(
            **GOOD["responses"], tools=[FLAT], tool_choice="required", temperature=0.5,
            reasoning={"effort": "low"}, truncation="auto", max_tool_calls=1,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        )  # fmt: skip
        await c.anthropic.messages.create(
            **GOOD["messages"], tools=[BLOCK], tool_choice={"type": "any"}, stop_sequences=["END"],
            extra_body={"temperature": 0.1, "thinking": {"type": "adaptive"}},
            output_config={"effort": "low"},
        )  # fmt: skip
        off = {"type": "disabled"}  # as it is
        await c.anthropic.messages.create(**GOOD["messages"], extra_body={"thinking": off})

    engine = StubEngine(TOKENIZER, lambda *_: turn("x"))
    rollout = alone(program(use), engine)
    both, one = ("tool_choice", "temperature", "reasoning_effort"), ("truncation", "thinking")
    counted = {**dict.fromkeys(both, 2), **dict.fromkeys(one, 1), "response_format": 1}
    stats = {name: n for name, n in rollout.stats.items() if name.startswith("unenforced")}
    assert stats == {f"unenforced_{name}": n for name, n in counted.items()}
    assert [request.options["stop"] for request in engine.requests] == [(), ("END",), ()]
    none = {**GOOD["messages"], "tools": [BLOCK], "tool_choice": {"type": "none"}}
    assert MESSAGES.read(none, {}).tools == ()
