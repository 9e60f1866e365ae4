"""vLLM's tool call parsers, for agents/tools.py, which must not import vllm."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from agentgrpo.actions import ReadCalls, Reading, Schema


def tool_call_reader(parser: str, tokenizer: Any) -> ReadCalls:
    """A parser of tool calls by vLLM's name of the format (hermes, qwen3_coder, ...)."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser_class = ToolParserManager.get_tool_parser(parser)
    except KeyError:
        names = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
        raise ValueError(
            f"parser: expected one of {', '.join(sorted(names))}, got {parser!r}"
        ) from None

    def make_parser(tools: Sequence[Schema]) -> tuple[Any, Any]:
        _silence_loggers()
        fields: dict[str, Any] = {"model": "", "messages": [], "tools": [*tools] or None}
        request = ChatCompletionRequest(**fields)
        request_tools: list[Any] | None = request.tools
        parser_object = parser_class(tokenizer, request_tools)  # new each time: it may keep state
        if engine := getattr(parser_object, "_parser_engine", None):  # newer parsers only
            # otherwise it parses again from the start at each "<": 8 s for 12 KB of HTML
            engine._stream_arg_deltas = False
        return parser_object, request

    def read(text: str, tools: Sequence[Schema]) -> Reading:
        parser_object, request = make_parser(tools)  # raises for invalid tool schemas
        marks = _marks(parser_object)
        attempted = any(mark in text for mark in marks)
        most_marks = max(map(text.count, ("<parameter", *marks)))
        if attempted and (most_marks > MAX_MARKS or _LONG_SPACE.search(text)):
            return Reading(text, (), attempted)
        try:
            extracted = parser_object.extract_tool_calls(text, request)
        except Exception:  # parsers raise for malformed text of the policy
            return Reading(text, (), attempted=True)
        calls = tuple((c.function.name, c.function.arguments) for c in extracted.tool_calls or ())
        content = (extracted.content or "") if calls else text
        return Reading(content, calls, attempted)

    try:
        make_parser([])
    except RuntimeError as error:  # the format's special tokens are not in this vocabulary
        raise ValueError(f"parser: {parser!r} does not fit the model: {error}") from error
    return read


def _silence_loggers() -> None:
    """Malformed calls of the policy are data and counted, so they need no traceback on the
    terminal.

    Called before every parse, because vLLM resets the levels of its loggers when an engine starts.
    """
    for name in ("vllm.tool_parsers", "vllm.parser"):
        logger = logging.getLogger(name)
        if logger.level != logging.CRITICAL:
            logger.setLevel(logging.CRITICAL)


_CALL_MARKS = (
    "<tool_call>",
    "<function=",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<\uff5ctool\u2581call",
)
"""Strings that begin a call in some format, whichever parser is chosen."""
MAX_MARKS = 1000
"""Marks of one kind in a turn, above which it is not parsed: parsers take quadratic time."""
_LONG_SPACE = re.compile(r"[<=]\s{256}")
"""White space in a tag: the regular expressions of some parsers take quadratic time in it."""


def _marks(parser: Any) -> list[str]:
    parser_marks = [
        value
        for name, value in {**vars(type(parser)), **vars(parser)}.items()
        if isinstance(value, str) and value and name.endswith(("start_token", "bot_token"))
    ]
    return [*_CALL_MARKS, *parser_marks]
