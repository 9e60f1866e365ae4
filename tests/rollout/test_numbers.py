"""Numbers that users' code gives: Python's, numpy's, torch's; whoever asks takes all."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.actions import Observation
from agentgrpo.config import RewardConfig, RolloutConfig
from agentgrpo.envs import factory
from agentgrpo.rewards.rewards import score
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rollout.custom import CustomSampler, rollout_from_tokens
from agentgrpo.types import Group, Rollout, SpanReward, as_number
from agentgrpo.usercode import UserCodeError
from tests.playing import EOT, sampled, says, tasks
from tests.rollout.stubs import StubEnv, StubEpisode
from tests.rollout.test_limits import AGENT

NUMBERS = [
    np.float32(0.5), np.float64(0.5), np.float16(0.5), np.array(0.5, np.float32), Decimal("0.5"),
    torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16),
    torch.tensor(0.5, requires_grad=True),
]  # fmt: skip
NONE = [
    "0.5", b"0.5", None, [0.5], np.array([0.5]), torch.tensor([0.5]), math.nan, np.float32("inf"),
    10**400, torch.tensor(math.nan), {"a": 1.0}, 1j,
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_number_is_a_number(number: Any) -> None:
    assert as_number(number) == 0.5
    assert type(as_number(number)) is float


@pytest.mark.parametrize("value", NONE, ids=repr)
def test_what_is_none_is_not(value: Any) -> None:
    assert as_number(value) is None


def given(number: Any) -> Rollout:
    """A rollout that has the number from everybody who can give one."""
    (task,) = tasks(1)

    class Env(StubEnv):
        def reset(self, task: Any) -> StubEpisode:
            episode = super().reset(task)
            episode.finish = lambda answer: {"end": number}  # type: ignore[method-assign]
            return episode

    def mine(engine: Any, tasks: Any, n: int, params: Any) -> Any:
        made = rollout_from_tokens(task, [1], [2], [-1.0])
        made.rewards, made.span_rewards = {"mine": number}, [SpanReward(1, 2, "span", number)]
        made.stats = {"own": number}
        return [[made]]

    counts = {"goals": number}
    env = Env(answer=lambda code: Observation("seen", rewards={"step": number}, counts=counts))
    groups, _ = sampled(says("<code>1</code>", f"Answer: 1{EOT}"), AGENT, env, [task])
    (played,) = groups[0].rollouts
    config = RewardConfig(functions={f"{__name__}:half": 1.0}, overlap=False)
    half.number = number  # type: ignore[attr-defined]
    Scoring(lambda rollout: {"base": number}, config, lambda ids: "").score(groups)
    engine = SimpleNamespace(max_model_len=9, num_in_flight=0, abort_all=lambda: None)
    sampler: Any = CustomSampler(SimpleNamespace(rollout=mine), engine, RolloutConfig(), ())  # type: ignore[arg-type]
    (custom,), _ = sampler.play([task], 1, seed=0)
    played.rewards |= custom.rollouts[0].rewards
    played.span_rewards += custom.rollouts[0].span_rewards
    played.stats |= custom.rollouts[0].stats
    world: Any = SimpleNamespace(_world=None)
    played.rewards |= factory._World._rewards(world, number)
    return played


def half(view: Any) -> Any:
    return half.number  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_whoever_gives_it_it_is_recorded_as_a_float(number: Any) -> None:
    rollout = given(number)
    assert rollout.rewards.keys() == {"end", "base", "half", "mine", "environment"}
    assert [span.name for span in rollout.span_rewards] == ["step", "span"]
    values = [*rollout.rewards.values(), *(span.value for span in rollout.span_rewards)]
    assert {type(value) for value in values} == {float}
    assert json.loads(json.dumps(values)) == [0.5] * 7
    assert {type(value) for value in rollout.stats.values()} == {float}
    assert (rollout.stats["goals"], rollout.stats["own"]) == (0.5, 0.5)


def test_the_built_in_reward_takes_no_other_form() -> None:
    (task,) = tasks(1)
    rollout = rollout_from_tokens(task, [1], [2], [-1.0])
    with pytest.raises(UserCodeError, match=r"expected \{name: finite number\}"):
        score(Group(task=task, rollouts=[rollout]), lambda r: {"a": np.array([1.0])})
