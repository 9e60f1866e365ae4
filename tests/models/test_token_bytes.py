"""Token bytes against the tokenizers' own encoding of texts."""

from __future__ import annotations

import random

import pytest
from tokenizers import decoders

from agentgrpo.models.token_bytes import token_bytes
from bench.conversations import PIECES, SPELLED
from tests.models.test_templates import ids_of, judge_of
from tests.tiny import make_tokenizer

KINDS = ["qwen3", "llama3_1", "smollm2", "deepseekv3", "mistral_v3", "gemma3"]


@pytest.mark.parametrize("name", KINDS)
def test_token_bytes_join_to_the_text(name: str) -> None:
    judge, rng = judge_of(name), random.Random(0)
    vocabulary = token_bytes(judge.tokenizer)
    for _ in range(200):
        text = "".join(rng.choices(PIECES + SPELLED, k=rng.randint(0, 9))).replace("e\u0301", "")
        joined = b"".join(vocabulary[i] for i in ids_of(judge, text))
        expected = text.replace("\u2581", " ") if name in ("mistral_v3", "gemma3") else text
        assert joined.decode().removeprefix(" ") == expected.removeprefix(" ")


def test_unsupported_tokenizer_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"'tiny' decodes with \['WordPiece'\]; known are"):
        token_bytes(tokenizer)
