"""Host functions: their declaration, and the values that pass."""

import asyncio
import datetime
import threading
from functools import partial, wraps
from typing import Any, Literal

import pytest

from agentgrpo.sandbox import (
    Console,
    HostBudget,
    HostTools,
    InvalidArgumentException,
    Sandbox,
    SandboxPool,
)
from agentgrpo.sandbox.inside.data import EncodeError, decode, encode
from tests.sandbox.session.hosted import add, answer, error_of, seen, tools

pytestmark = [pytest.mark.nsjail, pytest.mark.usefixtures("hosted")]


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**63), 2**99, 1.5, -0.0, 1e300, "", "é\N{SNOWMAN}\0", [],
     {"a": [1, {}]}],
)  # fmt: skip
def test_json_round_trip_keeps_values(value: Any) -> None:
    text = encode(value, 1000)
    again = decode(text, 1000)
    assert repr(again) == repr(value)
    assert type(again) is type(value)


@pytest.mark.parametrize(
    "value",
    [10**5000, float("nan"), float("inf"), (1,), {1}, b"x", 1j, object(), {1: 2}, "x" * 999],
    ids=lambda value: type(value).__name__,
)
def test_encoding_other_values_raises(value: Any) -> None:
    for held in (value, [value], {"a": [value]}):
        with pytest.raises(EncodeError):
            encode(held, 999)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "expected different names"),
        ([add, add], "expected different names"),
        ([lambda: 1], "expected functions with public names"),
        (["add"], "expected functions"),
        ([partial(int, 1)], "not Python builtins"),
    ],
)
def test_invalid_functions_raise(functions: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentException, match=message):
        HostTools(functions)


def test_builtin_names_and_unchecked_annotations_raise() -> None:
    def open() -> None: ...

    def takes(a: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821

    def waits(a: threading.Event) -> None: ...

    for function, message in ((open, "not Python builtins"), (takes, "Nowhere"), (waits, "Event")):
        with pytest.raises(InvalidArgumentException, match=message):
            HostTools([function])
    with pytest.raises(InvalidArgumentException, match="cached"):
        HostTools([add], cached="forever")  # type: ignore[arg-type]
    for field in ("calls", "call_s", "total_kib"):
        with pytest.raises(ValueError, match=f"host_budget.{field}"):
            HostBudget(**{field: 0})


CLIENT = threading.Event()


def test_a_default_that_is_not_json_raises() -> None:
    def search(query: str, client: Any = CLIENT) -> None: ...

    wanted = r"search: the default of client is not JSON.*functools.partial\(search, client="
    with pytest.raises(InvalidArgumentException, match=wanted):
        HostTools([search])


@pytest.mark.parametrize("is_async", [False, True])
def test_arguments_bound_by_partial_are_hidden_and_fixed(is_async: bool) -> None:
    def search(base: str, query: str, api_key: str, client: Any = CLIENT, top_n: int = 3) -> Any:
        """Of the web."""
        return [base, query, api_key, top_n, client is CLIENT]

    @wraps(search)
    async def also(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return search(*args, **kwargs)

    bound = partial(also if is_async else search, "base-1", api_key="sk-1", client=CLIENT)
    made = HostTools([bound])
    assert made.signatures.startswith(
        'def search(query: str, *, top_n: int = 3) -> Any:\n    """Of the'
    )
    calls = made.begin()
    assert answer(calls, "search", b'[["q"],{"top_n":4}]').answer == (
        b'["base-1","q","sk-1",4,true]',
    )
    for named in ("api_key", "client"):
        bad = answer(calls, "search", f'[["q"],{{"{named}":"mine"}}]'.encode())
        assert bad.answer[0] == b"TypeError"
        assert b"unexpected keyword" in bad.answer[1]


@pytest.mark.parametrize(
    ("annotation", "value", "wanted"),
    [(int, "5", None), (int, True, None), (int, 5.0, None), (float, 5, 5.0), (float, "5", None),
     (str, 5, None), (bool, 1, None), (tuple[int, int], [1, 2], (1, 2)), (list[int], ["1"], None),
     (datetime.date, "2026-11-24", datetime.date(2026, 11, 24)), (dict[str, int], {"a": 1.0}, None),
     (Literal["a", "b"], "a", "a"), (Literal["a", "b"], "c", None), (Any, "5", "5")],
)  # fmt: skip
def test_arguments_are_checked_against_annotations(
    annotation: Any, value: Any, wanted: Any
) -> None:
    def f(*several: Any, a: Any) -> None:
        seen.append((several, a))

    f.__annotations__ |= {"a": annotation, "several": annotation}
    told = answer(HostTools([f]).begin(), "f", encode([[value], {"a": value}], 999))
    if wanted is None:
        assert (told.kind, told.answer[0], seen) == ("raised", b"TypeError", [])
        assert told.answer[1].startswith(b"several.0")
    else:
        assert (told.kind, seen) == ("returned", [((wanted,), wanted)])


def test_host_functions_are_called_like_python_functions(pool: SandboxPool) -> None:
    with pool.acquire(host=tools().begin()) as session:
        assert session.step("add(1), add(1, 2), add(b=5, a=1), add(**{'a': 0})").value == (
            "(2, 3, 6, 1)"
        )
        assert seen == [(1, 1), (1, 2), (1, 5), (0, 1)]
        shown = session.step("print(add.__name__, add.__doc__)").stdout
        assert shown == "add def add(a: int, b: int = 1) -> int:\nThe sum.\n"
        result = session.step("print('before')\nx = later(0.01, 'b')\nprint('after'); x")
        assert (result.stdout, result.value) == ("before\nafter\n", "'b'")
        assert [(c.name, c.arguments, c.answer) for c in result.host_calls] == [
            ("later", b'[[0.01,"b"],{}]', (b'"b"',))
        ]
        assert result.host_calls[0].seconds >= 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        ("add('x')", "TypeError", "a: Input should be a valid integer"),
        ("add()", "TypeError", "missing a required argument: 'a'"),
        ("add(1, c=2)", "TypeError", "unexpected keyword argument 'c'"),
        ("fail('value')", "ValueError", "a bad value"),
        ("fail('key')", "KeyError", "k"),
        ("fail('own')", "RuntimeError", "Own: mine"),
        ("fail('exit')", "RuntimeError", "SystemExit: 3"),
        (
            "fail('object')",
            "TypeError",
            "fail() cannot be passed: Object of type object",
        ),
        ("add({1: 2})", "TypeError", "its arguments cannot be passed: a tuple, or a key"),
    ],
)
def test_a_failed_call_raises_in_the_session(
    pool: SandboxPool, call: str, name: str, value: str
) -> None:
    with pool.acquire(host=tools().begin()) as session:
        kind, text = error_of(session.step(call))
        assert kind == name
        assert value in text
        assert session.step("add(20)").value == "21", "the session goes on"


