"""Known causes of a mismatch between sampler and learner, injected: each is detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentgrpo.config import EngineConfig
from agentgrpo.engine.agreement import Disagreement, Probes, check_agreement, probe_prompts
from agentgrpo.engine.engine import Engine
from agentgrpo.engine.weights import views_for
from agentgrpo.learn.learner import Learner
from tests.learn.given import learner_on
from tests.tiny import VOCAB, make_model

THRESHOLD = EngineConfig().agreement_on("cpu")


@pytest.fixture
def probes() -> Probes:
    return probe_prompts(VOCAB)


@pytest.fixture
def make_learner(engine: Engine, tiny_model: Path) -> Callable[[str], Learner]:
    def make(weights: str) -> Learner:
        return learner_on(engine, tiny_model, weights=weights, dlogp_limit=THRESHOLD)

    return make


@pytest.fixture
def shared(make_learner: Callable[[str], Learner]) -> Learner:
    return make_learner("shared")


@pytest.fixture
def copied(make_learner: Callable[[str], Learner]) -> Learner:
    return make_learner("copy")


def move(learner: Learner, seed: int = 0) -> None:
    """Update every parameter by about as much as an optimizer in a few steps."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


def agree(engine: Engine, learner: Learner, probes: Probes) -> dict[str, float]:
    return check_agreement(engine, learner, probes, threshold=THRESHOLD)


@pytest.mark.parametrize("weights", ["shared", "copy"])
def test_correct_sync_agrees_after_each_update(
    engine: Engine, make_learner: Callable[[str], Learner], probes: Probes, weights: str
) -> None:
    learner = make_learner(weights)
    for seed in range(3):
        engine.wake()
        metrics = learner.publish()
        assert agree(engine, learner, probes)["max_dlogp"] < 1e-5
        assert ("publish_gb_per_s" in metrics) == (weights == "copy")
        engine.sleep()
        move(learner, seed)
    engine.wake()


def test_skipped_weight_sync_is_detected(engine: Engine, copied: Learner, probes: Probes) -> None:
    copied.publish()
    agree(engine, copied, probes)
    move(copied)
    engine.reset_prefix_cache()
    with pytest.raises(Disagreement, match="disagree after the weight update"):
        agree(engine, copied, probes)


NAMES = [name for name, _ in make_model().named_parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_one_unsynchronised_tensor_is_detected(
    engine: Engine, copied: Learner, probes: Probes, name: str
) -> None:
    copied.publish()
    agree(engine, copied, probes)
    move(copied)
    views = views_for(engine.model, copied.model)
    stale = views[name].clone()
    copied.publish()
    views[name].copy_(stale)
    engine.reset_prefix_cache()
    with pytest.raises(Disagreement, match="disagree after the weight update"):
        agree(engine, copied, probes)


def test_stale_prefix_cache_is_detected(engine: Engine, shared: Learner, probes: Probes) -> None:
    shared.publish()
    agree(engine, shared, probes)
    move(shared)  # and no publish(), which would have reset it
    with pytest.raises(Disagreement):
        agree(engine, shared, probes)
    shared.publish()
    agree(engine, shared, probes)


def test_wrong_dtype_is_detected(engine: Engine, copied: Learner, probes: Probes) -> None:
    copied.publish()
    with torch.no_grad():
        for tensor in engine.model.parameters():
            tensor.copy_(tensor.to(torch.bfloat16))
    engine.reset_prefix_cache()
    with pytest.raises(Disagreement, match="disagree after the weight update"):
        agree(engine, copied, probes)


def reordered(part: Tensor) -> Tensor:
    """A matrix with its values in the order of its transpose."""
    return part.t().contiguous().reshape(part.shape)


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("_proj.weight")])
def test_transposed_slice_of_fused_tensor_is_detected(
    engine: Engine, copied: Learner, probes: Probes, name: str
) -> None:
    copied.publish()
    views = views_for(engine.model, copied.model)
    views[name].copy_(reordered(views[name]))
    engine.reset_prefix_cache()
    with pytest.raises(Disagreement):
        agree(engine, copied, probes)


@pytest.mark.parametrize("pair", [("k_proj", "v_proj"), ("gate_proj", "up_proj")])
def test_swapped_slices_of_fused_tensor_are_detected(
    engine: Engine, copied: Learner, probes: Probes, pair: tuple[str, str]
) -> None:
    copied.publish()
    views = views_for(engine.model, copied.model)
    part = "self_attn" if pair[0] == "k_proj" else "mlp"
    a, b = (views[f"model.layers.0.{part}.{name}.weight"] for name in pair)
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    engine.reset_prefix_cache()
    with pytest.raises(Disagreement):
        agree(engine, copied, probes)


@pytest.fixture
def rope(engine: Engine) -> Iterator[list[Tensor]]:
    """The sampler's rotary position tables, which are not in checkpoints."""
    tables = [b for name, b in engine.model.named_buffers() if "cos_sin_cache" in name]
    kept = [table.clone() for table in tables]
    yield tables
    for table, value in zip(tables, kept, strict=True):
        table.copy_(value)


def test_dropped_rope_buffers_are_detected(
    engine: Engine, shared: Learner, probes: Probes, rope: list[Tensor]
) -> None:
    shared.publish()
    agree(engine, shared, probes)
    assert rope
    for table in rope:
        table.zero_()
    shared.publish()
    with pytest.raises(Disagreement, match="disagree after the weight update"):
        agree(engine, shared, probes)


def test_changed_rope_buffers_of_the_learner_are_detected(
    engine: Engine, shared: Learner, probes: Probes
) -> None:
    shared.publish()
    agree(engine, shared, probes)
    (inv_freq,) = {
        id(b): b for n, b in shared.model.named_buffers() if n.endswith("rotary_emb.inv_freq")
    }.values()
    inv_freq.zero_()
    with pytest.raises(Disagreement, match="disagree after the weight update"):
        agree(engine, shared, probes)


def test_nan_weights_are_detected(engine: Engine, shared: Learner, probes: Probes) -> None:
    shared.publish()
    with torch.no_grad():
        next(iter(shared.model.parameters()))[:] = torch.nan
    engine.reset_prefix_cache()
    with pytest.raises(
        FloatingPointError, match=r"the sampler gave its token 0 the log-prob.* nan"
    ):
        agree(engine, shared, probes)
