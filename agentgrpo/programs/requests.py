"""What a request of a protocol asks for, and how its answer is written: OpenAI's chat completions.

The answer is one message, made once a turn is whole; the plain reply and the chunks of a stream are
both written from it, so they cannot differ. Other protocols (responses.py, anthropic.py,
completions.py) write their requests as those of chat completions, which are read here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentgrpo.programs.messages import BadRequest, Message, read_messages
from agentgrpo.types import Completion

NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (0, 1), "top_k": (-1, 2**31 - 1), "min_p": (0, 1),
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100),
}  # fmt: skip
"""With their least and greatest values: vLLM's, and of penalties what leaves logits finite."""
OBEYED = (*NUMBERS, "response_format", "structured_outputs")
"""Keys that bend what is sampled. Not in training: the run's own sampling is trained on."""
NEVER = ("seed", "logit_bias", "reasoning_effort", "verbosity")
"""Those that nothing obeys: seeds and the template are the run's, a bias is of single tokens."""
BENT = (*OBEYED, *NEVER)
READ = (
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options",
    "stop", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs", "modalities",
    "chat_template_kwargs",
)  # fmt: skip
UNHEARD = (
    "user", "metadata", "store", "service_tier", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
)  # fmt: skip
"""By which no answer is another: whose it is, how fast it comes, where it is kept."""
REFUSED = ("audio", "function_call", "functions", "moderation", "web_search_options")
KNOWN = {*BENT, *READ, *UNHEARD, *REFUSED}
MODEL = "policy"
FROZEN = "policy:frozen"
"""The same weights, by a name that keeps a turn out of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for one turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    one_call: bool = False
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    frozen: bool = False
    """The turn is in no record and not trained on."""
    bent: Mapping[str, Any] = field(default_factory=dict)
    """What it asks for that the run's own sampling and template decide, by the protocol's keys."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The same that may be obeyed, as Engine.add_request() takes it."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Those that it is to be rendered with."""
    text: str | None = None
    """Of a text completion, which has no messages: what is gone on from."""
    objects: bool = False
    """Whether the protocol has no form for a call whose arguments are no JSON object."""
    alone: int | None = None
    """How many of the first messages are this request's alone, where others may go on from its
    answer by the answer's id."""


Past = Mapping[str, tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]]
"""Conversations by the ids of their last answers, with their tools."""


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
    tokens: tuple[bytes, ...] = ()
    """Of each sampled token, where log-probabilities were asked for."""


@dataclass(frozen=True, slots=True)
class Api:
    """A protocol: how its requests are read, and its answers, streams and errors are written."""

    read: Callable[[Mapping[str, Any], Past], Asked]
    whole: Callable[[Reply], dict[str, Any]]
    events: Callable[[Reply, bool], Iterator[Mapping[str, Any] | str]]
    """Of a stream; with the usage, if that was asked for."""
    error: Callable[[Exception, int], dict[str, Any]]
    """For a status of HTTP."""


@contextlib.contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Say what is wrong with a key of chat completions by another protocol's name of it."""
    try:
        yield
    except BadRequest as error:
        told = str(error)
        for name, other in names.items():
            if told.startswith(name):
                raise BadRequest(other + told[len(name) :], error.code, other) from None
        raise


def known(body: Mapping[str, Any], names: set[str], refused: Sequence[str] = ()) -> None:
    """Refuse a request's keys that a protocol does not have, or that are not offered.

    Raises:
        BadRequest: names one.
    """
    if unknown := sorted(body.keys() - names):
        raise BadRequest(f"{unknown[0]}: there is no such parameter", param=unknown[0])
    for name in refused:
        if body.get(name) not in (None, False, "", []):  # {} asks for it
            raise BadRequest(f"{name}: is not offered", param=name)


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """A list of a request's, which may be missing.

    Raises:
        BadRequest: it is another thing.
    """
    given = body.get(name)
    if given is not None and not isinstance(given, list):
        raise BadRequest.expected("a list", param=name, got=given)
    return given or []


