"""Bytes of each vocabulary entry (byte-level BPE or SentencePiece)."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


def bytes_of(piece: str, *, byte_level: bool) -> bytes:
    """The bytes of a vocabulary entry that is not a special token.

    `byte_level`: one printable character per byte (GPT-2, Qwen, Llama 3, SmolLM2); otherwise text
    with a mark for the space and `<0x0A>` for single bytes (SentencePiece: Llama 2, Mistral,
    Gemma).
    """
    if byte_level:
        if all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return piece.encode()  # added to the vocabulary as text
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of each token, by id; b"" for ids without a token.

    Concatenated over a text's tokens they are the text in UTF-8; SentencePiece may add a space
    before the first word.
    """
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = set(_decoders(spec["decoder"]))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocabulary = tokenizer.get_vocab()
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} decodes with {sorted(kinds)}; known are "
            "ByteLevel, and ByteFallback or Metaspace"
        )
    entries = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        entries[index] = (
            token.encode() if index in special else bytes_of(token, byte_level="ByteLevel" in kinds)
        )
    return entries


def _decoders(spec: dict[str, Any] | None) -> list[str]:
    if spec is None:
        return []
    return [
        spec["type"],
        *(kind for inner in spec.get("decoders", []) for kind in _decoders(inner)),
    ]
