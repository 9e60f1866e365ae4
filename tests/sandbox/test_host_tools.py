"""Functions of the host that sessions call: what crosses, what it may use, what is told twice."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import urlopen

import pytest

from agentgrpo.sandbox import (
    AsyncSandbox,
    Console,
    HostBudget,
    HostCall,
    HostTools,
    InvalidArgumentException,
    Limits,
    ReplayDiverged,
    Sandbox,
    SandboxException,
    SandboxInfraError,
    SandboxPool,
    Session,
    StepLoop,
    StepResult,
)
from agentgrpo.sandbox.calls import joined
from agentgrpo.sandbox.guest.data import NotData, read, spell
from agentgrpo.sandbox.guest.wire import Malformed
from agentgrpo.sandbox.host_tools import HostCalls, HostFailed

pytestmark = pytest.mark.nsjail
LATE = 10.0
"""Seconds that a busy machine may add to a limit; far below what a hang would take."""
seen: list[Any] = []
"""What the functions below were called with."""


@pytest.fixture(autouse=True)
def forget() -> None:
    seen.clear()


def add(a: int, b: int = 1) -> int:
    """The sum."""
    seen.append((a, b))
    return a + b


async def later(seconds: float, value: str = "late") -> str:
    """A text, after a while."""
    seen.append(value)
    await asyncio.sleep(seconds)
    return value


def fail(kind: str) -> Any:
    """Does what it should not."""
    seen.append(kind)
    if kind == "object":
        return object()
    if kind == "print":
        sys.stdout.write("to the host's own stdout")
        return "printed"
    if kind == "large":
        return "x" * 10_000
    if kind == "unprintable":

        class Unprintable(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise Unprintable
    if kind == "exits":

        class Exits(Exception):
            def __str__(self) -> str:
                raise SystemExit

        raise Exits
    if kind == "nameless":

        class Nameless(type):
            __module__ = property(lambda _: 1 // 0)

        odd: Any = Nameless("Odd", (Exception,), {})
        raise odd
    raised: dict[str, BaseException] = {
        "value": ValueError("a bad value"), "exit": SystemExit(3), "stop": StopIteration("end"),
        "interrupt": KeyboardInterrupt(), "key": KeyError("k"), "own": Own("mine"),
        "machine": SandboxInfraError("the index is down"), "long": ValueError("y" * 9999),
        "group": ExceptionGroup("g", [ValueError()]),
    }  # fmt: skip
    raise raised[kind]


class Own(Exception):
    """Of the host's."""


release = threading.Event()


def hang() -> str:
    """Until it is let go."""
    seen.append("hang")
    release.wait(60)
    return "too late"


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    release.clear()
    yield
    release.set()


def tools(*functions: Callable[..., Any], cached: Any = "no", **budget: Any) -> HostTools:
    return HostTools(functions or (add, later, fail, hang), budget=HostBudget(**budget),
                     cached=cached)  # fmt: skip


def told(result: StepResult) -> tuple[str, str]:
    assert result.error is not None, result
    return result.error.name, result.error.value


# --- what crosses


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**63 - 1,
        1.5,
        -0.0,
        1e300,
        "",
        "é\N{SNOWMAN}\0",
        [],
        {"a": [1, {}]},
    ],
)
def test_data_crosses_as_it_is(value: Any) -> None:
    text = spell(value, 1000)
    again = read(text, 1000)
    assert repr(again) == repr(value)
    assert type(again) is type(value)


class Text(str):
    """No str, exactly."""


@pytest.mark.parametrize(
    "value",
    [2**63, -(2**63) - 1, 10**4000, float("nan"), float("inf"), "\ud800", (1,), {1}, b"x", 1j,
     object(), Text("a"), {1: 2}, {Text("a"): 1}],
)  # fmt: skip
def test_what_is_no_data_crosses_nowhere(value: Any) -> None:
    for held in (value, [value], {"a": [value]}):
        with pytest.raises(NotData):
            spell(held, 1 << 20)


@pytest.mark.parametrize(
    "text",
    ["", " 1", "1 ", "01", "-0", "1E1", "1.00", "NaN", "Infinity", "1e999", "[1, 2]",
     '{"a":1,"a":1}', "9" * 5000, str(2**63), '"\\u0061"', '"\\ud800"', '"\N{SNOWMAN}"',
     "[" * 5000, "nul", "(1,)"],
)  # fmt: skip
def test_a_value_has_one_text(text: str) -> None:
    for data in (text.encode(), text.encode("utf-16"), b"\xff"):
        with pytest.raises(NotData):
            read(data, 1 << 20)