def inside(body: Mapping[str, Any], name: str, key: str) -> Any:
    """What an object of a request's has, either of which may be missing.

    Raises:
        BadRequest: it is another thing.
    """
    given = body.get(name)
    if not isinstance(given, Mapping | None):
        raise BadRequest.expected("an object", param=name, got=given)
    return None if given is None else given.get(key)


def read_chat(
    body: Mapping[str, Any], past: Past, messages: Sequence[Message] | None = None
) -> Asked:
    """A request to /v1/chat/completions.

    Args:
        body: of the request.
        past: what may be named by an id: nothing here.
        messages: in place of those of the body, if another protocol's were read.

    Raises:
        BadRequest: something in it has the wrong form, or is not offered.
    """
    _require_model(body)
    known(body, KNOWN, REFUSED)
    if body.get("n") not in (None, 1):
        raise BadRequest(f"n: one answer per request, got {body['n']!r}", param="n")
    if body.get("modalities") not in (None, ["text"]):
        raise BadRequest.expected("['text']", param="modalities", got=body["modalities"])
    require_own(body, "top_logprobs")
    template = body.get("chat_template_kwargs")
    if not isinstance(template, Mapping | None):
        raise BadRequest.expected("an object", param="chat_template_kwargs", got=template)
    choice = body.get("tool_choice")
    tools = _tools(body.get("tools"))
    options = body.get("stream_options") or {}
    bent, sampling = bending(body, choice, body.get("response_format"), tools)
    return Asked(
        messages=tuple(read_messages(body.get("messages")) if messages is None else messages),
        tools=() if choice == "none" else tools,
        max_tokens=_most(body),
        stop=_stops(body.get("stop")),
        one_call=body.get("parallel_tool_calls") is False,
        stream=_flag(body, "stream"),
        usage_in_stream=bool(isinstance(options, Mapping) and options.get("include_usage")),
        logprobs=_flag(body, "logprobs"),
        frozen=body["model"] == FROZEN,
        bent=bent,
        sampling=sampling,
        template_options=template or {},
    )


def require_own(body: Mapping[str, Any], name: str) -> None:
    """Refuse to say how likely other tokens were than the sampled.

    Raises:
        BadRequest: it is asked for.
    """
    if body.get(name):
        raise BadRequest.expected(
            "0: only sampled tokens have log-probabilities", param=name, got=body[name]
        )


def _require_model(body: Mapping[str, Any]) -> None:
    if (model := body.get("model")) not in (MODEL, FROZEN):
        raise BadRequest(
            f"model: there is {MODEL!r} (OPENAI_MODEL) and {FROZEN!r}, got {model!r:.80}",
            "model_not_found", "model",
        )  # fmt: skip


