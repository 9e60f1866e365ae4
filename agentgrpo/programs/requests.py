"""Requests and replies of all protocols, and OpenAI's chat completions.

A reply is one message, which is made when its turn is complete. The plain response and the chunks
of a stream are both generated from it, so they cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agentgrpo.actions import inlined
from agentgrpo.programs.messages import BadRequest, Call, ChatMessage, Message, with_tool_names
from agentgrpo.types import Completion

MODEL = "policy"
FROZEN = "policy:frozen"
"""Model name for turns with the same weights that are not trained on."""
OVERRIDES = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "response_format", "structured_outputs", "seed", "logit_bias",
    "reasoning_effort", "verbosity", "context_management",
)  # fmt: skip
"""Options that the run's config decides. In requests they are counted and ignored, since the run
trains on its own sampling."""
NO_CHANGE = (None, "disabled", {"type": "text"}, {"type": "disabled"})
"""Values of such options that change nothing."""
IGNORED = {
    "billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "inference_geo",
    "max_tool_calls", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "speed", "store",
    "stream_options", "user", "user_profile_id",
}  # fmt: skip
"""Options of any protocol without effect on the reply: user, speed, storage, cost.
max_tool_calls concerns tools of OpenAI's servers."""
REFUSED = {
    "access_programs", "audio", "background", "compaction", "container", "conversation",
    "fallbacks", "function_call", "functions", "image", "logprobs", "mcp_servers", "moderation",
    "previous_response_id", "prompt", "thread", "top_logprobs", "web_search_options",
}  # fmt: skip
"""Options of any protocol that would change the reply, and that the endpoint lacks."""
OTHER_FIELDS = 32
"""How many unknown fields of a request are counted, and how many characters of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for one turn."""

    model: str
    """The program's name of the model. Only FROZEN has an effect."""
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    frozen: bool = False
    """The turn is not recorded and not trained on."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Options that the run's config decides, by the protocol's keys."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template (chat_template_kwargs)."""
    objects: bool = False
    """Whether the protocol requires a JSON object as the arguments of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to a request."""

    id: str
    """Without the protocol's prefix."""
    message: Message
    finish_reason: str
    """"stop", "length" or "tool_calls"."""
    turn: Completion
    created: int


@dataclass(frozen=True, slots=True)
class Api:
    """A protocol: parses requests, and formats replies, streams and errors."""

    read: Callable[[Mapping[str, Any]], TurnRequest]
    to_json: Callable[[Reply], dict[str, Any]]
    to_stream: Callable[[Reply, bool], Iterator[Mapping[str, Any] | str]]
    """The second argument: include the usage."""
    error: Callable[[Exception, int], dict[str, Any]]
    """The second argument: the HTTP status."""


# --- requests


def choice_of(choice: Any) -> Any:
    """Validate a tool choice and convert it to the form of chat completions."""
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


def as_list(value: Any) -> Any:
    """Wrap a text in a list; return a list unchanged."""
    return [value] if isinstance(value, str) else value


