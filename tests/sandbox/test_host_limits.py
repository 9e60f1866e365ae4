"""What calls of the host's functions may use: time, and a budget over a rollout's sessions."""

import asyncio
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from agentgrpo.sandbox import (
    HostBudget,
    SandboxPool,
    StepResult,
)
from agentgrpo.sandbox.channels import Channels
from agentgrpo.sandbox.guest.wire import encode
from agentgrpo.sandbox.host_tools import HostFailed
from agentgrpo.sandbox.outcome import Ending, RawStep
from tests.playing import wrapped
from tests.sandbox.hosted import LATE, later, release, seen, told, tools

pytestmark = [pytest.mark.nsjail, pytest.mark.usefixtures("hosted")]

# --- time


def test_a_call_that_hangs_has_its_own_limit(pool: SandboxPool) -> None:
    host = tools(call_s=0.2).begin()
    with pool.acquire(host=host) as session:
        result = session.step("hang()", timeout_s=40)
        assert told(result) == ("TimeoutError", "hang(): the host did not answer in time")
        assert 0.2 <= result.wall_s < 0.2 + LATE
        release.set()  # what it says now is nobody's
        assert session.step("add(1)").value == "2"
        assert host.failures == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("hang()", "timeout"),
        ("while True:\n try: hang()\n except BaseException: pass", "timeout_killed"),
        ("while True: pass", "timeout"),
        ("import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass", "timeout_killed"),
        ("import time; time.sleep(99)", "timeout"),
        ("import threading; threading.Thread(target=hang).start()", "timeout"),
    ],
)
def test_a_step_ends_within_its_limit_and_the_grace(
    pool: SandboxPool, code: str, status: str
) -> None:
    """Of two limits each is the one that holds, calls included; of a busy machine's making is LATE,
    and a limit that is another's, or none, is farther off than that.
    """
    for limit in (0.2, 1.5):
        with pool.acquire(host=tools(call_s=50).begin()) as session:
            result = session.step(code, timeout_s=limit)
            assert result.status in (status, "timeout_killed"), result
            assert limit <= result.wall_s < limit + session.limits.grace_s + LATE


def test_a_step_whose_time_ends_in_a_call_has_timed_out_however_it_goes_on(
    pool: SandboxPool,
) -> None:
    """The answer may come before the interrupt does, and the code may end of itself."""
    with pool.acquire(host=tools(call_s=99).begin()) as session:
        for limit, asked in ((0.05, (b"hang", b"[[],{}]")), (99.0, (b"add", b"[[1],{}]"))):
            talk = session.conversation(((), (), b"", 1, limit, 0.3, 9, 9, 9, None))

            def part(number: int, *fields: bytes) -> RawStep:
                told = encode(number, [*fields])[4:]
                nothing = (b"", b"", 0)
                return (Ending.ANSWERED, False, 0.0, nothing, nothing, b"", told, 0, 0, 0, 0)

            assert talk.goes_on(part(1, b"call", *asked))
            assert talk.answer() is not None
            assert not talk.goes_on(part(2, b"ok"))
            assert talk.raw[1] is (asked[0] == b"hang")


