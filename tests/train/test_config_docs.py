"""Every setting is documented, where a person looks for it, and by the code alone."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_config
from agentgrpo.config.section import is_section, walk
from agentgrpo.train.config_docs import Setting, as_markdown, as_toml, settings, toml

ROOT = Path(__file__).parents[2]
NAMES = [f"{setting.section}.{setting.key}".lstrip(".") for setting in settings()]


@pytest.mark.parametrize("setting", list(settings()), ids=NAMES)
def test_every_key_has_a_description_and_a_type(setting: Setting) -> None:
    assert setting.text, f"{setting.section}.{setting.key} has no docstring in agentgrpo/config"
    assert setting.kind


def test_settings_lists_every_key_of_the_config() -> None:
    keys = {key for key, field in walk(TrainConfig) if not is_section(field.annotation)}
    assert set(NAMES) == keys


def test_docs_config_md_is_up_to_date() -> None:
    """After a change: `python -m agentgrpo.train.config_docs > docs/config.md`."""
    assert (ROOT / "docs" / "config.md").read_text() == as_markdown()


def test_commented_config_sets_only_the_given_values(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    values = {"model": 'a "quoted" name', "out_dir": tmp_path, "rollout.group_size": 4}
    path.write_text(as_toml(values))
    read = load_config(path)
    assert (read.model, read.out_dir, read.rollout.group_size) == (values["model"], tmp_path, 4)
    assert read == TrainConfig.model_validate({
        "model": values["model"], "out_dir": tmp_path, "rollout": {"group_size": 4}
    })  # fmt: skip
    for name in NAMES:
        assert f"{name.rpartition('.')[2]} = " in path.read_text()


def test_commented_config_with_unknown_key_raises() -> None:
    with pytest.raises(KeyError, match="nosuch"):
        as_toml({"model": "m", "out_dir": "o", "rollout.nosuch": 1})


VALUES = [
    'a"b\\c\nd', True, 1.5, [1, 2], {"a": 1, "b": ["x"]}, [], {}, [[{"role": "user"}]], 1e-6,
    "\x1b[0m\r\t\x7f\x00", "é\u2028", {"my:length": 1.0, "a.b": 1, "": 2, "c d": {"é": 3}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_toml_values_round_trip(value: Any) -> None:
    assert tomllib.loads(f"x = {toml(value)}")["x"] == value