def test_data_is_limited_in_size_on_both_sides() -> None:
    assert len(spell("x" * 98, 100)) == 100
    for big in ("x" * 99, [0] * 51):
        with pytest.raises(NotData, match="more than 100 bytes"):
            spell(big, 100)
    with pytest.raises(NotData, match="more than 100 bytes"):
        read(b'"' + b"x" * 99 + b'"', 100)


def test_data_that_holds_itself_many_times_is_refused_before_it_is_written() -> None:
    wide: Any = 0
    for _ in range(32):  # four billion parts
        wide = [wide, wide]
    with pytest.raises(NotData, match="more than 100 bytes"):
        spell(wide, 100)


def deep(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


def test_data_is_limited_in_depth_on_both_sides() -> None:
    assert read(spell(deep(32), 999), 999) == deep(32)
    with pytest.raises(NotData, match="deep"):
        spell(deep(33), 999)
    with pytest.raises(NotData, match="deep"):
        read(b"[" * 33 + b"1" + b"]" * 33, 999)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "expected different names"),
        ([add, add], "expected different names"),
        ([lambda: 1], "no name to call it by"),
        (["add"], "expected functions"),
        ([partial(int, 1)], "Python's own"),
    ],
)
def test_what_cannot_be_offered_is_refused(functions: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentException, match=message):
        HostTools(functions)


def test_names_of_python_and_annotations_that_cannot_be_checked_are_refused() -> None:
    def open() -> None: ...

    def takes(a: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821

    def waits(a: threading.Event) -> None: ...

    for function, message in ((open, "Python's own"), (takes, "Nowhere"), (waits, "Event")):
        with pytest.raises(InvalidArgumentException, match=message):
            HostTools([function])
    with pytest.raises(InvalidArgumentException, match="cached"):
        HostTools([add], cached="forever")  # type: ignore[arg-type]
    for field in ("calls", "call_s", "total_kib"):
        with pytest.raises(ValueError, match=f"host_budget.{field}"):
            HostBudget(**{field: 0})


CLIENT = threading.Event()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda q, client=CLIENT: 1, "client is no data .a Event."),
        (lambda q, sizes=(1, 2): 1, "sizes is no data"),
        (lambda q, api_key="sk-1": 1, "api_key looks like a secret"),
        (lambda q, apiKey="sk-1": 1, "apiKey looks like a secret"),
        (lambda q, auth_tokens=["sk-1"]: 1, "auth_tokens looks like a secret"),
        (lambda q, *, where="http://me:pw@host": 1, "where is keyword-only"),
    ],
)
def test_a_default_that_is_not_for_a_policy_is_refused(function: Any, why: str) -> None:
    function.__name__ = "search"
    wanted = rf"search: the default of {why}.*functools.partial\(search, "
    with pytest.raises(InvalidArgumentException, match=wanted):
        HostTools([function])


def test_defaults_that_are_for_a_policy_are_shown() -> None:
    def search(key: str, max_tokens: int = 9, token: str | None = None, keyword: str = "a") -> str:
        """A key without a default is the policy's own."""
        return key

    assert "max_tokens: int = 9, token: str | None = None" in HostTools([search]).shown


@pytest.mark.parametrize("is_async", [False, True])
def test_what_partial_binds_is_neither_shown_nor_to_be_set(is_async: bool) -> None:
    def search(base: str, query: str, api_key: str, client: Any = CLIENT, top_n: int = 3) -> Any:
        """Of the web."""
        return [base, query, api_key, top_n, client is CLIENT]

    async def also(
        base: str, query: str, api_key: str, client: Any = CLIENT, top_n: int = 3
    ) -> Any:
        """Of the web."""
        return search(base, query, api_key, client, top_n)

    also.__name__ = "search"
    bound = partial(also if is_async else search, "base-1", api_key="sk-1", client=CLIENT)
    made = HostTools([bound])
    assert made.shown.startswith('def search(query: str, *, top_n: int = 3) -> Any:\n    """Of the')
    rest = (0, 9.0, None, lambda: False)
    calls = made.begin()
    good, _ = calls.answer("search", b'[["q"],{"top_n":"4"}]', *rest)
    assert good.told == (b'["base-1","q","sk-1",4,true]',)
    for named in (b"api_key", b"client"):
        bad, _ = calls.answer("search", b'[["q"],{"%s":"mine"}]' % named, *rest)
        assert bad.told == (b"TypeError", b"%s: Unexpected keyword argument" % named)


