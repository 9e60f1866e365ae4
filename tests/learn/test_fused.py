"""Liger's norms, rotations and MLPs in Triton's interpreter have the original gradients.

Compared with the unrolled batch through transformers' original layers in float64, which shares
nothing with the code under test.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agentgrpo.config import LoraConfig
from agentgrpo.learn.lora import Adapter
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.policy import Scorer, checkpoint_layers, freeze_all_but
from agentgrpo.models.liger import FAMILIES, UNROTATED, fuse_layers
from agentgrpo.types import Group
from tests.learn.given import group_of, rollout_of
from tests.learn.interpreted import let_liger_be_interpreted
from tests.learn.test_attention import (
    MODELS,
    SMALL,
    Float64,
    gradients,
    loss_of,
    make,
    segment,
    unrolled_loss,
)

pytest.importorskip("liger_kernel", reason="liger-kernel is in requirements-dev.txt")
NAMES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "smollm3": "smollm3",
    "mistral": "mistral", "gemma": "gemma", "gemma2 with soft caps": "gemma2",
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "phi3": "phi3", "phi4": "phi3",
    "granite": "granite", "olmo2": "olmo2", "olmo3": "olmo3", "ministral": "ministral",
    "qwen3.5": "qwen3_5_text", "qwen3 next": "qwen3_next",
}  # fmt: skip
"""Models of test_attention.py, and their types."""


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    let_liger_be_interpreted(monkeypatch)


def test_every_family_is_tested() -> None:
    assert {*NAMES.values()} == {*FAMILIES}


def forked() -> list[Group]:
    """A prompt and two rollouts that part after their first token: each token is interpreted."""
    rng = np.random.default_rng(0)
    prompt, first = segment(rng, 3), segment(rng, 1, sampled=True)
    rollouts = [
        rollout_of(
            *(prompt, first, segment(rng, length, sampled=True)), advantage=float(rng.normal())
        )
        for length in (4, 3)
    ]
    return [group_of(*rollouts)]


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of Liger's kernels, as they are launched."""
    from triton.runtime.interpreter import InterpretedFunction

    recorded: list[str] = []
    run: Any = InterpretedFunction.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn.__module__.startswith("liger_kernel"):
            recorded.append(self.fn.__name__)
        return run(self, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return recorded


def apart(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest gradient difference relative to the largest gradient."""
    scale = max(x.abs().max().item() for x in want.values())
    return max((got[name] - want[name]).abs().max().item() for name in want) / scale


@pytest.mark.parametrize("name", NAMES)
def test_fused_layers_have_the_original_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, model = forked(), make(name)
    assert model.config.model_type == NAMES[name]
    with Float64():
        expected = gradients(model, unrolled_loss(model, groups))
    scorer = Scorer(model.float())
    (batch,) = pack_tree(groups, max_tokens=1000)
    plain = apart(gradients(model, loss_of(scorer, [batch])), expected)
    summary, recorded = fuse_layers(model), launches(monkeypatch)
    fused = apart(gradients(model, loss_of(scorer, [batch])), expected)
    assert fused < 2 * plain + 2e-6 < 1e-4
    rope = NAMES[name] not in UNROTATED
    assert ("_triton_rope" in recorded) is rope
    attention = sum(hasattr(module, "o_proj") for module in model.modules())
    assert summary.endswith(f" {attention * rope} rotations")
    for kernel in ("_rms_norm", "_geglu_tanh" if "gemma" in name else "_swiglu"):
        assert {f"{kernel}_forward_kernel", f"{kernel}_backward_kernel"} <= {*recorded}


@pytest.mark.parametrize("way", ["lora", "checkpointing", "last layers", "rows"])
def test_fused_layers_work_with_every_training_mode(way: str) -> None:
    """In any order of the patches."""
    groups = forked()
    (batch,) = pack_tree(groups, max_tokens=1000, share_prefixes=way != "rows")

    def trained(fused: bool) -> dict[str, torch.Tensor]:
        model = make("olmo3").float()
        if fused:
            fuse_layers(model)
        if way == "lora":
            adapter = Adapter(model, LoraConfig(rank=2))
            for index, matrix in enumerate(adapter.parameters):
                torch.manual_seed(index)
                matrix.data = 0.1 * torch.randn_like(matrix)
        if way == "checkpointing":
            checkpoint_layers(model)
        if way == "last layers":
            freeze_all_but(model, 1)
        return gradients(model, loss_of(Scorer(model), [batch]))

    expected = trained(False)
    assert max(x.abs().max().item() for x in expected.values()) > 0
    assert apart(trained(True), expected) < 5e-6


@pytest.mark.parametrize("name", NAMES)
def test_other_models_are_not_patched(name: str) -> None:
    """Such as vLLM's, where it runs transformers' code."""
    model = make(name)
    kinds = {module: dict(vars(sys.modules[module])) for module in list(sys.modules)
             if module.startswith(("transformers.models.", "torch.nn."))}  # fmt: skip
    fuse_layers(model)
    for module, before in kinds.items():
        now = vars(sys.modules[module])
        changed = {name for name in before if now[name] is not before[name]}
        assert not changed, module
    assert not any("forward" in vars(module) for module in make(name).modules())


def test_unsupported_layers_are_refused_by_name() -> None:
    family, options = MODELS["llama"]
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**SMALL | options, hidden_act="gelu")
    )
    with pytest.raises(ValueError, match="activation 'gelu', Liger's kernel uses 'silu'"):
        fuse_layers(model)
    with pytest.raises(ValueError, match="layers of model type 'cohere' were not compared"):
        fuse_layers(make("cohere"))
