"""What counts as user code and as a number, and late calls outside a command."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentgrpo
from agentgrpo.support import user_calls
from agentgrpo.support.user_calls import UserCodeError, as_number, await_within, user_call

PACKAGE = Path(agentgrpo.__file__).parent


@pytest.mark.parametrize(
    ("file", "users"),
    [
        (PACKAGE / "train.py", False),
        (PACKAGE / "examples" / "code_search" / "web.py", True),
        (PACKAGE.with_name("agentgrpo_task.py"), True),
        (PACKAGE.with_name("agentgrpo2") / "mine.py", True),
        (PACKAGE.with_name("agentgrpo") / "examples_of_ours.py", False),
        (Path(pytest.__file__), False),
        (Path(os.__file__), False),
        (Path(pytest.__file__).parents[1].with_name("site-packages-mine") / "m.py", False),
        (Path(os.__file__).parent.with_name("python3-mine") / "m.py", True),
    ],
)
def test_file_owner_depends_on_its_folder(file: Path, users: bool) -> None:
    assert user_calls._is_users(str(file)) is users


def test_event_loop_is_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make, result = asyncio.new_event_loop, list[object]()

    def slow() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        result.append(loop := make())
        return loop

    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    with ThreadPoolExecutor(8) as side:
        loops = set(side.map(user_calls.event_loop, ["of this test"] * 8))
    assert result == [*loops]


def hangs() -> None:
    """Never called."""


def test_late_call_outside_a_command_is_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A notebook, or a thread of somebody else's program."""
    with user_call(hangs, "f", limit_s=50.0):
        (call,) = user_calls._calls
        for seconds, message in (
            (26, "waiting for f (at "),
            (6, ""),
            (20, "error: f did not return"),
        ):
            call.since -= seconds
            user_calls._check_calls([call])
            err = capsys.readouterr().err
            assert err.startswith(message)
            assert bool(err) == bool(message)


def test_late_coroutine_is_cancelled_with_its_line() -> None:
    async def waits() -> None:
        await asyncio.sleep(1000)  # here

    async def ours() -> None:
        with user_call(waits):
            await await_within(0.01, waits())

    here = next(n for n, line in enumerate(inspect.getsourcelines(waits)[0]) if "# here" in line)
    line = inspect.getsourcelines(waits)[1] + here
    message = rf"waits did not return within 0.01 s \(at .*test_user_calls.py:{line}\)"
    with pytest.raises(UserCodeError, match=message):
        asyncio.run(ours())


def test_timeout_raised_by_the_user_passes() -> None:
    async def raises() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(await_within(100, raises()))


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
