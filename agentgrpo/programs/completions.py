"""OpenAI's completions of text, which the program has rendered itself."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from agentgrpo.programs.messages import BadRequest
from agentgrpo.programs.requests import (
    BENT,
    MODEL,
    Api,
    Asked,
    Past,
    Reply,
    error_json,
    known,
    read_chat,
    require_own,
    shown,
    usage,
)

SAME = ("model", "max_tokens", "stop", "stream", "stream_options")
READ = ("prompt", "n", "best_of", "logprobs")
UNHEARD = ("user",)
REFUSED = ("suffix", "echo")
KNOWN = {*SAME, *BENT, *READ, *UNHEARD, *REFUSED}
MAX_TOKENS = 16
"""Of an answer, if the request does not say: the protocol's own."""


def read(body: Mapping[str, Any], past: Past) -> Asked:
    """A request to /v1/completions.

    Raises:
        BadRequest: something in it has the wrong form, or is not offered.
    """
    known(body, KNOWN, REFUSED)
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise BadRequest(f"{name}: one answer per request, got {body[name]!r}", param=name)
    text = body.get("prompt")
    if isinstance(text, list) and len(text) == 1:
        (text,) = text
    if not isinstance(text, str) or not text:
        raise BadRequest.expected("one text", param="prompt", got=text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"prompt: is no Unicode text: {error}", param="prompt") from None
    chat = {name: body[name] for name in (*SAME, *BENT) if body.get(name) is not None}
    require_own(body, "logprobs")
    chat = {"max_tokens": MAX_TOKENS, **chat, "logprobs": body.get("logprobs") is not None}
    return replace(read_chat(chat, past, ()), text=text)


def whole(reply: Reply) -> dict[str, Any]:
    """The answer in one piece."""
    choice = {
        "index": 0,
        "text": reply.message.content,
        "finish_reason": reply.finish_reason,
        "logprobs": _logprobs(reply),
    }
    head = {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": reply.created}
    return {**head, "model": MODEL, "choices": [choice], "usage": usage(reply)}


def events(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any] | str]:
    """The answer as data of server-sent events."""
    answer = whole(reply)
    used = answer.pop("usage")
    yield answer
    if with_usage:
        yield {**answer, "choices": [], "usage": used}
    yield "[DONE]"


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    if not reply.tokens:
        return None
    read = codecs.getincrementaldecoder("utf-8")("replace").decode
    ends = itertools.accumulate((len(read(token)) for token in reply.tokens[:-1]), initial=0)
    said = reply.message.content
    first = b"".join(reply.tokens).startswith(f" {said}".encode())  # decoders leave the space out
    return {
        "tokens": [*map(shown, reply.tokens)],
        "token_logprobs": reply.turn.logprobs.tolist(),
        "text_offset": [max(0, end - first) for end in ends],
        "top_logprobs": None,
    }


COMPLETIONS = Api(read, whole, events, error_json)
