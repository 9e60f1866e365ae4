"""The bytes that an entry of a vocabulary stands for, by either way of writing them down."""

from __future__ import annotations

import re

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


def bytes_of(piece: str, *, byte_level: bool) -> bytes:
    """The bytes of a piece that is no special token.

    Args:
        piece: as the vocabulary spells it.
        byte_level: with one printable character per byte (GPT-2, Qwen, Llama 3, SmolLM2); else as
            text with a mark for the space and `<0x0A>` for single bytes (SentencePiece: Llama 2,
            Mistral, Gemma).
    """
    if byte_level:
        if all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return piece.encode()  # added to the vocabulary as text
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()
