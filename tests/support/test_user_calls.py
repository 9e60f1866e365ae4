"""What counts as the user's code, and what becomes of calls where no command ends them."""

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
from agentgrpo.support.user_calls import UserCodeError, user_call, within

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
def test_a_file_is_whose_folder_it_is_in(file: Path, users: bool) -> None:
    assert user_calls._is_users(str(file)) is users


def test_what_all_threads_share_is_made_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = asyncio.new_event_loop, list[object]()

    def slow() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        made.append(loop := make())
        return loop

    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    with ThreadPoolExecutor(8) as side:
        loops = set(side.map(user_calls.event_loop, ["of this test"] * 8))
    assert made == [*loops]


def hangs() -> None:
    """Never called."""


def test_where_no_command_ends_a_call_its_limit_is_said_once_and_it_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A notebook, or a thread of somebody else's program."""
    with user_call(hangs, "f", limit_s=50.0):
        (call,) = user_calls._calls
        for seconds, said in ((26, "waiting for f (at "), (6, ""), (20, "error: f has not come")):
            call.since -= seconds
            user_calls._look_at([call])
            err = capsys.readouterr().err
            assert err.startswith(said)
            assert bool(err) == bool(said)


def test_a_coroutine_that_is_late_is_cancelled_and_its_line_is_said() -> None:
    async def waits() -> None:
        await asyncio.sleep(1000)  # here

    async def ours() -> None:
        with user_call(waits):
            await within(0.01, waits())

    here = next(n for n, line in enumerate(inspect.getsourcelines(waits)[0]) if "# here" in line)
    line = inspect.getsourcelines(waits)[1] + here
    said = rf"waits has not come back after 0.01 s \(at .*test_user_calls.py:{line}\)"
    with pytest.raises(UserCodeError, match=said):
        asyncio.run(ours())


def test_a_timeout_of_the_users_own_is_no_limit_of_ours() -> None:
    async def raises() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(within(100, raises()))