def test_a_key_holds_what_was_passed_and_nothing_else() -> None:
    def f(a: object, b: object = None, table: dict[str, int] = {}) -> None: ...  # noqa: B006

    tool = HostTools([f]).by_name["f"]
    table = f.__defaults__
    assert table is not None
    table[1][("a", "b")] = CLIENT  # a default that is no data any more
    given: list[Any] = [
        ([1], {}), ([1.0], {}), ([True], {}), (["1"], {}), ([1, None], {}), ([1, "None"], {}),
        ([], {"a": 1, "b": 1}), ([1, 2, {}, 3], {}), ([{"a": 1, "b": 2}], {}),
    ]  # fmt: skip
    keys = [tool.key(args, kwargs) for args, kwargs in given]
    assert len({*keys}) == len(given)
    assert tool.key([1, 1], {}) == tool.key([1], {"b": 1}) == tool.key([], {"b": 1, "a": 1})
    assert tool.key([{"b": 2, "a": 1}], {}) == keys[-1]


def test_only_what_is_exact_reaches_a_function() -> None:
    calls = tools().begin()
    good = (b"[[1],{}]", 0, 9.0, None, lambda: False)
    assert calls.answer("add", *good)[0].told == (b"2",)
    for name, data in (("fail2", b"[[],{}]"), ("add", b"[[1], {}]"), ("add", b"[[1]]"),
                       ("add", b"{}"), ("__init__", b"[[],{}]")):  # fmt: skip
        with pytest.raises(Malformed):
            calls.answer(name, data, *good[1:])
    assert seen == [(1, 1)]


def test_a_function_is_called_like_any_other(pool: SandboxPool) -> None:
    with pool.acquire(host=tools().begin()) as session:
        assert session.step("add(1), add(1, 2), add(b=5, a=1), add(**{'a': 0})").value == (
            "(2, 3, 6, 1)"
        )
        assert seen == [(1, 1), (1, 2), (1, 5), (0, 1)]
        shown = session.step("print(add.__name__, add.__doc__)").stdout
        assert shown == "add def add(a: int, b: int = 1) -> int:\nThe sum.\n"
        result = session.step("print('before')\nx = later(0.01, 'b')\nprint('after'); x")
        assert (result.stdout, result.value) == ("before\nafter\n", "'b'")
        assert [(c.name, c.arguments, c.told) for c in result.host_calls] == [
            ("later", b'[[0.01,"b"],{}]', (b'"b"',))
        ]
        assert result.host_calls[0].seconds >= 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        ("add('x')", "TypeError", "0: Input should be a valid integer"),
        ("add()", "TypeError", "a: Missing required argument"),
        ("add(1, c=2)", "TypeError", "c: Unexpected keyword argument"),
        ("fail('value')", "ValueError", "a bad value"),
        ("fail('key')", "KeyError", "k"),
        ("fail('own')", "RuntimeError", "Own: mine"),
        ("fail('exit')", "RuntimeError", "SystemExit: 3"),
        ("fail('interrupt')", "RuntimeError", "KeyboardInterrupt: "),
        ("fail('stop')", "RuntimeError", "StopIteration: end"),
        ("fail('group')", "RuntimeError", "ExceptionGroup: g"),
        (
            "fail('object')",
            "TypeError",
            "returned cannot be passed: a value of the type object",
        ),
        ("fail('unprintable')", "RuntimeError", "Unprintable: <unprintable>"),
        ("add({1: 2})", "TypeError", "its arguments cannot be passed: a dict with a key"),
    ],
)
def test_a_failure_is_an_exception_of_the_session(
    pool: SandboxPool, call: str, name: str, value: str
) -> None:
    with pool.acquire(host=tools().begin()) as session:
        kind, text = told(session.step(call))
        assert kind == name
        assert value in text
        assert session.step("add(20)").value == "21", "the session goes on"


