"""Gradient checkpointing, the optimizer and its state, schedules, resuming."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgrpo.config import LearnerConfig
from agentgrpo.engine.start import use_plain_weight
from agentgrpo.kernels import products
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.learn.policy import Policy, load_model
from agentgrpo.models.models import chat_of
from agentgrpo.types import Group
from tests.learn.given import DAPO, Holder, run_config


def test_checkpointed_layers_train_equally(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    updates = plan_updates(groups, run_config(DAPO), step=0)
    plain, checkpointed = make_learner(gradient_checkpointing=False), make_learner()
    assert not plain.checkpoint_if_auto()
    assert checkpointed.checkpoint_if_auto()
    passes = {plain: 0, checkpointed: 0}

    def counted(learner: Learner) -> float:
        def count(*_: object) -> None:
            passes[learner] += 1

        learner.model.get_decoder().layers[0].mlp.register_forward_pre_hook(count)
        return learner.step(updates)["loss"]

    assert counted(plain) == counted(checkpointed)
    assert passes[checkpointed] == 2 * passes[plain] > 0, "once more in the backward pass"
    for a, b in zip(plain.policy.trained, checkpointed.policy.trained, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"decay": "constant"}, [1.0] * 5),
        ({"decay": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"decay": "cosine"}, [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
        ({"decay": "cosine", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.5, 0.0]),
        ({"decay": "linear", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    ],
)  # fmt: skip
def test_learning_rate_schedules(options: dict[str, Any], rates: list[float]) -> None:
    config = LearnerConfig(learning_rate=1.0, **options)
    assert [config.learning_rate_at(step, 4) for step in range(5)] == pytest.approx(rates)


def test_step_uses_its_own_settings(
    make_learner: Callable[..., Learner], groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduled learning rate, the clipping, only updates with batches, their tokens."""
    learner = make_learner(decay="linear", learning_rate=0.5, max_grad_norm=0.25)
    recorded: list[Any] = []
    step = learner._optimizer.step

    def watched(*, max_grad_norm: float) -> float:
        recorded.append((max_grad_norm, learner._optimizer.lr))
        return step(max_grad_norm=max_grad_norm)

    monkeypatch.setattr(learner._optimizer, "step", watched)
    (update,) = plan_updates(groups, run_config(DAPO), step=0)
    learner.step([])
    metrics = learner.step([replace(update, batches=[]), update])
    assert recorded == [(0.25, pytest.approx(0.375))]
    assert metrics["learning_rate"] == pytest.approx(0.375)
    assert metrics["updates"] == 1
    assert metrics["packed_tokens"] == sum(len(b.input_ids_T) for b in update.batches)
    assert learner.step_count == 2


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip"])
def test_unreadable_state_error_names_the_file(
    make_learner: Callable[..., Learner], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "agentgrpo_state.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"agentgrpo_state\.pt"):
        make_learner().load_state(path)
    torch.save({"something": 1}, path)
    with pytest.raises(ValueError, match=r"agentgrpo_state\.pt: .*: no optimizer, step"):
        make_learner().load_state(path)


def test_dry_pass_reserves_future_optimizer_memory(
    make_learner: Callable[..., Learner], groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, held = make_learner(), list[int]()
    empty = torch.empty

    def noted(*size: Any, **options: Any) -> Any:
        if options.get("dtype") is torch.uint8:
            held.append(size[0])
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", noted)
    learner.step([])  # without a batch: it has taken nothing
    learner.dry_pass(20)
    learner.step(plan_updates(groups, run_config(DAPO), step=0))
    learner.dry_pass(20)
    assert held == [8 * sum(p.numel() for p in learner.policy.trained), 0, 0, 0]
    learner._optimizer.offload_peak_bytes = 77  # and where it waits in host memory what comes of it
    learner.dry_pass(20)
    assert held[4:] == [0, 77]


def test_saved_model_keeps_the_stop_tokens(tmp_path: Path, tiny_model: Path) -> None:
    """Also for a model whose generation_config.json transformers refuses to write."""
    folder, again = tmp_path / "model", tmp_path / "again"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 7]}')
    model = load_model(folder, device="cpu", dtype="float32")
    Policy(model, LearnerConfig(), weights="its own").save(again)
    chat = chat_of(str(folder))
    chat.save(again)
    written = json.loads((again / "generation_config.json").read_text())
    assert written == {"temperature": 0.6, "eos_token_id": [2, 7]}
    assert chat_of(str(again)).stop_token_ids == chat.stop_token_ids == (2, 7)


def test_sampler_and_learner_use_the_same_matrix_products(
    make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For trained layers; vLLM packs frozen ones (Engine.prepack_frozen_linears)."""
    monkeypatch.setattr(products, "by_onednn", lambda: True)
    monkeypatch.setattr(products, "_WORTH", 0)
    assert make_learner().describe()["products"] == "PyTorch's", "in float64"
    monkeypatch.setattr(Holder, "dtype", "float32")
    learner = make_learner()
    layers = [m for m in learner.model.get_decoder().modules() if isinstance(m, torch.nn.Linear)]
    assert learner.describe()["products"] == f"oneDNN's, of {len(layers) + 1} layers in float32"
    monkeypatch.setattr(products, "by_onednn", lambda: False)
    assert make_learner().describe()["products"] == "PyTorch's"
    layer = torch.nn.Linear(2, 3)
    use_plain_weight(layer)
    assert layer.cpu_linear is products.linear
