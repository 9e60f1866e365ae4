"""Unsupported models are named from config.json alone: there are no weights to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from agentgrpo.config import TrainConfig
from agentgrpo.models import architectures
from agentgrpo.models.architectures import architecture_of, read_architecture, unsupported
from agentgrpo.models.models import check_model
from agentgrpo.train.dry_run import _learning
from bench.models import FAMILIES, PAGE, config_of, newest, table
from bench.pages import with_made


@pytest.fixture(autouse=True)
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the machine of the rows, where it was beside vLLM for Qwen3.5."""
    monkeypatch.setattr(architectures, "_installed", lambda package: True)


def refused(model: Path, *, trained: bool = True, **sections: Any) -> str:
    """check_model's error for a model on CPU; "" if none."""
    options = {"model": str(model), "out_dir": "o", "engine": {"max_model_len": 128}} | sections
    config = TrainConfig.model_validate(options)
    try:
        check_model(config, str(model), trained=trained)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_refused_as_in_its_row(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    why = refused(tmp_path, engine={"dtype": FAMILIES[name].dtype, "max_model_len": 128})
    reason, _, _ = why.removeprefix(f"model {str(tmp_path)!r}: ").partition(",")
    assert newest()[name]["refused"].partition(",")[0] == reason  # rows keep their day's words


@pytest.mark.parametrize("name", FAMILIES)
def test_supported_family_was_measured_and_agrees(name: str) -> None:
    row = newest()[name]
    limit = 1e-4 if row["dtype"] == "float32" else 1.0  # as engine.agreement_threshold()
    served = () if row.get("served_refused") else ("served",)
    for part in () if row["refused"] else ("full", *served):
        assert len(row[part]["max_dlogp"]) == 3
        assert max(row[part]["max_dlogp"]) < limit, part


@pytest.mark.parametrize("name", [name for name in FAMILIES if not newest()[name]["refused"]])
def test_dry_run_reports_the_row_of_the_family(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    config = TrainConfig.model_validate({"model": str(tmp_path), "out_dir": "o"})
    found_by_check = {check.name: check.found for check in _learning(config, str(tmp_path))}
    assert found_by_check["prefixes"] == {"shared": "trees"}[newest()[name]["full"]["prefixes"]]


def test_docs_page_has_the_table_of_the_rows() -> None:
    page = PAGE.read_text()
    assert page == with_made(page, "bench.models", table()), "python -m bench.models --write"


def test_recurrent_layers_are_known() -> None:
    actual = {name for name in FAMILIES if architecture_of(config_of(name)).recurrent}
    assert actual == {"Qwen3.5", "Qwen3.5, whole", "Granite 4 H", "Granite 4 H, experts", "LFM2"}


def test_missing_torchvision_is_found_before_vllm_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actual = architecture_of(config_of("Qwen3.5"))
    for there in (False, True):
        monkeypatch.setattr(architectures, "_installed", lambda package, there=there: there)
        why = unsupported(actual, device="cuda", trained=False) or ""
        assert ("imports torchvision, which is not installed" in why) is not there


def test_cpu_gated_delta_net_needs_bfloat16_without_adapters(tmp_path: Path) -> None:
    config_of("Qwen3.5").save_pretrained(tmp_path)
    assert "set engine.dtype to 'bfloat16', it is 'float32'" in refused(tmp_path, trained=False)
    sections: dict[str, Any] = {"engine": {"dtype": "bfloat16", "max_model_len": 128}}
    assert "supports no adapters" in refused(tmp_path, learner={"lora": {"rank": 4}}, **sections)
    assert not refused(tmp_path, **sections)


def test_unsupported_multimodal_model_is_named(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "max_position_embeddings": 256}
    transformers.Gemma3Config(text_config=text).save_pretrained(tmp_path)
    why = refused(tmp_path)
    assert "only its language model gemma3_text" in why
    assert "from checkpoints of gemma4, mistral3, qwen3_5. Save it as" in why
    assert not refused(tmp_path, trained=False)


def test_quantised_weights_are_named(tmp_path: Path) -> None:
    config_of("Qwen3").save_pretrained(tmp_path)
    assert not refused(tmp_path)
    path = tmp_path / "config.json"
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    assert "stored as mxfp4" in refused(tmp_path)
    assert not refused(tmp_path, trained=False)


def test_experts_are_refused_only_on_cpu(tmp_path: Path) -> None:
    config_of("gpt-oss").save_pretrained(tmp_path)
    assert "its layers have 4 experts" in refused(tmp_path)
    actual = read_architecture(str(tmp_path))
    assert unsupported(actual, device="cuda", trained=True) is None


@pytest.mark.parametrize("model_type", ["no-such-model", "vit"])
def test_model_type_without_causal_lm_is_named(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert model_type in refused(tmp_path)
    assert "Traceback" not in refused(tmp_path)
