"""Anthropic's messages: contents are blocks, and what tools gave are blocks of the user's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from agentgrpo.programs.messages import BadRequest, Call, Message, Text, named, parsed
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

IGNORED = (
    "metadata", "service_tier", "cache_control", "speed", "inference_geo", "diagnostics",
    "user_profile_id", "billing_policy", "fallback_credit_token",
)  # fmt: skip
"""By which no answer is another: whose it is, how fast it comes, what it costs."""
REFUSED = ("container", "mcp_servers", "compaction", "fallbacks", "thread")
UNTHREADED = "thread_unsupported_request"
"""The error behind which Anthropic's runner of tools goes on with whole conversations."""
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
BLOCKS = {
    "user": {"text", "tool_result"}, "system": {"text"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
}  # fmt: skip
ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip
"""Types of errors by their status; others are invalid requests, or from 500 on the server's."""
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
    def _has_its_own(self) -> Self:
        if wrong := {block.type for block in self.content} - BLOCKS[self.role]:
            raise ValueError(f"{self.role} has no block of type {sorted(wrong)[0]}")
        return self

    def read(self) -> list[Message]:
        """The messages that it is: what a tool gave is one of its own."""
        made: list[Message] = []
        for block in self.content:
            if block.type == "tool_result":
                made.append(Message("tool", block.content, call_id=block.tool_use_id))
                continue
            if not made or made[-1].role != self.role:
                made.append(Message(self.role))
            last = made.pop()
            if block.type == "thinking":
                last = replace(last, reasoning=(last.reasoning or "") + block.thinking)
            elif block.type == "tool_use":
                call = Call(block.id, block.name, json.dumps(block.input))
                last = replace(last, calls=(*last.calls, call))
            else:
                last = replace(last, content=last.content + block.text)
            made.append(last)
        return made or [Message(self.role)]


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


def read(body: Mapping[str, Any]) -> TurnRequest:
    """A request to /v1/messages."""
    if body.get("thread"):
        raise BadRequest("thread: is not offered", UNTHREADED, "thread")
    read = parse_body(MessagesBody, body, IGNORED, REFUSED)
    choice, wishes = read.tool_choice or _ToolChoice(), read.output_config or {}
    told = [message for one in read.messages for message in one.read()]
    if told[-1].role == "assistant":
        raise BadRequest("messages: to begin an answer is not offered", param="messages")
    tools = [
        tool.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        for tool in read.tools or ()
    ]
    return turn_request(
        read,
        tools=[{"type": "function", "function": tool} for tool in tools],
        choice=CHOICES.get(choice.type) or choice_named(choice.name),
        overrides={
            "response_format": wishes.get("format") or read.output_format,
            "reasoning_effort": wishes.get("effort"),
            "thinking": read.thinking,
        },
        messages=named([*([Message("system", read.system)] if read.system else []), *told]),
        max_tokens=read.max_tokens,
        stop=tuple(read.stop_sequences or ()),
        one_call=choice.disable_parallel_tool_use is True,
        objects=True,
    )


# --- answers


def to_json(reply: Reply) -> dict[str, Any]:
    """The answer in one piece."""
    message, stopped = reply.message, reply.turn.stop_reason
    reason = REASONS.get(reply.finish_reason)
    if reason is None:
        reason = "stop_sequence" if isinstance(stopped, str) else "end_turn"
    blocks: list[dict[str, Any]] = []
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        given = parsed(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    used = usage(reply)
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": stopped if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": used["completion_tokens"],
        },
    }


def to_stream(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any]]:
    """The answer as events of a stream; usage is in it, asked for or not."""
    answer = to_json(reply)
    blocks, end = answer["content"], ("stop_reason", "stop_sequence")
    begun = {**answer, "content": [], **dict.fromkeys(end)}
    begun["usage"] = {**answer["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(blocks):
        kind, at = block["type"], {"index": index}
        nothing = {"text": "", "input": {}}
        empty = {name: nothing.get(name, value) for name, value in block.items()}
        yield {"type": "content_block_start", **at, "content_block": empty}
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
    """An error as Anthropic's clients read it."""
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    text, code = str(error), getattr(error, "code", None)
    if code == "context_length_exceeded":
        text = f"prompt is too long: {text}"
    told: dict[str, Any] = {"type": kind, "message": text}
    if code is not None:
        told["details"] = {"error_code": code}
    return {"type": "error", "error": told}


MESSAGES = Api(read, to_json, to_stream, error)
