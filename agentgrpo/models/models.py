"""What a config names as its model: where it is, how its chat is written, what it can hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from agentgrpo.config import LoraConfig, TrainConfig
from agentgrpo.models.architectures import kinds_of, unsupported
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.liger import why_plain
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
"""The files of an adapter's folder, by peft's names."""


def check_model(
    config: TrainConfig, model: str, *, device: str = "cpu", trained: bool = True
) -> None:
    """The model is as long and as deep as the config asks, and of a kind that works here."""
    from transformers import AutoConfig

    config.engine.schedules_ahead(device)
    why = unsupported(
        kinds_of(model),
        device=device,
        trained=trained,
        dtype=config.engine.dtype_on(device),
        adapters=config.learner.lora.rank > 0,
    )
    if why:
        raise ValueError(f"model {model!r}: {why}")

    whole = AutoConfig.from_pretrained(model)
    if trained:
        why_plain(config.learner.use_liger_kernel, language_model(whole), device)
    shape = whole.get_text_config()
    layers, wanted = shape.num_hidden_layers, config.learner.trained_layers
    if wanted is not None and wanted > layers:
        raise ValueError(f"learner.trained_layers must be at most {layers}, got {wanted}")
    rank, width = config.learner.lora.rank, shape.hidden_size
    if trained and rank > width:
        raise ValueError(
            f"learner.lora.rank must be at most {width}, the width of the layers, got {rank}"
        )
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
    """A model directory for `config.model`: itself, or what `package:NAME` imports to."""
    if model.startswith("package:"):
        from agentgrpo.models.gguf import find_in_package, import_gguf

        package = model.removeprefix("package:")
        source, of = find_in_package(package), f"{package}-{metadata.version(package)}"
        folder = cache_dir() / "models" / of / source.stem.split(".")[0]
        if not (folder / "config.json").is_file():
            say(f"model: unpacked to {folder}")
        import_gguf(source, folder)
        return str(folder)
    folder = Path(expanded(model))
    if folder.is_dir():
        model = str(folder)
        if saved_adapter(model) is not None:
            raise ValueError(f"model {model!r}: the directory holds an adapter, not a whole model")
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {model!r}: the directory holds no config.json")
        for path in folder.glob("*.json"):
            if path.name.endswith(("config.json", ".index.json")):
                read_table(path)
        if not any(path.suffix in WEIGHTS for path in folder.iterdir()):
            raise ValueError(f"model {model!r}: the directory holds no {' or '.join(WEIGHTS)}")
        verify_checksums(folder, ours=False)
        return model
    if folder.exists():
        raise ValueError(f"model {model!r}: a file, expected a directory")
    if "/" not in model or looks_like_path(model):
        hub = "" if looks_like_path(model) else "; a model of the hub is named owner/name"
        missing = not_found(folder).removeprefix(f"{folder}: ")
        raise ValueError(f"model {model!r}: {missing}{hub}")
    return model


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """A LoRA adapter's folder, as a checkpoint of learner.lora is, or as peft writes it."""

    folder: Path
    config: Mapping[str, Any]
    """What its adapter_config.json says."""

    @property
    def base(self) -> str:
        """The model that it was trained on: a directory or a hub name."""
        return str(self.config["base_model_name_or_path"])

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    def tensors(self) -> dict[str, Any]:
        """Its matrices, under peft's names."""
        from safetensors.torch import load_file

        return load_file(self.folder / ADAPTER_TENSORS)


def saved_adapter(model: str) -> SavedAdapter | None:
    """The adapter that a folder holds instead of a model; None if it holds none."""
    folder = Path(expanded(model))
    if not (folder / ADAPTER_CONFIG).exists() or (folder / "config.json").is_file():
        return None
    if not (folder / ADAPTER_TENSORS).is_file():
        raise ValueError(f"model {model!r}: the adapter's {ADAPTER_TENSORS} is missing")
    verify_checksums(folder, ours=False)
    config = read_table(folder / ADAPTER_CONFIG)
    for key in ("base_model_name_or_path", "r", "lora_alpha"):
        if not config.get(key):
            raise ValueError(f"{folder / ADAPTER_CONFIG}: {key} is missing")
    return SavedAdapter(folder, config)


def require_lora_of(adapter: SavedAdapter, lora: LoraConfig) -> None:
    """That training can go on from an adapter."""
    layers = adapter.config.get("target_modules") if lora.target_modules else ()
    for key, then, now in (
        ("rank", adapter.rank, lora.rank),
        ("alpha", adapter.config["lora_alpha"], lora.alpha),
        ("target_modules", sorted(layers or ()), sorted(lora.target_modules)),
    ):
        if then != now:
            raise ValueError(
                f"learner.lora.{key} must be {then}, that of the adapter in {adapter.folder}, "
                f"got {now}"
            )


def base_of(adapter: SavedAdapter) -> str:
    """The model directory or hub name that an adapter is to."""
    try:
        return resolve_model(adapter.base)
    except ValueError as error:
        raise ValueError(
            f"{error}; it is the base model that {adapter.folder / ADAPTER_CONFIG} names as "
            "base_model_name_or_path"
        ) from None


def named_base(model: str) -> str:
    """What `config.model` names, or of an adapter's folder the model that it is to."""
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
    """The chat template of a model's tokenizer; what ends a turn is in generation_config.json."""
    from transformers.utils.hub import cached_file

    tokenizer = _tokenizer_of(model)
    for name in ("generation_config.json", "config.json"):  # the second is transformers' fallback
        path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if path:
            break
    table = read_table(Path(path)) if path else {}
    if name == "config.json":
        table |= table.get("text_config") or {}
        named = ("bos_token_id", "eos_token_id", "pad_token_id")
        table = {key: table[key] for key in named if table.get(key) is not None}
    return ChatTemplate(tokenizer, options, generation_config=table)


def teacher_model(
    config: TrainConfig, chat: ChatTemplate, say: Callable[[str], None]
) -> str | None:
    """The directory or hub name of teacher.model, whose tokenizer is the policy's; None: there is
    none here.
    """
    named = config.teacher.model
    if named is None or config.teacher.endpoint or not config.teacher.teaches:
        return None
    try:
        taught_by = _tokenizer_of(model := resolve_model(named, say))
    except ValueError as error:
        raise ValueError(f"teacher.model: {error}") from None
    ours, theirs = chat.tokenizer.get_vocab(), taught_by.get_vocab()
    if other := sorted({token for token, _ in ours.items() ^ theirs.items()}):
        raise ValueError(
            f"teacher.model {named!r}: its tokenizer must be the policy's, and has the id "
            f"{theirs.get(other[0])} for {other[0]!r}, the policy's {ours.get(other[0])}"
        )
    return model
