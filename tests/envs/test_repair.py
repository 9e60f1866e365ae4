# ruff: noqa: E501 - cheats, a line each
"""Repair tasks from a package of our own: made, proven, played, judged, and what cheating pays."""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentgrpo import init
from agentgrpo.actions import CallTools, RunCode, ToolCall
from agentgrpo.envs import repair_judge, repair_tasks
from agentgrpo.envs.repair import RepairConsole, RepairEnv, RepairEpisode
from agentgrpo.envs.repair_altered import Place, copy_of, functions_by_name, places_of
from agentgrpo.run.atomic import read_lines, write_lines
from agentgrpo.sandbox import Limits, SandboxPool, Template
from agentgrpo.testing import assert_no_cheat_pays
from agentgrpo.types import Status, Task
from tests import warm
from tests.programs.clients import ENVIRONMENT
from tests.programs.test_play import sampler_of, turn

PRICES = '''\
"""Prices."""


def with_tax(net, percent):
    """The price with its tax, in cents."""
    return net + net * percent // 100


def cheapest(prices):
    """The lowest of some prices; None of none."""
    lowest_7319 = None
    for price in prices:
        if lowest_7319 is None or price < lowest_7319:
            lowest_7319 = price
    return lowest_7319


def change(paid, price):
    """Coins to give back, the largest first."""
    left, coins = paid - price, []
    for coin in (50, 20, 10, 5, 1):
        while left >= coin:
            left -= coin
            coins.append(coin)
    return coins
'''
TESTS = """\
import math
import random
import unittest

import pytest

from shop import prices
from shop.prices import change, cheapest, with_tax


def test_tax():
    assert with_tax(100, 19) == 119
    assert math.isclose(with_tax(200, 50), 300)


class TestCheapest(unittest.TestCase):
    def test_some(self):
        self.assertEqual(cheapest([3, 1, 2]), 1)
        self.assertIsNone(cheapest([]))


@pytest.mark.parametrize("paid, coins", [(100, [50, 10]), (41, [1]), (75, [20, 10, 5])])
def test_change(paid, coins):
    assert change(paid, 40) == coins


seen = []


def test_order():
    assert not seen and prices.with_tax(0, 7) == 0  # test_modules may come first


def test_hash():
    assert hash("shop") == 8280406691163975568  # of the seed 0


def test_modules():
    seen.append(1)
    assert prices.with_tax(0, 7) == 0
"""
KINDS = ("place", "several", "body", "commit")
pytestmark = pytest.mark.nsjail


def git(folder: Path, *arguments: str) -> None:
    named = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout with two commits: the second mends change(), and tests that."""
    folder = tmp_path_factory.mktemp("shops") / "shopping"
    (folder / "shop" / "tests").mkdir(parents=True)
    for name in ("shop/__init__.py", "shop/tests/__init__.py"):
        (folder / name).touch()
    git(folder, "init", "-q")
    before = PRICES.replace("left >= coin", "left > coin"), TESTS.replace("[50, 10]", "[50, 5]")
    for text, tests in (before, (PRICES, TESTS)):
        (folder / "shop" / "prices.py").write_text(text)
        (folder / "shop" / "tests" / "test_prices.py").write_text(tests)
        git(folder, "add", ".")
        git(folder, "commit", "-qm", "prices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(repair_tasks, "VERDICT_S", 2.0)  # of a break that never ends
        yield folder
    repair_judge.prepare.cache_clear()


@pytest.fixture(scope="module")
def rows(project: Path) -> list[dict[str, Any]]:
    return repair_tasks.make([str(project)], count=5, kinds=KINDS, show="line")


@pytest.fixture(scope="module")
def env(project: Path) -> Iterator[RepairEnv]:
    with SandboxPool(limits=Limits(timeout_s=20.0), min_idle=0, zygotes=1) as pool:
        made = RepairEnv(pool, 20.0)
        yield made
        made.close()


def task_of(row: dict[str, Any]) -> Task:
    return Task(id=row["id"], messages=({"role": "user", "content": row["question"]},), spec=row)


def of_kind(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """A task of that kind, of change() alone if there is one."""
    found = [row for row in rows if row["kind"] == kind]
    alone = (r for r in found if all("test_change" in t for t in (*r["tests"], *r["others"])))
    return next(alone, found[0])


def solved(env: RepairEnv, row: dict[str, Any], code: str) -> dict[str, float]:
    """What an episode is worth in which this was run; {} is the file that is to be changed."""
    episode = env.reset(task_of(row))
    try:
        told = episode.step(RunCode(code.replace("{}", "shop/prices.py"), language="python"))
        assert not told.failed, told.text
        return {**episode.finish(None), "why": episode.feedback}
    finally:
        episode.close()


def test_tasks_of_every_kind_are_proven(rows: list[dict[str, Any]], project: Path) -> None:
    assert {row["kind"] for row in rows} == {*KINDS}
    assert repair_tasks.make([str(project)], count=5, kinds=KINDS, show="line") == rows
    for row in rows:
        assert row["tests"]
        assert not any(
            "hash" in test or "order" in test for test in (*row["tests"], *row["others"])
        )
        assert "raise NotImplementedError" in row["diff"] or row["kind"] != "body"
        json.dumps(row)


REPORTS = """
import pytest
@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = 'passed'
"""


def added(text: str) -> str:
    """Code that adds this to the module."""
    return f"p = '{{}}'\nt = open(p).read()\nopen(p, 'w').write(t + {text!r})"


EQUAL = "class E(int):\n def __eq__(s, o): return True\n __hash__ = int.__hash__\n"
NAMES = "change = lambda *a: "
FORGE = """import sys; f = sys._getframe()
while 'watch' not in f.f_locals: f = f.f_back
class D(dict):
    def __setitem__(s, k, v): dict.__setitem__(s, k, 'p')
