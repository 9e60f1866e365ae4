"""The bytes of every token, to find texts in a stream of ids."""

from __future__ import annotations

import json
from typing import Any

from agentgrpo.models.pieces import bytes_of


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
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} decodes with {sorted(kinds)}; known are "
            "ByteLevel, and ByteFallback or Metaspace"
        )
    found = [b""] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        found[index] = (
            token.encode() if index in special else bytes_of(token, byte_level="ByteLevel" in kinds)
        )
    return found


def _decoders(spec: dict[str, Any] | None) -> list[str]:
    """The kinds of a decoder and of those in it."""
    if spec is None:
        return []
    return [
        spec["type"],
        *(kind for inner in spec.get("decoders", []) for kind in _decoders(inner)),
    ]
