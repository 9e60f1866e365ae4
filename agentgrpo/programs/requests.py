"""What a request of a protocol asks for, and how its answer is written: OpenAI's chat completions.

The answer is one message, made once a turn is whole; the plain reply and the chunks of a stream are
both written from it, so they cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from agentgrpo.actions import inlined
from agentgrpo.programs.messages import BadRequest, Call, ChatMessage, Message, named
from agentgrpo.types import Completion

MODEL = "policy"
FROZEN = "policy:frozen"
"""The same weights, by a name that keeps a turn out of training."""
OVERRIDES = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "response_format", "structured_outputs", "seed", "logit_bias",
    "reasoning_effort", "verbosity", "context_management",
)  # fmt: skip
"""Keys of what the run decides: counted and not obeyed, since its own sampling is trained on."""
NOTHING = (None, "disabled", {"type": "text"}, {"type": "disabled"})
"""Values of such keys that ask for no change."""
IGNORED = (
    "user", "metadata", "store", "service_tier", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
)  # fmt: skip
"""By which no answer is another: whose it is, how fast it comes, where it is kept."""
REFUSED = (
    "audio", "function_call", "functions", "moderation", "web_search_options", "logprobs",
    "top_logprobs",
)  # fmt: skip
OTHER_FIELDS = 32
"""Fields of other servers that are counted in a request, and characters of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for one turn."""

    model: str
    """By the program's name for it, which only FROZEN makes another."""
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    frozen: bool = False
    """The turn is in no record and not trained on."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """What it asks for that the run's own sampling and template decide, by the protocol's keys."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Those that it is to be rendered with."""
    objects: bool = False
    """Whether the protocol has no form for a call whose arguments are no JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a turn came to."""

    id: str
    """Without the prefix that a protocol gives it."""
    message: Message
    finish_reason: str
    """Of the protocol: "stop", "length" or "tool_calls"."""
    turn: Completion
    created: int


@dataclass(frozen=True, slots=True)
class Api:
    """A protocol: how its requests are read, and its answers, streams and errors are written."""

    read: Callable[[Mapping[str, Any]], TurnRequest]
    to_json: Callable[[Reply], dict[str, Any]]
    to_stream: Callable[[Reply, bool], Iterator[Mapping[str, Any] | str]]
    """With the usage, if that was asked for."""
    error: Callable[[Exception, int], dict[str, Any]]
    """For a status of HTTP."""


# --- requests


def choice_of(choice: Any) -> Any:
    """A choice of a tool as chat completions name it."""
    match choice:
        case None | "auto" | "none" | "required":
            return choice
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            return choice_named(name)
    raise ValueError("expected 'none', 'auto', 'required' or a function by its name")


def choice_named(name: str) -> dict[str, Any]:
    """The choice of one tool."""
    return {"type": "function", "function": {"name": name}}


def as_list(given: Any) -> Any:
    """One text as a list of one."""
    return [given] if isinstance(given, str) else given