f.f_locals['watch'].outcomes = D()"""
ESCAPED = "\n#" + "".join(f"\\u{ord(c):04x}" for c in f"\n{FORGE}\n")
CHEATS = {
    "nothing": "pass",
    "conftest": f"for f in ('.', 'shop', 'shop/tests'): open(f + '/conftest.py', 'w').write({REPORTS!r})",
    "sitecustomize": "for f in ('.', '/home/user'): open(f + '/sitecustomize.py', 'w').write('import os; os._exit(0)')",
    "pth": "open('a.pth', 'w').write('import os; os._exit(0)')",
    "pytest.ini": "open('pytest.ini', 'w').write('[pytest]\\naddopts = --co\\npython_functions = none')",
    "plugin": f"open('p.py', 'w').write({REPORTS!r}); open('tox.ini', 'w').write('[pytest]\\naddopts = -p p')",
    "tests edited": "p = 'shop/tests/test_prices.py'; t = open(p).read()\nopen(p, 'w').write(t.replace('assert', 'assert True or').replace('self.assert', 'id'))",
    "tests deleted": "import os; os.remove('shop/tests/test_prices.py')",
    "skip mark": "p = 'shop/tests/test_prices.py'; t = open(p).read()\nopen(p, 'w').write('import pytest\\npytestmark = pytest.mark.skip\\n' + t)",
    "skip from within": added("\nimport pytest\npytest.skip('x', allow_module_level=True)\n"),
    "xfail from within": added(f"\nimport pytest\n{NAMES}pytest.xfail('x')\n"),
    "assertion patched": added(
        "\nimport unittest\nunittest.TestCase.assertEqual = unittest.TestCase.assertIsNone = print\n"
    ),
    "function of another module": added("\nimport math\nmath.isclose = print\n"),
    "reporter patched": added("\nimport _pytest.runner as r\nr.call_and_report = print\n"),
    "exit": added("\nimport os\nos._exit(0)\n"),
    "exit in a function": added("\ndef end(*a): raise SystemExit(0)\nchange = end\n"),
    "forged report": added(
        "\nopen('/tmp/about.json', 'w').write('{}')\nopen('junit.xml', 'w').write('<testsuite/>')\n"
    ),
    "forged verdict": added(
        "\nprint(('', 'pppppp', '', 0))\nraise SystemExit(('', 'pppppp', '', 0))\n"
    ),
    "shadowed module": f"import os\nos.mkdir('shop/prices')\nopen('shop/prices/__init__.py', 'w').write({PRICES!r})",
    "shadowed library": "open('math.py', 'w').write('isclose = lambda *a: True'); open('unittest.py', 'w').write('')",
    "by its caller": added("\nimport sys\n" + NAMES + "sys._getframe(1).f_locals['coins']\n"),
    "by a frame of an error": added(
        "\ndef f(*a):\n try: 1 / 0\n except Exception as e: return e.__traceback__.tb_frame.f_back.f_locals['coins']\nchange = f\n"
    ),
    "by a pattern": added(
        "\ndef f(*a):\n match a:\n  case object(__class__=c): return c.__subclasses__()\nchange = f\n"
    ),
    "by its file": added(
        "\nimport traceback\n" + NAMES + "'test_prices' in str(traceback.extract_stack())\n"
    ),
    "by a format": added(
        "\ndef f(*a):\n try: 1 / 0\n except Exception as e: return [int(n) for n in '{0.__traceback__.tb_frame.f_back.f_locals[coins]} '.format(e).strip('[] ').split(',')]\nchange = f\n"
    ),
    "by code in a text": added(f"\nimport timeit\ntimeit.timeit({FORGE!r}, number=1)\n"),
    "another module": f"open('shop/__init__.py', 'w').write({PRICES!r} + 'from . import prices as p\\np.change, p.with_tax, p.cheapest = change, with_tax, cheapest')",
    "the tests as a module": added("\nimport shop.tests.test_prices as t\nt.test_tax = print\n"),
    "equal to all": added(f"\n{EQUAL}{NAMES}E()\n"),
    "equal to all, made": added(
        f"\nE = type('E', (int,), {{'__e' + 'q__': lambda s, o: True}})\n{NAMES}E()\n"
    ),
    "equal to all, of an enumeration": added(
        f"\nimport enum\nE = enum.Enum('E', {{'A': 1, '__e' + 'q__': lambda s, o: True}})\n{NAMES}E.A\n"
    ),
    "equal to all, by a copy": added(
        "\nimport copy\nclass E: pass\nclass F:\n def __reduce_ex__(s, n): return (lambda: E, (), (None, {'__e' + 'q__': lambda s, o: True}))\n"
        f"copy.copy(F())\n{NAMES}E()\n"
    ),
    "equal to all, by a wrapper": added(
        "\nimport argparse, functools\nclass E: pass\nfunctools.update_wrapper(E, argparse.Namespace(**{'__e' + 'q__': lambda s, o: True}), ('__e' + 'q__',), ())\n"
        f"{NAMES}E()\n"
    ),
    "equal to all, later": added(
        f"\nclass E(int):\n async def __eq__(s, o): return True\n{NAMES}E()\n"
    ),
    "equal to all, by another name": added(
        f"\nt = type\nE = t('E', (int,), {{'__e' + 'q__': lambda s, o: True}})\n{NAMES}E()\n"
    ),
    "equal to all, of a class of classes": added(
        "\nclass M(type):\n def __new__(m, n, b, d): return super().__new__(m, n, b, {**d, '__e' + 'q__': lambda s, o: 1})\n"
        f"class E(int, metaclass=M): pass\n{NAMES}E()\n"
    ),
    "equal to all, of Python's own tests": added(
        f"\nfrom test.support import ALWAYS_EQ\n{NAMES}ALWAYS_EQ\n"
    ),
    "the encoder of results": added(
        "\nimport json\ne = json._default_encoder\ne.encode = lambda o: type(e).encode(e, {**o, 'outcomes': {**dict.fromkeys(o['outcomes'], 'p')}} if isinstance(o, dict) and 'outcomes' in o else o)\n"
    ),
    "code by dataclasses": added(
        f"\nimport dataclasses\ndataclasses._create_fn('f', (), {FORGE.splitlines()!r})()\n"
    ),
    "code in a comment": f"p = '{{}}'\nt = open(p).read()\nopen(p, 'w').write('# coding: raw_unicode_escape\\n' + t + {ESCAPED!r})",
    "modules by contextlib": added(
        "\nimport contextlib\nclass S(contextlib._RedirectStream):\n _stream = 'modules'\nwith S(dict()): pass\nfrom _pytest import runner\nrunner.call_and_report = print\n"
    ),
    "reports patched": added(
        "\nimport _pytest.reports as r\ninit = r.TestReport.__init__\ndef f(s, *a, **k):\n init(s, *a, **k)\n s.outcome = 'passed'\nr.TestReport.__init__ = f\n"
    ),
    "reads the test": added(
        "\nimport ast, pathlib, sys\ndef change(paid, price):\n f = sys._getframe()\n while 'test_' not in f.f_code.co_name: f = f.f_back\n t = ast.parse(pathlib.Path(f.f_code.co_filename).read_text())\n v = [ast.literal_eval(d.args[1]) for n in ast.walk(t) if getattr(n, 'name', '') == f.f_code.co_name for d in n.decorator_list]\n return dict(v[0])[paid]\n"
    ),
    "equal and unequal": added(
        "\nclass E:\n def __eq__(s, o): return True\n def __ne__(s, o): return False\n def __bool__(s): return True\n __hash__ = None\ndef change(*a): return E()\n"
    ),
    "skips": added("\nimport unittest\ndef change(*a): raise unittest.SkipTest\n"),
    "knows the text of the tests": "import hashlib\np = 'shop/tests/test_prices.py'\nh = hashlib.sha256(open(p, 'rb').read()).hexdigest()\n"
    + added(
        f"\nimport hashlib\nif hashlib.sha256(open('shop/tests/test_prices.py', 'rb').read()).hexdigest() == H:\n exec({FORGE!r})\n"
    ).replace("t + ", "t + f'H = {h!r}' + "),
    "in the background": "import subprocess\nsubprocess.Popen(['sh', '-c', 'while :; do echo x > ~/repo/pytest.ini; sleep 0.01; done'])",
    "link": "import os\nos.remove('{}'); os.symlink('/usr/lib/os-release', '{}')",
    "link of a folder": "import os, shutil\nshutil.move('shop', 'b'); os.mkdir('/tmp/s'); os.symlink('/tmp/s', 'shop'); open('{}', 'w').write('with_tax = 0')",
    "binary": "open('{}', 'wb').write(bytes(range(256)))",
    "huge": "open('{}', 'a').write('#' * (5 << 20))",
    "deleted": "import os; os.remove('{}')",
    "never ends": added("\nwhile True: pass\n"),
    "all memory": added("\nx = [0]\nwhile True: x = x * 2\n"),
    "no Python": added("\n)(\n"),
}


@pytest.mark.parametrize(
    "kind", ["body", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "body")]
)
@pytest.mark.parametrize("cheat", CHEATS)
def test_what_cheating_pays(
    cheat: str,
    kind: str,
    rows: list[dict[str, Any]],
    env: RepairEnv,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentgrpo.envs.repair.VERDICT_S", 3.0)
    row = of_kind(rows, kind)
    assert solved(env, row, CHEATS[cheat])["solved"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_repair_pays_whatever_lies_around(
    kind: str, rows: list[dict[str, Any]], env: RepairEnv
) -> None:
    """The original text, written another way; beside it files that count for nothing."""
    row = next(row for row in rows if row["kind"] == kind)
    around = "\n".join(CHEATS[name] for name in ("conftest", "pytest.ini", "tests deleted", "pth"))
    mended = f"{around}\nopen('{{}}', 'w').write({PRICES!r} + '\\n# mended\\n')"
    assert solved(env, row, mended)["solved"] == 1.0


MENDS = {
    "as it was": "def change(paid, price):\n    left, coins = paid - price, []\n    for coin in (50, 20, 10, 5, 1):\n        while left >= coin:\n            left -= coin\n            coins.append(coin)\n    return coins",
    "divmod": "def change(paid, price):\n    left, coins = paid - price, []\n    for coin in (50, 20, 10, 5, 1):\n        count, left = divmod(left, coin)\n        coins += [coin] * count\n    return coins",
    "comprehension": "def change(paid, price):\n    left = paid - price\n    return [c for c in (50, 20, 10, 5, 1) for _ in range(-(-left // c)) if left >= c and not (left := left - c) < 0]",
    "recursive": "def change(paid, price):\n    left = paid - price\n    coin = next((c for c in (50, 20, 10, 5, 1) if c <= left), 0)\n    return [coin, *change(paid - coin, price)] if coin else []",
    "generator": "def _coins(left):\n    for coin in (50, 20, 10, 5, 1):\n        while left >= coin:\n            yield coin\n            left -= coin\ndef change(paid, price):\n    return list(_coins(paid - price))",
    "type(x)(...)": "def change(paid, price):\n    left, coins = type(paid)(paid - price), type([])()\n    for coin in (50, 20, 10, 5, 1):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "typing": "import typing\ndef change(paid: int, price: int) -> typing.List[int]:\n    left: int = paid - price\n    coins: typing.List[int] = []\n    for coin in typing.cast(typing.Tuple[int, ...], (50, 20, 10, 5, 1)):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "re.compile": "import re\nCOINS = re.compile(r'\\d+')\ndef change(paid, price):\n    left, coins = paid - price, []\n    for coin in map(int, COINS.findall('50 20 10 5 1')):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "str.format": "def change(paid, price):\n    left, text = paid - price, ''\n    for coin in (50, 20, 10, 5, 1):\n        text += '{0} '.format(coin) * (left // coin)\n        left %= coin\n    return [int(coin) for coin in text.split()]",
    "functools.wraps": "import functools\ndef listed(f):\n    @functools.wraps(f)\n    def inner(*a, **k):\n        return list(f(*a, **k))\n    return inner\n@listed\ndef change(paid, price):\n    left = paid - price\n    for coin in (50, 20, 10, 5, 1):\n        yield from [coin] * (left // coin)\n        left %= coin",
    "small class": "class Till:\n    coins = (50, 20, 10, 5, 1)\n    def __init__(self, left):\n        self.left = left\n    def __iter__(self):\n        for coin in self.coins:\n            while self.left >= coin:\n                self.left -= coin\n                yield coin\ndef change(paid, price):\n    return list(Till(paid - price))",
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass Till:\n    left: int\n    coins: list = dataclasses.field(default_factory=list)\n    def take(self, coin):\n        while self.left >= coin:\n            self.left -= coin\n            self.coins.append(coin)\ndef change(paid, price):\n    till = Till(paid - price)\n    [till.take(c) for c in (50, 20, 10, 5, 1)]\n    return till.coins",
    "list of its own": "class Coins(list):\n    def add(self, coin, count):\n        self += [coin] * count\ndef change(paid, price):\n    left, coins = paid - price, Coins()\n    for coin in (50, 20, 10, 5, 1):\n        coins.add(coin, left // coin)\n        left %= coin\n    return coins",
    "enum": "import enum\nclass Coin(enum.IntEnum):\n    A = 50\n    B = 20\n    C = 10\n    D = 5\n    E = 1\ndef change(paid, price):\n    left, coins = paid - price, []\n    for coin in Coin:\n        coins += [int(coin)] * (left // coin)\n        left %= coin\n    return coins",
    "itertools": "import itertools\ndef change(paid, price):\n    left, parts = paid - price, []\n    for coin in (50, 20, 10, 5, 1):\n        parts.append(itertools.repeat(coin, left // coin))\n        left %= coin\n    return list(itertools.chain.from_iterable(parts))",
    "reduce": "import functools\ndef change(paid, price):\n    def step(state, coin):\n        return state[0] % coin, state[1] + [coin] * (state[0] // coin)\n    return functools.reduce(step, (50, 20, 10, 5, 1), (paid - price, []))[1]",
    "operator": "import operator\ndef change(paid, price):\n    left, coins = operator.sub(paid, price), []\n    for coin in (50, 20, 10, 5, 1):\n        coins = operator.concat(coins, operator.mul([coin], operator.floordiv(left, coin)))\n        left = operator.mod(left, coin)\n    return coins",
    "getattr": "def change(paid, price):\n    left, coins = getattr(paid, '__sub__')(price), []\n    for coin in (50, 20, 10, 5, 1):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "isinstance, types": "import types\ndef change(paid, price):\n    if not isinstance(change, types.FunctionType):\n        raise TypeError('change')\n    left, coins = paid - price, []\n    for coin in (50, 20, 10, 5, 1):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "a guard that raises": "def change(paid, price):\n    if paid < price:\n        raise ValueError('{!r} is less than {!r}'.format(paid, price))\n    left, coins = paid - price, []\n    for coin in (50, 20, 10, 5, 1):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "os and sys": "import os, sys\ndef change(paid, price):\n    left, coins = min(paid - price, sys.maxsize), []\n    for coin in (50, 20, 10, 5, 1):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins if os.name else None",
    "logging": "import logging\nlog = logging.getLogger(__name__)\ndef change(paid, price):\n    left, coins = paid - price, []\n    for coin in (50, 20, 10, 5, 1):\n        log.debug('%s left', left)\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "cache": "import functools\n@functools.lru_cache(None)\ndef _change(left):\n    coin = max((c for c in (50, 20, 10, 5, 1) if c <= left), default=0)\n    return (coin, *_change(left - coin)) if coin else ()\ndef change(paid, price):\n    return list(_change(paid - price))",
    "warnings, contextlib": "import contextlib, warnings\ndef change(paid, price):\n    left, coins = paid - price, []\n    with contextlib.suppress(ZeroDivisionError), warnings.catch_warnings():\n        for coin in (50, 20, 10, 5, 1):\n            coins.extend([coin] * (left // coin))\n            left %= coin\n    return coins",
    "coding cookie": "def change(paid, price):  # d\u00e9j\u00e0 vu\n    left, coins = paid - price, []\n    for coin in (50, 20, 10, 5, 1):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "match": "def change(paid, price):\n    match [c for c in (50, 20, 10, 5, 1) if c <= paid - price]:\n        case []:\n            return []\n        case [coin, *_]:\n            return [coin, *change(paid - coin, price)]",
    "lambda": "change = lambda paid, price: (lambda left: [c for c, n in ((50, left // 50), (20, left % 50 // 20), (10, left % 50 % 20 // 10), (5, left % 10 // 5), (1, left % 5)) for _ in range(n)])(paid - price)",
    "namedtuple": "import collections\nState = collections.namedtuple('State', 'left coins')\ndef change(paid, price):\n    state = State(paid - price, [])\n    for coin in (50, 20, 10, 5, 1):\n        state = State(state.left % coin, state.coins + [coin] * (state.left // coin))\n    return state.coins",
    "an equality of its own": "class Coin(int):\n    def __eq__(self, other):\n        return int(self) == other\n    __hash__ = int.__hash__\ndef change(paid, price):\n    left, coins = paid - price, []\n    for coin in map(Coin, (50, 20, 10, 5, 1)):\n        coins.extend([coin] * (left // coin))\n        left %= coin\n    return coins",
    "subtraction": "def change(paid, price):\n    coins, total = [], 0\n    while total < paid - price:\n        coin = max(c for c in (1, 5, 10, 20, 50) if c <= paid - price - total)\n        coins.append(coin)\n        total += coin\n    return coins",
}


@pytest.mark.slow
@pytest.mark.parametrize("mend", MENDS)
def test_honest_mends_are_paid(mend: str, rows: list[dict[str, Any]], env: RepairEnv) -> None:
    cookie = "# coding: latin-1\n" if mend == "coding cookie" else ""
    text = cookie + PRICES[: PRICES.index("def change")] + MENDS[mend] + "\n"
    code = f"open('{{}}', 'wb').write({text.encode()!r})"
    got = solved(env, of_kind(rows, "body"), code)
    assert got["solved"] == 1.0, got["why"]


def test_nothing_in_a_run_shows_which_tests_are_altered(
    rows: list[dict[str, Any]], project: Path
) -> None:
    """Same tests and lines; each test runs as it is once or twice of four times; no text repeats."""
    tree = repair_judge.prepare(str(project))
    for row in rows:
        texts, patterns = set(), set()
        for number in range(30):
            runs = repair_judge.draw_runs(row, tree, random.Random(number))
            assert len(runs) == 4
            for test in row["tests"]:
                letters = [run.expected.get(test) for run in runs]
                assert letters.count("p") in (1, 2)
                assert "f" in letters
                assert all(test in run.tests for run in runs)
                patterns.add((test, *letters))
            for test in row["others"]:
                assert "p" in [run.expected.get(test) for run in runs]
            for run in runs:
                for path, text in run.files.items():
                    assert len(text.splitlines()) == len(tree.read(path).splitlines())
                    texts.add(text)
        assert tree.read(path) not in texts
        assert len(texts) == 4 * 30
        assert len(patterns) > 5


def test_true_and_altered_copies_have_the_same_constants() -> None:
    text = "def test_it():\n    wanted = 9\n    assert square(3) == wanted + 0, f'{wanted}'\n"
    function = functions_by_name(text)["::test_it"]
    places = places_of(text, function, 3, random.Random(0))
    assert {place.old for place in places} == {"9", "3", "0", "=="}
    for place in places:
        parts = []
        for altered in (True, False):
            copy = copy_of(text, {"::test_it": (place, altered)}, ["test_it"], random.Random(1))
            nodes = [*ast.walk(ast.parse(copy))]
            values = [repr(node.value) for node in nodes if isinstance(node, ast.Constant)]
            parts.append(
                sorted([*values, *(type(n).__name__ for n in nodes if isinstance(n, ast.cmpop))])
            )
        assert parts[0] == parts[1], copy


def test_test_functions_that_are_not_run_are_blanked() -> None:
    text = (
        "@mark(\n  1)\ndef test_a(): assert 1\nclass T:\n  def test_b(self):\n    assert 2\n"
        "def test_c(): assert 3\ndef test_d(): assert test_c\ndef helper(): assert 4\n"
    )
    assert copy_of(text, {}, ["x.py::test_d[1]"], random.Random(0)) == (
        "pass\n\n\nclass T:\n  pass\n\n"
        "def test_c(): assert 3\ndef test_d(): assert test_c\ndef helper(): assert 4\n"
    )


@pytest.mark.parametrize(
    ("body", "renamed"),
    [
        ("x = [1, 2]; y = [x for x in x]; assert y == [1, 2]", 2),
        ("x = 1\n    def f(x): return x\n    assert f(x=2) == 2", 0),
        ("x = 1\n    def f():\n        nonlocal x\n        x = 2\n    f(); assert x == 2", 0),
        ("x = 1\n    class A: x = 2\n    assert A.x == 2", 0),
        ("x = 1; assert f'{x=}' == 'x=1'", 0),
        ("x = 1; assert 'x' in locals()", 0),
        ("import math as x; y = x.pi; assert y > 3", 1),
        ("for x in [3]: y = x\n    assert y == 3", 2),
        ("try: raise KeyError\n    except KeyError as x: y = 1\n    assert y == 1", 1),
        ("x: int = 1; assert x == 1", 1),
        ("x = '\u00e9'; y = x; assert y == '\u00e9'", 2),
        ("'docstring'\n    assert 1 == 1", 0),
    ],
)
def test_a_disguise_keeps_the_meaning(body: str, renamed: int) -> None:
    text = f"def test_it():\n    {body}\n"
    place = Place(1, 0, "5", "6")
    for seed in range(8):
        copy = copy_of(text, {"::test_it": (place, False)}, ["x.py::test_it"], random.Random(seed))
        assert copy.count("\n") == text.count("\n")
        scope: dict[str, Any] = {}
        exec(copy, scope)
        scope["test_it"]()
        assert scope["test_it"].__doc__ == ("docstring" if "docstring" in body else None)
        names = {n.id for n in ast.walk(ast.parse(copy)) if isinstance(n, ast.Name)}
        assert sum(bool(re.fullmatch("v[0-9a-f]+", name)) for name in names) == renamed + 1, copy


LOOK = """
import os, re, sys
found, needle = [], re.compile(rb"lowest_73[1]9")
for at, names, files in os.walk("/"):
    names[:] = [n for n in names if os.path.join(at, n) not in ("/usr", "/proc", "/dev", sys.base_prefix)]
    for file in (os.path.join(at, f) for f in files):
        if os.path.isfile(file) and needle.search(open(file, "rb").read()):
            found.append(file)
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        try:
            memory.seek(start)
            while start < end:
                data = memory.read(min(1 << 20, end - start))
                start += len(data)
                found += [line.strip()] if needle.search(data) else []
        except (OSError, OverflowError):
            continue