def bending(
    body: Mapping[str, Any], choice: Any, shape: Any, tools: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a request bends the distribution: `bent` and `sampling` of Asked.

    Args:
        body: has numbers by OpenAI's names.
        choice: of a tool: "auto", "none", "required" or one that is named as OpenAI names it.
        shape: of the answer, a response_format as in a chat completion.
        tools: of which one may be chosen.

    Raises:
        BadRequest: one of them has the wrong form, or a number is out of its range.
    """
    bent = {name: body[name] for name in BENT if body.get(name) is not None}
    sampling = {name: _number(name, bent[name]) for name in NUMBERS if name in bent}
    if choice not in (None, "auto", "none"):
        bent["tool_choice"] = _choice(choice, tools)
    shaped = body.get("structured_outputs")
    if shaped is not None and not (isinstance(shaped, Mapping) and len(shaped) == 1):
        raise BadRequest.expected(
            "an object of one constraint", param="structured_outputs", got=shaped
        )
    formed = None if shape is None else _shaped(shape)
    if formed is None:
        bent.pop("response_format", None)
    else:
        bent["response_format"] = shaped = formed
    return bent, {**sampling, **({"structured_outputs": shaped} if shaped else {})}


def _number(name: str, value: Any) -> Any:
    """The value itself, if the sampler takes it."""
    (least, most), whole = NUMBERS[name], name == "top_k"
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or (name == "top_p" and not value):
        kind = "a whole number" if whole else "a number"
        above = "above 0 and at most 1" if name == "top_p" else f"from {least} to {most}"
        raise BadRequest.expected(f"{kind} {above}", param=name, got=value)
    return value


def _choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    if choice == "required":
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise BadRequest.expected(
            "'none', 'auto', 'required' or a function by its name", param="tool_choice", got=choice
        )
    if all(tool["function"]["name"] != name for tool in tools):
        raise BadRequest(f"tool_choice: none of the tools is {name!r:.80}", param="tool_choice")
    return {"type": "function", "function": {"name": name}}


def _shaped(shape: Any) -> dict[str, Any] | None:
    """A response_format in vLLM's words; None: any text."""
    kind = shape.get("type") if isinstance(shape, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    inside = shape.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inside, Mapping) or not isinstance(inside.get("schema"), Mapping):
        raise BadRequest.expected(
            "the type text, json_object, or json_schema with its json_schema.schema",
            param="response_format",
            got=shape,
        )
    return {"json": dict(inside["schema"])}


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest.expected("true or false", param=name, got=value)
    return bool(value)


def _most(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest.expected("a whole number above 0", param=name, got=value)
        return value
    return None


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest.expected("texts", param="stop", got=given)
    if len(stops) > 16:
        raise BadRequest(f"stop: at most 16 texts, got {len(stops)}", param="stop")
    return tuple(stops)


def _tools(given: Any) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise BadRequest.expected("a list", param="tools", got=given)
    for place, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest.expected("a function with a name", param=f"tools[{place}]", got=tool)
        described, shape = function.get("description"), function.get("parameters")
        if tool.get("type", "function") != "function":
            wrong = f"type: only functions are offered, got {tool['type']!r:.80}"
        elif not isinstance(described, str | None):
            wrong = f"function.description: expected text, got {described!r:.80}"
        elif not isinstance(shape, Mapping | None):
            wrong = f"function.parameters: expected an object, got {shape!r:.80}"
        else:
            continue
        raise BadRequest(f"tools[{place}].{wrong}", param=f"tools[{place}]")
    return tuple(given)


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
        "reasoning_content": None,  # where it is not said, litellm cuts thoughts out of content
    }
    if message.calls:
        said["tool_calls"] = [_call_json(call) for call in message.calls]
    choice = {
        "index": 0,
        "message": said,
        "finish_reason": reply.finish_reason,
        "logprobs": logprobs(reply),
    }
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": usage(reply)}


def chat_chunks(reply: Reply, with_usage: bool) -> Iterator[Mapping[str, Any] | str]:
    """The answer as data of server-sent events."""
    message = reply.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.content:
        deltas.append({"content": message.content})
    for index, call in enumerate(message.calls):
        deltas.append({"tool_calls": [{"index": index, **_call_json(call)}]})
    head = _head(reply, "chat.completion.chunk")
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        yield {**head, "choices": [choice]}
    last = {
        "index": 0,
        "delta": {},
        "finish_reason": reply.finish_reason,
        "logprobs": logprobs(reply),
    }
    yield {**head, "choices": [last]}
    if with_usage:
        yield {**head, "choices": [], "usage": usage(reply)}
    yield "[DONE]"


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": MODEL}


def _call_json(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def shown(token: bytes) -> str:
    """A token as text; what is part of a character only is no text."""
    return token.decode("utf-8", "replace")


def logprobs(reply: Reply) -> dict[str, Any] | None:
    """Of each sampled token, if they were asked for."""
    if not reply.tokens:
        return None
    pairs = zip(reply.tokens, reply.turn.logprobs.tolist(), strict=True)
    said = [
        {"token": shown(token), "logprob": value, "bytes": list(token), "top_logprobs": []}
        for token, value in pairs
    ]
    return {"content": said, "refusal": None}


def error_json(error: Exception, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code, param = getattr(error, "code", None), getattr(error, "param", None)
    return {"error": {"message": str(error), "type": kind, "code": code, "param": param}}


CHAT = Api(read_chat, chat_json, chat_chunks, error_json)
