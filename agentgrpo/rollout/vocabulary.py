"""The bytes of every token: what _C.TagScanner needs to find tags in a stream of ids.

A tokenizer writes its tokens down in one of two ways, which its decoder tells: with one printable
character per byte (byte-level BPE: GPT-2, Qwen, Llama 3, SmolLM2), or as text with a mark for the
space and `<0x0A>` for single bytes (SentencePiece: Llama 2, Mistral, Gemma).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of each token, by id; b"" for ids that no token has.

    The bytes of a text's tokens, one behind the other, are the text in UTF-8; SentencePiece may put
    a space before its first word.

    Args:
        tokenizer: a fast transformers tokenizer.

    Raises:
        ValueError: its decoder is of neither kind.
    """
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = set(_decoders(spec["decoder"]))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocabulary = tokenizer.get_vocab()
    decode: Callable[[str], bytes]
    if "ByteLevel" in kinds:
        decode = _byte_level()
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        decode = _sentence_piece
    else:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} decodes with {sorted(kinds)}; known are "
            "ByteLevel, and ByteFallback or Metaspace"
        )
    found = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        found[index] = token.encode() if index in special else decode(token)
    return found


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _decoders(spec: dict[str, Any] | None) -> list[str]:
    """The kinds of a decoder and of those in it."""
    if spec is None:
        return []
    return [
        spec["type"],
        *(kind for inner in spec.get("decoders", []) for kind in _decoders(inner)),
    ]


def _byte_level() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for what follows 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = printable + [256 + i for i in range(len(others))]
    table = {chr(code): byte for code, byte in zip(codes, printable + others, strict=True)}

    def decode(token: str) -> bytes:
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()  # added to the vocabulary as text

    return decode