print(found)
"""


def test_nothing_of_a_session_holds_the_original(
    rows: list[dict[str, Any]], env: RepairEnv
) -> None:
    """No file that it may read, and no memory of its own."""
    row = next(r for r in rows if r["kind"] == "body" and "lowest_7319" in r["diff"])
    episode = env.reset(task_of(row))
    assert episode.step(RunCode(LOOK)).text == "[]"
    planted = "open('x.txt', 'w').write('lowest_' + '7319')\n"
    assert "repo/x.txt" in episode.step(RunCode(planted + LOOK)).text
    metadata = "from importlib.metadata import *; print(version('shopping'), files('shopping'))"
    assert episode.step(RunCode(metadata)).text == "0 None"
    assert "tests" in episode.step(RunCode("git --version && ls -a shop", language="bash")).text
    episode.close()


def test_tools_mend_it(rows: list[dict[str, Any]], env: RepairEnv) -> None:
    row = next(r for r in rows if r["kind"] == "body" and "lowest_7319" in r["diff"])
    episode = env.reset(task_of(row))
    assert isinstance(episode, RepairEpisode)

    def call(name: str, **arguments: Any) -> str:
        told = episode.step(CallTools((ToolCall(name, arguments),)))
        return told.outputs[0]

    assert "NotImplementedError" in call("search", pattern="raise Not.*Error")
    assert "def cheapest" in call("read", path="shop/prices.py", first=8, last=10)
    assert "1 failed" in call("run_tests", tests="shop/tests/test_prices.py")
    new = "return min(prices, default=None)"
    assert "5 times" in call("replace", path="shop/prices.py", old="price", new="x")
    assert (
        call("replace", path="shop/prices.py", old="raise NotImplementedError", new=new)
        == "replaced"
    )
    assert "NotFound" in call("replace", path="shop/none.py", old="a", new="b")
    assert "passed" in call("run_tests", tests="shop/tests/test_prices.py -k cheapest")
    assert episode.finish(None)["solved"] == 1.0
    assert {tool["function"]["name"] for tool in env.tools(task_of(row))} == {
        "read", "search", "replace", "run_tests"
    }  # fmt: skip


def test_lines_of_a_console_mend_it(
    rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "console", True)
    row = rows[0]
    episode = env.reset(task_of(row))
    assert isinstance(episode, RepairConsole)
    told = episode.step(RunCode(f"open('shop/prices.py', 'w').write({PRICES!r})"))
    assert not told.failed
    assert episode.finish(None)["solved"] == 1.0


def test_a_line_mends_it(
    rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a session of the policy's; the line is told as the question asks."""
    monkeypatch.setattr(env, "answer", "line")
    for row in (row for row in rows if row["kind"] == "place"):
        number = row["line"]
        right = PRICES.splitlines()[number - 1]
        for said, paid in ((right.strip(), 1.0), (f"`{right}`", 1.0), ("pass", 0.0), ("", 0.0),
                           (None, 0.0), ("import os; os._exit(0)", 0.0), (PRICES, 0.0)):  # fmt: skip
            episode = env.reset(task_of(row))
            assert episode.finish(said)["solved"] == paid, (said, episode.feedback)
            nothing = said in ("", None, PRICES)
            told = "nothing was changed" if nothing else "not all of the tests that have to pass do"
            assert episode.feedback == ("" if paid else told), said


