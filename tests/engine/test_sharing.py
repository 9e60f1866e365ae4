"""Shared weights on real vLLM models: architectures, biases, tied and padded embeddings, both
dtypes.

Each case starts an engine, and vLLM inspects a new architecture in another process: seconds, once
per machine. Which tensors are shared is tested in test_weights.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgrpo.config import EngineConfig
from agentgrpo.engine.agreement import check_agreement, probe_prompts
from agentgrpo.engine.engine import Engine
from agentgrpo.engine.weights import views_for
from tests.learn.given import learner_on
from tests.tiny import SPECIAL, VOCAB, make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,  # no multiple of 64: vLLM pads it
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": SPECIAL.index("<|im_end|>"),
    "bos_token_id": None,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 with biases, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "phi3, fused on disk": ("Phi3", {"tie_word_embeddings": False}),
    "smollm3, which vLLM runs as transformers' own": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "lfm2, hybrid, its queries apart by head": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
            "block_dim": 64, "conv_dim": 64, "conv_dim_out": 64,
        },
    ),
}  # fmt: skip


def make_dir(folder: Path, kind: str, options: dict[str, Any]) -> Path:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):  # transformers begins with zeros, which would prove nothing
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    model.float().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def start(
    slow_setup: None, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Engine, Path]]:
    (kind, options), dtype = request.param
    model = make_dir(tmp_path / "model", kind, options)
    other = Engine(model, EngineConfig(max_model_len=256, kv_cache_gib=1 / 32, dtype=dtype))
    yield other, model
    other.shutdown()


CASES = [
    *(pytest.param((made, "float32"), id=name) for name, made in ARCHITECTURES.items()),
    pytest.param(
        (("Llama", {"tie_word_embeddings": False}), "bfloat16"), id="llama untied, in bfloat16"
    ),
]


@pytest.mark.parametrize("start", CASES, indirect=True)
def test_learner_and_sampler_share_weights_and_agree(start: tuple[Engine, Path]) -> None:
    engine, model = start
    learner = learner_on(engine, model, dlogp_limit=1.0)
    theirs = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in learner.model.parameters()} == theirs
    assert (
        set(views_for(engine.model, learner.model)) == dict(learner.model.named_parameters()).keys()
    )
    generator = torch.Generator().manual_seed(1)
    probes, gaps = probe_prompts(VOCAB), []
    for _ in range(2):
        learner.publish()
        gaps.append(check_agreement(engine, learner, probes, threshold=1.0)["max_dlogp"])
        with torch.no_grad():
            for parameter in learner.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += (0.02 * noise).to(parameter.dtype)
    assert max(gaps) < (1e-5 if engine.dtype == "float32" else 0.2)
