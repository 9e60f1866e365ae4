"""Shared weights: exactly one learner parameter owns each number of the sampler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from agentgrpo.engine.engine import Engine
from agentgrpo.engine.start import use_plain_convolutions
from agentgrpo.engine.weights import (
    CannotShare,
    InPlaceCopy,
    install,
    parameters_on_meta,
    saved_buffers,
    views_for,
)
from tests.tiny import VOCAB


def on_meta(model: Path) -> Any:
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))


@pytest.fixture
def learner(engine: Engine, tiny_model: Path) -> Any:
    """A transformers model on the engine's weights."""
    learner = on_meta(tiny_model)
    install(learner, views_for(engine.model, learner))
    return learner


def test_learner_values_equal_the_files(learner: Any, tiny_model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ours, theirs = dict(learner.named_parameters()), dict(loaded.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_learner_writes_are_visible_to_the_sampler(learner: Any, engine: Engine) -> None:
    for number, parameter in enumerate(learner.parameters(), 1):
        with torch.no_grad():
            parameter.fill_(number)
    for name, tensor in engine.model.named_parameters():
        rows = tensor[:VOCAB] if "embed" in name else tensor  # vLLM pads the vocabulary
        assert rows.min() >= 1, f"{name} has numbers that no parameter of the learner owns"
    owned = sum(p.numel() for p in learner.parameters())
    padding = dict(engine.model.named_parameters())["model.embed_tokens.weight"][VOCAB:].numel()
    assert sum(p.numel() for p in engine.model.parameters()) == owned + padding
    assert padding > 0


def test_learner_uses_only_the_sampler_storage(learner: Any, engine: Engine) -> None:
    theirs = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in learner.parameters()} == theirs


def test_tied_embeddings_stay_tied(learner: Any) -> None:
    assert learner.lm_head.weight is learner.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(learner.named_parameters())


def test_buffers_are_real_with_parameters_on_meta(tiny_model: Path) -> None:
    learner = on_meta(tiny_model)
    assert all(p.is_meta for p in learner.parameters())
    assert not any(b.is_meta for b in learner.buffers())
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model)
    for ours, theirs in zip(learner.buffers(), loaded.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_only_modules_built_in_the_context_are_on_meta() -> None:
    with contextlib.suppress(ZeroDivisionError), parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta


class Fused(nn.Module):
    """Named and laid out as by vLLM: parts fused along dim 0, the vocabulary padded at the end."""

    packed_modules_mapping = {"qkv": ["q", "k", "v"], "same": ["same"]}

    def __init__(self, *, vocab: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 4)
        self.qkv = nn.Linear(4, 12)
        self.qkv.output_sizes = [6, 3, 3]  # type: ignore[assignment]
        self.same = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, vocab, bias=False)


class Plain(nn.Module):
    """The same as transformers would have it."""

    def __init__(self, *, vocab: int = 9, k: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 4)
        self.q, self.k, self.v = nn.Linear(4, 6), nn.Linear(4, k), nn.Linear(4, 3)
        self.same = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, vocab, bias=False)


def test_untied_and_fused_weights_with_biases() -> None:
    sampler, learner = Fused(), Plain()
    views = views_for(sampler, learner)
    expected: dict[str, Tensor] = {
        "embed.weight": sampler.embed.weight[:9],
        "q.weight": sampler.qkv.weight[:6],
        "q.bias": sampler.qkv.bias[:6],
        "k.weight": sampler.qkv.weight[6:9],
        "k.bias": sampler.qkv.bias[6:9],
        "v.weight": sampler.qkv.weight[9:],
        "v.bias": sampler.qkv.bias[9:],
        "same.weight": sampler.same.weight,
        "head.weight": sampler.head.weight[:9],
    }
    assert views.keys() == expected.keys()
    for name, value in expected.items():
        assert views[name].data_ptr() == value.data_ptr(), name
        assert views[name].shape == value.shape, name
    install(learner, views)
    assert learner.k.weight.requires_grad
    with torch.no_grad():
        learner.k.bias.fill_(7.0)
    assert sampler.qkv.bias[6:9].tolist() == [7.0] * 3


def emptied(sampler: Fused) -> None:
    sampler.same.weight = nn.Parameter(torch.empty(0))  # what vLLM's CPU packing leaves behind


def extended(sampler: Fused) -> None:
    sampler.extra = nn.Linear(2, 2, bias=False)


def dropped(sampler: Fused) -> None:
    del sampler.head


def renamed(sampler: Fused) -> None:
    sampler.packed_modules_mapping = {}


def transposed(sampler: Fused) -> None:
    sampler.head = nn.Linear(10, 4, bias=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (emptied, "same.weight: vLLM has no tensor same.weight"),
        (extended, "the learner has no parameter for vLLM's extra.weight"),
        (dropped, "head.weight: vLLM has no tensor head.weight"),
        (renamed, "q.weight: vLLM has no tensor q.weight"),
        (transposed, r"head.weight: \(9, 4\) is not a slice of \(4, 10\)"),
    ],
)
def test_unshareable_weight_is_named(change: Callable[[Fused], None], message: str) -> None:
    sampler = Fused()
    change(sampler)
    with pytest.raises(CannotShare, match=message):
        views_for(sampler, Plain())


class OfSeveral(Fused):
    """As vLLM's Qwen3.5: a module of the checkpoint is two parts of a fused one."""

    packed_modules_mapping = {"qkv": ["qk", "v"]}

    hf_to_vllm_mapper: Any = SimpleNamespace(
        orig_to_new_stacked={".qk": (".qkv", (0, 1)), ".v": (".qkv", 2)}
    )


