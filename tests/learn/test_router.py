"""The load-balancing loss of a mixture of experts: transformers' own, on what is laid out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    GraniteMoeHybridConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentgrpo.config import LearnerConfig, LossConfig, TrainConfig
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.updates import plan_updates
from agentgrpo.models.kinds import router_coef
from agentgrpo.models.models import check_model
from agentgrpo.types import Group, Rollout
from tests.learn.given import Holder, learner_on, run_config
from tests.tiny import VOCAB, make_tokenizer

COEF = 0.5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


class Floats(Holder):
    """transformers' experts take no float64."""

    dtype = "float32"


def step(
    folder: Path, groups: list[Group], coef: float | None, *, max_tokens: int = 2048,
    share: bool = True,
) -> tuple[dict[str, float], list[Tensor]]:  # fmt: skip
    """Metrics and gradient of a step, every rollout in a batch of its own or all in one."""
    loss = LossConfig(router_aux_loss_coef=coef)
    learner: Learner = learner_on(
        Floats(), folder, LearnerConfig(max_grad_norm=1e9), loss, weights="copy", dlogp_limit=99.0
    )
    seen: list[Tensor] = []
    update = learner._optimizer.step

    def watched(*, max_grad_norm: float) -> float:
        seen.extend(p.grad.clone() for p in learner.policy.trained if p.grad is not None)
        return update(max_grad_norm=max_grad_norm)

    learner._optimizer.step = watched  # type: ignore[method-assign]
    config = run_config(loss, max_tokens=1024)
    small = config.model_copy(
        update={"learner": config.learner.model_copy(update={"max_tokens": max_tokens})}
    )
    return learner.step(plan_updates(groups, small, step=0, share_prefixes=share)), seen


def balance(logits: list[Tensor]) -> Tensor:
    found = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    made: Tensor = found.load_balancing_loss_func(tuple(logits), 4, 2)
    return made


def gradient(model: Any, value: Tensor) -> list[Tensor]:
    own = list(model.parameters())
    return list(torch.autograd.grad(value, own, materialize_grads=True))


@pytest.fixture(params=[True, False], ids=["trees", "rows"])
def share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether prefixes may be shared."""
    if not request.param:
        monkeypatch.setattr("agentgrpo.learn.policy.why_not_packed", lambda model: "told so")
    return bool(request.param)


def laid_out(rollout: Rollout) -> Tensor:
    """[1, T]: up to the token before the last sampled one."""
    end = max(i for i, segment in enumerate(rollout.segments) if segment.sampled)
    ids = np.concatenate([segment.token_ids for segment in rollout.segments[: end + 1]])
    return torch.from_numpy(ids[:-1]).long()[None]


def test_alone_in_a_batch_a_rollout_has_the_models_own(
    experts: Path, groups: list[Group], share: bool
) -> None:
    """As TRL, but that batches count by their tokens; loss and gradient have it on top."""
    model: Any = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    total = torch.zeros(())
    rollouts = [r for g in groups for r in g.rollouts]
    tokens = sum(laid_out(r).shape[1] for r in rollouts)
    for rollout in rollouts:
        ids = laid_out(rollout)
        aux = model(ids, output_router_logits=True, use_cache=False).aux_loss
        total = total + aux * ids.shape[1] / tokens
    options: Any = {"max_tokens": max(laid_out(r).shape[1] for r in rollouts), "share": share}
    (without, plain), (metrics, grads) = (step(experts, groups, c, **options) for c in (0.0, COEF))
    assert "aux_loss" not in without
    assert metrics["loss"] - without["loss"] == pytest.approx(COEF * total.item(), rel=1e-5)
    assert metrics["loss"] - without["loss"] > 0.4
    for mine, base, want in zip(grads, plain, gradient(model, COEF * total), strict=True):
        torch.testing.assert_close(mine - base, want, rtol=1e-3, atol=1e-6)


def test_of_a_batch_it_is_over_what_is_laid_out(
    experts: Path, groups: list[Group], share: bool
) -> None:
    """A shared prompt once in a tree; in rows each, and no padding."""
    model: Any = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    layers: list[list[Tensor]] = [[], []]
    for group in groups:
        for i, rollout in enumerate(group.rollouts):
            out = model(laid_out(rollout), output_router_logits=True, use_cache=False)
            first = len(rollout.segments[0].token_ids) if share and i else 0
            for layer, logits in zip(layers, out.router_logits, strict=True):
                layer.append(logits[first:])
    want = balance([torch.cat(layer) for layer in layers])
    metrics, _ = step(experts, groups, COEF, share=share)
    assert metrics["aux_loss"] == pytest.approx(want.item(), rel=1e-6)


def test_a_model_without_experts_has_none(experts: Path, tiny_model: Path) -> None:
    dense = Qwen3Config()
    assert router_coef(dense, None) == router_coef(dense, 0.0) == 0.0
    assert router_coef(Qwen3MoeConfig(), None) == 0.001
    assert router_coef(Qwen3MoeConfig(), 0.0) == 0.0
    loss = LossConfig(router_aux_loss_coef=0.01)
    config = TrainConfig(model="m", out_dir=Path("o"), loss=loss)
    with pytest.raises(
        ValueError, match=r"loss\.router_aux_loss_coef: 0\.01 does nothing: qwen3 h"
    ):
        check_model(config, str(tiny_model))
    check_model(config, str(experts), device="cuda")
    with pytest.raises(ValueError, match=r"router_aux_loss_coef\n.*greater than or equal to 0"):
        LossConfig(router_aux_loss_coef=-1.0)


MIXED: dict[str, Any] = {"mlp_only_layers": [0, 1]}
"""A mixture's config whose layers are all dense."""


@pytest.mark.parametrize(
    ("config", "coef"),
    [
        (GraniteMoeHybridConfig(num_local_experts=0, num_experts_per_tok=0), 0.0),
        (GraniteMoeHybridConfig(num_local_experts=4), 0.001),
        (DogeConfig(is_moe=True), 0.0),
    ],
    ids=["dense", "mixture", "another function"],
)
def test_a_dense_model_of_a_family_of_mixtures_has_none(config: Any, coef: float) -> None:
    assert router_coef(config, None) == coef
    if not coef:
        with pytest.raises(ValueError, match="has no load-balancing loss in transformers, or no"):
            router_coef(config, 0.5)


def test_a_mixture_without_any_expert_layer_trains(tmp_path: Path, groups: list[Group]) -> None:
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **MIXED)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    metrics, _ = step(tmp_path, groups, None)
    assert "aux_loss" not in metrics
    assert np.isfinite(metrics["loss"])
