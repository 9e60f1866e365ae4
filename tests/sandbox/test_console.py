"""The console shows what Python's own interactive console shows."""

import code
import contextlib
import io
import sys

import pytest

from agentgrpo.sandbox import Console, SandboxPool, Session, Status

pytestmark = pytest.mark.nsjail

SCRIPTS = [
    ["1 + 1", "_ * 2", "x = 3", "x", "None", "'a'"],
    ["def f(n):", "    return n + 1", "", "f(1)"],
    ["for i in range(3):", "    i", ""],
    ["if True:", "    print('yes')", "else:", "    print('no')", ""],
    ["1 / 0", "x", "x = 1", "x"],
    ["def f():", "    return 1 / 0", "", "f()"],
    ["1 +", "x = (1,", "2)", "x"],
    ["import sys", "sys.stderr.write('e\\n') and None", "print('a'); print('b')"],
    ["class A:", "    def __repr__(self): return 'an A'", "", "A()"],
    ["'''one", "two'''", "  indented", "@", "\\"],
    ["raise KeyboardInterrupt", "raise ValueError('x') from KeyError('y')"],
]


@pytest.fixture(autouse=True)
def pythons_own_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle prints through it, and torch.distributed puts one in that adds "[rank0]"."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def oracle(lines: list[str]) -> str:
    """The same lines typed into the standard library's console, in this process."""
    shown = io.StringIO()
    todo = iter(lines)
    console = code.InteractiveConsole({"__name__": "__main__"}, filename="<stdin>")

    def type_line(prompt: str) -> str:
        try:
            line = next(todo)
        except StopIteration:
            raise EOFError from None
        shown.write(f"{prompt}{line}\n")
        return line

    console.raw_input = type_line  # type: ignore[assignment,method-assign]
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        console.interact(banner="", exitmsg="")
    return shown.getvalue()


@pytest.mark.parametrize("lines", SCRIPTS, ids=lambda lines: lines[0])
def test_transcript_is_pythons(session: Session, lines: list[str]) -> None:
    console = Console(session)
    for line in lines:
        console.type(line)
    # the oracle adds a newline for its empty banner, the prompt at the end of its input and another
    shown = oracle(lines).removeprefix("\n").removesuffix("\n")
    assert console.transcript == shown


def test_prompt_and_failure_of_each_line(session: Session) -> None:
    console = Console(session)
    typed = [console.type(line) for line in ("if 1:", "    1 / 0", "", "2")]
    assert [t.prompt for t in typed] == [">>> ", "... ", "... ", ">>> "]
    assert [t.failed for t in typed] == [False, False, True, False]
    assert typed[3].shown == "2\n"


def test_timeout_keeps_the_console(session: Session) -> None:
    console = Console(session)
    console.type("x = 1")
    assert console.type("while True: pass", timeout_s=0.2).prompt == ">>> "
    typed = console.type("", timeout_s=0.2)
    assert typed.step.status is Status.TIMEOUT
    assert typed.shown.endswith("KeyboardInterrupt\n")
    assert console.type("x").shown == "1\n"


def test_exit_is_seen(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        console = Console(session)
        assert console.type("import sys; sys.exit(2)").step.status is Status.EXIT


def test_one_line_at_a_time(session: Session) -> None:
    with pytest.raises(ValueError, match="one line"):
        Console(session).type("1\n2")
