"""What counts as the user's code, and what becomes of calls where no command ends them."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

import agentgrpo
from agentgrpo import usercode
from agentgrpo.command import told
from agentgrpo.run.interrupt import OVERDUE, guarded, stop_after_step
from agentgrpo.usercode import Call, UserCodeError, awaited, calling

PACKAGE = Path(agentgrpo.__file__).parent


@pytest.mark.parametrize(
    ("file", "users"),
    [
        (PACKAGE / "train.py", False),
        (PACKAGE / "examples" / "web.py", True),
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
    assert usercode._is_users(str(file)) is users


def test_what_all_threads_share_is_made_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = asyncio.new_event_loop, list[object]()

    def slow() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        made.append(loop := make())
        return loop

    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    with ThreadPoolExecutor(8) as side:
        loops = set(side.map(usercode.event_loop, ["of this test"] * 8))
    assert made == [*loops]


def hangs() -> None:
    """Never called."""


def test_where_no_command_ends_a_call_its_limit_is_said_and_it_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A notebook, or a thread of somebody else's program."""
    with calling(hangs, "f", limit_s=5.0) as call:
        call.since -= 6
        usercode._look_at([call])
        assert "error: f has not come back after 5 s (at " in capsys.readouterr().err
        for seconds in (30, 300):
            call.since -= seconds
            usercode._look_at([call])
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("waiting for f (at ")


def test_a_bug_of_what_looks_at_calls_ends_the_command_and_not_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = SimpleQueue[str]()
    monkeypatch.setattr(usercode, "ends", [said.put])

    def fails(calls: list[Call]) -> None:
        raise RuntimeError("by hand")

    with calling(hangs):
        monkeypatch.setattr(usercode, "_look_at", fails)
        for _ in range(2):
            told = said.get(timeout=100)
            assert told == "a bug: looking at calls raised RuntimeError: by hand"


def test_a_coroutine_that_is_cancelled_from_outside_has_not_failed() -> None:
    async def waits() -> None:
        with calling(hangs):
            await asyncio.sleep(1000)

    async def raises() -> None:
        with calling(hangs):
            raise asyncio.CancelledError

    async def outside() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await waits()
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        with pytest.raises(UserCodeError, match="raised CancelledError"):
            await raises()

    asyncio.run(outside())


def test_a_coroutine_of_ours_that_cancels_itself_has_failed() -> None:
    """Awaited in a task of its own, so that no other ends with it, and at no later place."""

    async def leaves() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def ours() -> None:
        with calling(hangs):
            await usercode.awaited(leaves())

    with pytest.raises(UserCodeError, match="raised CancelledError"):
        asyncio.run(ours())


def test_what_is_overdue_when_the_command_has_ended_ends_nothing() -> None:
    with guarded():
        late = usercode.ends[-1]
    late("of the one before")
    with guarded():
        late("of the one before")
    assert callable(signal.getsignal(OVERDUE)), "one may be on its way: it must end nothing"
    signal.raise_signal(OVERDUE)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_none_of_the_guard() -> None:
    with guarded(), stop_after_step(print):
        child = os.fork()
        if child == 0:
            ours = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
            own = [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]
            same = all(a in (b, signal.SIG_IGN) for a, b in zip(ours, own, strict=True))
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            os._exit(same and not blocked and signal.set_wakeup_fd(-1) == -1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert callable(signal.getsignal(signal.SIGTERM))


def test_a_command_ends_as_it_would_where_nobody_can_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", closefd=False) as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        with told() as outcome:
            int("by hand")
        monkeypatch.undo()
        assert outcome.status == 2
        with pytest.raises(BrokenPipeError):
            nobody.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
    os.close(write)


def test_a_coroutine_that_was_cancelled_before_it_began_is_closed() -> None:
    async def never() -> None: ...

    made = never()

    async def run() -> None:
        task = asyncio.ensure_future(awaited(made))
        await asyncio.sleep(0)  # it waits for a task that has not begun
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert inspect.getcoroutinestate(made) == inspect.CORO_CLOSED
