"""Memory is added up from the true shapes; the oracle is transformers' model on no device."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from agentgrpo.config import LearnerConfig, LoraConfig, TrainConfig
from agentgrpo.learn.policy import freeze_all_but
from agentgrpo.support import hardware
from agentgrpo.train.memory_estimate import (
    GIB,
    LIBRARIES,
    count,
    footprint,
    kv_bytes_per_token,
    room_checks,
    shapes_at,
    shapes_in,
    shapes_of,
    trained_sizes,
)
from tests import qwen3, tiny

ROOT = Path(__file__).parents[2]


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def make_config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": "m", "out_dir": "o", **sections})


@pytest.mark.parametrize("size", qwen3.SIZES)
def test_shapes_equal_those_of_the_model(size: str) -> None:
    shapes = shapes_of(qwen3.config(size))
    assert count(shapes) == qwen3.PARAMETERS[size]
    assert shapes["model.layers.0.self_attn.k_proj.weight"][0] == 8 * 128
    assert ("lm_head.weight" in shapes) == (size == "8b"), "a tied head is no tensor of its own"


def test_activations_find_embeddings_and_layers_under_any_name() -> None:
    """GPT-2's: the positions' table is its second, and its layers are `h`."""
    sizes: dict[str, Any] = {"vocab_size": 50, "n_positions": 20, "n_embd": 8, "n_head": 2}
    shapes = shapes_of(GPT2Config(n_layer=3, **sizes))
    held = footprint(make_config(), shapes, cuda=False)
    assert held.trained == held.parameters == count(shapes)


def test_shapes_in_reads_a_model_directory(tmp_path: Path) -> None:
    model = tiny.make_model()
    folder = tiny.make_model_dir(tmp_path / "model")
    assert shapes_in(folder) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert shapes_in(tmp_path) == {}


@pytest.mark.parametrize("layers", [None, 1, 5, 28])
def test_trained_sizes_equal_the_learners_parameters(layers: int | None) -> None:
    config = qwen3.config("0.6b")
    want = sum(p.numel() for p in freeze_all_but(on_meta(config), layers))
    assert sum(trained_sizes(shapes_of(config), LearnerConfig(trained_layers=layers))) == want


@pytest.mark.parametrize(
    "targets", [(), ("q_proj", "v_proj"), ("self_attn.o_proj", "1.mlp.up_proj")]
)
def test_adapter_sizes_equal_those_of_peft(targets: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    config = qwen3.config("0.6b")
    wanted = peft.LoraConfig(
        r=8, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(on_meta(config), wanted)
    want = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    learner = LearnerConfig(lora=LoraConfig(rank=8, target_modules=targets))
    assert sum(trained_sizes(shapes_of(config), learner)) == want


def test_bytes_per_parameter_computed_by_hand() -> None:
    """bfloat16: 2 of weight, 12 of optimizer, 4 of gradients and 2 of one at a time; float32: 4,
    8, 4.
    """
    shapes = shapes_of(qwen3.config("0.6b"))
    n = count(shapes)
    gpu = footprint(make_config(), shapes, cuda=True)
    head = 2 * math.prod(shapes["model.embed_tokens.weight"])
    assert (gpu.weights, gpu.optimizer, gpu.gradients) == (2 * n, 12 * n, 4 * n + head)
    assert (gpu.copies, gpu.kv_cache) == (0, GIB // 2)
    assert gpu.activations == 2048 * 2 * (151936 + 28 * 1024)
    cpu = footprint(make_config(), shapes, cuda=False)
    assert (cpu.weights, cpu.optimizer, cpu.gradients) == (4 * n, 8 * n, 4 * n)
    assert cpu.peak == 16 * n + cpu.activations + GIB // 2 + LIBRARIES
    assert gpu.peak == 18 * n + head + gpu.activations  # the cache is given back for them
    more = footprint(make_config(engine={"kv_cache_gib": 40}), shapes, cuda=True)
    assert more.peak == 14 * n + 40 * GIB


def test_the_sum_for_eight_ranks_is_that_of_footprint() -> None:
    held = footprint(make_config(), {"w": (8, 10**9)}, cuda=True, ranks=8)
    parts = [n // 10**9 for n in (held.weights, held.copies, held.gradients, held.optimizer)]
    said = "8 B parameters on 8 ranks: engine {} GB, learner {} + {} + {} GB, so {} GB before cache"
    assert said.format(*parts, sum(parts)) in " ".join((ROOT / "docs/gpu.md").read_text().split())


@pytest.mark.parametrize(
    ("sections", "name", "factor"),
    [
        ({"engine": {"weights": "copy"}}, "copies", 2),
        ({"loss": {"beta": 0.1}}, "copies", 2),
        ({"loss": {"beta": 0.1}, "engine": {"weights": "copy"}}, "copies", 4),
        ({"learner": {"offload_optimizer": True}}, "optimizer", 0),
    ],
)
def test_footprint_of_each_setting(sections: dict[str, Any], name: str, factor: int) -> None:
    shapes = shapes_of(qwen3.config("0.6b"))
    held = footprint(make_config(**sections), shapes, cuda=True)
    assert getattr(held, name) == factor * count(shapes)


def test_adapter_needs_one_copy_of_the_weights() -> None:
    shapes = shapes_of(qwen3.config("0.6b"))
    n = count(shapes)
    held = footprint(
        make_config(learner={"lora": {"rank": 12}}, loss={"beta": 0.1}), shapes, cuda=True
    )
    a = held.trained
    assert 0 < a < n / 20
    assert (held.weights, held.copies) == (2 * n, 4 * a), "the KL's is the adapter's"
    assert (held.optimizer, held.gradients, held.checkpoint) == (12 * a, 4 * a, 12 * a)


def test_each_rank_holds_its_share_of_the_learner() -> None:
    """As documented: P b of the engine, P b / W of weights and gradients, 12 P / W of moments."""
    shapes = shapes_of(qwen3.config("8b"))
    n = count(shapes)
    sections: dict[str, Any] = {"loss": {"beta": 0.1}, "engine": {"tensor_parallel_size": 4}}
    held = footprint(make_config(**sections), shapes, cuda=True, ranks=8)
    assert held.weights == 2 * n // 4
    assert held.copies == 2 * n // 8 + 2 * n, "the KL's reference is whole on each"
    assert (held.optimizer, held.gradients) == (12 * n // 8, 6 * n // 8)
    assert held.checkpoint == 14 * n


def test_tables_of_the_gpu_page_equal_the_footprint() -> None:
    """docs/gpu.md: each model's weights, and what training all or a quarter of it holds."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    for size in qwen3.SIZES:
        shapes = shapes_of(qwen3.config(size))
        layers = qwen3.SIZES[size]["num_hidden_layers"]
        numbers = [2 * count(shapes) / GIB]
        for trained_layers in (None, layers // 4):
            learner = {"trained_layers": trained_layers}
            held = footprint(make_config(learner=learner), shapes, cuda=True)
            numbers.append((held.weights + held.optimizer + held.gradients) / GIB)
        row = re.search(rf"^\| Qwen3 {size.upper()} \| [\d.]+ B \|.*$", page, re.M)
        assert row, size
        cells = [float(cell) for cell in re.findall(r"([\d.]+) GiB", row[0])]
        assert cells == [round(n, 1) for n in numbers], row[0]


@pytest.mark.parametrize(
    ("shape", "kv_bytes"),
    [
        ({}, 2 * 2 * 64 * 4),
        ({"num_key_value_heads": 1}, 2 * 2 * 32 * 4),
        ({"layer_types": ["full_attention"] * 2}, 2 * 2 * 64 * 4),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8,
          "use_sliding_window": True, "max_window_layers": 1}, 0),
    ],
)  # fmt: skip
def test_kv_bytes_are_known_only_for_full_attention(
    shape: dict[str, Any], kv_bytes: int, tmp_path: Path
) -> None:
    """Two layers of two heads of 32 for keys, as many for values, in float32."""
    config = tiny.make_model().config
    for name, value in shape.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    assert kv_bytes_per_token(shapes_at(str(tmp_path)), str(tmp_path), 4) == kv_bytes


@pytest.mark.parametrize(
    ("free", "where"), [(80, "80% of the GPU's 40"), (3, "the 3.0 GiB that are free on the GPU")]
)
def test_memory_used_by_other_processes_is_not_free(
    free: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: (40 * GIB, free * GIB))
    qwen3.config("0.6b").save_pretrained(tmp_path)
    config = make_config(engine={"kv_cache_gib": 4}, learner={"max_tokens": 1 << 20})
    room, memory, *_ = room_checks(config, str(tmp_path), trained=True)
    assert room.ok is (free == 80)
    assert not memory.ok
    assert f"are needed, more than {where}" in memory.found
