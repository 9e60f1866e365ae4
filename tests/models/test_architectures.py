"""What cannot work is said by name from config.json alone: no weights are there to be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from agentgrpo.config import TrainConfig
from agentgrpo.models import architectures
from agentgrpo.models.architectures import kinds_in, kinds_of, unsupported
from agentgrpo.models.models import check_model
from agentgrpo.train.dry_run import _learning
from bench.models import FAMILIES, PAGE, config_of, newest, table
from bench.pages import with_made


@pytest.fixture(autouse=True)
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the machine of the rows, where it was beside vLLM for Qwen3.5."""
    monkeypatch.setattr(architectures, "_installed", lambda package: True)


def refused(model: Path, *, trained: bool = True, **sections: Any) -> str:
    """What check_model says of a model on CPU; "" if nothing."""
    given = {"model": str(model), "out_dir": "o", "engine": {"max_model_len": 128}} | sections
    config = TrainConfig.model_validate(given)
    try:
        check_model(config, str(model), trained=trained)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_refused_if_and_only_if_its_row_says_so(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    why = refused(tmp_path, engine={"dtype": FAMILIES[name].dtype, "max_model_len": 128})
    assert newest()[name]["refused"] == why.removeprefix(f"model {str(tmp_path)!r}: ")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_that_is_not_refused_was_measured_and_agrees(name: str) -> None:
    row = newest()[name]
    limit = 1e-4 if row["dtype"] == "float32" else 1.0  # as engine.agreement_threshold()
    served = () if row.get("served_refused") else ("served",)
    for part in () if row["refused"] else ("full", *served):
        assert len(row[part]["max_dlogp"]) == 3
        assert max(row[part]["max_dlogp"]) < limit, part


@pytest.mark.parametrize("name", [name for name in FAMILIES if not newest()[name]["refused"]])
def test_a_dry_run_says_what_the_row_of_the_family_says(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    config = TrainConfig.model_validate({"model": str(tmp_path), "out_dir": "o"})
    said = {check.name: check.found for check in _learning(config, str(tmp_path))}
    assert said["prefixes"] == {"shared": "trees"}[newest()[name]["full"]["prefixes"]]


def test_the_page_has_the_table_of_the_rows() -> None:
    page = PAGE.read_text()
    assert page == with_made(page, "bench.models", table()), "python -m bench.models --write"


def test_layers_with_a_state_are_known() -> None:
    found = {name for name in FAMILIES if kinds_in(config_of(name)).recurrent}
    assert found == {"Qwen3.5", "Qwen3.5, whole", "Granite 4 H", "Granite 4 H, experts", "LFM2"}


def test_torchvision_is_asked_for_before_vllm_fails_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = kinds_in(config_of("Qwen3.5"))
    for there in (False, True):
        monkeypatch.setattr(architectures, "_installed", lambda package, there=there: there)
        why = unsupported(found, device="cuda", trained=False) or ""
        assert ("imports torchvision, which is not installed" in why) is not there


def test_a_gated_delta_net_on_cpu_takes_bfloat16_and_no_adapters(tmp_path: Path) -> None:
    config_of("Qwen3.5").save_pretrained(tmp_path)
    assert "set engine.dtype to 'bfloat16', it is 'float32'" in refused(tmp_path, trained=False)
    sections: dict[str, Any] = {"engine": {"dtype": "bfloat16", "max_model_len": 128}}
    assert "no adapters beside it" in refused(tmp_path, learner={"lora": {"rank": 4}}, **sections)
    assert not refused(tmp_path, **sections)


def test_a_model_with_parts_for_images_of_another_family_is_named(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "max_position_embeddings": 256}
    transformers.Gemma3Config(text_config=text).save_pretrained(tmp_path)
    why = refused(tmp_path)
    assert "beside its language model gemma3_text" in why
    assert "from such checkpoints of gemma4, mistral3, qwen3_5; save it as" in why
    assert not refused(tmp_path, trained=False)


def test_quantised_weights_are_named(tmp_path: Path) -> None:
    config_of("Qwen3").save_pretrained(tmp_path)
    assert not refused(tmp_path)
    path = tmp_path / "config.json"
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    assert "stored as mxfp4" in refused(tmp_path)
    assert not refused(tmp_path, trained=False)


def test_experts_are_refused_on_cpu_alone(tmp_path: Path) -> None:
    config_of("gpt-oss").save_pretrained(tmp_path)
    assert "its layers have 4 experts" in refused(tmp_path)
    found = kinds_of(str(tmp_path))
    assert unsupported(found, device="cuda", trained=True) is None


@pytest.mark.parametrize("model_type", ["no-such-model", "vit"])
def test_a_type_that_transformers_cannot_generate_with_is_named(
    tmp_path: Path, model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert model_type in refused(tmp_path)
    assert "Traceback" not in refused(tmp_path)