def test_output_of_a_function_stays_on_the_host(
    pool: SandboxPool, capfd: pytest.CaptureFixture[str]
) -> None:
    host = tools(answer_kib=1).begin()
    with pool.acquire(host=host) as session:
        result = session.step("fail('print')")
        assert (result.value, result.stdout) == ("'printed'", "")
        assert "own stdout" in capfd.readouterr().out
        assert "more than 1024 bytes" in error_of(session.step("fail('large')"))[1]
        assert len(error_of(session.step("fail('long')"))[1]) == 2000
        assert (host.calls, host.failures) == (3, 2)


@pytest.mark.parametrize(
    ("kind", "said"), [("machine", "the index is down"), ("unprintable", "fail(): RuntimeError")]
)
def test_machine_errors_end_the_step_with_infra_error(
    pool: SandboxPool, kind: str, said: str
) -> None:
    with pool.acquire(host=tools().begin()) as session:
        result = session.step(f"try: fail({kind!r})\nexcept BaseException: pass")
        assert (result.status, result.state_lost) == ("infra_error", True)
        assert said in result.detail


# --- in sandboxes, contexts and consoles


@pytest.mark.slow
def test_host_functions_in_a_sandbox_and_its_contexts(pool: SandboxPool) -> None:
    with Sandbox.create(pool=pool, host_tools=[add]) as sandbox:
        sandbox.run_code("x = add(40, 2)")
        assert sandbox.run_code("x").text == "42"
        context = sandbox.create_code_context(language="python")
        assert sandbox.run_code("add(5)", context=context).text == "6"
        heard: list[str] = []
        code = "print('a')\nadd(1)\nprint('b')"
        sandbox.run_code(code, on_stdout=lambda message: heard.append(message.line))
        assert "".join(heard) == "a\nb\n"


def test_host_functions_in_a_console(pool: SandboxPool) -> None:
    with pool.acquire(host=tools().begin()) as session:
        console = Console(session)
        assert console.type("add(1)").output == "2\n"
        assert console.type("fail('value')").output.endswith("ValueError: a bad value\n")


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 50_000, 200_000])
def test_output_before_and_after_calls_is_joined(pool: SandboxPool, size: int) -> None:
    with pool.acquire(host=tools().begin()) as session, pool.acquire() as plain:
        code = "print('a' * {n}); {call}; print('b' * {n}); {call}; print('c' * {n})"
        result = session.step(code.format(n=size, call="add(1)"))
        wanted = plain.step(code.format(n=size, call="1"))
        assert (result.stdout, result.stdout_bytes) == (wanted.stdout, wanted.stdout_bytes)
        assert result.truncated == wanted.truncated
        flood = "for n in range(20): print('x' * 10**6); add(1)"
        assert session.step(flood).status == "output_limit", "the limit is that of all parts"
