"""A setting that would do nothing where it stands is refused, with what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_config, load_config_of, shipped_configs
from agentgrpo.config.recipe import RecipeConfig


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Reads a config that sets nothing, and overrides."""
    path = tmp_path / "config.toml"
    path.write_text('model = "m"\nout_dir = "o"\n')
    return lambda *overrides: load_config(path, overrides)


@pytest.mark.parametrize(
    ("override", "need", "then"),
    [
        ("learner.lora.alpha=8", "learner.lora.rank above 0", "learner.lora.rank=4"),
        ("learner.lora.serve=merged", "learner.lora.rank above 0", "learner.lora.rank=4"),
        (
            'learner.lora.target_modules=["q_proj"]',
            "learner.lora.rank above 0",
            "learner.lora.rank=4",
        ),
        (
            "learner.final_learning_rate=1e-7",
            'learner.decay = "linear" or "cosine"',
            "learner.decay=cosine",
        ),
        ("reward.decay_sigmas=false", "reward.sigma_tool or", "reward.sigma_length=0.5"),
        ("rollout.fork_threshold=9", 'rollout.history = "render"', "rollout.history=render"),
    ],
)
def test_what_does_nothing_is_refused_until_it_does(
    load: Callable[..., TrainConfig], override: str, need: str, then: str
) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ValueError, match=rf"^{key}: .* does nothing without {need}"):
        load(override)
    load(override, then)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "key", ["loss.sapo_temperature_pos", "rollout.temperature", "engine.kv_cache_gib"]
)
def test_numbers_are_finite(load: Callable[..., TrainConfig], key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"config key {key}: "):
        load(f"{key}={value}")


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_set_nothing_that_is_not_read(name: str) -> None:
    assert load_config_of(RecipeConfig, name).steps > 0
