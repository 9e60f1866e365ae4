"""Numbers that users' code gives: Python's, numpy's, torch's; whoever asks takes all."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.rewards.rewards import score
from agentgrpo.rollout.custom import rollout_from_tokens
from agentgrpo.types import Group
from agentgrpo.usercode import UserCodeError, as_number
from tests.playing import tasks

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


def test_the_built_in_reward_takes_no_other_form() -> None:
    (task,) = tasks(1)
    rollout = rollout_from_tokens(task, [1], [2], [-1.0])
    with pytest.raises(UserCodeError, match=r"expected \{name: finite number\}"):
        score(Group(task=task, rollouts=[rollout]), lambda r: {"a": np.array([1.0])})
