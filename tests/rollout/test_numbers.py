"""Numbers that users' code gives: Python's, numpy's, torch's; whoever asks takes all."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.support.user_calls import as_number

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
def test_valid_numbers_are_accepted(number: Any) -> None:
    assert as_number(number) == 0.5
    assert type(as_number(number)) is float


@pytest.mark.parametrize("value", NONE, ids=repr)
def test_invalid_numbers_are_errors(value: Any) -> None:
    assert as_number(value) is None
