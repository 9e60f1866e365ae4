"""learner.use_liger_kernel: what a dry run says of it, and refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import transformers

from agentgrpo.config import TrainConfig
from agentgrpo.models import liger
from agentgrpo.models.liger import COMPARED, why_plain
from agentgrpo.models.models import check_model
from bench.models import config_of
from tests import qwen3


def install(monkeypatch: pytest.MonkeyPatch, there: bool = True, version: str = COMPARED) -> None:
    """Or take it away."""
    find = importlib.util.find_spec
    monkeypatch.setattr(liger, "version", lambda name: version)

    def found(name: str, *rest: Any) -> Any:
        return (find("json") if there else None) if name == "liger_kernel" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.parametrize(
    ("device", "package", "config", "said"),
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
        ("cuda", True, transformers.LlamaConfig(hidden_act="gelu"), "have the activation 'gelu'"),
    ],
)
def test_where_the_kernels_are_taken(
    monkeypatch: pytest.MonkeyPatch, device: str, package: bool, config: Any, said: str | None
) -> None:
    install(monkeypatch, package)
    assert why_plain(False, config, device) == "learner.use_liger_kernel = false"
    if said is None:
        assert why_plain("auto", config, device) is why_plain(True, config, device) is None
        return
    assert said in (why_plain("auto", config, device) or "")
    with pytest.raises(ValueError, match=r"learner\.use_liger_kernel = true: ") as refused:
        why_plain(True, config, device)
    assert said in str(refused.value)


def asked(model: Path, wanted: bool | str) -> TrainConfig:
    sections = {"learner": {"use_liger_kernel": wanted}, "engine": {"max_model_len": 128}}
    return TrainConfig.model_validate({"model": str(model), "out_dir": "o", **sections})


def test_a_dry_run_refuses_what_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    config_of("Qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_liger_kernel = true: Liger's kernels need an NVID"):
        check_model(asked(tmp_path, True), str(tmp_path), device="cpu")
    check_model(asked(tmp_path, True), str(tmp_path), device="cpu", trained=False)
    check_model(asked(tmp_path, True), str(tmp_path), device="cuda")


def test_a_version_that_was_not_compared_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version="0.6.0")
    said = why_plain("auto", qwen3.config("4b"), "cuda")
    assert said is not None
    assert said.startswith("the layers were compared with liger-kernel 0.8.5, and 0.6.0 is inst")