class Joined(nn.Module):
    """OfSeveral, as transformers would have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.qk, self.v = nn.Linear(4, 9), nn.Linear(4, 3)
        self.same = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 9, bias=False)


def test_module_may_be_several_parts_of_a_fused_one() -> None:
    sampler = OfSeveral()
    views = views_for(sampler, Joined())
    assert torch.equal(views["qk.weight"], sampler.qkv.weight[:9])
    assert torch.equal(views["v.weight"], sampler.qkv.weight[9:])


def test_fused_tensor_with_unnamed_parts_is_refused() -> None:
    """By index v would be read where k lies, which is as large."""
    sampler = OfSeveral()
    sampler.hf_to_vllm_mapper = None
    with pytest.raises(CannotShare, match=r"v\.weight: qkv has 3 parts, expected 2"):
        views_for(sampler, nn.ModuleDict({"v": nn.Linear(4, 3)}))


def scaled(model: Any) -> Any:
    model.register_buffer("scale", torch.full((1,), 2.0))
    model.register_buffer("cached", torch.zeros(5), persistent=False)
    return model


def test_saved_buffers_are_shared() -> None:
    sampler, learner = scaled(Fused()), scaled(Plain())
    learner.scale.fill_(1.0)  # as made, and not as loaded
    assert saved_buffers(learner).keys() == {"scale"}
    install(learner, views_for(sampler, learner))
    assert learner.scale.data_ptr() == sampler.scale.data_ptr()
    assert learner.cached.data_ptr() != sampler.cached.data_ptr()
    with pytest.raises(CannotShare, match="scale: vLLM has no such buffer"):
        views_for(Fused(), learner)


def test_gated_delta_nets_use_plain_convolution_weights() -> None:
    """What their prompts of one and more tokens, and tokens after them, go through on CPU."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    use_plain_convolutions()
    width, dim = 4, 64
    weight = torch.randn(dim, 1, width, dtype=torch.bfloat16)
    inputs = torch.randn(9, dim, dtype=torch.bfloat16)
    expected = nn.functional.silu(
        nn.functional.conv1d(inputs.T.float(), weight.float(), padding=width - 1, groups=dim)
    )[:, : len(inputs)]
    same: Any = {"weight": weight, "bias": None, "silu_activation": True, "is_weight_packed": True}
    slot = torch.tensor([1], dtype=torch.int32)
    for prompt in (1, 2, 8):
        states = torch.randn(3, width - 1, dim, dtype=torch.bfloat16).transpose(1, 2)
        first = gdn_attention._causal_conv1d_fwd_cpu(
            x=inputs[:prompt].T,
            conv_states=states,
            query_start_loc=torch.tensor([0, prompt], dtype=torch.int32),
            cache_indices=slot,
            has_initial_state=torch.tensor([False]),
            **same,
        )
        torch.testing.assert_close(first.float(), expected[:, :prompt], atol=0.05, rtol=0.02)
        then = gdn_attention._causal_conv1d_update_cpu(
            x=inputs[prompt : prompt + 1], conv_states=states, conv_state_indices=slot, **same
        )
        torch.testing.assert_close(then[0].float(), expected[:, prompt], atol=0.05, rtol=0.02)


def test_unowned_part_of_a_fused_tensor_is_named() -> None:
    learner = Plain()
    del learner.v
    with pytest.raises(CannotShare, match=r"no parameter for vLLM's qkv.bias, qkv.weight"):
        views_for(Fused(), learner)


@pytest.mark.parametrize("k", [2, 4])
def test_part_of_another_size_is_refused(k: int) -> None:
    with pytest.raises(CannotShare, match=r"k\.weight: "):
        views_for(Fused(), Plain(k=k))


@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_copy_writes_in_place(bucket_bytes: int, dtype: torch.dtype) -> None:
    sampler, learner = Fused(), Plain().to(dtype)
    before = {name: tensor.data_ptr() for name, tensor in sampler.named_parameters()}
    loaded: list[str] = []
    copy = InPlaceCopy(
        sampler, lambda named: loaded.extend(n for n, _ in named), bucket_bytes=bucket_bytes
    )
    named = list(learner.named_parameters())
    assert copy(iter(named)) == sum(p.nbytes for _, p in named)
    assert loaded == []
    for name, view in views_for(sampler, learner).items():
        assert torch.equal(view, dict(named)[name].float()), name
    assert {name: tensor.data_ptr() for name, tensor in sampler.named_parameters()} == before


def test_copy_holds_at_most_one_bucket() -> None:
    """An iterator is drawn on only as far as a bucket reaches before its tensors are written."""
    sampler, learner = Fused(), Plain()
    written: list[bool] = []

    def drawn() -> Any:
        for name, parameter in learner.named_parameters():
            yield name, parameter + 1
            written.append(torch.equal(views_for(sampler, learner)[name], parameter + 1))

    InPlaceCopy(sampler, lambda named: None, bucket_bytes=1)(drawn())
    assert written == [True] * 9


def test_other_layouts_use_the_vllm_loader() -> None:
    sampler, learner = Fused(), Plain()
    emptied(sampler)
    loaded: dict[str, Tensor] = {}
    InPlaceCopy(sampler, loaded.update)(learner.named_parameters())
    assert loaded.keys() == {"same.weight"}
    assert torch.equal(sampler.qkv.weight[:6], learner.q.weight)
