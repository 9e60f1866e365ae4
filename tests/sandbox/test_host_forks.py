"""Answers of the host's functions that are given again: by the cache, and to forks."""

import threading
import time

import pytest

from agentgrpo.sandbox import (
    HostCall,
    ReplayDiverged,
    SandboxPool,
    StepResult,
)
from tests.sandbox.hosted import seen, told, tools

pytestmark = [pytest.mark.nsjail, pytest.mark.usefixtures("hosted")]

# --- the cache


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
            values.append(
                session.step("number(1), number(1, 2), number(b=2, a=1), number(1)").value
            )
        assert host.calls == 4, "those that the cache answers count too"
    assert len(seen) == calls
    assert (values[0] == values[1]) == (cached == "run")


def test_failures_are_not_kept(pool: SandboxPool) -> None:
    def flaky() -> int:
        """Fails once."""
        seen.append(1)
        return 1 // (len(seen) - 1)

    with pool.acquire(host=tools(flaky, cached="run").begin()) as session:
        assert told(session.step("flaky()"))[0] == "ZeroDivisionError"
        assert session.step("flaky(), flaky()").value == "(1, 1)"
    assert len(seen) == 2


@pytest.mark.slow
def test_who_asks_meanwhile_waits_for_the_same_answer(pool: SandboxPool) -> None:
    shared = tools(cached="run")
    results: list[StepResult] = []

    def play() -> None:
        with pool.acquire(host=shared.begin()) as session:
            results.append(session.step("later(0.5)"))

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.value for result in results] == ["'late'"] * 4
    assert seen == ["late"]


# --- forks


@pytest.mark.slow
def test_a_fork_is_told_again_what_was_told_and_no_function_runs(pool: SandboxPool) -> None:
    def token() -> float:
        """Never twice the same."""
        seen.append(1)
        return time.monotonic()

    first = tools(token, cached="no", calls=3).begin()
    with pool.acquire(host=first) as session:
        session.step("a = token()")
        session.step("b = token()")
        with pool.fork(session) as fork:
            assert len(seen) == 2
            assert fork.step("a, b").value == session.step("a, b").value
            assert fork.host is not None
            assert fork.host is not first
            assert (fork.host.calls, fork.host.size) == (first.calls, first.size)
            assert fork.step("token()").error is None
            assert "used up" in told(fork.step("token()"))[1], "it has what was left"
            assert session.step("token()").error is None, "and the other keeps its own"


def test_a_repeated_step_that_calls_otherwise_is_not_answered(pool: SandboxPool) -> None:
    call = HostCall("add", b"[[1],{}]", "returned", (b"2",), 0.5)
    host = tools().begin()
    with pool.acquire(host=host) as session:
        for code, wanted in (("add(1)", "2"), ("add(3)", None), ("add(1); add(1)", None)):
            host.recall([call])
            assert session.step(code).value == wanted
        host.recall(None)
        assert (seen, host.seconds) == ([], 1.0)
        assert session.step("add(3)").value == "4"


@pytest.mark.slow
def test_a_fork_has_what_was_left_whatever_it_repeats(pool: SandboxPool) -> None:
    storm = (
        "n = 0\nfor i in range(9):\n try: add(i); n += 1\n except RuntimeError as e: print(e)\nn"
    )
    for cached in ("no", "rollout"):
        calls = tools(calls=4, cached=cached).begin()
        with pool.acquire(host=calls) as first:
            first.step("add(7)")
        with pool.acquire(host=calls) as session:
            before = session.step(storm)
            assert (before.value, before.host_refused) == ("3", 6)
            with pool.fork(session) as fork:
                assert fork.host is not None
                assert (fork.host.calls, fork.host.size) == (calls.calls, calls.size)
                assert fork.host.failures == calls.failures
                assert fork.step(storm).value == "0", "an earlier session's calls count"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["not flag", "flag"])
def test_a_repeated_step_that_makes_fewer_or_more_calls_is_no_fork(
    pool: SandboxPool, when: str
) -> None:
    code = ("import time\nflag = time.monotonic() > {until}\n"
            f"if {when}:\n try: add(1)\n except RuntimeError: pass")  # fmt: skip
    with pool.acquire(host=tools().begin()) as session:
        assert session.step("import time; time.monotonic() > 0").value == "True"
        until = time.monotonic() + 2.0
        assert session.step(code.format(until=until)).error is None
        time.sleep(max(0.0, until - time.monotonic()))
        with pytest.raises(ReplayDiverged, match="other calls"):
            pool.fork(session)


def test_recall_says_whether_all_of_it_was_asked_for() -> None:
    call = HostCall("add", b"[[1],{}]", "returned", (b"2",), 0.5)
    rest = (0, 9.0, None, lambda: False)
    host = tools().begin()
    for asked, whole in (([b"[[1],{}]"], True), ([], False), ([b"[[3],{}]"], False),
                         ([b"[[1],{}]"] * 2, False)):  # fmt: skip
        host.recall([call])
        for data in asked:
            host.answer("add", data, *rest)
        assert host.recall(None) is whole
        assert host.recall(None), "it is said once"
    used = host.calls
    host.recall([call, call])
    host.answer("add", b"[[1],{}]", *rest)
    host.recall_again()
    for _ in range(2):
        assert host.answer("add", b"[[1],{}]", *rest)[0] == call
    assert host.recall(None)
    assert (host.calls, seen) == (used + 2, []), "counted once"