Choice = Annotated[Any, AfterValidator(choice_of)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
Tokens = Annotated[int, Field(ge=1)]


class Body(BaseModel):
    """What the requests of all protocols have."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str = MODEL
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None


class _ToolFunction(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ChatTool(BaseModel):
    type: Literal["function"] = "function"
    function: _ToolFunction


class ChatBody(Body):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[_ChatTool] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None
    stop: Annotated[Stops, BeforeValidator(as_list)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Literal[1] | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Kind = TypeVar("Kind", bound=BaseModel)


def parse_body(
    kind: type[Kind], body: Mapping[str, Any], ignored: Collection[str], refused: Collection[str]
) -> Kind:
    """A request's body, checked."""
    for name in refused:
        if body.get(name) not in (None, False, "", []):  # {} asks for it
            raise BadRequest(f"{name}: is not offered", param=name)
    try:
        skipped = {*ignored, *refused}
        return kind.model_validate({k: v for k, v in body.items() if k not in skipped})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        places = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        param = "".join(places).removeprefix(".")
        said = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        said += f", got {first['input']!r:.80}"
        raise BadRequest(f"{param}: {said}", param=param) from None


def turn_request(
    body: Body, *, tools: Sequence[Mapping[str, Any]], choice: Any,
    one_call: bool, overrides: Mapping[str, Any] = MappingProxyType({}), **more: Any,
) -> TurnRequest:  # fmt: skip
    """What a body asks for; tools, a choice and overrides as chat completions have them."""
    given = {name: getattr(body, name, None) for name in OVERRIDES} | {**overrides}
    extra = sorted((body.model_extra or {}).items())[:OTHER_FIELDS]
    given |= {re.sub(r"\W", "_", name[:OTHER_FIELDS]): value for name, value in extra}
    given = {name: value for name, value in given.items() if value not in NOTHING}
    if choice not in (None, "auto", "none"):
        name = None if choice == "required" else choice["function"]["name"]
        if name is not None and all(tool["function"]["name"] != name for tool in tools):
            raise BadRequest(f"tool_choice: none of the tools is {name!r:.80}", param="tool_choice")
        given["tool_choice"] = choice
    if one_call:
        given["parallel_tool_calls"] = False
    try:
        tools = [inlined(tool) for tool in tools]
    except ValueError as error:
        raise BadRequest(f"tools: {error}", param="tools") from None
    return TurnRequest(
        model=body.model, tools=() if choice == "none" else tuple(tools), stream=bool(body.stream),
        frozen=body.model.endswith(FROZEN), overrides=given, **more,
    )  # fmt: skip


def read_chat(body: Mapping[str, Any]) -> TurnRequest:
    """A request to /v1/chat/completions."""
    read = parse_body(ChatBody, body, IGNORED, REFUSED)
    return turn_request(
        read,
        tools=body.get("tools") or (),  # as they are: a template shows all that they say
        choice=read.tool_choice,
        messages=named([message.read() for message in read.messages]),
        max_tokens=read.max_completion_tokens or read.max_tokens,
        stop=tuple(read.stop or ()),
        one_call=read.parallel_tool_calls is False,
        usage_in_stream=bool((read.stream_options or {}).get("include_usage")),
        template_options=read.chat_template_kwargs or {},
    )


# --- answers


def usage(reply: Reply) -> dict[str, Any]:
    """Tokens of prompt and turn, as the engine counted them."""
    turn, sampled = reply.turn, len(reply.turn.token_ids)
    prompt = turn.account.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": turn.num_cached_tokens},
    }


def chat_json(reply: Reply) -> dict[str, Any]:
    """The answer in one piece."""
    message = reply.message
    said: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if message.calls else ""),
        "refusal": None,
        "reasoning_content": message.reasoning,  # without it litellm looks for thoughts in content
    }
    if message.calls:
        said["tool_calls"] = [_call_json(call) for call in message.calls]
    choice = {"index": 0, "message": said, "finish_reason": reply.finish_reason, "logprobs": None}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": usage(reply)}


def chat_chunks(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any] | str]:
    """The answer as data of server-sent events."""
    message = reply.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.reasoning:
        deltas.append({"reasoning_content": message.reasoning})
    if message.content:
        deltas.append({"content": message.content})
    for index, call in enumerate(message.calls):
        deltas.append({"tool_calls": [{"index": index, **_call_json(call)}]})
    head = _head(reply, "chat.completion.chunk")
    ends = [None] * len(deltas) + [reply.finish_reason]
    for delta, end in zip([*deltas, {}], ends, strict=True):
        choice = {"index": 0, "delta": delta, "finish_reason": end, "logprobs": None}
        yield {**head, "choices": [choice]}
    if with_usage:
        yield {**head, "choices": [], "usage": usage(reply)}
    yield "[DONE]"


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": MODEL}


def _call_json(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def error_json(error: Exception, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code, param = getattr(error, "code", None), getattr(error, "param", None)
    return {"error": {"message": str(error), "type": kind, "code": code, "param": param}}


CHAT = Api(read_chat, chat_json, chat_chunks, error_json)
