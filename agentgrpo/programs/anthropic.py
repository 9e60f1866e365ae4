"""Anthropic's Messages protocol. Contents are blocks; tool results are blocks of the user."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from agentgrpo.programs.messages import (
    BadRequest,
    Call,
    Message,
    Text,
    parse_arguments,
    with_tool_names,
)
from agentgrpo.programs.requests import (
    MODEL,
    Api,
    Body,
    Reply,
    Stops,
    Tokens,
    TurnRequest,
    choice_named,
    parse_body,
    turn_request,
    usage,
)

UNTHREADED = "thread_unsupported_request"
"""The error after which Anthropic's tool runner sends whole conversations."""
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
BLOCKS = {
    "user": {"text", "tool_result"}, "system": {"text"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
}  # fmt: skip
ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip
"""Error types by HTTP status. Others are invalid_request_error, or api_error from 500 on."""
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class _Block(BaseModel):
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Text = ""


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _BlockMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_Block], BeforeValidator(_as_blocks)]

    @model_validator(mode="after")
    def _check_block_types(self) -> Self:
        if wrong := {block.type for block in self.content} - BLOCKS[self.role]:
            raise ValueError(f"{self.role} has no block of type {sorted(wrong)[0]}")
        return self

    def to_messages(self) -> list[Message]:
        messages: list[Message] = []
        for block in self.content:
            if block.type == "tool_result":
                messages.append(Message("tool", block.content, call_id=block.tool_use_id))
                continue
            if not messages or messages[-1].role != self.role:
                messages.append(Message(self.role))
            last = messages.pop()
            if block.type == "thinking":
                last = replace(last, reasoning=(last.reasoning or "") + block.thinking)
            elif block.type == "tool_use":
                call = Call(block.id, block.name, json.dumps(block.input))
                last = replace(last, calls=(*last.calls, call))
            else:
                last = replace(last, content=last.content + block.text)
            messages.append(last)
        return messages or [Message(self.role)]


class _BlockTool(BaseModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, serialization_alias="parameters")


class _ToolChoice(BaseModel):
    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class MessagesBody(Body):
    """A request to /v1/messages."""

    messages: Annotated[list[_BlockMessage], Field(min_length=1)]
    system: Text | None = None
    max_tokens: Tokens
    tools: list[_BlockTool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: Stops | None = None
    thinking: Any = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None


def parse_request(body: Mapping[str, Any]) -> TurnRequest:
    """Parse a request to /v1/messages."""
    if body.get("thread"):
        raise BadRequest("thread: is not offered", UNTHREADED, "thread")
    parsed = parse_body(MessagesBody, body)
    choice, output = (parsed.tool_choice or _ToolChoice(), parsed.output_config or {})
    messages = [message for sent in parsed.messages for message in sent.to_messages()]
    if messages[-1].role == "assistant":
        raise BadRequest("messages: to begin an answer is not offered", param="messages")
    tools = [
        tool.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        for tool in parsed.tools or ()
    ]
    return turn_request(
        parsed,
        tools=[{"type": "function", "function": tool} for tool in tools],
        choice=CHOICES.get(choice.type) or choice_named(choice.name),
        overrides={
            "response_format": output.get("format") or parsed.output_format,
            "reasoning_effort": output.get("effort"),
            "thinking": parsed.thinking,
        },
        messages=with_tool_names(
            [*([Message("system", parsed.system)] if parsed.system else []), *messages]
        ),
        max_tokens=parsed.max_tokens,
        stop=tuple(parsed.stop_sequences or ()),
        one_call=choice.disable_parallel_tool_use is True,
        objects=True,
    )


# --- answers


def to_json(reply: Reply) -> dict[str, Any]:
    """Format a reply as one response."""
    message, stopped = reply.message, reply.turn.stop_reason
    reason = REASONS.get(reply.finish_reason)
    if reason is None:
        reason = "stop_sequence" if isinstance(stopped, str) else "end_turn"
    blocks: list[dict[str, Any]] = []
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        arguments = parse_arguments(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    token_usage = usage(reply)
    cached = token_usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": stopped if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": token_usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": token_usage["completion_tokens"],
        },
    }


def to_stream(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any]]:
    """Format a reply as events of a stream, which always have the usage."""
    answer = to_json(reply)
    blocks, end = answer["content"], ("stop_reason", "stop_sequence")
    start_message = {**answer, "content": [], **dict.fromkeys(end)}
    start_message["usage"] = {**answer["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": start_message}
    for index, block in enumerate(blocks):
        kind, at = block["type"], {"index": index}
        empty_values = {"text": "", "input": {}}
        empty_block = {name: empty_values.get(name, value) for name, value in block.items()}
        yield {"type": "content_block_start", **at, "content_block": empty_block}
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            delta = {"type": "text_delta", "text": block["text"]}
        yield {"type": "content_block_delta", **at, "delta": delta}
        yield {"type": "content_block_stop", **at}
    delta = {name: answer[name] for name in end}
    yield {"type": "message_delta", "delta": delta, "usage": answer["usage"]}
    yield {"type": "message_stop"}


def error(error: Exception, status: int) -> dict[str, Any]:
    """Format an error for Anthropic's clients."""
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    text, code = str(error), getattr(error, "code", None)
    if code == "context_length_exceeded":
        text = f"prompt is too long: {text}"
    error_json: dict[str, Any] = {"type": kind, "message": text}
    if code is not None:
        error_json["details"] = {"error_code": code}
    return {"type": "error", "error": error_json}


MESSAGES = Api(parse_request, to_json, to_stream, error)
