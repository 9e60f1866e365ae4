"""What a config names as its model: where it is, how its chat is written, what it can hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.rollout.delta import ChatTemplate

WEIGHTS = (".safetensors", ".bin", ".pt")


def check_model(config: TrainConfig, model: str) -> None:
    """The model is as long and as deep as the config asks."""
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(model).get_text_config()
    layers, wanted = shape.num_hidden_layers, config.learner.trained_layers
    if wanted is not None and wanted > layers:
        raise ValueError(f"learner.trained_layers must be at most {layers}, got {wanted}")
    positions = getattr(shape, "max_position_embeddings", None)
    if positions is not None and config.engine.max_model_len > positions:
        raise ValueError(
            f"engine.max_model_len must be at most {positions}, the positions that {model!r} "
            f"knows, got {config.engine.max_model_len}"
        )


def cache_dir() -> Path:
    """Where imported models are kept: $AGENTGRPO_CACHE, else ~/.cache/agentgrpo."""
    return Path(os.environ.get("AGENTGRPO_CACHE", "~/.cache/agentgrpo")).expanduser()


def resolve_model(model: str, say: Callable[[str], None] = lambda line: None) -> str:
    """A model directory for `config.model`: itself, or what `package:NAME` imports to.

    Args:
        model: of the config.
        say: told before an import, which takes a while and is made once.

    Raises:
        ValueError: no such directory, nothing in the local hub cache, or no such package.
    """
    if model.startswith("package:"):
        from agentgrpo.data.import_gguf import find_in_package, import_gguf

        source = find_in_package(model.removeprefix("package:"))
        folder = cache_dir() / "models" / source.stem.split(".")[0]
        if not folder.exists():
            say(f"model: written once to {folder}")
        import_gguf(source, folder)
        return str(folder)
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ValueError(f"model {model!r}: the directory holds no config.json")
        if not any(path.suffix in WEIGHTS for path in Path(model).iterdir()):
            raise ValueError(f"model {model!r}: the directory holds no {' or '.join(WEIGHTS)}")
        return model
    if "/" not in model or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"model {model!r}: no such directory")
    return model


def chat_of(model: str, options: Mapping[str, Any] | None = None) -> ChatTemplate:
    """The chat template of a model's tokenizer.

    Raises:
        ValueError: the tokenizer cannot be read, or has no usable template.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {model!r}: its tokenizer cannot be read: {error}") from error
    return ChatTemplate(tokenizer, options)
