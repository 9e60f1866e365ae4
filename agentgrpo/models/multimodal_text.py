"""The language model of a multimodal checkpoint (Qwen3.5, Gemma 4, Ministral 3).

The learner and vLLM load only the language model's tensors. A saved checkpoint contains all tensors
of the original under the same names, so the same servers can load it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TEXT_PARTS = {"qwen3_5", "gemma4", "mistral3"}
"""Model types of multimodal checkpoints whose language model can be trained."""
NAMES = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}
"""Tensor name prefixes of the checkpoint -> of its language model (a key_mapping)."""


def language_model(config: Any) -> Any:
    """The transformers config to load: for a multimodal checkpoint, its language model's."""
    if config.model_type not in TEXT_PARTS:
        return config
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES,
    )

    text = config.get_text_config()
    text.architectures = [ARCHITECTURES[text.model_type]]
    text.tie_word_embeddings = config.tie_word_embeddings  # only the outer config is right
    text.name_or_path = config.name_or_path
    return text


def text_name(name: str) -> str | None:
    """A tensor's name in the language model; None: it belongs to another part.

    >>> text_name("model.language_model.norm.weight"), text_name("model.visual.norm.weight")
    ('model.norm.weight', None)
    """
    for pattern, replacement in NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name)
    return name if name.startswith("lm_head.") else None


def only_text(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The language model's tensors of a multimodal checkpoint, under their language-model names."""
    return ((text, tensor) for name, tensor in named if (text := text_name(name)) is not None)


class MultimodalCheckpoint:
    """A multimodal checkpoint, to be saved again with a trained language model.

    Its files stay open, because a resumed run may delete the checkpoint that it started from.
    """

    def __init__(self, model: str | Path) -> None:
        from huggingface_hub import snapshot_download
        from safetensors import safe_open

        folder = Path(model)
        if not folder.is_dir():
            folder = Path(snapshot_download(str(model), local_files_only=True))
        files = [f for f in sorted(folder.glob("*.safetensors")) if "consolidated" not in f.name]
        if not files:
            raise ValueError(f"model {str(model)!r}: its weights must be *.safetensors")
        self._tensors: list[Any] = [safe_open(path, "pt") for path in files]
        self._configs = {
            path.name: path.read_bytes()
            for path in folder.glob("*config.json")
            if not path.name.startswith("tokenizer")
        }

    def holds(self, name: str) -> bool:
        """Whether the language model has a tensor of this name in the files."""
        stored = {key for file in self._tensors for key in file.keys()}  # noqa: SIM118
        return name in map(text_name, stored)

    def save(self, folder: Path, text_tensors: dict[str, Any]) -> None:
        from huggingface_hub import save_torch_state_dict

        rest, tensors = dict(text_tensors), {}
        for file in self._tensors:
            for name in file.keys():  # noqa: SIM118, not a mapping
                new = rest.pop(text_name(name) or "", None)
                tensors[name] = file.get_tensor(name) if new is None else new
        if rest:
            raise ValueError(f"the checkpoint has no tensor for {', '.join(sorted(rest)[:3])}")
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, folder)
        for name, content in self._configs.items():
            (folder / name).write_bytes(content)
