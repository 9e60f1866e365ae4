"""One conversation as the requests of each protocol, written as recorded clients write them.

It shares nothing with what reads them. A conversation is a list of messages as of chat completions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def request(path: str, messages: Sequence[Any], tools: Sequence[Any], rng: random.Random) -> Any:
    """The body of a request for the next turn."""
    if path == "/v1/chat/completions":
        return {"model": "policy", "messages": list(messages), "tools": list(tools)}
    functions = [tool["function"] for tool in tools]
    told, rest = system(messages)
    if path == "/v1/messages":
        given = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
        body = {"model": "policy", "max_tokens": 99, "messages": turns(rest), "tools": given}
        return body if told is None else {**body, "system": told}
    items = [item for message in rest for item in items_of(message, rng)]
    flat = [{"type": "function", "strict": None, "description": None, **f} for f in functions]
    if told is not None and rng.random() < 0.5:  # as LangChain has it
        items.insert(0, {"role": "system", "content": told, "type": "message"})
        told = None
    return {"model": "policy", "input": items, "instructions": told, "tools": flat}


def system(messages: Sequence[Any]) -> tuple[str | None, Sequence[Any]]:
    first = messages[0]
    return (first["content"], messages[1:]) if first["role"] == "system" else (None, messages)


def text(message: Any) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def thoughts(message: Any) -> Any:
    return message.get("reasoning") or message.get("reasoning_content")


def items_of(message: Any, rng: random.Random) -> list[dict[str, Any]]:
    """Of responses."""
    if message["role"] == "tool":
        parts = [{"type": "input_text", "text": text(message)}]
        told = {"output": rng.choice([text(message), parts]), "call_id": message["tool_call_id"]}
        return [{"type": "function_call_output", **told}]
    if message["role"] != "assistant":
        return [{"role": message["role"], "content": text(message)}]
    made: list[dict[str, Any]] = []
    if thought := thoughts(message):
        parts = [{"type": "reasoning_text", "text": thought}]
        made.append({"type": "reasoning", "id": "rs", "summary": [], "content": parts})
    calls = message.get("tool_calls") or ()
    if text(message) or not calls:
        part = {"type": "output_text", "text": text(message), "annotations": []}
        made.append({"type": "message", "role": "assistant", "id": "msg", "content": [part]})
    made += (
        {"type": "function_call", "id": "fc", "call_id": call["id"], **call["function"]}
        for call in calls
    )
    return made


def turns(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Of Anthropic: what tools gave is the user's, in one message with what the user says next."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            blocks: list[dict[str, Any]] = []
            if thought := thoughts(message):
                blocks.append({"type": "thinking", "thinking": thought, "signature": "s"})
            calls = message.get("tool_calls") or ()
            if text(message) or not calls:
                blocks.append({"type": "text", "text": text(message), "cache_control": None})
            for call in calls:
                name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
                blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
            made.append({"role": "assistant", "content": blocks})
        elif message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            block["content"] = text(message)
            if made and made[-1]["role"] == "user" and isinstance(made[-1]["content"], list):
                made[-1]["content"].append(block)
            else:
                made.append({"role": "user", "content": [block]})
        else:
            made.append({"role": "user", "content": text(message)})
    return made
