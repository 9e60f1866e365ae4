"""OpenAI's Responses protocol. A conversation is a list of items; a turn has several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from agentgrpo.programs.messages import ROLES, Call, Message, Role, Text, with_tool_names
from agentgrpo.programs.requests import (
    MODEL,
    Api,
    Body,
    Choice,
    Reply,
    Tokens,
    TurnRequest,
    error_json,
    parse_body,
    turn_request,
    usage,
)

LOGPROBS = "message.output_text.logprobs"
RANKS = {"reasoning": 0, "message": 1, "function_call": 2}
"""The order of the items of one turn."""


class _Item(BaseModel):
    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Role | None = None
    content: Text = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Text = ""

    @model_validator(mode="after")
    def _check_required_fields(self) -> Self:
        if self.type == "message" and self.role is None:
            raise ValueError("a message has a role")
        if self.type == "function_call" and not self.name:
            raise ValueError("a function_call has a name")
        return self

    def to_message(self) -> Message:
        match self.type:
            case "message":
                assert self.role is not None
                return Message(ROLES.get(self.role, self.role), self.content)
            case "reasoning":
                return Message("assistant", reasoning=self.content or None)
            case "function_call":
                call = Call(self.call_id, self.name, self.arguments)
                return Message("assistant", calls=(call,))
        return Message("tool", self.output, call_id=self.call_id)


class _FlatTool(BaseModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _as_items(input: Any) -> Any:
    return [{"role": "user", "content": input}] if isinstance(input, str) else input


def _without_logprobs(include: list[Any]) -> list[Any]:
    if LOGPROBS in include:
        raise ValueError(f"{LOGPROBS} is not offered")
    return include


class ResponsesBody(Body):
    """A request to /v1/responses."""

    input: Annotated[list[_Item], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: Text | None = None
    max_output_tokens: Tokens | None = None
    tools: list[_FlatTool] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Any = None
    include: Annotated[list[Any], AfterValidator(_without_logprobs)] | None = None


def parse_request(body: Mapping[str, Any]) -> TurnRequest:
    """Parse a request to /v1/responses."""
    parsed = parse_body(ResponsesBody, body)
    first = [Message("system", parsed.instructions)] if parsed.instructions else []
    text, reasoning = parsed.text or {}, parsed.reasoning or {}
    tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in parsed.tools or ()]
    return turn_request(
        parsed,
        tools=[{"type": "function", "function": tool} for tool in tools],
        choice=parsed.tool_choice,
        overrides={
            "response_format": text.get("format"),
            "verbosity": text.get("verbosity"),
            "reasoning_effort": reasoning.get("effort"),
            "reasoning_summary": reasoning.get("summary") or reasoning.get("generate_summary"),
            "include": parsed.include or None,
            "truncation": parsed.truncation,
        },
        messages=with_tool_names([*first, *_messages(parsed.input)]),
        max_tokens=parsed.max_output_tokens,
        one_call=parsed.parallel_tool_calls is False,
    )


def _messages(items: Sequence[_Item]) -> list[Message]:
    """Convert items to messages. The items of one turn become one message."""
    messages: list[Message] = []
    rank = 0
    for item in items:
        message = item.to_message()
        if message.role != "assistant":
            messages.append(message)
            continue
        continues = bool(messages) and messages[-1].role == "assistant"
        if continues and (item.type == "function_call" or rank < RANKS[item.type]):
            last = messages.pop()
            message = Message(
                "assistant", last.content + message.content, last.calls + message.calls,
                last.reasoning if message.reasoning is None else message.reasoning,
            )  # fmt: skip
        messages.append(message)
        rank = RANKS[item.type]
    return messages


# --- answers


def to_json(reply: Reply) -> dict[str, Any]:
    """Format a reply as one response. It does not repeat the request's fields."""
    is_truncated = reply.finish_reason == "length"
    used = usage(reply)
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": "incomplete" if is_truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
        "error": None,
        "model": MODEL,
        "output": _items(reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **used["prompt_tokens_details"]},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        },
    }


def _items(reply: Reply) -> list[dict[str, Any]]:
    message, items = reply.message, list[dict[str, Any]]()
    if message.content or not message.calls:
        text_part = {
            "type": "output_text",
            "text": message.content,
            "annotations": [],
            "logprobs": [],
        }
        items.append(
            {
                "type": "message", "id": f"msg_{reply.id}", "role": "assistant",
                "status": "completed", "content": [text_part],
            }
        )  # fmt: skip
    items += (
        {
            "type": "function_call", "id": f"fc_{reply.id}_{number}", "status": "completed",
            "call_id": call.id, "name": call.name, "arguments": call.arguments,
        }
        for number, call in enumerate(message.calls)
    )  # fmt: skip
    return items


def to_stream(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any]]:
    """Format a reply as events of a stream. The last event always has the usage."""
    count = itertools.count()

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(count), **fields}

    answer = to_json(reply)
    in_progress: dict[str, Any] = {
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield event("created", response={**answer, **in_progress})
    yield event("in_progress", response={**answer, **in_progress})
    for index, item in enumerate(answer["output"]):
        at: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        empty: Any = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        start_item = {**item, **empty, "status": "in_progress"}
        yield event("output_item.added", output_index=index, item=start_item)
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", **at, delta=arguments)
            yield event(
                "function_call_arguments.done", **at, name=item["name"], arguments=arguments
            )
        else:
            (part,) = item["content"]
            at["content_index"] = 0
            yield event("content_part.added", **at, part={**part, "text": ""})
            yield event("output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("output_text.done", **at, text=part["text"], logprobs=[])
            yield event("content_part.done", **at, part=part)
        yield event("output_item.done", output_index=index, item=item)
    yield event(answer["status"], response=answer)


RESPONSES = Api(parse_request, to_json, to_stream, error_json)
