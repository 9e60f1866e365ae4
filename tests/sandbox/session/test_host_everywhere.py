"""Host functions in sandboxes, contexts, consoles and loops of steps."""

import pytest

from agentgrpo.sandbox import (
    Console,
    Sandbox,
    SandboxPool,
)
from tests.sandbox.session.hosted import add, tools

pytestmark = [pytest.mark.nsjail, pytest.mark.usefixtures("hosted")]

# --- everywhere


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