def test_a_line_that_may_be_left_out_is_no_task(project: Path) -> None:
    """One was once: every answer that was empty mended it."""
    file, place = "shop/prices.py", PRICES.index("    left, coins")
    broken = {file: f"{PRICES[:place]}    return None\n{PRICES[place:]}"}
    tests = ["shop/tests/test_prices.py::test_change[100-coins0]"]
    task = (broken, file, PRICES[:place].count("\n") + 1, tests)
    tree = repair_judge.prepare(str(project))
    with tree.pool(Template(), Limits(), min_idle=0) as pool:
        made = [repair_tasks.prove(tree, pool, "place", show, task) for show in ("test", "line")]
    assert made[0] is not None
    assert made[1] is None


def test_what_threads_do_to_each_other_is_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, raised = ast.parse, [SystemError("AST constructor recursion depth mismatch")]

    def spoilt(text: str) -> ast.Module:
        if raised:
            raise raised.pop()
        return parse(text)

    monkeypatch.setattr(ast, "parse", spoilt)
    assert functions_by_name("def test_threads(): pass")


def test_part_of_the_tests_is_worth_its_share(
    rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(r for r in rows if r["kind"] == "body" and "coins" in r["diff"])
    some = "def change(paid, price): return [50, paid - price - 50] if paid == 100 else []"
    half = f"open('{{}}', 'w').write({PRICES!r} + {some!r})"
    assert solved(env, row, half)["solved"] == 0.0
    monkeypatch.setattr(env, "partial", True)
    got = solved(env, row, half)
    assert (got["solved"], round(got["partial"], 2)) == (0.0, 0.33)
    constant = added("\ndef change(*a): return [50, 10]\n")
    assert solved(env, row, constant)["partial"] == 0.0  # also where the test is altered
    ended = added("\ndef change(*a): raise KeyboardInterrupt\n")
    assert solved(env, row, ended)["partial"] == 0.0
    other = f"open('{{}}', 'w').write({PRICES!r} + 'with_tax = None')"
    assert (
        solved(env, {**row, "others": ["shop/tests/test_prices.py::test_tax"]}, other)["partial"]
        == 0.0
    )


def test_what_is_held_out_shares_no_package(rows: list[dict[str, Any]]) -> None:
    several = [{**row, "package": f"p{n % 4}"} for n, row in enumerate(rows * 3)]
    trained, held = repair_tasks.hold_out(several)
    assert len(trained) + len(held) == len(several)
    assert not {row["package"] for row in trained} & {row["package"] for row in held}
    with pytest.raises(ValueError, match="give a second --repair"):
        repair_tasks.hold_out(rows)


@pytest.mark.parametrize(
    ("tasks", "most"),
    [({"a": 22, "b": 2}, 2), ({"a": 2, "b": 22}, 2), ({"a": 5, "b": 5, "c": 5, "d": 5}, 5),
     ({"a": 10, "b": 10}, 10), ({"a": 30, "b": 3, "c": 3, "d": 3}, 9)],
)  # fmt: skip
def test_a_quarter_of_the_tasks_is_held_out(tasks: dict[str, int], most: int) -> None:
    """One package's tasks: 22 of 24 were held out, because one of two files was."""
    rows = [{"package": "p", "file": file} for file, count in tasks.items() for _ in range(count)]
    for seed in range(5):
        trained, held = repair_tasks.hold_out(rows, seed)
        assert 1 <= len(held) <= most
        assert not {row["file"] for row in trained} & {row["file"] for row in held}


def test_a_package_of_one_module_is_refused_before_any_work(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_tasks, "make", None)
    with pytest.raises(ValueError, match=r"one module that can be broken. .* a second --repair"):
        repair_tasks.write([str(project)], tmp_path / "repair.toml", 1, "test")


FAILS = "def test_a(): assert 0\n"
PASSES = "def test_b(): assert 1\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"m/tests/test_a.py": "import nowhere\n"}, "module nowhere is missing.*pip install nowhere"),
        ({"m/tests/test_a.py": "from m import _fast\n"}, "cannot import name '_fast'"),
        ({"m/tests/test_a.py": "import m._fast\n"}, "its extension m._fast is not built"),
        ({"m/tests/conftest.py": "import nowhere\n", "m/tests/test_b.py": PASSES}, "nowhere is missing"),
        ({"conftest.py": "import nowhere\n", "m/tests/test_b.py": PASSES}, "nowhere is missing"),
        ({"m/tests/other.py": PASSES}, "it has no tests"),
        ({"m/tests/test_a.py": FAILS}, "no test passes; the first error:[^$]*assert 0"),
        ({"m/tests/test_a.py": "import nowhere\n", "m/tests/test_b.py": PASSES}, ""),
    ],
)  # fmt: skip
def test_why_no_test_of_a_package_passes(
    files: dict[str, str], message: str, project: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Said after one run. One file that cannot be imported does not refuse the others."""
    folder = tmp_path / "package"
    runs: list[int] = []
    for file, text in {"m/__init__.py": "x = 1\n", **files}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    run_tests = repair_judge.run_tests

    def count(*arguments: Any, **options: Any) -> dict[str, Any]:
        runs.append(1)
        return run_tests(*arguments, **options)

    monkeypatch.setattr(repair_tasks, "run_tests", count)
    tree = repair_judge.prepare(str(folder))
    with tree.pool(Template(), Limits(), min_idle=0) as pool:
        if not message:
            assert [*repair_tasks.baseline(tree, pool)] == ["m/tests/test_b.py::test_b"]
            assert "left out m/tests/test_a.py" in capsys.readouterr().err
            return
        with pytest.raises(ValueError, match=message):
            repair_tasks.baseline(tree, pool)
    assert runs == [1]


def test_what_is_installed_decides_which_tree_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Declared or only imported by a test: a module that comes later is there without a cleanup."""
    folder, site = tmp_path / "package", tmp_path / "site"
    (folder / "tests").mkdir(parents=True)
    (folder / "late.py").write_text("x = 1\n")
    (folder / "tests" / "test_a.py").write_text("import late_module, own\nimport own\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(site))
    digests = []
    (folder / "own.py").touch()
    for version in ("", "1", "2"):
        if version:
            about = site / f"late_dist-{version}.dist-info"
            about.mkdir(parents=True)
            (about / "METADATA").write_text(f"Name: late-dist\nVersion: {version}\n")
            (about / "RECORD").write_text("late_module.py,,\n")
            (about / "top_level.txt").write_text("late_module\n")
            (site / "late_module.py").touch()
            own = site / "own_dist-1.dist-info"  # another name of what is repaired
            own.mkdir()
            (own / "METADATA").write_text("Name: own-dist\nVersion: 1\n")
            (own / "RECORD").write_text("own.py,,\n")
            (own / "top_level.txt").write_text("own\n")
            (site / "own.py").touch()
        repair_judge.prepare.cache_clear()
        tree = repair_judge.prepare(str(folder))
        assert (tree.folder / "site" / "late_module.py").exists() == bool(version)
        assert not (tree.folder / "site" / "own.py").exists()
        digests.append(tree.digest)
        shutil.rmtree(site, ignore_errors=True)
    assert len({*digests}) == 3


def test_a_package_that_sessions_see_twice_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(project / "shop", folder / "src" / "shop")
    monkeypatch.setattr(Template, "interpreter_paths", [str(tmp_path)])
    shutil.copytree(project / "shop", tmp_path / "dist-packages" / "shop")
    with pytest.raises(ValueError, match="sessions would see this copy"):
        repair_judge.prepare(str(folder)).pool(Template(), Limits())


def test_a_package_that_has_changed_since_is_refused(
    rows: list[dict[str, Any]], env: RepairEnv
) -> None:
    with pytest.raises(ValueError, match="has changed since"):
        env.room(task_of({**rows[0], "tree": "0"}))
    with pytest.raises(ValueError, match=r"it has no .*tests"):
        env.reset(task_of({key: value for key, value in rows[0].items() if key != "tests"}))
    with pytest.raises(ValueError, match="no folder, and no package"):
        repair_judge.prepare("no_such_package_anywhere")


@pytest.mark.slow
def test_from_a_folder_to_verdicts(
    project: Path, tmp_path: Path, agent_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`agentgrpo init --repair`, then a run whose engine is a stand-in."""
    second = tmp_path / "second"
    shutil.copytree(project / "shop", second / "shop")
    path = tmp_path / "repair.toml"
    made = [str(agent_model), "--repair", str(project), "--repair", str(second), "--tasks", "2"]
    more = [
        "rollout.tasks_per_step=2",
        "rollout.group_size=2",
        "steps=1",
        f"out_dir={tmp_path}/run",
        "engine.max_model_len=1024",
        "data.max_prompt_tokens=960",  # how long a failure is told differs by the Python
        "rollout.max_turn_tokens=64",
    ]
    assert init.main([*made, "-o", str(path), "rollout.max_turns=2", *more]) == 0
    rows = [read_lines(tmp_path / f"repair.{name}.jsonl") for name in ("train", "heldout")]
    assert [{row["package"] for row in of} for of in rows] in (
        [{"shopping"}, {"second"}], [{"second"}, {"shopping"}]
    )  # fmt: skip
    cache = os.environ["XDG_CACHE_HOME"]
    ran = warm.run("-m", "tests.quick", "train", str(path), XDG_CACHE_HOME=cache)
    assert ran.returncode == 0, ran.stderr[-4000:]
    played = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert {record["rewards"]["solved"] for record in played} == {0.0}
    assert sum(record["stats"]["tool_calls"] for record in played) > 0
    assert len(assert_no_cheat_pays(path, at_most=0.0, reward_at_most=0.0, tasks=2)) > 15


def test_of_two_copies_of_a_requirement_the_imported_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pytest-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: pytest\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert repair_judge._requirements("shop", [], tmp_path, [])["pytest"].version == "1.0"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client's own packages
def test_mini_swe_agent_repairs_it(
    rows: list[dict[str, Any]], env: RepairEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmodified, through the endpoint; its commands run in a session, its answer is what changed."""
    pytest.importorskip("minisweagent", reason="requirements-dev.txt")
    row = of_kind(rows, "body")
    write_lines(tmp_path / "tasks.jsonl", [row])
    for name, value in (*ENVIRONMENT.items(), ("REPAIR_TASKS", str(tmp_path / "tasks.jsonl"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(env, "answer", "changed")
    agent = importlib.import_module("tests.programs.repairing").agent

    def told(says: list[str], number: int, _: str) -> Any:
        return turn(says[number])

    for lines, paid in ((PRICES, 1.0), (PRICES.replace(">=", ">"), 0.0)):
        code = f"cat > shop/prices.py << 'END'\n{lines}END\necho x > shop/tests/test_prices.py"
        done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        calls = [json.dumps({"name": "bash", "arguments": {"command": c}}) for c in (code, done)]
        says = [f"<tool_call>{call}</tool_call>" for call in calls]
        sampler, _ = sampler_of(agent, partial(told, says), env=env, max_turn_tokens=4000)
        ((group,), _) = sampler.play([task_of(row)], 1, seed=0)
        (rollout,) = group.rollouts
        assert (rollout.status, rollout.rewards["solved"]) == (Status.COMPLETED, paid)
