"""learner.use_liger_kernel: what a dry run reports and refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import transformers

from agentgrpo.config import TrainConfig
from agentgrpo.models import liger
from agentgrpo.models.liger import TESTED_VERSION, why_not_fused
from agentgrpo.models.models import check_model
from bench.models import config_of
from tests import qwen3


def install(
    monkeypatch: pytest.MonkeyPatch, there: bool = True, version: str = TESTED_VERSION
) -> None:
    """Pretend that Liger is (or is not) installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(liger, "version", lambda name: version)

    def found(name: str, *rest: Any) -> Any:
        return (find("json") if there else None) if name == "liger_kernel" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.parametrize(
    ("device", "package", "config", "message"),
    [
        ("cuda", True, qwen3.config("4b"), None),
        ("cpu", True, qwen3.config("4b"), "need an NVIDIA GPU"),
        (
            "cuda",
            False,
            qwen3.config("4b"),
            "liger-kernel 0.8.5, and none is installed; remedy: pip",
        ),
        ("cuda", True, config_of("LFM2"), "layers of model type 'lfm2' were not compared"),
        ("cuda", True, transformers.LlamaConfig(hidden_act="gelu"), "use activation 'gelu'"),
    ],
)
def test_liger_is_used_where_supported(
    monkeypatch: pytest.MonkeyPatch, device: str, package: bool, config: Any, message: str | None
) -> None:
    install(monkeypatch, package)
    assert why_not_fused(False, config, device) == "learner.use_liger_kernel = false"
    if message is None:
        assert why_not_fused("auto", config, device) is why_not_fused(True, config, device) is None
        return
    assert message in (why_not_fused("auto", config, device) or "")
    with pytest.raises(ValueError, match=r"learner\.use_liger_kernel = true: ") as refused:
        why_not_fused(True, config, device)
    assert message in str(refused.value)


def asked(model: Path, wanted: bool | str) -> TrainConfig:
    sections = {"learner": {"use_liger_kernel": wanted}, "engine": {"max_model_len": 128}}
    return TrainConfig.model_validate({"model": str(model), "out_dir": "o", **sections})


def test_dry_run_refuses_unsupported_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    config_of("Qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_liger_kernel = true: Liger's kernels need an NVID"):
        check_model(asked(tmp_path, True), str(tmp_path), device="cpu")
    check_model(asked(tmp_path, True), str(tmp_path), device="cpu", trained=False)
    check_model(asked(tmp_path, True), str(tmp_path), device="cuda")


def test_untested_liger_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version="0.6.0")
    message = why_not_fused("auto", qwen3.config("4b"), "cuda")
    assert message is not None
    assert message.startswith("the layers were compared with liger-kernel 0.8.5, and 0.6.0 is inst")
