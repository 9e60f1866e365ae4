"""Known causes of a mismatch between sampler and learner, injected: each is detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

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


NAMES = [name for name, _ in make_model().named_parameters()]


def unsynchronised(engine: Engine, learner: Learner, names: Sequence[str] = ()) -> None:
    """An update of which these tensors, or by default all, do not reach the sampler."""
    move(learner)
    if names:
        views = views_for(engine.model, learner.model)
        stale = {name: views[name].clone() for name in names}
        learner.publish()
        for name, value in stale.items():
            views[name].copy_(value)


def in_bfloat16(engine: Engine, learner: Learner) -> None:
    for tensor in engine.model.parameters():
        tensor.copy_(tensor.to(torch.bfloat16))


def transposed(engine: Engine, learner: Learner, name: str) -> None:
    """A matrix with its values in the order of its transpose."""
    part = views_for(engine.model, learner.model)[name]
    part.copy_(part.t().contiguous().reshape(part.shape))


def swapped(engine: Engine, learner: Learner, names: Sequence[str]) -> None:
    views = views_for(engine.model, learner.model)
    a, b = (views[f"model.layers.0.{name}.weight"] for name in names)
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def without_rope(engine: Engine, learner: Learner) -> None:
    """The sampler's rotary position tables, which are not in checkpoints, are zero."""
    for name, table in engine.model.named_buffers():
        if "cos_sin_cache" in name:
            table.zero_()


def without_rope_in_the_learner(engine: Engine, learner: Learner) -> None:
    for name, table in learner.model.named_buffers():
        if name.endswith("rotary_emb.inv_freq"):
            table.zero_()


FAULTS: list[tuple[str, Any]] = [
    ("copy", unsynchronised),
    *(("copy", partial(unsynchronised, names=[name])) for name in NAMES),
    ("copy", in_bfloat16),
    *(("copy", partial(transposed, name=name)) for name in NAMES if name.endswith("_proj.weight")),
    ("copy", partial(swapped, names=("self_attn.k_proj", "self_attn.v_proj"))),
    ("copy", partial(swapped, names=("mlp.gate_proj", "mlp.up_proj"))),
    ("shared", without_rope),
    ("shared", without_rope_in_the_learner),
]


@pytest.fixture
def rope(engine: Engine) -> Iterator[None]:
    """Restores the sampler's rotary tables."""
    tables = [b for name, b in engine.model.named_buffers() if "cos_sin_cache" in name]
    kept = [table.clone() for table in tables]
    assert tables
    yield
    for table, value in zip(tables, kept, strict=True):
        table.copy_(value)


@pytest.mark.usefixtures("rope")
@pytest.mark.parametrize(("weights", "fault"), FAULTS)
def test_fault_of_the_weights_is_detected(
    engine: Engine, make_learner: Callable[[str], Learner], probes: Probes, weights: str, fault: Any
) -> None:
    learner = make_learner(weights)
    learner.publish()
    agree(engine, learner, probes)
    with torch.no_grad():
        fault(engine, learner)
    engine.reset_prefix_cache()
    with pytest.raises(Disagreement, match="disagree after the weight update"):
        agree(engine, learner, probes)


def test_stale_prefix_cache_is_detected(
    engine: Engine, make_learner: Callable[[str], Learner], probes: Probes
) -> None:
    shared = make_learner("shared")
    shared.publish()
    agree(engine, shared, probes)
    move(shared)  # and no publish(), which would have reset it
    with pytest.raises(Disagreement):
        agree(engine, shared, probes)
    shared.publish()
    agree(engine, shared, probes)


def test_nan_weights_are_detected(
    engine: Engine, make_learner: Callable[[str], Learner], probes: Probes
) -> None:
    shared = make_learner("shared")
    shared.publish()
    with torch.no_grad():
        next(iter(shared.model.parameters()))[:] = torch.nan
    engine.reset_prefix_cache()
    with pytest.raises(
        FloatingPointError, match=r"the sampler gave its token 0 the log-prob.* nan"
    ):
        agree(engine, shared, probes)
