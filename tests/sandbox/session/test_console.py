"""The console shows what Python's own interactive console shows."""

from dataclasses import replace

import pytest

from agentgrpo.sandbox import Console, SandboxPool, Session, StepStatus
from tests.terminal import typed_into_python

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
    ["'''one", "two'''", "  indented", "@", "\\", "5"],
    ["raise KeyboardInterrupt", "raise ValueError('x') from KeyError('y')"],
]


@pytest.mark.parametrize("lines", SCRIPTS, ids=lambda lines: lines[0])
def test_transcript_equals_that_of_python(session: Session, lines: list[str]) -> None:
    console = Console(session)
    for line in lines:
        console.type(line)
    assert f"{console.transcript}>>>" == typed_into_python(lines)


def test_prompt_and_failure_of_each_line(session: Session) -> None:
    console = Console(session)
    typed = [console.type(line) for line in ("if 1:", "    1 / 0", "", "2")]
    assert [t.prompt for t in typed] == [">>> ", "... ", "... ", ">>> "]
    assert [t.failed for t in typed] == [False, False, True, False]
    assert typed[3].output == "2\n"


def test_timeout_keeps_the_console(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = replace(session.limits, grace_s=30.0)  # of a busy machine
    monkeypatch.setattr(session, "limits", patient)
    console = Console(session)
    console.type("x = 1")
    assert console.type("while True: pass", timeout_s=0.2).prompt == ">>> "
    typed = console.type("", timeout_s=0.2)
    assert typed.step.status is StepStatus.TIMEOUT
    assert typed.output.endswith("KeyboardInterrupt\n")
    assert console.type("x").output == "1\n"


def test_sys_exit_has_status_exit(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        console = Console(session)
        assert console.type("import sys; sys.exit(2)").step.status is StepStatus.EXIT


def test_a_line_with_newline_raises(session: Session) -> None:
    with pytest.raises(ValueError, match="one line"):
        Console(session).type("1\n2")
