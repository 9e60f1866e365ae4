# ruff: noqa: E501 - cheats, a line each
"""Repair tasks from a package of our own: made, proven, played, judged, and what cheating pays."""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import os
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


@pytest.mark.parametrize(
    "cheat",
    ["assertion patched", "function of another module", "reporter patched", "exit",
     "exit in a function", "forged report", "forged verdict"],
)  # fmt: skip
def test_what_cheating_pays_where_any_word_may_be_used(
    cheat: str, rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_judge, "refusal", lambda *_: "")
    row = of_kind(rows, "body")
    assert solved(env, row, CHEATS[cheat])["solved"] == 0.0


def test_an_assertion_that_is_patched_is_seen(
    rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = PRICES.splitlines(True), PRICES.replace("price < ", "price > ").splitlines(True)
    diff = "".join(difflib.unified_diff(*both, "a/shop/prices.py", "b/shop/prices.py"))
    tests = ["shop/tests/test_prices.py::TestCheapest::test_some"]
    row = {**rows[0], "diff": diff, "tests": tests, "others": []}
    monkeypatch.setattr(repair_judge, "refusal", lambda *_: "")
    got = solved(env, row, CHEATS["assertion patched"])
    assert got["solved"] == 0.0
    assert "replaced: ['unittest.case.TestCase.assertEqual'" in str(got["why"])
    blind = repair_judge.RUNNER.replace("replaced = [", "replaced = [] and [")
    monkeypatch.setattr(repair_judge, "RUNNER", blind)
    assert solved(env, row, CHEATS["assertion patched"])["solved"] == 1.0


@pytest.mark.parametrize(
    "cheat",
    [c for c in CHEATS if c.startswith("equal to all")]
    + ["by its caller", "by a frame of an error", "by a format", "by code in a text"],
)
def test_what_only_words_keep_from_being_paid(
    cheat: str, rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = of_kind(rows, "body")
    assert solved(env, row, CHEATS[cheat])["solved"] == 0.0
    monkeypatch.setattr(repair_judge, "refusal", lambda *_: "")
    assert solved(env, row, CHEATS[cheat])["solved"] == 1.0


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
            told = "nothing was changed" if nothing else "0% of the tests that have to pass do"
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
    assert repair_judge.words_of("eval('1')")["eval"] == 1


def test_part_of_the_tests_is_worth_its_share(
    rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(r for r in rows if r["kind"] == "body" and "coins" in r["diff"])
    some = "def change(paid, price): return [50, 10] if paid == 100 else []"
    half = f"open('{{}}', 'w').write({PRICES!r} + {some!r})"
    assert solved(env, row, half)["solved"] == 0.0
    monkeypatch.setattr(env, "partial", True)
    got = solved(env, row, half)
    assert (got["solved"], round(got["partial"], 2)) == (0.0, 0.33)
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
    with pytest.raises(ValueError, match="nothing can be held out"):
        repair_tasks.hold_out(rows)


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
