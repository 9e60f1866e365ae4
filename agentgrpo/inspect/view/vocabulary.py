"""The text of single tokens, or their bytes where a character spans several tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from agentgrpo.models.token_bytes import bytes_of

Shown = str | list[int]
"""A token's text, or its bytes if they are not valid UTF-8."""


class Vocabulary:
    """The texts of token ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._special: frozenset[int] = frozenset()
        self._byte_level = False
        if tokenizer is not None:
            self._special = frozenset(tokenizer.get_added_tokens_decoder())
            decoder = json.loads(tokenizer.to_str())["decoder"]
            self._byte_level = "ByteLevel" in json.dumps(decoder)

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def special(self, ids: Iterable[int]) -> list[int]:
        """The ids of special tokens."""
        return [token for token in ids if token in self._special]

    def shown(self, token: int) -> Shown:
        """The text or bytes of a token."""
        piece = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        if piece is None:
            return f"⟨{token}⟩"
        if token in self._special:
            return piece
        raw = bytes_of(piece, byte_level=self._byte_level)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)


def find_tokenizer(places: Sequence[Path]) -> Tokenizer | None:
    """The tokenizer of the first folder with a tokenizer.json."""
    for place in places:
        if (place / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(place / "tokenizer.json"))
    return None
