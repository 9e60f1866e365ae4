"""The KL's reference follows the policy as TRL's callback has it, and resumes bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentgrpo.config import LearnerConfig, LossConfig, TrainConfig
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.policy import load_model
from agentgrpo.learn.updates import plan_updates
from agentgrpo.types import Group
from tests.learn.given import run_config

MakeLearner = Callable[..., Learner]
LOSS = LossConfig(beta=0.3, sync_ref_model=True, ref_model_sync_steps=2)


def params(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def reference_of(learner: Learner) -> Any:
    assert learner._reference is not None
    assert learner._reference.scorer is not None
    return learner._reference.scorer.model


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_it_moves_when_and_where_trls_does(
    make_learner: MakeLearner, groups: list[Group], tiny_model: Path, alpha: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    callbacks = pytest.importorskip("trl.trainer.callbacks", reason="trl: requirements-dev.txt")
    no_deepspeed = SimpleNamespace(deepspeed_plugin=None)
    monkeypatch.setattr(callbacks, "AcceleratorState", lambda: no_deepspeed)
    loss = LOSS.model_copy(update={"ref_model_mixup_alpha": alpha})
    learner = make_learner(loss)
    theirs = load_model(tiny_model, device="cpu", dtype="float64")
    callback = callbacks.SyncRefModelCallback(ref_model=theirs, accelerator=None)
    kl = []
    for step in range(1, 5):
        before = params(reference_of(learner))
        kl.append(learner.step(plan_updates(groups, run_config(loss), step=step))["ref_kl"])
        callback.on_step_end(loss, SimpleNamespace(global_step=step), None, model=learner.model)
        assert same(params(reference_of(learner)), params(theirs))
        assert same(before, params(theirs)) == (step % 2 == 1)
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert (kl[2] == pytest.approx(0, abs=1e-9)) == (alpha == 1)
    assert same(params(theirs), params(learner.model)) == (alpha == 1)


def test_every_update_counts_those_without_a_gradient_too(
    make_learner: MakeLearner, groups: list[Group]
) -> None:
    loss = LOSS.model_copy(update={"num_mini_batches": 2, "num_iterations": 3})
    learner = make_learner(loss)
    (first, second) = plan_updates(groups, run_config(loss), step=0)
    learner.step([replace(first, batches=[]), second])
    assert learner.update_count == 6


@pytest.mark.parametrize("sync", [True, False])
def test_a_resumed_run_has_the_same_reference(
    make_learner: MakeLearner, groups: list[Group], tmp_path: Path, sync: bool
) -> None:
    """Six updates, with a sync before the checkpoint and one after it."""
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 4} if sync else {}
    loss = LossConfig.model_validate({"beta": 0.3, "num_iterations": 2, **settings})
    updates = plan_updates(groups, run_config(loss), step=0)
    learner = make_learner(loss)
    for _ in range(3):
        learner.step(updates)
    weights = params(learner.model)
    learner.save_state(tmp_path / "state.pt")
    resumed = make_learner(loss)
    with torch.no_grad():
        for p, saved in zip(resumed.model.parameters(), weights, strict=True):
            p.copy_(saved)
    resumed.load_state(tmp_path / "state.pt")
    assert resumed.update_count == 6
    assert learner._reference is not None
    assert bool(learner._reference.state()) == sync
    assert same(params(reference_of(resumed)), params(reference_of(learner)))
    for _ in range(2):
        whole, again = learner.step(updates), resumed.step(updates)
        assert {k: v for k, v in whole.items() if k != "seconds"} == {
            k: v for k, v in again.items() if k != "seconds"
        }
    assert same(params(resumed.model), params(learner.model))
    assert same(params(reference_of(resumed)), params(reference_of(learner)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"sync_ref_model": True}, r"loss\.sync_ref_model: True does nothing without loss\.beta"),
        (
            {"ref_model_sync_steps": 3},
            r"loss\.ref_model_sync_steps: 3 does nothing without loss\.s",
        ),
        ({"ref_model_mixup_alpha": 0.5}, r"loss\.ref_model_mixup_alpha: 0\.5 does nothing"),
        ({"ref_model_mixup_alpha": 0.0, **LOSS.model_dump(include={"beta"})}, "greater than 0"),
        ({"beta": 0.1, "sync_ref_model": True}, "loss.sync_ref_model and learner.lora.rank excl"),
    ],
)
def test_what_cannot_follow_is_refused_before_a_model_is_loaded(
    loss: dict[str, Any], message: str
) -> None:
    learner = LearnerConfig.model_validate({"lora": {"rank": 4}})
    with pytest.raises(ValueError, match=message):
        TrainConfig(model="m", out_dir=Path("o"), loss=LossConfig(**loss), learner=learner)
