"""What is counted without storage is what autograd keeps of the real policy on this CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from agentgrpo.config import LearnerConfig
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.kept import kept
from agentgrpo.learn.policy import Policy
from agentgrpo.learn.rehearsal import batches_of, one_row
from agentgrpo.machine.footprint import GIB
from bench.models import FAMILIES, SIZES
from tests import qwen3

TOKENS = 384


def made(config: Any, device: str, dtype: torch.dtype) -> Any:
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def hollow(config: Any) -> Any:
    return made(config, "meta", torch.bfloat16)


def small(family: str) -> Any:
    options = SIZES | dict(FAMILIES[family].options)
    return getattr(transformers, FAMILIES[family].config)(**options)


def most_held(policy: Policy) -> int:
    """Of the batches that a step may have."""
    trees = policy.scorer.rows is None
    return max(held(policy, batch) for batch in batches_of(TOKENS, trees=trees, cuda=False))


def held(policy: Policy, batch: PackedBatch) -> int:
    """Bytes of all that a forward pass leaves for the backward pass; by storage, each once."""
    seen = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    seen |= {b.untyped_storage().data_ptr() for b in policy.model.buffers()}
    sizes: dict[int, int] = {}
    alive = []

    def pack(x: Tensor) -> Tensor:
        alive.append(x)
        sizes.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        policy.scorer(batch, 1.0)
    return sum(size for at, size in sizes.items() if at not in seen)


SMALL = 100
"""Bytes a token: what the loss notes of each, which is not counted."""


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3.5", "Phi-4", "Granite 4 H", "LFM2"])
@pytest.mark.parametrize(
    "options", [{}, {"trained_layers": 1}, {"lora": {"rank": 4}}, {"gradient_checkpointing": True}]
)
def test_what_is_counted_is_kept(family: str, options: dict[str, Any]) -> None:
    learner = LearnerConfig(max_tokens=TOKENS, **{"gradient_checkpointing": False, **options})
    counted = kept(made(small(family), "meta", torch.float32), learner, cuda=False)
    policy = Policy(made(small(family), "cpu", torch.float32), learner, weights="own")
    whole = counted.whole
    if policy.checkpointed:  # and one layer, when it is computed again
        whole += counted.inputs - counted.layers
    assert 0 <= most_held(policy) - whole <= SMALL * TOKENS


@pytest.mark.parametrize("size", qwen3.SIZES)
def test_a_token_of_qwen3_on_a_card_by_hand(size: str) -> None:
    """Of hidden size h, intermediate size i, queries q and keys k: 16 h + 12 q + 10 k + 8 i bytes,
    and a float32 number for each norm and softmax. The first layer notes the rotation for all.
    """
    config = qwen3.config(size)
    config.num_hidden_layers = 4
    hidden, heads, keys = config.hidden_size, config.num_attention_heads, 8
    token = 16 * hidden + 128 * (12 * heads + 10 * keys) + 8 * config.intermediate_size
    token += 4 * (2 + heads + keys) + 4 * heads
    learner = LearnerConfig(max_tokens=TOKENS, use_liger_kernel=False)
    plain = kept(hollow(config), learner, cuda=True)
    rotation = 2 * 2 * 128
    assert plain.layers == TOKENS * (4 * token + rotation)
    assert plain.largest == TOKENS * (token + rotation)
    assert plain.inputs == 4 * TOKENS * 2 * hidden
    assert plain.logits == TOKENS * 2 * config.vocab_size
    exact = learner.model_copy(update={"cast_lm_head_to_fp32": True})
    assert kept(hollow(config), exact, cuda=True).logits == TOKENS * 4 * config.vocab_size
    many = learner.model_copy(update={"max_tokens": 100_000})
    assert kept(hollow(config), many, cuda=True).logits == 6 * GIB
    fused = learner.model_copy(update={"use_liger_kernel": True})
    assert kept(hollow(config), fused, cuda=True).layers < 0.7 * plain.layers


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_kind_are_counted(family: str) -> None:
    config = small(family)
    counted = kept(hollow(config), LearnerConfig(max_tokens=TOKENS), cuda=True)
    assert counted.layers >= counted.largest > 0
    assert counted.inputs == 2 * TOKENS * config.hidden_size * config.num_hidden_layers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16}),
        ("FalconH1", {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}),
        ("Jamba", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
        ("MiniMax", {"layer_types": ["full_attention", "linear_attention"]}),
        ("NemotronH", {}),
    ],
)
def test_layers_that_look_at_their_mask_are_counted(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the largest of their batches, and in a dry run, whose ranks have not met."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = getattr(transformers, f"{name}Config")(
        **{"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
           "num_key_value_heads": 1, "pad_token_id": 0, **options}
    )  # fmt: skip
    learner = LearnerConfig(max_tokens=TOKENS)
    counted = kept(hollow(config), learner, cuda=True)
    row = one_row(np.zeros(TOKENS, np.int32))
    monkeypatch.setattr("agentgrpo.learn.kept.batches_of", lambda *_, **__: [row])
    alone = kept(hollow(config), learner, cuda=True).layers
    assert 0 < 1.2 * alone < counted.layers


def test_the_table_of_the_gpu_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for size in qwen3.SIZES:
        ways: list[dict[str, Any]] = [{}, {"use_liger_kernel": True}, {"lora": {"rank": 32}}]
        every = [
            kept(
                hollow(qwen3.config(size)),
                LearnerConfig(max_tokens=16384, **{"use_liger_kernel": False, **way}), cuda=True,
            )
            for way in ways
        ]  # fmt: skip
        numbers = [*(of.whole for of in every), every[0].checkpointed]
        cells = " | ".join(f"{number / GIB:.1f}" for number in numbers)
        assert f"\n| Qwen3 {size.upper()} | {cells} |\n" in page
