"""OpenAI's responses: a conversation as items, of which a turn has several.

Where a request names an earlier answer by its id, that conversation comes before what is new, less
its instructions, which are each request's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from agentgrpo.programs.messages import BadRequest, Message, named, read_call, read_role, text_of
from agentgrpo.programs.requests import (
    MODEL,
    Api,
    Asked,
    Past,
    Reply,
    called,
    error_json,
    inside,
    known,
    listed,
    logprobs,
    read_chat,
    usage,
)

SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "top_logprobs")
"""Keys that a chat completion has too."""
READ = (
    "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "store",
    "previous_response_id", "include", "reasoning", "truncation",
)  # fmt: skip
UNHEARD = (
    "user", "metadata", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "max_tool_calls",
)  # fmt: skip
"""By which no answer is another; a number of calls is of the tools of OpenAI's servers."""
REFUSED = (
    "access_programs", "background", "context_management", "conversation", "image", "moderation",
    "prompt",
)  # fmt: skip
KNOWN = {*SAME, *READ, *UNHEARD, *REFUSED}
LOGPROBS = "message.output_text.logprobs"
RANKS = {"reasoning": 0, "message": 1, "function_call": 2}
"""The order of the items of one turn."""


def read(body: Mapping[str, Any], past: Past) -> Asked:
    """A request to /v1/responses.

    Raises:
        BadRequest: something in it has the wrong form, or is not offered.
    """
    known(body, KNOWN, REFUSED)
    chat: dict[str, Any] = {name: body[name] for name in SAME if name in body}
    chat["max_tokens"] = body.get("max_output_tokens")
    chat["tools"] = [_tool(tool, place) for place, tool in enumerate(listed(body, "tools"))]
    chat["tool_choice"] = _choice(body.get("tool_choice"))
    chat["response_format"] = _format(inside(body, "text", "format"))
    chat["verbosity"] = inside(body, "text", "verbosity")
    chat["reasoning_effort"] = inside(body, "reasoning", "effort")
    chat["logprobs"] = LOGPROBS in listed(body, "include")
    told = text_of(body.get("instructions"), "instructions")
    first = [Message("system", told)] if told else []
    before = _before(body.get("previous_response_id"), past)
    messages = named([*first, *before, *_messages(body.get("input"))])
    with called({"max_tokens": "max_output_tokens", "response_format": "text.format"}):
        asked = read_chat(chat, past, messages)
    cut = body.get("truncation") not in (None, "disabled")
    return replace(
        asked,
        bent={**asked.bent, "truncation": "auto"} if cut else asked.bent,
        alone=None if body.get("store") is False else len(first),
    )


def _before(name: Any, past: Past) -> tuple[Message, ...]:
    if name is None:
        return ()
    held = past.get(name.removeprefix("resp_")) if isinstance(name, str) else None
    if held is None:
        raise BadRequest(
            f"Previous response with id {name!r:.80} not found: this rollout was given no such "
            "one, or it was not to be stored", "previous_response_not_found",
            "previous_response_id",
        )  # fmt: skip
    return held[0]


def _messages(given: Any) -> list[Message]:
    """The messages that items are: those of one turn are one message."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise BadRequest("input: expected text or a list of at least one item", param="input")
    made: list[Message] = []
    rank = 0
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, Mapping):
            raise BadRequest.expected("an object", param=where, got=item)
        kind = item.get("type") or "message"
        one = _message(item, kind, where)
        if one.role != "assistant":
            made.append(one)
            continue
        goes_on = bool(made) and made[-1].role == "assistant"
        if goes_on and (kind == "function_call" or rank < RANKS[kind]):
            last = made.pop()
            one = Message(
                "assistant", last.content + one.content, last.calls + one.calls,
                last.reasoning if one.reasoning is None else one.reasoning,
            )  # fmt: skip
        made.append(one)
        rank = RANKS[kind]
    return made


def _message(item: Mapping[str, Any], kind: Any, where: str) -> Message:
    content, call_id = item.get("content"), str(item.get("call_id") or "")
    match kind:
        case "message":
            role = read_role(item.get("role"), where)
            return Message(role, text_of(content, f"{where}.content"))
        case "reasoning":
            thoughts = text_of(content, f"{where}.content") if content else None
            return Message("assistant", reasoning=thoughts)
        case "function_call":
            call = read_call({"id": call_id, "function": item}, where)
            return Message("assistant", calls=(call,))
        case "function_call_output":
            return Message("tool", text_of(item.get("output"), f"{where}.output"), call_id=call_id)
    raise BadRequest(f"{where}.type: {kind!r:.80} is not offered", param=f"{where}.type")


def _tool(tool: Any, place: int) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise BadRequest(
            f"tools[{place}].type: only functions are offered, got {kind!r:.80}",
            param=f"tools[{place}].type",
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: Any) -> Any:
    """A response_format of chat completions."""
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        described = {name: value for name, value in form.items() if name != "type"}
        return {"type": "json_schema", "json_schema": described}
    return form


# --- answers


def whole(reply: Reply) -> dict[str, Any]:
    """The answer in one piece. What the request said is not repeated in it."""
    cut = reply.finish_reason == "length"
    used = usage(reply)
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
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
    message, made = reply.message, list[dict[str, Any]]()
    if message.content or not message.calls:
        tokens = (logprobs(reply) or {"content": []})["content"]
        said = {"type": "output_text", "text": message.content, "annotations": []}
        made.append(
            {
                "type": "message", "id": f"msg_{reply.id}", "role": "assistant",
                "status": "completed", "content": [{**said, "logprobs": tokens}],
            }
        )  # fmt: skip
    made += (
        {
            "type": "function_call", "id": f"fc_{reply.id}_{number}", "status": "completed",
            "call_id": call.id, "name": call.name, "arguments": call.arguments,
        }
        for number, call in enumerate(message.calls)
    )  # fmt: skip
    return made


def events(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any]]:
    """The answer as events of a stream; the last has the usage, asked for or not."""
    count = itertools.count()

    def event(kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(count), **more}

    answer = whole(reply)
    nothing: dict[str, Any] = {
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield event("created", response={**answer, **nothing})
    yield event("in_progress", response={**answer, **nothing})
    for place, item in enumerate(answer["output"]):
        at: dict[str, Any] = {"item_id": item["id"], "output_index": place}
        empty: Any = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        begun = {**item, **empty, "status": "in_progress"}
        yield event("output_item.added", output_index=place, item=begun)
        if item["type"] == "function_call":
            said = item["arguments"]
            yield event("function_call_arguments.delta", **at, delta=said)
            yield event("function_call_arguments.done", **at, name=item["name"], arguments=said)
        else:
            (part,) = item["content"]
            at["content_index"], tokens = 0, part["logprobs"]
            yield event("content_part.added", **at, part={**part, "text": ""})
            yield event("output_text.delta", **at, delta=part["text"], logprobs=tokens)
            yield event("output_text.done", **at, text=part["text"], logprobs=tokens)
            yield event("content_part.done", **at, part=part)
        yield event("output_item.done", output_index=place, item=item)
    yield event(answer["status"], response=answer)


RESPONSES = Api(read, whole, events, error_json)
