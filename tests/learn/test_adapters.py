"""LoRA: what is trained, published, resumed, and what cannot be adapted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.config import LoraConfig, LossConfig
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.learn.preflight import one_row
from agentgrpo.models.models import named_base, require_lora_of, resolve_model, saved_adapter
from agentgrpo.types import Group
from tests.learn.given import DAPO, distributions, oracle_model, run_config


def test_only_the_adapter_is_trained_and_published(
    make_learner: Callable[..., Learner], tiny_model: Path, groups: list[Group]
) -> None:
    learner = make_learner(lora={"rank": 4, "alpha": 8.0}, learning_rate=1e-2)
    engine: Any = vars(learner._publisher)["_engine"]
    base = oracle_model(tiny_model).state_dict()
    for _ in range(2):
        learner.step(plan_updates(groups, run_config(DAPO), step=0))
    learner.publish()
    assert not engine.weights
    sides = {name.rpartition(".lora_")[0] for name in engine.adapter}
    assert len(sides) == 14, "all linear layers of both blocks"
    merged = oracle_model(tiny_model)
    with torch.no_grad():
        for side in sides:
            a, b = (engine.adapter[f"{side}.lora_{x}.weight"] for x in "AB")
            layer = merged.get_submodule(side.removeprefix("base_model.model."))
            layer.weight += 8.0 / 4 * b @ a
    ids = groups[0].rollouts[0].token_ids
    expected = distributions(merged, ids, 1.0)[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(learner.score(ids), expected.detach(), atol=1e-5)
    assert (layer.weight - base[f"{side.removeprefix('base_model.model.')}.weight"]).abs().max() > 0
    trained = learner.describe()["trained_parameters"]
    assert (
        trained
        == sum(p.numel() for p in learner.policy.trained)
        < 0.3 * sum(p.numel() for p in base.values())
    )


@pytest.mark.parametrize("saved", [False, True])
def test_adapter_kl_is_relative_to_the_initial_policy(
    make_learner: Callable[..., Learner], groups: list[Group], tmp_path: Path, saved: bool
) -> None:
    """Either the base model, or the adapter that training started from; a resumed run keeps it."""
    loss, ids = LossConfig(beta=0.5), groups[0].rollouts[0].token_ids
    updates = plan_updates(groups, run_config(loss), step=0)
    options: dict[str, Any] = {"lora": {"rank": 4}, "learning_rate": 1e-2}
    begin = make_learner(**options)
    if saved:
        begin.step(updates)
    begin.policy.save(tmp_path)
    began = begin.score(ids)
    learner = make_learner(loss, adapter=tmp_path if saved else None, **options)
    assert learner._reference is not None
    assert learner._reference.scorer is None, "no second copy"
    assert learner.step(updates)["ref_kl"] == pytest.approx(0.0, abs=1e-9)
    assert learner.step(updates)["ref_kl"] > 1e-4
    learner.policy.save(tmp_path)
    learner.save_state(tmp_path / "state.pt")
    resumed = make_learner(loss, adapter=tmp_path, **options)
    resumed.load_state(tmp_path / "state.pt")
    assert resumed._reference is not None
    with pytest.raises(ValueError, match=r"reference has .* parameters, 0 were saved: .* out_dir"):
        resumed._reference.load([])
    for each in (learner, resumed):
        assert each._reference is not None
        now = each.score(ids)
        then = each._reference(one_row(ids), 1.0).logp_N.float().numpy()
        np.testing.assert_array_equal(then, began)
        np.testing.assert_array_equal(each.score(ids), now)
        assert np.abs(now - began).max() > 1e-2


def test_resumed_adapter_repeats_the_bits(
    make_learner: Callable[..., Learner], groups: list[Group], tmp_path: Path
) -> None:
    lora = {"rank": 2}
    learner = make_learner(lora=lora)
    updates = plan_updates(groups, run_config(DAPO), step=0)
    learner.step(updates)
    learner.policy.save(tmp_path)
    learner.save_state(tmp_path / "state.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "state.pt",
    ]  # fmt: skip
    learner.step(updates)
    resumed = make_learner(lora=lora, adapter=tmp_path)
    resumed.load_state(tmp_path / "state.pt")
    assert resumed.step_count == 1
    resumed.step(updates)
    theirs = learner.policy.adapter.tensors() if learner.policy.adapter else {}
    ours = resumed.policy.adapter.tensors() if resumed.policy.adapter else {}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "rank: expected 4, as in the adapter of .*, got 0"),
        ({"rank": 8, "alpha": 8.0}, "rank: expected 4, .*, got 8"),
        ({"rank": 4}, r"alpha: expected 8\.0, .*, got 32\.0"),
        (
            {"rank": 4, "alpha": 8.0, "target_modules": ("q_proj",)},
            "target_modules: expected .*'v_",
        ),
    ],
)
def test_adapter_with_other_settings_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    layers = ["v_proj", "q_proj"]
    described = {"base_model_name_or_path": "m", "r": 4, "lora_alpha": 8.0}
    written = json.dumps({**described, "target_modules": layers})
    (tmp_path / "adapter_config.json").write_text(written)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match="holds an adapter, not a full model"):
        resolve_model(str(tmp_path))
    assert (named_base(str(tmp_path)), named_base("m")) == ("m", "m")
    adapter = saved_adapter(str(tmp_path))
    assert adapter is not None
    for named in ((), layers):
        require_lora_of(adapter, LoraConfig(rank=4, alpha=8.0, target_modules=tuple(named)))
    with pytest.raises(ValueError, match=rf"learner\.lora\.{message}"):
        require_lora_of(adapter, LoraConfig(**settings))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "v_porj"), "no linear layer has this name: 'v_porj'"),
        (("proj",), "no linear layer has this name: 'proj'"),
        (("embed_tokens",), "no linear layer has this name: 'embed_tokens'"),
        (("q_proj", "lm_head"), "the head cannot have an adapter: 'lm_head'"),
    ],
)
def test_target_modules_must_name_adaptable_layers(
    make_learner: Callable[..., Learner], targets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"learner.lora.target_modules: {message}"):
        make_learner(lora={"rank": 2, "target_modules": targets})


def test_target_module_may_name_one_layer(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner(lora={"rank": 2, "target_modules": ("1.self_attn.q_proj", "k_proj")})
    assert learner.policy.adapter is not None
    layers = {name.rpartition(".lora_")[0] for name in learner.policy.adapter.tensors()}
    assert {layer.partition("layers.")[2] for layer in layers} == {
        "1.self_attn.q_proj", "0.self_attn.k_proj", "1.self_attn.k_proj",
    }  # fmt: skip
