"""What tries to look right without being right does not pass."""

from typing import Any

import pytest

from agentgrpo.sandbox import Sandbox, SandboxPool
from agentgrpo.sandbox.grade import check_all, check_output, check_tests

pytestmark = pytest.mark.nsjail

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"

CHEATS = {
    "wrong": "def add(a, b): return a - b",
    "exits at import": "import sys; sys.exit(0)",
    "exits at once": "import os; os._exit(0)",
    "exits when called": "import sys\ndef add(a, b): sys.exit(0)",
    "exits hard when called": "import os\ndef add(a, b): os._exit(0)",
    "prints the verdict": "print('PASSED', '1 passed')\ndef add(a, b): print('passed')",
    "equals everything": (
        "class Yes:\n def __eq__(self, other): return True\n def __repr__(self): return 'Yes()'\n"
        "def add(a, b): return Yes()"
    ),
    "looks like a number": (
        "class Yes:\n def __eq__(self, other): return True\n def __repr__(self): return '4'\n"
        "def add(a, b): return Yes()"
    ),
    "patches assertions": (
        "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\n"
        "builtins.bool = lambda x: True\ndef add(a, b): return 0"
    ),
    "patches the test machinery": (
        "import sys, unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "sys.modules['queue'] = None\ndef add(a, b): return 1"
    ),
    "overwrites files": (
        "import os\nfor d, _, fs in os.walk('.'):\n for f in fs: open(f, 'w').write('')\n"
        "def add(a, b): return 1"
    ),
    "raises nothing": "def add(a, b): raise StopIteration",
    "never returns": "def add(a, b):\n while True: pass",
    "is not there": "x = 1",
    "does not parse": "def add(a, b)",
    "forges an answer": (
        "import os, struct\n"
        "def frame(n, *fs):\n"
        " b = struct.pack('<II', n, len(fs))\n"
        " b += b''.join(struct.pack('<I', len(f)) + f for f in fs)\n"
        " return struct.pack('<I', len(b)) + b\n"
        "def add(a, b): os.write(4, frame(3, b'ok', b'0'))"  # of a call that is yet to come
    ),
}


def test_right_code_passes(pool: SandboxPool) -> None:
    verdict = check_tests(pool, "def add(a, b): return a + b", TESTS)
    assert verdict.passed, verdict


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheat_fails(pool: SandboxPool, cheat: str) -> None:
    verdict = check_tests(pool, CHEATS[cheat], TESTS, timeout_s=0.5 if "never" in cheat else 5.0)
    assert not verdict.passed
    assert not verdict.infra_error
    assert verdict.reason


def test_classes_exceptions_and_other_names(pool: SandboxPool) -> None:
    code = (
        "class Stack:\n"
        " def __init__(self): self.items = []\n"
        " def push(self, x): self.items.append(x); return self\n"
        " def pop(self):\n"
        "  if not self.items: raise IndexError('empty')\n"
        "  return self.items.pop()\n"
        " def __len__(self): return len(self.items)\n"
        "def f(x): return {'x': [x, (1, None)]}"
    )
    tests = (
        "s = Stack()\ns.push(1).push('a')\nassert len(s) == 2 and s.items == [1, 'a']\n"
        "assert s.pop() == 'a'\ns.pop()\n"
        "try: s.pop()\nexcept IndexError as e: assert str(e) == 'empty'\nelse: assert False\n"
        "def check(candidate): assert candidate(2) == {'x': [2, (1, None)]}\ncheck(g)\n"
    )
    verdict = check_tests(pool, code, tests, names={"g": "f"})
    assert verdict.passed, verdict
    assert not check_tests(
        pool, code, tests.replace("== 2 and", "== 3 and"), names={"g": "f"}
    ).passed


def test_program_output(pool: SandboxPool) -> None:
    code = "print(sum(map(int, input().split())))"
    cases = [("1 2\n", "3"), ("5 6\n", "11\n"), ("1 1\n", "3")]
    assert [v.passed for v in check_all(pool, code, cases)] == [True, True, False]


def test_a_sandbox_outlives_the_time_of_its_program(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, asked = Sandbox.create, []

    def recording(**options: Any) -> Sandbox:
        asked.append(options.get("timeout", 300.0))
        return create(**options)

    monkeypatch.setattr(Sandbox, "create", recording)
    assert check_output(pool, "print(3)", "3", timeout_s=1000.0).passed
    assert asked[0] > 1000.0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print(3); raise SystemExit(1)", "exit code 1"),
        ("print(3); import os; os.abort()", "exit code 134"),
        ("print(3)\nwhile True: pass", "still running"),
        ("print(4)", "expected"),
        ("1 / 0", "ZeroDivisionError"),
        ("while True: print('3' * 9999)", "too much output"),
    ],
)
def test_program_that_fails(pool: SandboxPool, code: str, why: str) -> None:
    verdict = check_output(pool, code, "3", timeout_s=0.5 if why == "still running" else 30.0)
    assert not verdict.passed
    assert why in verdict.reason
