"""What can be known of a model before the engine starts is told before it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.records.metrics import RunLog
from agentgrpo.records.run_folder import lock_run_dir, require_same_run
from agentgrpo.train import build
from agentgrpo.train.build import prepare
from agentgrpo.train.progress import Progress


def config(model: Path, **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": str(model), "out_dir": "unused"} | sections)


def test_invalid_loss_and_checkpoint_are_found_before_other_checks(tmp_path: Path) -> None:
    """Before the sandbox is looked at."""
    asked = config(Path("m"), loss={"loss_type": "no_such_module:loss"})
    with pytest.raises(ValueError, match=r"loss\.loss_type: .*no_such_module"):
        prepare(asked)
    damaged = tmp_path / "checkpoints" / "step_000003"
    damaged.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"step_000003: not a complete checkpoint"):
        prepare(config(Path("m"), out_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("sections", "package", "message"),
    [
        ({"learner": {"lora": {"rank": 4}}}, "peft", "learner.lora.rank: the package peft is not"),
        ({"reward": {"kind": "math"}}, "math_verify", "'math': the package math-verify"),
    ],
)
def test_missing_packages_are_found_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], package: str, message: str
) -> None:
    find = importlib.util.find_spec

    def without(name: str, *_: Any) -> Any:
        return None if name == package else find("json")

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ValueError, match=message):
        prepare(config(Path("m"), **sections))


def test_run_json_is_written_before_any_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between it would be taken for somebody else's records, and never go on."""
    asked = config(Path("m"), out_dir=str(tmp_path), preflight="always")
    policy = SimpleNamespace(vocab_size=300)
    chosen = {"weights": "shared", "prefixes": "shared", "trained_parameters": 1}
    chosen["all_parameters"] = 2
    learner = SimpleNamespace(step_count=0, describe=lambda: chosen, policy=policy)
    monkeypatch.setattr("agentgrpo.learn.weight_sync.policy_on", lambda *_, **__: (policy, None))
    monkeypatch.setattr("agentgrpo.learn.learner.Learner", lambda *_, **__: learner)

    class Killed(BaseException):
        pass

    def preflight(*_: Any, **__: Any) -> dict[str, float]:
        return {"seconds": 1.0}

    def killed(self: RunLog, step: int, **areas: Any) -> None:
        self._append("metrics.jsonl", [{"step": step}])
        raise Killed

    monkeypatch.setattr("agentgrpo.learn.preflight.preflight", preflight)
    monkeypatch.setattr(RunLog, "write", killed)
    engine = SimpleNamespace(device="cpu", describe=dict)
    parts: Any = SimpleNamespace(
        engine=engine, played="m", progress=Progress(1), jail={}, reward=SimpleNamespace(),
        resolved=SimpleNamespace(reward=asked.reward),
        env=None, adapter=None, resumed=None, log=RunLog(tmp_path), undo=contextlib.ExitStack(),
    )  # fmt: skip
    with pytest.raises(Killed):
        build._add_learner(asked, parts)
    assert (tmp_path / "metrics.jsonl").exists()
    require_same_run(asked)


LESS: dict[str, Any] = {
    "engine": {"kv_cache_gib": 0.25, "max_num_seqs": 8},
    "learner": {
        "max_tokens": 1024,
        "gradient_checkpointing": True,
        "offload_optimizer": True,
        "use_liger_kernel": False,
    },
    "steps": 900,
    "trackers": ["tensorboard"],
}


def test_resume_allows_only_settings_that_errors_ask_to_lower(tmp_path: Path) -> None:
    def asked(**sections: Any) -> TrainConfig:
        return config(Path("m"), **{"out_dir": str(tmp_path), **sections})

    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(
        ValueError, match=r"expected run\.json next to it, so agentgrpo did not write it"
    ):
        require_same_run(asked())
    then = asked().model_dump(mode="json")
    del then["eval_every"], then["loss"]["beta"]  # as if it was older than these settings
    (tmp_path / "run.json").write_text(json.dumps({"config": then}))
    require_same_run(asked(**LESS))
    others: dict[str, dict[str, Any]] = {
        "learner.learning_rate": {"learner": {"learning_rate": 1.0}},
        "seed": {"seed": 3},
        "loss.beta": {"loss": {"beta": 0.5}},
        "engine.max_model_len": {"engine": {"max_model_len": 512}},
    }
    for key, sections in others.items():
        with pytest.raises(ValueError, match=rf"holds a run with {key} = .*: set it back"):
            require_same_run(asked(**sections))


def test_ranks_share_the_lock_only_for_divided_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with lock_run_dir(tmp_path, ranks=True):
        monkeypatch.setenv("RANK", "1")
        lock_run_dir(tmp_path, ranks=True).close()
    with pytest.raises(ValueError, match="one process, got 2: start it without torchrun"):
        lock_run_dir(tmp_path)
