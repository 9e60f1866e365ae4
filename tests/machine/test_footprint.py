"""Memory is added up from the true shapes; the oracle is transformers' model on no device."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from agentgrpo.config import LearnerConfig, LoraConfig, TrainConfig
from agentgrpo.learn.policy import freeze_all_but
from agentgrpo.machine import hardware
from agentgrpo.machine.footprint import (
    GIB,
    count,
    footprint,
    shapes_in,
    shapes_of,
    trained_count,
)
from agentgrpo.room import room_checks
from tests import qwen3, tiny

ROOT = Path(__file__).parents[2]


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def make_config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": "m", "out_dir": "o", **sections})


@pytest.mark.parametrize("size", qwen3.SIZES)
def test_shapes_are_those_of_the_real_model(size: str) -> None:
    shapes = shapes_of(qwen3.config(size))
    assert count(shapes) == qwen3.PARAMETERS[size]
    assert shapes["model.layers.0.self_attn.k_proj.weight"][0] == 8 * 128
    assert ("lm_head.weight" in shapes) == (size == "8b"), "a tied head is no tensor of its own"


def test_a_mixture_of_experts_by_hand() -> None:
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4,
        num_key_value_heads=1, num_experts=4, moe_intermediate_size=6, tie_word_embeddings=True,
    )  # fmt: skip
    attention, norms = 8 * (8 + 4 + 4 + 8), 8 + 8 + 4 + 4 + 8
    assert count(shapes_of(config)) == 50 * 8 + attention + norms + 4 * 8 + 4 * 3 * 8 * 6


def test_tables_and_layers_are_found_whatever_they_are_called() -> None:
    """GPT-2's: the positions' table is its second, and its layers are `h`."""
    sizes: dict[str, Any] = {"vocab_size": 50, "n_positions": 20, "n_embd": 8, "n_head": 2}
    shapes = shapes_of(GPT2Config(n_layer=3, **sizes))
    held = footprint(make_config(), shapes, cuda=False)
    assert held.trained == held.parameters == count(shapes)


def test_a_model_directory_tells_its_shapes(tmp_path: Path) -> None:
    model = tiny.make_model()
    folder = tiny.make_model_dir(tmp_path / "model")
    assert shapes_in(folder) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert shapes_in(tmp_path) == {}


@pytest.mark.parametrize("layers", [None, 1, 5, 28])
def test_trained_parameters_are_those_the_learner_leaves_unfrozen(layers: int | None) -> None:
    config = qwen3.config("0.6b")
    want = sum(p.numel() for p in freeze_all_but(on_meta(config), layers))
    assert trained_count(shapes_of(config), LearnerConfig(trained_layers=layers)) == want


@pytest.mark.parametrize(
    "targets", [(), ("q_proj", "v_proj"), ("self_attn.o_proj", "1.mlp.up_proj")]
)
def test_an_adapters_parameters_are_pefts(targets: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    config = qwen3.config("0.6b")
    wanted = peft.LoraConfig(
        r=8, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(on_meta(config), wanted)
    want = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    learner = LearnerConfig(lora=LoraConfig(rank=8, target_modules=targets))
    assert trained_count(shapes_of(config), learner) == want


def test_bytes_of_a_parameter_by_hand() -> None:
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
    assert cpu.peak == 16 * n + cpu.activations + GIB // 2
    assert gpu.peak == 18 * n + head + gpu.activations  # the cache is given back for them
    more = footprint(make_config(engine={"kv_cache_gib": 40}), shapes, cuda=True)
    assert more.peak == 14 * n + 40 * GIB


def test_the_sum_of_docs_scale_is_footprints() -> None:
    held = footprint(make_config(), {"w": (8, 10**9)}, cuda=True, ranks=8)
    parts = [n // 10**9 for n in (held.weights, held.copies, held.gradients, held.optimizer)]
    said = "8 B parameters on 8 ranks: engine {} GB, learner {} + {} + {} GB, so {} GB before cache"
    assert said.format(*parts, sum(parts)) in (ROOT / "docs/scale.md").read_text()


def test_an_offloaded_optimizer_is_on_the_card_by_parameter() -> None:
    """Its largest parameter, and no activations then; the rest in host memory."""
    shapes = shapes_of(qwen3.config("8b"))
    n, head = count(shapes), math.prod(shapes["model.embed_tokens.weight"])
    few = {"gradient_checkpointing": True, "offload_optimizer": True}
    held = footprint(make_config(learner=few), shapes, cuda=True)
    assert (held.optimizer, held.resident) == (12 * n, 0)
    assert held.passing == 12 * head > held.activations
    assert held.peak == 2 * n + 4 * n + 2 * head + held.passing < 0.8 * 80 * GIB
    assert "optimizer's largest 6.96" in held.listed()
    held = footprint(make_config(learner={"offload_optimizer": True}), shapes, cuda=True)
    learner = {"offload_optimizer": True, "max_tokens": 65536}
    held = footprint(make_config(learner=learner), shapes, cuda=True)
    assert held.activations == 6 * GIB + 65536 * 2 * 36 * 4096
    assert held.peak == 6 * n + 2 * head + held.activations
    assert "activations 24" in held.listed()
    cpu = footprint(make_config(learner={"offload_optimizer": True}), shapes, cuda=False)
    assert (cpu.resident, cpu.passing) == (cpu.optimizer, 0)


@pytest.mark.parametrize(
    ("sections", "name", "factor"),
    [
        ({"engine": {"weights": "copy"}}, "copies", 2),
        ({"loss": {"beta": 0.1}}, "copies", 2),
        ({"loss": {"beta": 0.1}, "engine": {"weights": "copy"}}, "copies", 4),
        ({"learner": {"optimizer": "adamw_8bit"}}, "optimizer", 6),
    ],
)
def test_what_settings_add(sections: dict[str, Any], name: str, factor: int) -> None:
    shapes = shapes_of(qwen3.config("0.6b"))
    held = footprint(make_config(**sections), shapes, cuda=True)
    assert getattr(held, name) == factor * count(shapes)


def test_an_adapter_is_held_beside_one_copy_of_the_weights() -> None:
    """Rank 12 is served from room for 16."""
    shapes = shapes_of(qwen3.config("0.6b"))
    n = count(shapes)
    held = footprint(
        make_config(learner={"lora": {"rank": 12}}, loss={"beta": 0.1}),
        shapes, cuda=True,
    )  # fmt: skip
    a = held.trained
    assert 0 < a < n / 20
    assert held.weights == 2 * n
    assert held.copies == 4 * a, "the KL's is the adapter's"
    vocab, hidden = shapes["model.embed_tokens.weight"]
    room = 2 * 16 * (a // 12 + 2 * (vocab + hidden))
    assert held.adapter == 4 * a + room
    assert (held.optimizer, held.gradients, held.checkpoint) == (8 * a, 4 * a, 16 * a)
    assert held.peak == held.weights + held.copies + held.adapter + 12 * a + held.activations
    assert "adapter 0." in held.listed()


def test_a_rank_of_several_holds_its_part_of_the_learner() -> None:
    """docs/scale.md: P b of the engine, P b / W of weights and gradients, 12 P / W of moments."""
    shapes = shapes_of(qwen3.config("8b"))
    n = count(shapes)
    sections: dict[str, Any] = {"loss": {"beta": 0.1}, "engine": {"tensor_parallel_size": 4}}
    held = footprint(make_config(**sections), shapes, cuda=True, ranks=8)
    assert held.weights == 2 * n // 4
    assert held.copies == 2 * n // 8 + 2 * n, "the KL's reference is whole on each"
    assert (held.optimizer, held.gradients) == (12 * n // 8, 6 * n // 8)
    assert held.checkpoint == 14 * n
    adapted = {"learner": {"lora": {"rank": 8}}}
    one, eight = (footprint(make_config(**adapted), shapes, cuda=True, ranks=w) for w in (1, 8))
    assert one.copies == 0
    assert eight.copies == 2 * n // 8
    assert one.adapter - eight.adapter == 4 * one.trained - 4 * one.trained // 8


def test_the_tables_of_the_gpu_page() -> None:
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
    ("free", "where"), [(80, "80% of the card's 40"), (3, "the 3.0 GiB that are free on the card")]
)
def test_what_others_hold_of_a_card_is_not_free(
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


@pytest.mark.parametrize(("ranks", "waits"), [(1, 12), (8, 96)])
def test_host_memory_is_that_of_all_ranks_of_the_machine(
    ranks: int, waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its share of the offloaded state there: GB of 8 GB free, by hand."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(hardware, "memory_bytes", lambda: (64 * GIB, 8 * GIB))
    qwen3.config("0.6b").save_pretrained(tmp_path)
    config = make_config(learner={"offload_optimizer": True})
    said = {check.name: check for check in room_checks(config, str(tmp_path), trained=True)}
    gib = waits * count(shapes_of(qwen3.config("0.6b"))) / GIB
    assert said["host memory"].found.startswith(f"{gib:.1f} GiB of optimizer state wait there")
    assert said["host memory"].ok is (ranks == 1)


@pytest.mark.parametrize(
    ("flags", "ok"), [("avx512f avx512_bf16", True), ("amx_bf16", True), ("avx512f avx2", False)]
)
def test_bfloat16_on_a_cpu_is_asked_for_and_told_where_it_is_slow(
    flags: str, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    hardware.CPUINFO.write_text(f"processor : 0\nflags : {flags}\n\nprocessor : 1\n")
    qwen3.config("0.6b").save_pretrained(tmp_path)

    def told(**engine: str) -> list[bool]:
        checks = room_checks(make_config(engine=engine), str(tmp_path), trained=True)
        return [check.ok for check in checks if check.name == "bfloat16"]

    assert told() == told(dtype="float32") == []
    assert told(dtype="bfloat16") == [ok]