def test_what_a_function_prints_and_how_much_it_says_stay_apart(
    pool: SandboxPool, capfd: pytest.CaptureFixture[str]
) -> None:
    host = tools(answer_kib=1).begin()
    with pool.acquire(host=host) as session:
        result = session.step("fail('print')")
        assert (result.value, result.stdout) == ("'printed'", "")
        assert "own stdout" in capfd.readouterr().out
        assert "more than 1024 bytes" in told(session.step("fail('large')"))[1]
        assert len(told(session.step("fail('long')"))[1]) == 2000
        assert (host.calls, host.failures) == (3, 2)


def test_the_machines_fault_is_that_of_the_step(pool: SandboxPool) -> None:
    with pool.acquire(host=tools().begin()) as session:
        result = session.step("try: fail('machine')\nexcept BaseException: pass")
        assert (result.status, result.state_lost) == ("infra_error", True)
        assert "the index is down" in result.detail


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
        ("hang()", "error"),  # its own TimeoutError, or the step's: at the same moment
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
            assert result.status in (status, "timeout", "timeout_killed"), result
            if result.status == "error":
                assert result.error is not None
                assert result.error.name == "TimeoutError"
            assert limit <= result.wall_s < limit + session.limits.grace_s + LATE


def test_no_call_is_made_when_the_step_has_no_time_left(pool: SandboxPool) -> None:
    with pool.acquire(host=tools().begin()) as session:
        code = "import time\ntry: time.sleep(99)\nexcept KeyboardInterrupt:\n try: add(1)\n"
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


def test_the_event_loop_outlives_what_runs_on_it_and_a_blocked_one_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch,
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
    quick = tools(later, blocks, call_s=0.05)
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
        until = time.monotonic() + 0.5
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


# --- everywhere


@pytest.mark.slow
def test_in_a_sandbox_alone_its_contexts_and_its_forks(pool: SandboxPool) -> None:
    with Sandbox.create(pool=pool, host_tools=[add]) as sandbox:
        sandbox.run_code("x = add(40, 2)")
        assert sandbox.run_code("x").text == "42"
        (fork,) = sandbox.fork()
        with fork:
            assert fork.run_code("x, add(1)").text == "(42, 2)"
        context = sandbox.create_code_context(language="python")
        assert sandbox.run_code("add(5)", context=context).text == "6"
        heard: list[str] = []
        code = "print('a')\nadd(1)\nprint('b')"
        sandbox.run_code(code, on_stdout=lambda message: heard.append(message.line))
        assert "".join(heard) == "a\nb\n"


@pytest.mark.slow
def test_for_asyncio(pool: SandboxPool) -> None:
    async def play() -> str | None:
        async with await AsyncSandbox.create(pool=pool, host_tools=[later]) as sandbox:
            return (await sandbox.run_code("later(0.01)")).text

    assert asyncio.run(play()) == "'late'"


def test_in_a_console(pool: SandboxPool) -> None:
    with pool.acquire(host=tools().begin()) as session:
        console = Console(session)
        assert console.type("add(1)").shown == "2\n"
        assert console.type("fail('value')").shown.endswith("ValueError: a bad value\n")


@pytest.mark.slow
def test_in_a_loop_that_steps_many_sessions(pool: SandboxPool) -> None:
    host = tools(call_s=1.0)
    sessions = [pool.acquire(host=host.begin()) for _ in range(4)]
    plain = pool.acquire()
    try:
        loop = StepLoop()
        codes = ["later(0.2)", "add(1) + add(2)", "fail('value')", "hang()"]
        tags = [loop.submit(s, code) for s, code in zip(sessions, codes, strict=True)]
        tags.append(loop.submit(plain, "7"))
        ended: list[tuple[int, StepResult]] = []
        while len(loop):
            ended += loop.wait()
        results = dict(ended)
        assert [results[tag].value for tag in tags] == ["'late'", "5", None, None, "7"]
        assert [len(results[tag].host_calls) for tag in tags] == [1, 2, 1, 1, 0]
        assert told(results[tags[3]])[0] == "TimeoutError"
        assert loop.submit(sessions[0], "add(1)") > 0
        assert loop.wait()[0][1].value == "2"
        slow = loop.submit(plain, "import time; time.sleep(4)")
        quick = loop.submit(sessions[0], "later(0.01)")
        assert [tag for tag, _ in loop.wait()] == [quick], "it waits for no other's step"
        assert [tag for tag, _ in loop.wait()] == [slow]
    finally:
        loop.close()
        for session in (*sessions, plain):
            session.close()


