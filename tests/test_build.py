"""What can be known of a model before the engine starts is told before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.models import check_model


def config(model: Path, **sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": str(model), "out_dir": "unused", **sections})


@pytest.mark.parametrize(("layers", "fits"), [(1, True), (2, True), (3, False)])
def test_more_layers_than_the_model_has_cannot_be_trained(
    tiny_model: Path, layers: int, fits: bool
) -> None:
    asked = config(tiny_model, learner={"trained_layers": layers})
    if fits:
        check_model(asked, str(tiny_model))
        return
    with pytest.raises(ValueError, match=r"learner\.trained_layers must be at most 2, got 3"):
        check_model(asked, str(tiny_model))


@pytest.mark.parametrize(("length", "fits"), [(1024, True), (1025, False)])
def test_a_context_longer_than_the_models_is_refused(
    tiny_model: Path, length: int, fits: bool
) -> None:
    asked = config(tiny_model, engine={"max_model_len": length})
    if fits:
        check_model(asked, str(tiny_model))
        return
    with pytest.raises(
        ValueError, match=r"engine\.max_model_len must be at most 1024, .* got 1025"
    ):
        check_model(asked, str(tiny_model))
