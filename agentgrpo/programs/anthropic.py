"""Anthropic's messages: contents are blocks, and what tools gave are blocks of the user's.

A thread is a conversation that the server keeps: a request names an earlier answer by its id, and
has only what is new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from agentgrpo.programs.messages import BadRequest, Call, Message, named, parsed, read_call, text_of
from agentgrpo.programs.requests import (
    MODEL,
    Api,
    Asked,
    Past,
    Reply,
    called,
    inside,
    known,
    listed,
    read_chat,
    usage,
)

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
"""Keys that a chat completion has too."""
READ = (
    "messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config",
    "output_format", "thread",
)  # fmt: skip
UNHEARD = (
    "metadata", "service_tier", "cache_control", "speed", "inference_geo", "diagnostics",
    "user_profile_id", "billing_policy", "fallback_credit_token",
)  # fmt: skip
"""By which no answer is another: whose it is, how fast it comes, what it costs."""
REFUSED = ("container", "mcp_servers", "context_management", "compaction", "fallbacks")
KNOWN = {*SAME, *READ, *UNHEARD, *REFUSED}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip
"""Types of errors by their status; others are invalid requests, or from 500 on the server's."""
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Mapping[str, Any], past: Past) -> Asked:
    """A request to /v1/messages.

    Raises:
        BadRequest: something in it has the wrong form, or is not offered.
    """
    known(body, KNOWN, REFUSED)
    if body.get("max_tokens") is None:
        raise BadRequest("max_tokens: must be given", param="max_tokens")
    before, tools = _before(body.get("thread"), past)
    if body.get("tools") is not None:
        tools = tuple(_tool(tool, place) for place, tool in enumerate(listed(body, "tools")))
    if told := text_of(body.get("system"), "system"):
        kept = before[1:] if before and before[0].role == "system" else before
        before = (Message("system", told), *kept)
    choice = body.get("tool_choice") or {}
    if not isinstance(choice, Mapping):
        raise BadRequest.expected("an object", param="tool_choice", got=choice)
    chat = {
        **{name: body[name] for name in SAME if name in body},
        "stop": listed(body, "stop_sequences"),
        "tools": list(tools),
        "tool_choice": _choice(choice),
        "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True,
        "response_format": _format(body),
        "reasoning_effort": inside(body, "output_config", "effort"),
    }
    messages = named([*before, *_messages(body)])
    with called({"stop": "stop_sequences", "response_format": "output_config.format"}):
        asked = read_chat(chat, past, messages)
    wish = body.get("thinking")
    if wish and wish != {"type": "disabled"}:
        asked = replace(asked, bent={**asked.bent, "thinking": wish})
    return replace(asked, objects=True, alone=0 if body.get("thread") else None)


def read_count(body: Mapping[str, Any], past: Past) -> Asked:
    """A request to /v1/messages/count_tokens: one that asks for nothing.

    Raises:
        BadRequest: as read().
    """
    return read({"max_tokens": 1, **body}, past)


def _before(thread: Any, past: Past) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    kind = thread.get("type") if isinstance(thread, Mapping) else None
    if thread is None or kind == "create":
        return (), ()
    if kind != "continue":
        raise BadRequest.expected("create or continue", param="thread.type", got=kind)
    name = thread.get("previous_message_id")
    held = past.get(name.removeprefix("msg_")) if isinstance(name, str) else None
    if held is None:
        raise BadRequest(
            f"thread.previous_message_id: this rollout has no thread that ends with {name!r:.80}",
            "thread_not_found", "thread.previous_message_id",
        )  # fmt: skip
    return held


def _messages(body: Mapping[str, Any]) -> list[Message]:
    made: list[Message] = []
    for place, message in enumerate(listed(body, "messages")):
        where = f"messages[{place}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise BadRequest.expected("user, assistant or system", param=f"{where}.role", got=role)
        content = message.get("content")
        if isinstance(content, list):
            made += _of_blocks(role, content, f"{where}.content")
        else:
            made.append(Message(role, text_of(content, f"{where}.content")))
    if not made or made[-1].role == "assistant":
        raise BadRequest(
            "messages: expected at least one, and the last not the assistant's (to begin its "
            "answer is not offered)", param="messages",
        )  # fmt: skip
    return made


def _of_blocks(role: str, blocks: list[Any], where: str) -> list[Message]:
    """The messages that one of Anthropic's is: what a tool gave is one of its own."""
    made: list[Message] = []
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result" and role == "user":
            text = text_of(block.get("content"), f"{at}.content")
            made.append(Message("tool", text, call_id=str(block.get("tool_use_id") or "")))
            continue
        if not made or made[-1].role != role:
            made.append(Message(role))
        last = made.pop()
        if kind == "thinking" and role == "assistant":
            thought = text_of(block.get("thinking"), f"{at}.thinking")
            last = replace(last, reasoning=(last.reasoning or "") + thought)
        elif kind == "tool_use" and role == "assistant":
            last = replace(last, calls=(*last.calls, _call(block, at)))
        elif kind != "redacted_thinking" or role != "assistant":
            last = replace(last, content=last.content + text_of([block], at))
        made.append(last)
    return made or [Message(role)]


def _call(block: Mapping[str, Any], where: str) -> Call:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise BadRequest.expected("an object", param=f"{where}.input", got=given)
    function = {"name": block.get("name"), "arguments": json.dumps(given)}
    return read_call({"id": block.get("id"), "function": function}, where)


def _tool(tool: Any, place: int) -> dict[str, Any]:
    kind = tool.get("type") or "custom" if isinstance(tool, Mapping) else None
    if kind != "custom":
        raise BadRequest(
            f"tools[{place}].type: only tools of the client's are offered, got {kind!r:.80}",
            param=f"tools[{place}].type",
        )
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {chat: tool[name] for name, chat in names.items() if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise BadRequest.expected("auto, any, none or tool", param="tool_choice.type", got=kind)
    return CHOICES[kind]


def _format(body: Mapping[str, Any]) -> Any:
    """A response_format of chat completions."""
    form = inside(body, "output_config", "format") or body.get("output_format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        described = {"name": "answer", "schema": form.get("schema")}
        return {"type": "json_schema", "json_schema": described}
    return form


# --- answers


def whole(reply: Reply) -> dict[str, Any]:
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


def events(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any]]:
    """The answer as events of a stream; usage is in it, asked for or not."""
    answer = whole(reply)
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


MESSAGES = Api(read, whole, events, error)
