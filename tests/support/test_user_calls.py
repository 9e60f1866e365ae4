"""What counts as user code, and late calls outside a command."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import agentgrpo
from agentgrpo.support import user_calls
from agentgrpo.support.user_calls import UserCodeError, await_within, user_call

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
