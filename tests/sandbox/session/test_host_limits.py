"""Limits of host functions: time, and the budget of a rollout."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from agentgrpo.sandbox import (
    HostCall,
    SandboxPool,
    StepResult,
)
from tests.sandbox.session.hosted import LATE, answer, error_of, release, seen, tools

pytestmark = [pytest.mark.nsjail, pytest.mark.usefixtures("hosted")]

# --- time


def test_a_hanging_call_times_out(pool: SandboxPool) -> None:
    host = tools(call_s=0.2).begin()
    with pool.acquire(host=host) as session:
        result = session.step("hang()", timeout_s=40)
        assert error_of(result) == ("TimeoutError", "hang(): the host did not answer in time")
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
def test_a_step_with_calls_ends_within_limit_and_grace(
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


def test_no_call_is_made_when_the_step_has_no_time_left(pool: SandboxPool) -> None:
    with pool.acquire(host=tools().begin()) as session:
        session.limits = replace(session.limits, grace_s=30.0)  # of a busy machine
        session.step("import time")
        code = "try: time.sleep(99)\nexcept KeyboardInterrupt:\n try: add(1)\n"
        result = session.step(f"{code} except TimeoutError: print('late')", timeout_s=0.2)
        assert (result.status, result.stdout, seen) == ("timeout", "late\n", [])


@pytest.mark.slow
def test_closing_a_session_does_not_wait_for_a_call(pool: SandboxPool) -> None:
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
        assert "session that waits for it" in error_of(session.step("again()"))[1]
        assert session.step("1").value == "1"


# --- budget and cache


@pytest.mark.slow
@pytest.mark.parametrize(("cached", "calls"), [("no", 8), ("rollout", 4), ("run", 2)])
def test_the_same_arguments_have_the_same_answer(
    pool: SandboxPool, cached: str, calls: int
) -> None:
    def number(a: int, b: int = 2) -> int:
        """Another one each time."""
        seen.append(a)
        return len(seen)

    shared = tools(number, cached=cached)
    values = []
    for _ in range(2):
        host = shared.begin()
        with pool.acquire(host=host) as session:
            values.append(session.step("number(1), number(1, 2), number(1, 2), number(1)").value)
        assert host.calls == 4, "those that the cache answers count too"
    assert len(seen) == calls
    assert (values[0] == values[1]) == (cached == "run")


def test_concurrent_calls_share_an_answer_and_failures_are_not_cached() -> None:
    def flaky() -> int:
        """Fails once, and is another one each time."""
        seen.append(1)
        if len(seen) == 1:
            raise ValueError("once")
        barrier.wait(10)
        return threading.get_ident()

    barrier = threading.Barrier(2)
    shared = tools(flaky, cached="run")
    assert answer(shared.begin(), "flaky").kind == "raised"
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(answer, shared.begin(), "flaky") for _ in range(2)]
        assert len({one.result().answer for one in both}) == 1


def test_the_cache_drops_the_oldest_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgrpo.sandbox.session.host_tools.CACHE_MIB", 1)
    calls = tools(cached="run", total_kib=9999, argument_kib=256).begin()
    for value in (b"a", b"b", b"c", b"d", b"e", b"a"):
        answer(calls, "later", b'[[0.0,"%s"],{}]' % (value * (200 << 10)))
    assert [value[0] for value in seen] == ["a", "b", "c", "d", "e", "a"]


@pytest.mark.parametrize("cached", ["no", "rollout", "run"])
def test_replay_reports_whether_the_calls_were_the_same(cached: str) -> None:
    call = HostCall("add", b"[[1],{}]", "returned", (b"2",), 0.5)
    host = tools(cached=cached).begin()
    for asked, whole in (([b"[[1],{}]"], True), ([], False), ([b"[[3],{}]"], False),
                         ([b"[[1],{}]"] * 2, False)):  # fmt: skip
        host.replay_answers([call])
        for data in asked:
            answer(host, "add", data)
        assert host.replay_answers(None) is whole
        assert host.replay_answers(None), "it is said once"
    used = host.calls
    host.replay_answers([call, call])
    for _ in range(2):
        assert answer(host, "add", b"[[1],{}]") == call
    assert host.replay_answers(None)
    assert (host.calls, seen) == (used + 2, [])
    answer(host, "add", b"[[1],{}]")
    assert seen == [(1, 1)] * (cached == "no"), "what was recalled is in the cache"


# --- budget over sessions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "code", "wanted"),
    [
        ({"calls": 3}, "add(1)", "the budget of 3 calls"),
        ({"calls_per_step": 1}, "add(1); add(1)", "the budget of 1 calls in one step"),
        ({"seconds": 0.05}, "later(0.1)", "the budget of 0.05 seconds"),
        ({"total_kib": 1}, "later(0.0, 'x' * 300)", "the budget of 1 KiB"),
    ],
)
def test_a_budget_holds_across_sessions_of_a_rollout(
    pool: SandboxPool, budget: Any, code: str, wanted: str
) -> None:
    host = tools(**budget).begin()
    failures = []
    for _ in range(6):
        with pool.acquire(host=host) as session:
            result = session.step(code)
            failures += [error_of(result)] if result.error else []
    assert ("RuntimeError", f"{wanted} for host functions is used up") in failures
    assert host.calls == len(seen)
    assert host.failures == len(failures)
    with pool.acquire(host=tools(**budget).begin()) as session:
        assert session.step("add(5)").value == "6", "another rollout has its own"