def test_no_call_is_made_when_the_step_has_no_time_left(pool: SandboxPool) -> None:
    with pool.acquire(host=tools().begin()) as session:
        session.limits = replace(session.limits, grace_s=30.0)  # of a busy machine
        session.step("import time")
        code = "try: time.sleep(99)\nexcept KeyboardInterrupt:\n try: add(1)\n"
        result = session.step(f"{code} except TimeoutError: print('late')", timeout_s=0.2)
        assert (result.status, result.stdout, seen) == ("timeout", "late\n", [])


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_closing_a_session_does_not_wait_for_a_call(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Nor for the interpreter's end, before which that could say that the call has failed."""
    if not killed:
        monkeypatch.setattr(Channels, "signal", lambda self: True)
    session = pool.acquire(host=tools(call_s=50).begin())
    ended: list[StepResult] = []
    thread = threading.Thread(target=lambda: ended.append(session.step("hang()", timeout_s=50)))
    began = time.monotonic()
    thread.start()
    while not seen:
        time.sleep(0.01)
    session.close()
    thread.join()
    assert time.monotonic() - began < LATE
    assert ended[0].detail == "the session was closed"
    assert [call.name for call in ended[0].host_calls] == ["hang"]


def test_a_function_cannot_step_the_session_that_calls_it(pool: SandboxPool) -> None:
    def again() -> str:
        """A step within the step."""
        return str(session.step("1").status)

    with pool.acquire(host=tools(again).begin()) as session:
        assert "waits for the function" in told(session.step("again()"))[1]
        assert session.step("1").value == "1"


def test_a_call_that_hangs_is_asked_anew_by_who_comes_later() -> None:
    def flaky() -> str:
        """Hangs once, then fails."""
        seen.append(1)
        if len(seen) > 1:
            return "fine"
        release.wait(60)
        raise ValueError

    host = tools(flaky, cached="run", call_s=0.05)
    ask = ("flaky", b"[[],{}]", 0, 9.0, None, lambda: False)
    assert host.begin().answer(*ask)[0].told[0] == b"TimeoutError"
    time.sleep(0.02)
    host.budget = HostBudget()
    assert host.begin().answer(*ask)[0].told == (b'"fine"',)
    release.set()
    join("host-flaky")
    assert host.begin().answer(*ask)[0].told == (b'"fine"',)
    assert len(seen) == 2, "the later call's answer is kept"


def join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


def test_calls_that_do_not_come_back_fail_the_machine_not_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentgrpo.sandbox.host_tools.MAX_RUNNING", 2)
    host = tools(call_s=0.01)
    rest = (0, 9.0, None, lambda: False)
    for _ in range(2):
        assert host.begin().answer("hang", b"[[],{}]", *rest)[0].told[0] == b"TimeoutError"
    with pytest.raises(HostFailed, match=r"add\(\): 2 calls .* 2 of them of hang\(\)"):
        host.begin().answer("add", b"[[1],{}]", *rest)
    release.set()
    join("host-hang")
    assert host.begin().answer("add", b"[[1],{}]", *rest)[0].told == (b"2",)


@pytest.mark.parametrize("how", ["plain", "in a wrapper"])
def test_the_event_loop_outlives_what_runs_on_it_and_a_blocked_one_is_the_machines_fault(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exits() -> str:
        """A task of it ends by sys.exit()."""

        async def inner() -> None:
            sys.exit(3)

        task = asyncio.get_running_loop().create_task(inner())
        task.add_done_callback(lambda done: done.exception())  # or it is logged at some later time
        await asyncio.sleep(0.05)
        return "went on"

    async def blocks() -> None:
        """Does not await."""
        release.wait(60)

    host = tools(exits, later, blocks, call_s=5.0)
    rest = (0, 9.0, None, lambda: False)
    assert host.begin().answer("exits", b"[[],{}]", *rest)[0].told == (b'"went on"',)
    assert host.begin().answer("later", b"[[0.0],{}]", *rest)[0].told == (b'"late"',)
    monkeypatch.setattr("agentgrpo.sandbox.host_tools.LOOP_S", 0.05)
    quick = tools(later, blocks if how == "plain" else wrapped(blocks), call_s=0.05)
    for name, data in (("blocks", b"[[],{}]"), ("later", b"[[0.0],{}]")):
        with pytest.raises(HostFailed, match=f"{name}.*event loop .* is blocked"):
            quick.begin().answer(name, data, *rest)
    release.set()
    assert host.begin().answer("later", b"[[0.0],{}]", *rest)[0].told == (b'"late"',)


@pytest.mark.parametrize("kind", ["exits", "nameless"])
def test_an_exception_that_cannot_be_read_settles_its_call(kind: str) -> None:
    call = ("fail", b'[["%s"],{}]' % kind.encode(), 0, 9.0, None, lambda: False)
    if kind == "exits":
        assert tools().begin().answer(*call)[0].told == (b"Exits", b"<unprintable>")
    else:
        with pytest.raises(HostFailed, match="cannot be read"):
            tools().begin().answer(*call)


# --- budget


def test_calls_at_once_reserve_what_they_may_use() -> None:
    rest = (0, 9.0, None, lambda: False)
    for budget in ({"seconds": 9.0, "call_s": 9.0}, {"total_kib": 64, "answer_kib": 64}):
        calls = tools(**budget).begin()
        thread = threading.Thread(target=calls.answer, args=("hang", b"[[],{}]", *rest))
        release.clear()
        thread.start()
        while "hang" not in seen:
            time.sleep(0.001)
        refused, made = calls.answer("add", b"[[1],{}]", *rest)
        assert (refused.kind, made) == ("refused", False)
        release.set()
        thread.join()
        assert calls.answer("add", b"[[1],{}]", *rest)[0].told == (b"2",), "it was given back"
        seen.clear()


def test_a_refused_call_is_not_read() -> None:
    calls = tools(calls=1).begin()
    rest = (0, 9.0, None, lambda: False)
    calls.answer("add", b"[[1],{}]", *rest)
    told_, made = calls.answer("add", b"no data at all", *rest)
    assert (told_.kind, made, calls.calls, calls.failures) == ("refused", False, 1, 1)


def test_refused_calls_are_bounded(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgrpo.sandbox.calls.MAX_REFUSED", 5)
    code = "for n in range({}):\n try: add(n)\n except RuntimeError: pass"
    with pool.acquire(host=tools(calls_per_step=2).begin()) as session:
        assert session.step(code.format(7)).status == "ok"
        result = session.step(code.format(8))
        assert (result.status, result.detail, result.state_lost) == (
            "protocol_error", "more than 5 calls over the budget", True
        )  # fmt: skip
        assert (len(result.host_calls), result.host_refused) == (2, 6)


# --- budget over sessions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "code", "wanted"),
    [
        ({"calls": 3}, "add(1)", "the budget of 3 calls of"),
        ({"calls_per_step": 1}, "add(1); add(1)", "the budget of 1 calls in one step of"),
        ({"seconds": 0.05}, "later(0.1)", "the budget of 0.05 seconds of"),
        ({"total_kib": 1}, "later(0.0, 'x' * 300)", "the budget of 1 KiB of"),
    ],
)
def test_a_budget_holds_over_the_sessions_of_a_rollout(
    pool: SandboxPool, budget: Any, code: str, wanted: str
) -> None:
    host = tools(**budget).begin()
    failures = []
    for _ in range(6):
        with pool.acquire(host=host) as session:
            result = session.step(code)
            failures += [told(result)] if result.error else []
    assert ("RuntimeError", f"{wanted} functions of the host is used up") in failures
    assert host.calls == len(seen)
    assert host.failures == len(failures)
    with pool.acquire(host=tools(**budget).begin()) as session:
        assert session.step("add(5)").value == "6", "another rollout has its own"
