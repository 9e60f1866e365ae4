"""Encode rendered chats such that message text can never become a control token.

A tokenizer turns `<|im_end|>` into the token that ends a turn wherever it stands, for example in a
program's output. Splitting the text before encoding would change how bytes merge at the cut. So the
text is encoded as a whole and only names change: where a message spells a control token, a mark is
inserted into the spelling before the template is rendered; in the rendering the template's own
control tokens are renamed to strings that no text can contain, and a second tokenizer, equal except
for these names, encodes it. Every id, and every merge across the edge of a message, is what the
first tokenizer would give if control tokens had no spelling.

Tokens that frame a turn (`<|im_end|>`) cannot be written by anybody. Tokens within a turn
(`<think>`, `<tool_call>`, `<tool_response>`) can be written by the policy and by the author of
prompts. In the environment's text they are plain text too.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from agentgrpo.types import Int32

_MARKS = range(0xF0000, 0xFFFFE)  # private characters: in no template and no vocabulary
_ALIAS = "\U0010fffd"
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_NO_WORD = re.compile(r"[^\w\s\u2581]")  # not in words or runs of spaces
_CONTROL_SPELLING = re.compile(
    "<[|\uff5c].*[|\uff5c]>", re.DOTALL
)  # the ASCII bar or the full-width one


class TextEncoder:
    """Encodes renderings of a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} is a {type(tokenizer).__name__} "
                "without a tokenizer.json; save it once with a fast tokenizer class"
            )
        self._tokenizer = tokenizer
        self._ids = lru_cache(128)(tokenizer.encode)  # rollouts of a group share their prompt
        framing, inner = _control_ids(tokenizer)
        self.control_ids = framing | inner
        """Control tokens, spelling to id: special ones, those spelled `<|...|>`, and added tokens
        that occur in the chat template."""
        short = [spelling for spelling in self.control_ids if len(spelling) < 2]
        if short:
            raise ValueError(f"control tokens of one character cannot be kept apart: {short}")
        self.control = _any_of(self.control_ids)
        self.framing = _any_of(framing)
        tokens = tokenizer.added_tokens_decoder
        self._plain = min(framing, key=lambda t: bool(tokens[framing[t]].rstrip), default="")

    def shield(self, *values: Any, own: Sequence[bool] = ()) -> tuple[list[Any], str]:
        """Mark the control spellings in all strings of nested values of JSON types.

        Half of a surrogate pair, which no tokenizer accepts, becomes U+FFFD. `own`: which values
        were written by the policy or the author, who may write all control tokens except special
        ones and those spelled `<|...|>`. Returns the values and the inserted mark: "" if nothing
        had to be marked.
        """
        patterns = [
            self.framing if is_own else self.control for is_own in own or [False] * len(values)
        ]
        cleaned = [_mapped(value, _without_surrogates) for value in values]
        strings = [list(_strings(value)) for value in cleaned]
        pairs = list(zip(patterns, strings, strict=True))
        if not any(pattern.search(string) for pattern, texts in pairs for string in texts):
            return cleaned, ""
        used = set().union(*(string for texts in strings for string in texts))
        mark = next((chr(code) for code in _MARKS if chr(code) not in used), "")
        if not mark:
            raise ValueError("a message uses every private character of plane 15; none is left")

        def insert_mark(pattern: re.Pattern[str], value: Any) -> Any:
            return _mapped(value, lambda s: pattern.sub(lambda m: m[0][0] + mark + m[0][1:], s))

        return [
            insert_mark(pattern, value) for pattern, value in zip(patterns, cleaned, strict=True)
        ], mark

    def encode(self, text: str, mark: str = "") -> Int32:
        """The ids of a rendering whose messages were marked with `mark`."""
        if not mark:
            return ids_from_list(self._ids(text, add_special_tokens=False))
        aliases, tokenizer = self._renamed
        text = self.control.sub(lambda m: aliases[m[0]], text).replace(mark, "")
        return ids_from_list(tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_after(self, text: str, mark: str, before: str = "") -> Int32:
        """The ids of text that follows the control token `before`; "": that follows text.

        Some control tokens absorb the white space after them, so text cannot be encoded without
        context.
        """
        return self.encode((before or self._plain) + text, mark)[1:]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Character range [start, end) of each token of plain text."""
        text = _without_surrogates(text)
        spelled = self.control.search(text) is not None
        tokenizer = self._renamed[1] if spelled else self._tokenizer.backend_tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False).offsets)

    @cached_property
    def _renamed(self) -> tuple[dict[str, str], Tokenizer]:
        """Unguessable names of the control tokens, and a tokenizer with these names."""
        key = secrets.token_hex(16)
        aliases = {s: f"{_ALIAS}{key}.{i}." for i, s in enumerate(self.control_ids)}
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        _rename(spec, aliases)
        tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(spec))
        for spelling, index in self.control_ids.items():
            if tokenizer.token_to_id(aliases[spelling]) != index:
                raise ValueError(
                    f"the tokenizer of {self._tokenizer.name_or_path!r} does not keep the id "
                    f"{index} of {spelling!r} when its control tokens are renamed"
                )
        return aliases, tokenizer


def _control_ids(tokenizer: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Spelling -> id of the tokens that frame a turn, and of those used within a turn."""
    templates = tokenizer.chat_template or ""
    source = templates if isinstance(templates, str) else "".join(templates.values())
    framing, inner = {}, {}
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special or _CONTROL_SPELLING.fullmatch(token.content):
            framing[token.content] = index
        elif token.content in source and _NO_WORD.search(token.content):
            inner[token.content] = index
    return framing, inner


def _any_of(spellings: Mapping[str, int]) -> re.Pattern[str]:
    """Matches any of the spellings, the longest first; matches nothing if there are none."""
    ordered = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _without_surrogates(text: str) -> str:
    return _HALF_PAIR.sub("\ufffd", text)


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, fn: Any) -> Any:
    if isinstance(value, str):
        return fn(value)
    if isinstance(value, Mapping):
        return {_mapped(key, fn): _mapped(item, fn) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(item, fn) for item in value]
    return value


def _rename(spec: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Rename tokens in a tokenizer.json in place; merges that produce one of them are dropped."""
    for token in spec["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {aliases.get(text, text): index for text, index in model["vocab"].items()}
    else:
        model["vocab"] = [[aliases.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if _joined(pair) not in aliases]


def _joined(pair: Sequence[str] | str) -> str:
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)


def ids_from_list(ids: list[int]) -> Int32:
    """Token ids of the engine as an int32 array."""
    result = np.frombuffer(array("I", ids), np.int32)  # unsigned: array() rejects negative ids
    if result.size and result.min() < 0:
        raise OverflowError(f"token id: expected at most {2**31 - 1}, got {max(ids)}")
    return result
