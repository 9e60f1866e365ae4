"""A name of TRL's or verl's is answered with ours."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.config.other_trainers import NAMES, OURS
from agentgrpo.config.read import all_keys, load_config
from tests.given import LEAST


@pytest.mark.filterwarnings("ignore")
def test_every_name_is_theirs_and_leads_to_a_key_of_ours() -> None:
    assert NAMES.keys() <= {*all_keys(TrainConfig)}
    trl = pytest.importorskip("trl", reason="trl is in requirements-dev.txt")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    fields |= inspect.signature(trl.GRPOTrainer.__init__).parameters.keys()
    assert {name for name in OURS if "." not in name} <= fields


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_generations=8", r"key num_generations; did you mean rollout\.group_size\?"),
        ("loss.num_generations=8", r"did you mean rollout\.group_size\?"),
        ("temperature=0.5", r"did you mean rollout\.temperature\?"),
        ("data.train_files=x", r"did you mean data\.train\?"),
        ("actor_rollout_ref.actor.optim.lr=1", r"did you mean learner\.learning_rate\?"),
        ("learner.loss_type=grpo", r"did you mean loss\.loss_type\?"),
    ],
)
def test_another_trainers_name_is_answered_with_ours(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(LEAST, [override])
