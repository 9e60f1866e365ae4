"""What single tokens look like: text, or the bytes of a character that several tokens share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from agentgrpo.models.token_bytes import bytes_of

Shown = str | list[int]
"""A token's text; its bytes where they are not UTF-8 by themselves."""


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
        """Whether ids are shown as what they say."""
        return self._tokenizer is not None

    def special(self, ids: Iterable[int]) -> list[int]:
        """Those of the ids that stand for a mark of the template and not for text."""
        return [token for token in ids if token in self._special]

    def shown(self, token: int) -> Shown:
        """Text or bytes of one token."""
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
    """The tokenizer of the first place that has a tokenizer.json."""
    for place in places:
        if (place / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(place / "tokenizer.json"))
    return None
