"""Multimodal checkpoints: the language model is trained, all other tensors stay unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from agentgrpo.config import EngineConfig, LearnerConfig
from agentgrpo.learn.policy import Policy, load_model
from agentgrpo.models.multimodal_text import text_name
from agentgrpo.train.memory_estimate import shapes_in
from bench.models import IMAGES, write_model

KEPT = LearnerConfig(gradient_checkpointing=False)


@pytest.fixture(params=IMAGES)
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny multimodal checkpoint in the released form."""
    folder = tmp_path / "whole"
    write_model(f"{request.param}, whole", folder)
    return folder


def tensors_in(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def policy_of(folder: Path) -> Policy:
    model = load_model(folder, device="cpu", dtype="float32")
    return Policy(model, KEPT, weights="own")


def test_loaded_language_model_equals_the_inner_one(whole: Path) -> None:
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        inside: Any = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32)
        alone = load_model(whole, device="cpu", dtype="float32")
        assert torch.equal(alone(ids).logits, inside.eval()(input_ids=ids).logits)


def test_checkpoint_keeps_the_other_tensors(whole: Path, tmp_path: Path) -> None:
    before, policy = tensors_in(whole), policy_of(whole)
    config = (whole / "config.json").read_text()
    with torch.no_grad():
        for parameter in policy.trained:
            parameter += 1.0
    shutil.rmtree(whole)  # as the checkpoint that a run went on from may be
    policy.save(tmp_path / "saved")
    after = tensors_in(tmp_path / "saved")
    assert after.keys() == before.keys()
    trained = dict(policy.model.named_parameters())
    for name, tensor in before.items():
        changed = text_name(name) in trained
        assert torch.equal(after[name], tensor + 1.0 if changed else tensor), name
    assert {text_name(name) for name in before} >= trained.keys()
    assert (tmp_path / "saved" / "config.json").read_text() == config
    again = policy_of(tmp_path / "saved").model
    assert all(torch.equal(p, trained[name]) for name, p in again.named_parameters())


def test_tied_head_in_the_files_is_saved_as_the_embedding(whole: Path, tmp_path: Path) -> None:
    path = whole / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = {n: t for n, t in tensors_in(whole).items() if text_name(n) != "lm_head.weight"}
    (embedding,) = (t for n, t in tensors.items() if n.endswith(".embed_tokens.weight"))
    save_file(
        tensors | {"lm_head.weight": embedding.clone()},
        whole / "model.safetensors",
        metadata={"format": "pt"},
    )
    policy = policy_of(whole)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.fill_(3.0)
    policy.save(tmp_path / "saved")
    assert (tensors_in(tmp_path / "saved")["lm_head.weight"] == 3.0).all()


def test_memory_estimate_uses_the_language_model(whole: Path) -> None:
    named = dict(policy_of(whole).model.named_parameters())
    actual = {text_name(name): shape for name, shape in shapes_in(whole).items()}
    assert {name: tuple(p.shape) for name, p in named.items()}.items() <= actual.items()
    assert not any("vis" in (name or "vis") for name in actual)


def test_checkpoint_with_a_missing_tensor_is_refused(whole: Path) -> None:
    tensors = tensors_in(whole)
    gone = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    if "vision" in gone or "visual" in gone:
        gone = next(n for n in tensors if "language_model" in n and "up_proj" in n)
    del tensors[gone]
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"its files hold no {text_name(gone)}"):
        load_model(whole, device="cpu", dtype="float32")


def test_sampler_and_learner_share_the_language_model(tmp_path: Path) -> None:
    from agentgrpo.engine.engine import Engine
    from agentgrpo.learn.weight_sync import policy_on

    write_model("Gemma 4, whole", tmp_path)
    config = EngineConfig(max_model_len=128, kv_cache_gib=1 / 16, dtype="float32")
    engine = Engine(tmp_path, config)
    try:
        policy, _ = policy_on(engine, tmp_path, KEPT, weights="shared")
        loaded = load_model(tmp_path, device="cpu", dtype="float32")
        shared = dict(policy.model.state_dict())
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(shared[name], tensor), name
    finally:
        engine.shutdown()
