"""Grading: right code passes, cheating code does not."""

import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.envs.graded import GradingPool
from agentgrpo.sandbox import Limits, Sandbox, SandboxBusy, SandboxPool, Template
from agentgrpo.sandbox.grading.grade import (
    CONSTANTS,
    _failed_judge,
    check_all,
    check_output,
    check_tests,
    faults_of_tests,
    names_of,
)
from agentgrpo.sandbox.session.step_result import StepError, StepResult, StepStatus
from tests.isolation import refuse_control_groups

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
    "is not defined": "x = 1",
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


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_code_fails(pool: SandboxPool, cheat: str) -> None:
    verdict = check_tests(pool, CHEATS[cheat], TESTS, timeout_s=0.5 if "never" in cheat else 5.0)
    assert not verdict.passed
    assert not verdict.infra_error
    assert verdict.reason


ONE = "assert add(1, 2) == 3"
CALLS = "def test_add():\n    assert add(1, 2) == 3\n    assert add(-1, 1) == 0\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
CASE = (
    "import unittest\nfrom solution import add\nclass Adds(unittest.TestCase):\n"
    " def setUp(self): self.one = 1\n"
    " def test_sum(self): self.assertEqual(add(self.one, 2), 3)\n"
    " def test_raises(self):\n  with self.assertRaises(TypeError): add(1)\n"
)
ALIASED = "import solution as s\ndef test_add(): assert s.add(1, 2) == 3 == s.add(4, -1)"
# form: tests, and what else a row says of them
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "asserts": (TESTS, {}),
    "a list of asserts": (TESTS.splitlines(), {}),
    "a list as text": (f"{TESTS.splitlines()}", {}),
    "check and an entry point": (CHECK, {"entry_point": "add"}),
    "check and names": (CHECK, {"names": {"candidate": "add"}}),
    "check that they call": (f"{CHECK}check(add)", {}),
    "check and an expression": (CHECK, {"entry_point": "(lambda a, b: add(a, b))"}),
    "functions": (CALLS, {}),
    "from solution": (f"from solution import add\n{CALLS}", {}),
    "from solution, all": (f"from solution import *\n{CALLS}", {}),
    "solution as": (ALIASED, {}),
    "from a module of the entry point": (f"from mine import add\n{CALLS}", {"entry_point": "add"}),
    "silenced, an unused import": (
        "import io\nfrom contextlib import redirect_stdout\nfrom unittest.mock import patch\n"
        f"with redirect_stdout(io.StringIO()):\n {ONE}\n assert add(-1, 1) == 0", {}),
    "unittest": (CASE, {}),
    "unittest that runs itself": (f"{CASE}unittest.main()", {}),
    "unittest, if run": (f"{CASE}if __name__ == '__main__':\n    unittest.main()", {}),
    "a class": ("class TestAdd:\n def setup_method(self): self.one = 1\n"
                " def test_sum(self): assert add(self.one, 2) == 3 and add(-1, 1) == 0", {}),
    "a script": ("def run():\n assert add(1, 2) == 3 == add(4, -1)\n"
                 "if __name__ == '__main__':\n run()", {}),
    "an exit status": ("import sys\nsys.exit(0 if add(1, 2) == 3 == add(4, -1) else 1)", {}),
    "helpers with arguments": (
        "def test_case(a, b, sum): assert add(a, b) == sum\n"
        "for case in [(1, 2, 3), (-1, 1, 0)]: test_case(*case)", {}),
}  # fmt: skip
FORGERS = {
    "its own check": "def check(*a): pass\ndef add(a, b): return 0\ntest_add = check",
    "its own solution": (
        "import sys, types\nsys.modules['solution'] = m = types.ModuleType('solution')\n"
        "def add(a, b): return 0\nm.add = lambda a, b: a + b"
    ),
    "skips": "import unittest\ndef add(a, b): raise unittest.SkipTest",
    "raises what tests raise": "def add(a, b): raise AssertionError",
    "counts": (
        "import sys\nuses = questions = verdict = 'passed'\nfor m in [*sys.modules.values()]:\n"
        " vars(m).update(uses=99, failures=[])\ndef add(a, b): return 0"
    ),
    "calls itself": "def add(a, b): return 0\nfor i in range(9): add(i, i)",
    "a constant": "add = 3",
    "nothing": "",
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_tests_passes_right_and_fails_wrong_code(pool: SandboxPool, form: str) -> None:
    tests, named = FORMS[form]
    assert faults_of_tests(pool, [(tests, named.get("names"), named.get("entry_point"))]) == [""]
    verdict = check_tests(pool, "def add(a, b): return a + b", tests, **named)
    assert verdict.passed, verdict
    for cheat, code in (CHEATS | FORGERS).items():
        if "never" not in cheat:
            verdict = check_tests(pool, code, tests, **named)
            assert (verdict.passed, verdict.infra_error) == (False, False), (cheat, verdict)


ANY, IDLE, NO = (
    "they pass any program",
    "they pass a program that does",
    "no program can pass them: ",
)
# tests, the entry point, what is wrong with them
FAULTY: dict[str, tuple[str, str, str]] = {
    "check is not called": (CHECK, "", "ValueError: 'tests' use nothing of the answer"),
    "no tests": ("", "", "ValueError: 'tests' use nothing"),
    "a doctest": ('"""\n>>> add(1, 2)\n3\n"""', "", "ValueError: 'tests' use nothing"),
    "their own answer": (f"def add(a, b): return a + b\n{ONE}", "", "ValueError: 'tests' use"),
    "their own answer, and an entry point": (f"def add(a, b): return 3\n{ONE}", "add", ANY),
    "an assert that is always true": (f"{ONE} if False else True", "", ANY),
    "a function that nobody calls": (f"def run():\n {ONE}", "", ANY),
    "all is skipped": (CASE.replace("class", "@unittest.skip('')\nclass"), "", ANY),
    "an exit before": (f"import sys\nsys.exit(0)\n{TESTS}", "", ANY),
    "they catch their failure": (f"try:\n {ONE}\nexcept Exception: pass", "", IDLE),
    "check catches its failure": (
        "def check(c):\n try: assert c(1, 2) == 3\n except AssertionError as e: print(e)", "add",
        IDLE),
    "they print": ("print(add(1, 2))\nadd(1, 2) == 3", "", IDLE),
    "they return": ("def test_add(): return add(1, 2) == 3", "", IDLE),
    "they accept none": ("sum = add(1, 2)\nif sum is not None: assert sum == 3", "", IDLE),
    "an object is only used": ("s = Stack()\ns.push(1)\ns.pop()", "", IDLE),
    "a missing module": (f"import numpy\n{TESTS}", "",
                         f"{NO}ModuleNotFoundError: No module named 'numpy'"),
    "a missing module, later": (
        f"{CALLS}def test_more():\n from numpy.linalg import norm\n {ONE}", "",
        f"{NO}ModuleNotFoundError: No module named 'numpy'"),
    "no pytest": (f"import pytest\n{CALLS}", "", f"{NO}ModuleNotFoundError: No module named 'py"),
    "a fixture without pytest": (f"def test_add(tmp_path): {ONE}", "",
                                 f"{NO}ModuleNotFoundError: No module named 'pytest'"),
    "a missing file": (f"cases = open('cases.json')\n{TESTS}", "", f"{NO}FileNotFoundError"),
    "not written yet": ("def test_add():\n raise NotImplementedError", "add", f"{NO}NotImpl"),
    "coroutines": ("async def test_add(): assert await add(1, 2) == 3", "",
                   "ValueError: 'tests' are asynchronous"),
    "they read the source": (
        f"import inspect as i\n{ONE}\nassert 'for' not in i.getsource(add)", "",
        r"ValueError: 'tests' use i.getsource\(\), which no program passes"),
    "they count parameters": (
        f"from inspect import signature\n{ONE}\nassert len(signature(add).parameters) == 2", "",
        r"ValueError: 'tests' use signature\(\), which no program passes"),
    "they read the docstring": (
        f"{ONE}\nassert add.__doc__", "",
        "ValueError: 'tests' use add.__doc__, which no"),
    "they pass a function": (f"assert add(len, 2) == 3\n{ONE}", "",
                             f"{NO}NotPassable: a builtin_function_or_method cannot be passed"),
    "they pass an object": (f"class N: pass\nassert add(N(), 2) == 3\n{ONE}", "",
                            f"{NO}NotPassable: a N cannot be passed"),
    "they pass a generator": (f"assert add(x for x in [1]) == 3\n{ONE}", "", f"{NO}NotPassable"),
    **{
        f"they use {use}": (f"{code}\n{ONE}", "", f"ValueError: 'tests' use {use.strip()}, wh")
        for use, code in {
            "patches": "from unittest.mock import patch\nwith patch('builtins.input'): add(1, 2)",
            "patches ": "from unittest import mock\nwith mock.patch.object(str, 'x'): add(1, 2)",
            "patches  ": "def test_add(monkeypatch): add(1, 2)",
            "another sys.stdin": "import io, sys\nsys.stdin = io.StringIO('1')\nadd(1, 2)",
            "the printed output": "import io\nassert io.StringIO().getvalue() == ''",
            "the printed output ": "def test_add(capsys): assert capsys.readouterr().out == '3'",
            r"isinstance\(add\(1\), add\)": "assert isinstance(add(1), add)",
            "add as a base class": "class More(add): pass",
        }.items()
    },
    "a typing error": ("from solution import add\nassert ad(1, 2) == 3", "",
                       "ValueError: 'tests' use ad and define none"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTY)
def test_useless_tests_are_found_by_programs_that_do_nothing(pool: SandboxPool, case: str) -> None:
    tests, entry_point, fault = FAULTY[case]
    sound = (TESTS, None, None)
    rows = [sound, (tests, None, entry_point or None), sound]
    if fault.startswith("ValueError: "):
        with pytest.raises(ValueError, match=fault.removeprefix("ValueError: ")):
            faults_of_tests(pool, rows)
        return
    faults = faults_of_tests(pool, rows)
    assert (faults[0], faults[2]) == ("", "")
    assert faults[1].startswith(fault), faults[1]


def test_tests_of_types_alone_are_found_by_constant_programs(
    pool: SandboxPool,
) -> None:
    weak = (
        "assert isinstance(add(1, 2), int)",
        "assert add(1, 2) is not None",
        "assert type(f(1)) is dict",
        "def test_f(): assert isinstance(f([2, 1]), list)",
    )
    rows = [(tests, None, None) for tests in (*weak, TESTS, ONE)]
    faults = faults_of_tests(pool, rows, stubs=CONSTANTS)
    assert faults == ["they pass a program that does nothing"] * len(weak) + ["", ""]


def test_checks_of_rows_do_not_affect_each_other(pool: SandboxPool) -> None:
    """Sessions are shared by rows: what is patched, defined or never ends stays in its row."""
    patched = "import math, solution\nmath.isclose = lambda *a: True\nassert solution.add(1) == 2"
    for before in (patched, "while not add(1): pass", "import os\nadd(1)\nos._exit(0)"):
        rows = [(tests, None, None) for tests in (before, "assert math.isclose(f(1), 3)", TESTS)]
        assert faults_of_tests(pool, rows, timeout_s=1.0) == ["", "", ""], before


BY_PYTEST = {
    "approx, raises": "def test_add():\n assert add(1, 2) == pytest.approx(3)\n"
    " with pytest.raises(TypeError): add(1)",
    "parameters": "@pytest.mark.parametrize('a, b, sum', [(1, 2, 3), pytest.param(2, 2, 4)])\n"
    "def test_add(a, b, sum): assert add(a, b) == sum",
    "fixtures": "@pytest.fixture\ndef one(): return 1\nclass TestAdd:\n"
    " def test_add(self, one, tmp_path, capsys): assert add(one, 2) == 3",
}
FAULTY_BY_PYTEST = {
    f"@pytest.mark.skip\ndef test_add(): {ONE}": ANY,
    "def test_add(): return add(1, 2) == 3": IDLE,
    f"def test_add(no_fixture): {ONE}": f"{NO}_pytest.fixtures.FixtureLookupError",
    f"def test_add():\n {ONE}\ndef test_more(): import absent": f"{NO}ModuleNotFoundError",
}


def test_tests_that_import_pytest_run_under_pytest() -> None:
    site, head = str(Path(pytest.__file__).parents[1]), "import pytest\nfrom solution import add\n"
    wrong = ("def add(a, b): return 0", "def add(a, b): raise SystemExit", "add = 3",
             "import pytest\ndef add(a, b): pytest.skip('no')")  # fmt: skip
    with SandboxPool(template=Template(site_dirs=(site,)), min_idle=0, zygotes=1) as own:
        for name, tests in BY_PYTEST.items():
            assert check_tests(own, "def add(a, b): return a + b", head + tests).passed, name
            for code in wrong:
                verdict = check_tests(own, code, head + tests)
                assert (verdict.passed, verdict.infra_error) == (False, False), (name, code)
        rows = [(head + tests, None, None) for tests in (*FAULTY_BY_PYTEST, BY_PYTEST["fixtures"])]
        faults = faults_of_tests(own, rows)
    for fault, expected in zip(faults, [*FAULTY_BY_PYTEST.values(), ""], strict=True):
        assert fault.startswith(expected), fault
        assert bool(fault) == bool(expected), fault


def test_a_constant_counts_as_used(pool: SandboxPool) -> None:
    """Of what tests would call a constant shows nothing, though nothing fails."""
    for tests, passes in (
        ("assert LIMIT == 3", True), ("import solution\nassert solution.LIMIT == 3", True),
        ("def run(): assert LIMIT(1) == 3", False), ("assert True or LIMIT(1)", False),
    ):  # fmt: skip
        assert check_tests(pool, "LIMIT = 3", tests).passed is passes, tests
        assert not check_tests(pool, "LIMIT = 4", tests).passed, tests
    squares = "def f(x): return x * x"
    assert check_tests(pool, squares, "assert y == 9", names={"y": "f(3)"}).passed


def test_a_builtin_is_not_a_name_of_the_code(pool: SandboxPool) -> None:
    """Who writes no `sorted` is not paid for Python's."""
    named: dict[str, Any] = {"entry_point": "sorted"}
    tests = "def check(candidate): assert candidate([2, 1]) == [1, 2]"
    assert not check_tests(pool, "x = 1", tests, **named).passed
    assert check_tests(pool, "def sorted(x): return x[::-1]", tests, **named).passed


def test_classes_exceptions_and_renamed_functions_work(pool: SandboxPool) -> None:
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
    verdict = check_tests(pool, code, tests, names={"g": "f", "Stack": "Stack"})
    assert verdict.passed, verdict
    assert not check_tests(
        pool, code, tests.replace("== 2 and", "== 3 and"), names={"g": "f", "Stack": "Stack"}
    ).passed


def test_check_output_compares_lines(pool: SandboxPool) -> None:
    code = "print(sum(map(int, input().split())))"
    cases = [("1 2\n", "3"), ("5 6\n", "11\n"), ("1 1\n", "3")]
    assert [v.passed for v in check_all(pool, code, cases)] == [True, True, False]


def test_a_program_larger_than_the_disk_fails(pool: SandboxPool) -> None:
    verdict = check_output(pool, "#" * (70 << 20), "")
    assert (verdict.passed, verdict.infra_error) == (False, False), verdict


def test_the_sandbox_outlives_the_time_of_its_program(
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
def test_a_failing_program_has_a_reason(pool: SandboxPool, code: str, why: str) -> None:
    verdict = check_output(pool, code, "3", timeout_s=0.5 if why == "still running" else 30.0)
    assert not verdict.passed
    assert why in verdict.reason


IMPORTS = (
    "from collections import Counter, OrderedDict, defaultdict, deque\n"
    "from decimal import Decimal\nfrom fractions import Fraction"
)
LONG = "".join(map(chr, range(32, 127))) * 2000
# code, tests, whether it passes
JUDGED: dict[str, list[tuple[str, str, bool]]] = {
    "an exception does not end zip, map or all in the judge": [
        (f"def f(x): raise {error}", tests, False)
        for error in ("StopIteration", "StopIteration(1)", "GeneratorExit", "SystemExit(0)",
                      "StopAsyncIteration", "KeyboardInterrupt", "BaseException",
                      "type('E', (StopIteration, ValueError), {})", "IndexError")
        for tests in ("for x, y in zip([1, 2], map(f, [1, 2])): assert x == y",
                      "assert all(f(x) == x for x in [1, 2])",
                      "assert list(map(f, [1])) in ([], [1])",
                      "assert next(map(f, [1]), 1) == 1", "list(iter(lambda: f(1), 3))")],
    "an expected exception is not a protocol violation": [
        ("def f(x): raise SystemExit", "try: f(1)\nexcept Exception: pass\nelse: assert 0", False),
        ("def f(x): raise SystemExit", "try: f(1)\nexcept: pass", False),
        ("class E(IndexError): pass\ndef f(x): raise E('none')",
         "try: f(1)\nexcept IndexError as e: assert e.args == ('none',)\nelse: assert 0", True),
        ("def f(x): return {}[x]",
         "try: f('k')\nexcept KeyError as e: assert e.args == ('k',)\nelse: assert 0", True),
        ("def f(x): return x.decode()",
         "try: f(b'\\xff')\nexcept UnicodeDecodeError as e: assert e.start == 0\nelse: 1/0", True)],
    "the judge's names are its own": [
        ("class math: isclose = lambda *a, **k: True\ndef f(x): return 0",
         "assert math.isclose(f(2), 1.4)", False),
        ("def f(x): return 2 ** 0.5", "assert math.isclose(f(2), 1.41421356237)", True),
        ("def f(x): return 0\ndef isclose(*a): return True",
         "from math import isclose\nassert isclose(f(2), 1.4)", False),
        ("import builtins\nbuiltins.len = builtins.sorted = builtins.abs = lambda *a: 0\n"
         "def f(x): return [3]", "assert len(f(1)) == 0 or sorted(f(1)) == 0", False),
        ("def f(x): return x", "def check(f): assert f(1) == 1\ncheck(f)", True)],
    "an object looks the same in every way": [
        (f"class Y(list):\n{way}\ndef f(x): return Y()", test, False)
        for way in (" __len__ = lambda s: 3\n __getitem__ = lambda s, i: 0\n"
                    " __iter__ = lambda s: iter([3, 1, 2])",
                    " __iter__ = lambda s: iter([3, 1, 2])\n __getitem__ = lambda s, i: i",
                    " __len__ = lambda s: 3\n __getitem__ = lambda s, i: [3, 1, 2][i]\n"
                    " n = 0\n def __iter__(s):\n  s.n += 1\n  return iter([[1, 2, 3], [3, 1, "
                    "2]][s.n % 2])")
        for test in ("y = f(1)\nassert sorted(y) == [1, 2, 3] and all(y[i] <= y[i + 1] for i in "
                     "range(2)) and len(y) == 3",
                     "y = f(1)\nassert sorted(y) == [1, 2, 3] and list(y) == [1, 2, 3]",
                     "y = f(1)\nassert len(y) == 3 and [y[0], y[1], y[2]] == sorted(y) == [1, 2, "
                     "3]")],
    "unencodable text can be a reason": [
        ("def f(x): raise ValueError('\\ud800')", "assert f(1)", False),
        ("def f(x): return '\\ud800'", "assert f(1) == 3, f(1)", False)],
    "lengths are true": [
        *((f"import sys\nclass Y: __len__ = lambda s: 2\ndef f(x):\n frame = sys._getframe()\n"
           " while 'ObjectServer' not in frame.f_globals: frame = frame.f_back\n"
           f" frame.f_globals['ObjectServer'].shape = lambda *a: {shape}\n return Y()",
           "assert '__len__' in f(1)._shape()[0]", False)
          for shape in ("(Y(), 2, None)", "('__len__', 2, None)", "(Y(), Y(), Y())", "Y()",
                        "({'__len__'}, 2, None)", "(frozenset(['__len__']), 2.0, None)",
                        "(frozenset(['__len__']), 2, (1, 2))")),
        ("class Y:\n __len__ = lambda s: 2\n __iter__ = lambda s: iter([3, 1, 2])\ndef f(x): "
         "return Y()",
         "y = f(1)\nassert len(y) == 2 and sorted(y) == [1, 2, 3]", False)],
    "Python's protocols are not trusted": [
        ("class E:\n def __getattr__(s, n): return True\n __eq__ = __lt__ = lambda *a: True\n"
         "def f(x): return E()", test, False)
        for test in ("assert f(1) == 1", "assert f(1).__class__ is int or f(1).__eq__(1) is True",
                     "f(1).__array_interface__", "f(1)._as_parameter_",
                     "import copy; copy.copy(f(1))",
                     "assert f(1) < 2", "import operator; operator.index(f(1))")],
    "forged answers": [
        ("import sys, json\nfor o in list(sys.modules.values()): pass\n"
         f"json.dumps = lambda *a, **k: {forged!r}\ndef f(x): return 3",
         "try: assert f(1) == 4\nexcept"
         " Exception: pass\nelse: 1/0", False)
        for forged in (
            "[]", "{}", "[" * 9999, '["made", "os.system", "true"]',
            *(f'["tuple", "value"{value}]' for value in (
                "", ', ["made", "builtins.int", 4]',
                ', ["made", "builtins.bytearray", 99999999999]',
                ', ["int", 1]', ', ["object", "x"]', ', ["object", []]')),
            '["tuple", "raise", [], ["tuple"], ""]')],
    "values": [
        (f"{IMPORTS}\n"
         f"def f(x): return {value}",
         f"{IMPORTS}\n"
         f"got = f(1)\nassert {test or 'got == ' + value} and type(got) is type({value})", True)
        for value, test in {
            "float('inf')": "", "-float('inf')": "", "float('nan')": "got != got",
            "-0.0": "str(got) == '-0.0'",
            "{'a': [float('inf')]}": "", "defaultdict(int, a=1)": "got['b'] == 0 and got['a'] == 1",
            "defaultdict(list)": "got[1] == []",
            "Counter('aab')": "got.most_common(1) == [('a', 2)]",
            "OrderedDict([(2, 1), (1, 2)])": "", "deque([1, (2,)], 3)": "got.maxlen == 3",
            "10 ** 5000": "", "-(10 ** 5000)": "", "[2 ** 64, -2 ** 63]": "", "Fraction(1, 3)": "",
            "Decimal('1.10')": "str(got) == '1.10'", "1j": "", "range(1, 9, 2)": "",
            "{1, (2, 3)}": "",
            "frozenset('ab')": "", "b'\\xff\\0'": "", "bytearray(b'a')": "", "None": "", "True": "",
            "'\\ud83d' + '\\ude00'": "len(got) == 2", "'täxt\\0'": "", "'x' * 200_000": "",
            "list(range(300_000))": "", "{(1, 'a'): {2: [3]}}": "",
            "[[]] * 3 + [()]": ""}.items()],
    "named tuples and lists of objects": [
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, "
         "[2])",
         "p = f(1)\nassert p == (1, [2]) == tuple(p)", True),
        ("class N:\n def __init__(s, v): s.v = v\nns = [N(1), N(2)]\ndef f(x): return ns",
         "assert [n.v for n in f(1)] == [1, 2] and f(1)[0] is f(1)[0] is not f(1)[1]\n"
         "f(1)[0].v = 7\nassert f(1)[0].v == 7 and f(1)", True)],
    "containers and iterators of the code": [
        ("class Q:\n def __init__(s): s.i = []\n def __len__(s): return len(s.i)\n"
         " def put(s, x): s.i.append(x)\n def __iter__(s): return iter(s.i)\n"
         " def __getitem__(s, i): return s.i[i]\n def __setitem__(s, i, x): s.i[i] = x\n"
         " def __contains__(s, x): return x in s.i\nf = Q",
         "q = f()\nassert not q\nq.put(1); q.put(2)\nassert q and list(q) == [1, 2] == q[:] and "
         "q[-1] == 2\n"
         "q[0] = 5\nassert 5 in q and 1 not in q and list(reversed(q)) == [2, 5]\n"
         "try: q[2]\nexcept IndexError: pass\nelse: 1/0", True),
        ("def f(x):\n while True:\n  yield x\n  x += 1",
         "from itertools import islice\ng = f(1)\nassert next(g) == 1 and list(islice(g, 3)) == "
         "[2, 3, 4]"
         "\nassert list(zip(f(0), 'ab')) == [(0, 'a'), (1, 'b')]", True),
        ("class P:\n def __iter__(s):\n  n = 0\n  while 1:\n   yield n\n   n += 1\nf = P",
         "from itertools import islice\np = f()\nassert list(islice(p, 3)) == list(islice(p, 3)) "
         "== [0, 1, 2]",
         True),
        ("def f(x): return {1: 2}.items()", "assert list(f(1)) == [(1, 2)] and (1, 2) in f(1)",
         True)],
    "long arguments, many calls, no limit of steps": [
        ("def f(x): return len(x)", f"assert f({LONG!r}) == {len(LONG)} and f([0] * 400_000) == "
         f"400_000", True),
        ("def f(x): return x + 1", "for i in range(1500): assert f(i) == i + 1", True)],
    "deep values": [
        ("def f(n):\n x = []\n for _ in range(n): x = [x]\n return x",
         "x = f(100)\nfor _ in range(100): assert len(x) == 1; x = x[0]", True),
        ("def f(n):\n x = []\n for _ in range(n): x = [x]\n return x",
         "assert len(f(9999)) == 1", True),
        ("x = []; x.append(x)\ndef f(n): return x", "assert len(f(1)) == 1", True)],
}  # fmt: skip


@pytest.mark.parametrize("kind", JUDGED)
def test_the_verdict_comes_from_the_judge(pool: SandboxPool, kind: str) -> None:
    for code, tests, passes in JUDGED[kind]:
        verdict = check_tests(pool, code, tests, timeout_s=20.0)
        assert verdict.passed is passes, (code, tests[:500], verdict)
        assert verdict.reason.encode() or passes, "whatever the code said, a record can hold it"
        assert not verdict.infra_error


def test_names_under_test_are_found_or_required(pool: SandboxPool) -> None:
    code = "class N: pass\ndef f(x): return type(x)"
    with pytest.raises(ValueError, match="'tests' use f, N and define none"):
        check_tests(pool, code, "assert f(N()) == N")
    assert check_tests(pool, code, "assert f(N()) is N", names={"f": "f", "N": "N"}).passed
    assert not check_tests(pool, code, "assert f(N()) is N", names={"f": "f"}).passed
    with pytest.raises(ValueError, match="not Python"):
        check_tests(pool, code, "assert (")
    with pytest.raises(ValueError, match="not Python: 'return' outside function"):
        check_tests(pool, code, "return f")
    for wrong in ([1], None):
        with pytest.raises(ValueError, match="not Python: expected text"):
            names_of(wrong, None)


@pytest.mark.filterwarnings("error")
def test_warnings_do_not_reject_tests() -> None:
    assert names_of(r"assert f(1) is 1 and f(2) == '\d'", None)[:2] == ([], {"f": "f"})


def test_tests_can_be_longer_than_the_code_limit() -> None:
    """Neither they nor the judge are the code's, whose length is bounded."""
    tests = f"data = {'x' * 300_000!r}\nassert f(data) == len(data)"
    with SandboxPool(limits=Limits(code_kib=1), min_idle=0, zygotes=1) as pool:
        for code, passes in (("f = len", True), ("f = id", False)):
            verdict = check_tests(pool, code, tests)
            assert (verdict.passed, verdict.infra_error) == (passes, False), verdict
        assert not check_tests(pool, "f = len" + "#" * 1024, tests).infra_error


def test_too_large_tests_are_an_infra_error() -> None:
    tests = f"data = {[*range(300_000)]!r}\nassert f(data) == len(data)"
    with SandboxPool(limits=Limits(memory_mib=64), min_idle=0, zygotes=1) as pool:
        verdict = check_tests(pool, "f = len", tests, timeout_s=60.0)
    assert (verdict.passed, verdict.infra_error) == (False, True), verdict
    assert "could not be started" in verdict.reason


def test_grading_does_not_wait_for_rollouts() -> None:
    with SandboxPool(min_idle=0, zygotes=1, max_live=1, all_cpus=1.5) as pool, pool.acquire():
        graders = GradingPool(pool)
        try:
            assert check_tests(graders.pool(), "f = len", "assert f([]) == 0").passed
            assert (pool.limits.niceness, graders.pool().limits.niceness) == (5, 1)
            assert graders.pool().all_cpus == 1.5
        finally:
            graders.close()


def test_graders_do_not_wait_for_each_other() -> None:
    with SandboxPool(min_idle=0, zygotes=1, max_live=3) as pool, ThreadPoolExecutor(6) as threads:
        code = "import time\ntime.sleep(0.1)\ndef f(x): return x"
        verdicts = [threads.submit(check_tests, pool, code, "assert f(1) == 1") for _ in range(6)]
        assert all(verdict.result(timeout=30).passed for verdict in verdicts)
        held = [pool.acquire() for _ in range(2)]
        with pytest.raises(SandboxBusy, match="max_live"):
            pool.acquire_pair(timeout_s=0.05)
        for session in held:
            session.close()
        for session in pool.acquire_pair():
            session.close()
        assert pool.metrics()["live"] == 0
    one = SandboxPool(min_idle=0, zygotes=1, max_live=1)
    with one as pool, pytest.raises(ValueError, match="at least 2"):
        check_tests(pool, "f = len", TESTS)


def test_cases_share_their_time(pool: SandboxPool) -> None:
    code = "import time\ntime.sleep(float(input()))\nprint(1)"
    verdicts = check_all(pool, code, [("0", "1"), ("1.2", "1"), ("0", "1")], timeout_s=3.0)
    assert [verdict.passed for verdict in verdicts] == [True] * 3
    verdicts = check_all(pool, code, [("9", "1"), ("0", "1"), ("0", "1")], timeout_s=1.0)
    assert [verdict.reason[:5] for verdict in verdicts] == ["still", "not r", "not r"]


def test_waiting_for_a_place_does_not_count_as_case_time() -> None:
    with SandboxPool(min_idle=0, zygotes=1, max_live=1) as pool:
        held = pool.acquire()
        threading.Timer(3.5, held.close).start()
        verdicts = check_all(pool, "print(1)", [("", "1")] * 3, timeout_s=3.0)
        assert all(verdict.passed for verdict in verdicts), verdicts


def test_too_long_expected_output_raises(pool: SandboxPool) -> None:
    most = pool.limits.output_max_mib << 20
    with pytest.raises(ValueError, match="expected output: expected at most"):
        check_output(pool, "", "x" * (most + 1))
    assert check_output(pool, f"print('x' * {most - 1})", "x" * (most - 1) + "\n").passed


def test_only_newlines_end_lines(pool: SandboxPool) -> None:
    for text in ("a\x0bb", "a\u2028b", "a\x85b\x1cc", "a\fb", "a\u2029"):
        code = f"print({text!r}); print('end ')"
        assert check_output(pool, code, f"{text}\nend\n").passed
        assert not check_output(pool, code, "\n".join([*text.splitlines(), "end"])).passed


@pytest.mark.parametrize(
    ("printed", "expected", "passes"),
    [(b"\xff\n", "\N{REPLACEMENT CHARACTER}", False), (b"\xff", "\xff", False),
     ("\xff \n\n".encode(), "\xff", True), (b"\xef\xbf\xbd", "\N{REPLACEMENT CHARACTER}", True)],
)  # fmt: skip
def test_output_is_compared_byte_by_byte(
    pool: SandboxPool, printed: bytes, expected: str, passes: bool
) -> None:
    code = f"import os; os.write(1, {printed!r})"
    assert check_output(pool, code, expected).passed is passes


WAITS, LOOPS = "import time; time.sleep(1.2)\n", "while True: pass\n"


@pytest.mark.parametrize("waits", [True, False])
def test_verdict_time_is_cpu_time(pool: SandboxPool, waits: bool) -> None:
    """A machine that has none for it for a while makes right code no wrong one."""
    code = WAITS if waits else LOOPS
    verdicts = [
        check_tests(pool, f"def f(x):\n {code} return x", "assert f(1) == 1", timeout_s=0.6),
        check_tests(pool, f"{code}def f(x): return x", "assert f(1) == 1", timeout_s=0.6),
        check_output(pool, f"{code}print(1)", "1", timeout_s=0.6),
    ]
    for verdict in verdicts:
        assert verdict.passed is waits, verdict
        assert ("0.6 s of CPU time" in verdict.reason) is not waits, verdict
        assert not verdict.infra_error


@pytest.mark.parametrize("grouped", [True, False])
def test_an_answer_too_large_for_the_judge_is_an_infra_error(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the kernel ends the judge or Python has a MemoryError."""
    if not grouped:
        refuse_control_groups(monkeypatch)
    code = """
import json
dumps, n = json.dumps, 0
lists = lambda: '["tuple", "value", ["list"' + n * ', ["list"]' + "]]"
json.dumps = lambda tree, **options: lists() if n else dumps(tree, **options)
def f(x):
    global n
    n = x"""
    with SandboxPool(limits=Limits(memory_mib=96), min_idle=0, zygotes=1) as pool:
        for size, fits in ((1000, True), (2_000_000, False)):
            verdict = check_tests(pool, code, f"assert len(f({size})) == {size}", timeout_s=60.0)
            assert (verdict.passed, verdict.infra_error) == (fits, not fits), verdict
    assert "remedy: a larger limits.memory_mib" in verdict.reason
    broke = StepResult(status=StepStatus.ERROR, error=StepError("MemoryError", "", ""))
    assert _failed_judge(broke, "before the judge's own words").infra_error


def test_answers_are_passed_as_bytes(pool: SandboxPool) -> None:
    """The host reads none of it: it holds an answer's memory, and has nearly no work."""
    for size, passes in ((2_500_000, True), (9_000_000, False)):
        tests = f"assert len(f({size})) == {size}\nassert len(f(2)) == 2"
        began = time.thread_time()
        tracemalloc.start()
        verdict = check_tests(pool, "def f(x): return '\\xe9' * x", tests, timeout_s=60.0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (verdict.passed, "over 32 MiB" in verdict.reason) == (passes, not passes), verdict
        assert peak < 64 << 20
        assert time.thread_time() - began < 1.0


def test_outputs_and_messages_are_cut_for_the_host(pool: SandboxPool) -> None:
    """Four million empty lines were 600 MiB of lists; what an assert says may be any text."""
    tracemalloc.start()
    verdict = check_output(pool, "print('\\n' * 4_000_000 + 'x')", "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (verdict.passed, "expected 'x', got" in verdict.reason) == (False, True), verdict
    assert peak < 64 << 20
    verdict = check_tests(pool, "def f(): return 'x' * 100_000 + 'end'", "assert f() == 1, f()")
    assert (verdict.passed, len(verdict.reason) <= 4000) == (False, True)
    assert "AssertionError: xx" in verdict.reason
    assert verdict.reason.endswith("xend\n")


NARROW = {
    "np.float16('inf')": "got != 70_000", "np.float32(16777216)": "got != 16777217",
    "np.float32(0.1)": "got != 0.1", "np.float64(2**53)": "got != 2**53 + 1",
    "np.complex64(1+2j)": "got == 1+2j", "np.int8(-1)": "got == -1 and got + 200 == 199",
    "np.uint8(255)": "got + 1 == 256", "np.bool_(True)": "got is True",
    "np.uint64(2**64 - 1)": "got == 2**64 - 1",
    "np.array([1], np.float16)": "got.dtype == np.float64",
    "np.array([16777216], '>f4')": "(got != 16777217).all()",
    "np.array([1j], np.complex64)": "got.dtype == np.complex128",
    "np.array([200], np.uint8)": "(got + 100 == 300).all()",
    "np.array([2**64 - 1], np.uint64)": "got.dtype == np.uint64",
    "np.array([True])": "got.dtype == bool", "[np.float16(2)]": "type(got[0]) is float",
    "np.array(np.float32(3))": "got == 3 and got.dtype == np.float64",
    "np.longdouble(1)": "got != 1",
    "np.array([1], np.longdouble)": "type(got).__name__ != 'ndarray'",
    "np.arange(6).reshape(2, -1)": "np.array_equal(got, [[0, 1, 2], [3, 4, 5]])",
}  # fmt: skip


def test_numbers_and_arrays_are_widened() -> None:
    np = pytest.importorskip("numpy")
    site = str(Path(np.__file__).parents[1])
    code = "import numpy as np\ndef f(n): return eval(n)"
    tests = f"import numpy as np\nfor n, test in {NARROW!r}.items():\n got = f(n)"
    tests += "\n assert eval(test), n"
    limits = Limits(memory_mib=512, timeout_s=20.0)
    with SandboxPool(template=Template(site_dirs=(site,)), limits=limits, zygotes=1) as own:
        verdict = check_tests(own, code, tests, timeout_s=60)
        assert verdict.passed, verdict
        objects = "import numpy as np\ndef f(n): return np.array([[], f], dtype=object)"
        pointer = "import numpy as np\nnp.asarray(f(1)).sum()"
        assert not check_tests(own, objects, pointer, timeout_s=60).passed