def test_what_fails_in_an_answer_is_raised_by_wait(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    with pool.acquire(host=tools().begin()) as session, pool.acquire() as plain:
        loop = StepLoop()
        with monkeypatch.context() as patched:
            patched.setattr(HostCalls, "answer", broken)
            loop.submit(session, "add(1)")
            with pytest.raises(SandboxException, match="ZeroDivisionError"):
                loop.wait()
        assert (len(loop), session.alive) == (0, False)
        tag = loop.submit(plain, "7")
        assert [(tag, "7")] == [(one, result.value) for one, result in loop.wait()]
        loop.close()


def test_a_timeout_of_the_functions_own_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it comes in the moment between a wait that was in vain and a look."""

    class Racing(Future[Any]):
        first = True

        def result(self, timeout: float | None = None) -> Any:
            if not self.first:
                return super().result(timeout)
            self.first = False
            super().exception(60)
            raise TimeoutError

    monkeypatch.setattr("agentgrpo.sandbox.host_tools.Future", Racing)
    assert tools().begin().answer("add", b"[[1],{}]", 0, 9.0, None, lambda: False)[0].told == (
        b"2",
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 50_000, 200_000])
def test_output_around_calls_is_one_output(pool: SandboxPool, size: int) -> None:
    with pool.acquire(host=tools().begin()) as session, pool.acquire() as plain:
        code = "print('a' * {n}); {call}; print('b' * {n}); {call}; print('c' * {n})"
        result = session.step(code.format(n=size, call="add(1)"))
        wanted = plain.step(code.format(n=size, call="1"))
        assert (result.stdout, result.stdout_bytes) == (wanted.stdout, wanted.stdout_bytes)
        assert result.truncated == wanted.truncated
        flood = "for n in range(20): print('x' * 10**6); add(1)"
        assert session.step(flood).status == "output_limit", "the limit is that of all parts"


@pytest.mark.slow
def test_what_is_printed_during_a_call_is_of_the_step(pool: SandboxPool) -> None:
    code = ("import threading, time\n"
            "threading.Timer(0.1, print, ('during',)).start()\nlater(0.5)")  # fmt: skip
    with pool.acquire(host=tools().begin()) as session:
        result = session.step(code)
        assert (result.stdout, result.background) == ("during\n", "")


@pytest.mark.parametrize("first", ["", "ab", "abcdefgh", "abcdefghijklmnop"])
@pytest.mark.parametrize("then", ["", "12", "12345678", "1234567890123456"])
@pytest.mark.parametrize("keep", [1, 3, 7, 30])
def test_joined_output_is_cut_like_one(first: str, then: str, keep: int) -> None:
    def cut(text: str) -> tuple[bytes, bytes, int]:
        data = text.encode()
        return data[:keep], data[keep:][-keep:], len(data)

    assert joined(cut(first), cut(then), keep) == cut(first + then)


# --- the seed's example: a search that needs the network


@pytest.mark.slow
def test_a_search_of_the_web(pool: SandboxPool) -> None:
    class Web(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"pages about {self.path[1:]}".encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def web_search(query: str, top_n: int = 3) -> list[str]:
            """Search the web."""
            with urlopen(f"http://127.0.0.1:{server.server_port}/{query}") as page:
                return [page.read().decode()] * top_n

        with Sandbox.create(pool=pool, host_tools=[web_search]) as sandbox:
            found = sandbox.run_code("[page.upper() for page in web_search('otters', top_n=2)]")
            assert found.text == "['PAGES ABOUT OTTERS', 'PAGES ABOUT OTTERS']"
            reach = "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:%d/')"
            assert sandbox.run_code(reach % server.server_port).error is not None, "no network"
        server.shutdown()


def test_a_session_without_functions_is_stepped_as_before(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "conversation", None)
    assert session.step("1").value == "1"
    assert session.step("'add' in globals()").value == "False"


def test_the_grace_is_what_the_docs_say() -> None:
    assert Limits().grace_s == 0.3
