"""The language model inside of a checkpoint that has parts for images or sound beside it.

Qwen3.5, Gemma 4 and Ministral 3 are released so. The language model alone is loaded, by the learner
and by vLLM, from the tensors that are its; a checkpoint of it has all that the first one had, under
the same names, so that whatever serves that one serves it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TEXT_PARTS = {"qwen3_5", "gemma4", "mistral3"}
"""Model types of such checkpoints whose language model is trained from them."""
NAMES = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}
"""From the names of such a checkpoint to those of its language model, as transformers maps keys."""


def language_model(config: Any) -> Any:
    """The transformers config of what is loaded: of such a checkpoint, its language model's."""
    if config.model_type not in TEXT_PARTS:
        return config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    text = config.get_text_config()
    text.architectures = [KNOWN[text.model_type]]
    text.tie_word_embeddings = config.tie_word_embeddings  # the whole's head: its config says
    text.name_or_path = config.name_or_path
    return text


def text_name(name: str) -> str | None:
    """A tensor's name in the language model; None: it is of another part.

    >>> text_name("model.language_model.norm.weight"), text_name("model.visual.norm.weight")
    ('model.norm.weight', None)
    """
    for pattern, there in NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, there, name)
    return name if name.startswith("lm_head.") else None


def only_text(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Of a whole checkpoint's tensors those of its language model, under its names."""
    return ((there, tensor) for name, tensor in named if (there := text_name(name)) is not None)


class Whole:
    """Such a checkpoint, to be written again with another language model.

    It stays open: a run that goes on from a checkpoint of its own may delete that one.
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
        """Whether it has a tensor of this name of its language model."""
        names = {there for file in self._tensors for there in file.keys()}  # noqa: SIM118
        return name in map(text_name, names)

    def save(self, folder: Path, text: dict[str, Any]) -> None:
        """Write the whole with these tensors of its language model."""
        from huggingface_hub import save_torch_state_dict

        rest, tensors = dict(text), {}
        for file in self._tensors:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                new = rest.pop(text_name(name) or "", None)
                tensors[name] = file.get_tensor(name) if new is None else new
        if rest:
            raise ValueError(f"the checkpoint has no tensor for {', '.join(sorted(rest)[:3])}")
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, folder)
        for name, content in self._configs.items():
            (folder / name).write_bytes(content)