Choice = Annotated[Any, AfterValidator(choice_of)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
Tokens = Annotated[int, Field(ge=1)]


class Body(BaseModel):
    """The fields of requests in all protocols."""

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


def parse_body(model: type[Kind], body: Mapping[str, Any]) -> Kind:
    """Validate a request's body. Raises BadRequest with the first wrong field."""
    for name in sorted(REFUSED & body.keys()):
        if body[name] not in (None, False, "", []):  # {} enables an option
            raise BadRequest(f"{name}: is not offered", param=name)
    try:
        dropped = (IGNORED | REFUSED) - model.model_fields.keys()
        return model.model_validate({k: v for k, v in body.items() if k not in dropped})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        param = "".join(path).removeprefix(".")
        message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        message += f", got {first['input']!r:.80}"
        raise BadRequest(f"{param}: {message}", param=param) from None


def turn_request(
    body: Body, *, tools: Sequence[Mapping[str, Any]], choice: Any,
    one_call: bool, overrides: Mapping[str, Any] = MappingProxyType({}), **fields: Any,
) -> TurnRequest:  # fmt: skip
    """Make a TurnRequest. `tools` and `choice` have the form of chat completions."""
    overridden = {name: getattr(body, name, None) for name in OVERRIDES} | {**overrides}
    unknown = sorted((body.model_extra or {}).items())[:OTHER_FIELDS]
    overridden |= {re.sub(r"\W", "_", name[:OTHER_FIELDS]): value for name, value in unknown}
    overridden = {name: value for name, value in overridden.items() if value not in NO_CHANGE}
    if choice not in (None, "auto", "none"):
        name = None if choice == "required" else choice["function"]["name"]
        if name is not None and all(tool["function"]["name"] != name for tool in tools):
            raise BadRequest(f"tool_choice: none of the tools is {name!r:.80}", param="tool_choice")
        overridden["tool_choice"] = choice
    if one_call:
        overridden["parallel_tool_calls"] = False
    try:
        tools = [inlined(tool) for tool in tools]
    except ValueError as error:
        raise BadRequest(f"tools: {error}", param="tools") from None
    return TurnRequest(
        model=body.model, tools=() if choice == "none" else tuple(tools), stream=bool(body.stream),
        frozen=body.model.endswith(FROZEN), overrides=overridden, **fields,
    )  # fmt: skip


def read_chat(body: Mapping[str, Any]) -> TurnRequest:
    """Parse a request to /v1/chat/completions."""
    parsed = parse_body(ChatBody, body)
    return turn_request(
        parsed,
        tools=body.get("tools") or (),  # unvalidated fields too, since a template may show them
        choice=parsed.tool_choice,
        messages=with_tool_names([message.to_message() for message in parsed.messages]),
        max_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        stop=tuple(parsed.stop or ()),
        one_call=parsed.parallel_tool_calls is False,
        usage_in_stream=bool((parsed.stream_options or {}).get("include_usage")),
        template_options=parsed.chat_template_kwargs or {},
    )


# --- answers


def usage(reply: Reply) -> dict[str, Any]:
    """Token counts of prompt and turn, from the engine."""
    turn, sampled = reply.turn, len(reply.turn.token_ids)
    prompt = turn.account.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": turn.num_cached_tokens},
    }


def chat_json(reply: Reply) -> dict[str, Any]:
    """Format a reply as one response."""
    message = reply.message
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if message.calls else ""),
        "refusal": None,
        "reasoning_content": message.reasoning,  # else litellm searches content for thoughts
    }
    if message.calls:
        fields["tool_calls"] = [_call_json(call) for call in message.calls]
    choice = {"index": 0, "message": fields, "finish_reason": reply.finish_reason, "logprobs": None}
    return {**_metadata(reply, "chat.completion"), "choices": [choice], "usage": usage(reply)}


def chat_chunks(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any] | str]:
    """Format a reply as the data of server-sent events."""
    message = reply.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.reasoning:
        deltas.append({"reasoning_content": message.reasoning})
    if message.content:
        deltas.append({"content": message.content})
    for index, call in enumerate(message.calls):
        deltas.append({"tool_calls": [{"index": index, **_call_json(call)}]})
    head = _metadata(reply, "chat.completion.chunk")
    ends = [None] * len(deltas) + [reply.finish_reason]
    for delta, end in zip([*deltas, {}], ends, strict=True):
        choice = {"index": 0, "delta": delta, "finish_reason": end, "logprobs": None}
        yield {**head, "choices": [choice]}
    if with_usage:
        yield {**head, "choices": [], "usage": usage(reply)}
    yield "[DONE]"


def _metadata(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": MODEL}


def _call_json(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def error_json(error: Exception, status: int) -> dict[str, Any]:
    """Format an error for OpenAI's clients."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code, param = getattr(error, "code", None), getattr(error, "param", None)
    return {"error": {"message": str(error), "type": kind, "code": code, "param": param}}


CHAT = Api(read_chat, chat_json, chat_chunks, error_json)
