"""The bytes of tokens, against what tokenizers make of texts; tags found in real token streams."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import decoders

from agentgrpo import _C
from agentgrpo.rollout.vocabulary import token_bytes
from bench.conversations import PIECES, SPELLED
from tests.models.test_templates import ids_of, judge_of
from tests.tiny import make_tokenizer

KINDS = ["qwen3", "llama3_1", "smollm2", "deepseekv3", "mistral_v3", "gemma3"]


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_a_texts_tokens_are_the_text(name: str) -> None:
    judge, rng = judge_of(name), random.Random(0)
    vocabulary = token_bytes(judge.tokenizer)
    for _ in range(200):
        text = "".join(rng.choices(PIECES + SPELLED, k=rng.randint(0, 9))).replace("e\u0301", "")
        joined = b"".join(vocabulary[i] for i in ids_of(judge, text))
        expected = text.replace("\u2581", " ") if name in ("mistral_v3", "gemma3") else text
        assert joined.decode().removeprefix(" ") == expected.removeprefix(" ")


@pytest.mark.parametrize("name", ["qwen3", "mistral_v3"])
def test_tags_are_found_inside_merged_tokens(name: str) -> None:
    judge, rng = judge_of(name), random.Random(1)
    tags = [b"</code>", b"<output>", b"```"]
    scanner = _C.TagScanner(tags, token_bytes(judge.tokenizer))
    for _ in range(100):
        text = "".join(
            rng.choices(["</code>", "<output>", "```", "><", "<", "a\n", "print(1)"], k=8)
        )
        ids = np.array(ids_of(judge, text), np.int32)
        state, found = 0, []
        for part in np.array_split(ids, rng.randint(1, max(1, len(ids)))):
            state, matches = scanner.scan_ids(part, state)
            found += [tags[tag] for tag, _, _ in matches]
        expected = sorted(
            (i + len(tag), tag.decode())
            for tag in tags
            for i in range(len(text))
            if text.startswith(tag.decode(), i)
        )
        assert [tag.decode() for tag in found] == [tag for _, tag in expected]


def test_another_kind_of_tokenizer_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"'tiny' decodes with \['WordPiece'\]; known are"):
        token_bytes(tokenizer)
