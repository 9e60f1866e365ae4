"""The shapes of the real Qwen3 models, from their config.json files."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
SIZES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
}
PARAMETERS = {
    "0.6b": 596_049_920,
    "1.7b": 1_720_574_976,
    "4b": 4_022_468_096,
    "8b": 8_190_735_360,
}
"""On their model cards: 0.6B, 1.7B, 4.0B and 8.2B."""


def config(size: str) -> Any:
    """The transformers config of Qwen/Qwen3-SIZE."""
    from transformers import Qwen3Config

    return Qwen3Config(
        **COMMON,
        **SIZES[size],
        num_attention_heads=16 if size in ("0.6b", "1.7b") else 32,
        tie_word_embeddings=size != "8b",
    )
