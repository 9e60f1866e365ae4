"""A transformer that embeds texts as vectors, for dense retrieval."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agentgrpo.support.files import sha256_of
from agentgrpo.types import Float32

Pooling = Literal["mean", "cls", "last"]
MAX_TOKENS = 512
BATCH = 32


class Encoder:
    """A text encoder on the CPU in float32 (E5 and GTE: "mean"; BGE: "cls"; Qwen3: "last").

    The folder contains config.json, the weights and the tokenizer's files. Nothing is downloaded,
    and no code from the folder is run. ValueError: transformers cannot load it; the message is its
    own.
    """

    def __init__(self, folder: Path, pooling: Pooling = "mean") -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json")
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            model = AutoModel.from_pretrained(folder, dtype=torch.float32, **options)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"{folder}: {error}") from error
        self._model, self._pooling, self._lock = model.eval(), pooling, threading.Lock()
        self._tokenizer.padding_side = "right"
        positions = getattr(model.config, "max_position_embeddings", MAX_TOKENS)
        self._max_tokens = min(MAX_TOKENS, positions)
        self.checksum = _checksum(folder, pooling)
        """Covers everything that the vectors depend on."""

    def encode(self, texts: Sequence[str]) -> Float32:
        """[len(texts), width] of unit rows; long texts are truncated."""
        import torch

        vectors = []
        for start in range(0, len(texts), BATCH):
            batch = list(texts[start : start + BATCH])
            with self._lock, torch.inference_mode():  # a tokenizer's padding is state of the object
                inputs = self._tokenizer(
                    batch, padding=True, truncation=True, max_length=self._max_tokens,
                    return_tensors="pt",
                )  # fmt: skip
                hidden = self._model(**inputs).last_hidden_state
            vectors.append(self._pooled(hidden, inputs["attention_mask"]).numpy())
        rows = np.concatenate(vectors)
        unit_rows: Float32 = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)
        return unit_rows

    def _pooled(self, hidden: Any, mask: Any) -> Any:
        if self._pooling == "cls":
            return hidden[:, 0]
        if self._pooling == "last":
            return hidden[range(len(hidden)), mask.sum(1) - 1]
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def _checksum(folder: Path, pooling: str) -> str:
    digest = hashlib.sha256(pooling.encode())
    for path in sorted(filter(Path.is_file, folder.iterdir())):
        digest.update(f"{path.name}\n{sha256_of(path)}".encode())
    return digest.hexdigest()
