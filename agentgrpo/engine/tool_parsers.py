"""VLLM's parsers of tool calls, for agents/tools.py, which must not import vllm."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from agentgrpo.actions import ReadCalls, Reading, Schema


def tool_call_reader(parser: str, tokenizer: Any) -> ReadCalls:
    """VLLM's own tool parser of a model family (hermes, qwen3_coder, ...), for agents/tools.py."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        make = ToolParserManager.get_tool_parser(parser)
    except KeyError:
        known = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
        raise ValueError(
            f"parser: expected one of {', '.join(sorted(known))}, got {parser!r}"
        ) from None

    def made(tools: Sequence[Schema]) -> tuple[Any, Any]:
        _be_quiet()
        given: dict[str, Any] = {"model": "", "messages": [], "tools": [*tools] or None}
        request = ChatCompletionRequest(**given)
        shown: list[Any] | None = request.tools
        reader = make(tokenizer, shown)  # may keep state of the text it has read
        if engine := getattr(reader, "_parser_engine", None):  # of the newer parsers
            # else each "<" in an argument has it read anew up to there: 8 s for 12 KB of HTML
            engine._stream_arg_deltas = False
        return reader, request

    def read(text: str, tools: Sequence[Schema]) -> Reading:
        reader, request = made(tools)  # raises for tools that nobody could call
        marks = _marks(reader)
        attempted = any(mark in text for mark in marks)
        most = max(map(text.count, ("<parameter", *marks)))
        if attempted and (most > MOST_MARKS or _GAP.search(text)):
            return Reading(text, (), attempted)
        try:
            found = reader.extract_tool_calls(text, request)
        except Exception:  # parsers raise for what a policy says
            return Reading(text, (), attempted=True)
        calls = tuple((c.function.name, c.function.arguments) for c in found.tool_calls or ())
        content = (found.content or "") if calls else text
        return Reading(content, calls, attempted)

    try:
        made([])
    except RuntimeError as error:  # a family's special tokens are not in this vocabulary
        raise ValueError(f"parser: {parser!r} does not fit the model: {error}") from error
    return read


def _be_quiet() -> None:
    """What the policy gets wrong is data, counted as malformed, and no traceback on the terminal.

    Said before every reading: vLLM resets the levels of its loggers when an engine starts.
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
"""Marks that begin a call in some family, whichever parser is chosen."""
MOST_MARKS = 1000
"""Of one kind in a turn that is read: parsers take time quadratic in their number."""
_GAP = re.compile(r"[<=]\s{256}")
"""Space in a tag: patterns of parsers take time quadratic in it."""


def _marks(reader: Any) -> list[str]:
    """Those of every family, and its own."""
    own = [
        value
        for name, value in {**vars(type(reader)), **vars(reader)}.items()
        if isinstance(value, str) and value and name.endswith(("start_token", "bot_token"))
    ]
    return [*_CALL_MARKS, *own]
