"""Repair tasks from a package of our own: made, proven, played, judged, and what cheating pays."""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.actions import CallTools, RunCode, ToolCall
from agentgrpo.envs import repair_judge, repair_tasks
from agentgrpo.envs.repair import RepairConsole, RepairEnv, RepairEpisode
from agentgrpo.envs.repair_altered import candidates, functions_by_name, with_copies
from agentgrpo.sandbox import Limits, SandboxPool, Template
from agentgrpo.support.atomic_files import read_lines, write_lines
from agentgrpo.testing import assert_no_cheat_pays
from agentgrpo.train import init
from agentgrpo.types import Status, Task
from tests import warm
from tests.envs.repair_answers import CHEATS, EQUAL, MENDS, PRICES, TESTS, added
from tests.programs.clients import ENVIRONMENT
from tests.programs.test_play import sampler_of, turn

KINDS = {"place": 2, "several": 2, "body": 3, "commit": 1}  # and how many tasks of each
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


def rows_of(project: Path) -> list[dict[str, Any]]:
    make = partial(repair_tasks.make, [str(project)], show="line")
    return [row for kind, count in KINDS.items() for row in make(count=count, kinds=[kind])]


@pytest.fixture(scope="module")
def rows(project: Path) -> list[dict[str, Any]]:
    return rows_of(project)


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


def test_tasks_of_every_kind_are_valid(rows: list[dict[str, Any]], project: Path) -> None:
    assert {row["kind"] for row in rows} == {*KINDS}
    assert rows_of(project) == rows
    for row in rows:
        assert row["tests"]
        assert not any(
            "hash" in test or "order" in test for test in (*row["tests"], *row["others"])
        )
        assert "raise NotImplementedError" in row["diff"] or row["kind"] != "body"
        json.dumps(row)


@pytest.mark.parametrize(
    "kind", ["body", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "body")]
)
def test_what_cheating_pays(
    kind: str, rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgrpo.envs.repair.VERDICT_S", 2.0)
    row = of_kind(rows, kind)
    with ThreadPoolExecutor(2) as threads:
        scores = threads.map(lambda code: solved(env, row, code)["solved"], CHEATS.values())
        paid = [name for name, score in zip(CHEATS, scores, strict=True) if score]
    assert not paid


@pytest.mark.parametrize("kind", KINDS)
def test_repair_is_rewarded_with_any_other_files(
    kind: str, rows: list[dict[str, Any]], env: RepairEnv
) -> None:
    """The original text, written another way; beside it files that count for nothing."""
    row = next(row for row in rows if row["kind"] == kind)
    around = "\n".join(CHEATS[name] for name in ("conftest", "pytest.ini", "tests deleted", "pth"))
    mended = f"{around}\nopen('{{}}', 'w').write({PRICES!r} + '\\n# mended\\n')"
    assert solved(env, row, mended)["solved"] == 1.0


@pytest.mark.slow
def test_honest_repairs_are_rewarded(rows: list[dict[str, Any]], env: RepairEnv) -> None:
    row, before = of_kind(rows, "body"), PRICES[: PRICES.index("def change")]
    cookie = {"coding cookie": "# coding: latin-1\n"}
    texts = {name: f"{cookie.get(name, '')}{before}{text}\n" for name, text in MENDS.items()}
    codes = [f"open('{{}}', 'wb').write({text.encode()!r})" for text in texts.values()]
    with ThreadPoolExecutor(2) as threads:
        results = threads.map(lambda code: solved(env, row, code), codes)
        unpaid = {name: r["why"] for name, r in zip(MENDS, results, strict=True) if not r["solved"]}
    assert not unpaid


COPIED = """
@mark.parametrize("a, b", [(1, 2), (3, 4)])
def test_a(a, b):
    'text'
    f(9)
    assert f(a, 5) == b, f"{a} 6"
class T:
\tdef test_b(self):
\t\tself.assertEqual(g([7]), 'x',
\t\t\t\t\t\t'why')
def test_c():
    expected = 1
    result = f(2)
    assert_equal(expected, result)
"""


@pytest.mark.parametrize(
    ("name", "inputs", "shown"),
    [("test_a", {"1", "3", "2", "4", "9", "5"}, "    assert f(a, 5) == [8]"),
     ("T::test_b", {"7"}, "\t    self.assertEqual(g([7]), [8])"),
     ("test_c", {"1", "2"}, "    assert_equal(expected, [8])    assert_equal(result, [8])")],
)  # fmt: skip
def test_copies_change_an_input_and_the_expected_value(
    name: str, inputs: set[str], shown: str
) -> None:
    """What is expected, the true and the wrong value, is all that tells two copies apart."""
    function = functions_by_name(COPIED)[f"::{name}"]
    copies = candidates(function, function.lineno, random.Random(0))
    assert {one.unchanged(function).value for one in copies} == inputs
    new = f"{function.name}_1"
    for one in copies:
        made = one.recorded("@[8]@\n", "@[9]@\n", random.Random(0))
        assert made is not None
        assert (made.right, made.by_repr) == ("[8]", False)
        assert made.wrong not in ("[8]", "[9]")
        texts = [
            with_copies(COPIED, {f"::{name}": [(new, made, value)]}, [f"x.py::{name}"])
            for value in (made.right, made.wrong)
        ]
        assert texts[0].replace(made.right, made.wrong) == texts[1]
        functions = [n for n in ast.walk(ast.parse(texts[0])) if isinstance(n, ast.FunctionDef)]
        (copy,) = (n for n in functions if n.name == new)
        assert copy.col_offset == function.col_offset
        assert one.unchanged(function).source(function, new, "[8]").splitlines()[-1] in shown
    for message in ("", "@[9]@\n", "@None@\n", "@<f at 0x7f>@\n", "@0.3333333333@\n", "[8]"):
        assert copies[0].recorded(message, "@[9]@\n", random.Random(0)) is None
    shown_object = copies[0].recorded("@V('1.0')@\n", "", random.Random(0))
    assert shown_object is not None
    assert "repr(" in shown_object.source(function, new, shown_object.right)


def test_test_functions_that_are_not_run_are_blanked() -> None:
    text = (
        "@mark(\n  1)\ndef test_a(): assert 1\nclass T:\n  def test_b(self):\n    assert 2\n"
        "def test_c(): assert 3\ndef test_d(): assert test_c\ndef helper(): assert 4\n"
    )
    assert with_copies(text, {}, ["x.py::test_d[1]"]) == (
        "pass\n\n\nclass T:\n  pass\n\n"
        "def test_c(): assert 3\ndef test_d(): assert test_c\ndef helper(): assert 4\n"
    )


LOOK = """
import os, re, sys
found, needle = [], re.compile(rb"lowest_73[1]9")
for at, names, files in os.walk("/"):
    skipped = ("/usr", "/proc", "/dev", sys.base_prefix)
    names[:] = [n for n in names if os.path.join(at, n) not in skipped]
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


def test_session_does_not_contain_the_original(rows: list[dict[str, Any]], env: RepairEnv) -> None:
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


def test_repair_with_tools(rows: list[dict[str, Any]], env: RepairEnv) -> None:
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


def test_repair_with_console_lines(
    rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "console", True)
    row = rows[0]
    episode = env.reset(task_of(row))
    assert isinstance(episode, RepairConsole)
    told = episode.step(RunCode(f"open('shop/prices.py', 'w').write({PRICES!r})"))
    assert not told.failed
    assert episode.finish(None)["solved"] == 1.0


def test_repair_with_one_line(
    rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a session of the policy's; the line is told as the question asks."""
    monkeypatch.setattr(env, "answer", "line")
    row = of_kind(rows, "place")
    number = row["line"]
    right = PRICES.splitlines()[number - 1]
    for said, paid in ((right.strip(), 1.0), (f"`{right}`", 1.0), ("pass", 0.0), ("", 0.0),
                       (None, 0.0), ("import os; os._exit(0)", 0.0), (PRICES, 0.0)):  # fmt: skip
        episode = env.reset(task_of(row))
        assert episode.finish(said)["solved"] == paid, (said, episode.feedback)
        nothing = said in ("", None, PRICES)
        told = "nothing was changed" if nothing else "not all of the tests that have to pass do"
        assert episode.feedback == ("" if paid else told), said


def test_line_that_can_be_deleted_is_not_a_task(project: Path) -> None:
    """One was once: every answer that was empty mended it."""
    file, place = "shop/prices.py", PRICES.index("    left, coins")
    broken = {file: f"{PRICES[:place]}    return None\n{PRICES[place:]}"}
    tests = ["shop/tests/test_prices.py::test_change[100-coins0]"]
    task = (broken, file, PRICES[:place].count("\n") + 1, tests)
    tree = repair_judge.prepare(str(project))
    with tree.pool(Template(), Limits(), min_idle=0) as pool:
        assert repair_tasks.prove(tree, pool, "place", "test", task)["tests"] == tests
        with pytest.raises(repair_tasks.NoTask, match="are repaired by deleting the line"):
            repair_tasks.prove(tree, pool, "place", "line", task)
        fails = {file: PRICES.replace("    return", "    raise KeyError\n    return")}
        shown = [None, tests]
        ran = [repair_judge.run_tests(pool, fails, [], 9.0, with_errors=some) for some in shown]
    for results, errors in zip(ran, (3, 1), strict=True):  # each costs pytest a parse of the file
        assert [*results["outcomes"].values()].count("f") > 5
        assert len([*filter(None, results["errors"].values())]) == errors


SLOW = """
def doubled(n):
    while n % 4 == 3:
        pass
    return 2 * n
"""


def test_slow_copies_do_not_cost_the_others(project: Path, tmp_path: Path) -> None:
    """Half of the copies of these tests never end. Without the others' results, none was left."""
    numbers = range(4, 24, 4)
    tests = [f"def test_{n}():\n    assert doubled({n}) == {2 * n}\n" for n in numbers]
    (tmp_path / "tests").mkdir()
    (tmp_path / "two.py").write_text(SLOW)
    (tmp_path / "tests" / "test_two.py").write_text("from two import doubled\n" + "".join(tests))
    tree, names = (
        repair_judge.prepare(str(tmp_path)),
        [f"tests/test_two.py::test_{n}" for n in numbers],
    )
    with tree.pool(Template(), Limits(), min_idle=0) as pool:
        prove = partial(repair_tasks.prove, tree, pool, "place", "test")
        copies = prove(({"two.py": SLOW.replace("2 * n", "3 * n")}, "two.py", 5, names))["copies"]
        values = {int(copy[1]) for variants in copies.values() for copy in variants}
        assert values
        assert not any(value % 4 == 3 for value in values)
        for text, reason in (
            (SLOW.replace("3", "0"), "took (2 s of CPU|10 s of wall) time"),
            ("raise OSError", "they cannot be imported"),
        ):
            with pytest.raises(repair_tasks.NoTask, match=f"have tests without results .{reason}"):
                prove(({"two.py": f"{text}\n" * 6}, "two.py", 5, names))


@pytest.mark.parametrize(
    ("count", "breaks", "made", "message"),
    [
        (2, 10**6, 1, "breaks tried: 56 of more, 37 fail no test, 18 skip tests"),
        (2, 12, 1, "breaks tried: 12, 8 fail no test, 3 skip tests"),
        (1, 3, 0, "breaks tried: 3, 2 fail no test, 1 skip tests"),
        (1, 0, 0, "no line"),
        (1, 12, 1, ""),
    ],
)
def test_fewer_tasks_than_asked_for_are_explained(
    count: int, breaks: int, made: int, message: str
) -> None:
    """At most 8 breaks per task and 40 are tried: with fewer good ones, all of them took hours."""
    possible: Any = iter(range(breaks))

    def prove(number: Any) -> dict[str, Any]:
        if number == 9:
            return {"id": 9}
        raise repair_tasks.NoTask("fail no test" if number % 3 else "skip tests")

    rows, messages = repair_tasks.prove_some("p", count, possible, prove, "no line")
    assert rows == [{"id": 9}] * made
    assert messages == ([f"p: made {made} of {count} tasks; {message}"] if message else [])


@pytest.mark.parametrize(
    ("git_folder", "message"),
    [(None, "installed package"), ("", "not a git repository"), ("init", "not have any commits")],
)
def test_why_there_are_no_commits(git_folder: str | None, message: str, tmp_path: Path) -> None:
    tree: Any = None
    if git_folder:
        git(tmp_path, git_folder)
    source = str(tmp_path if git_folder is not None else tmp_path / "none")
    possible, none = repair_tasks.breaks(tree, "commit", {}, 0, source)
    assert not [*possible]
    assert message in none


def test_cached_tasks_repeat_their_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result that the busy machine may have changed is made again."""
    calls: list[str] = []

    def make(message: str) -> repair_tasks.Made:
        calls.append(message[:1])
        return [1], [message]

    for reason in ("a break fails no test", f"b break took 30 {repair_judge.WALL_TIME}"):
        message = f"{reason}, in one line, however long it is {'.' * 60}"
        for _ in range(2):
            value = repair_tasks.cached(tmp_path / reason[:1], partial(make, message))
            assert value == [1]
            assert message in capsys.readouterr().err
    assert calls == ["a", "b", "b"]


def test_parse_retries_after_a_thread_race(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, raised = ast.parse, [SystemError("AST constructor recursion depth mismatch")]

    def spoilt(text: str) -> ast.Module:
        if raised:
            raise raised.pop()
        return parse(text)

    monkeypatch.setattr(ast, "parse", spoilt)
    assert functions_by_name("def test_threads(): pass")


class InTurn(random.Random):
    """Draws every copy, in order, with a right and a wrong value in turn."""

    def sample(self, population: Any, k: int, **_: Any) -> list[Any]:
        return [*population][:k]

    def choices(self, population: Any, *, k: int = 1, **_: Any) -> list[Any]:  # type: ignore[override]
        return [population[n % 2] for n in range(k)]

    def shuffle(self, x: Any) -> None:
        pass


def test_partial_repair_earns_its_share(
    rows: list[dict[str, Any]], env: RepairEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(r for r in rows if r["kind"] == "body" and "net" in r["diff"])
    assert len(row["tests"]) == 2
    half = added("\ndef with_tax(net, percent): return net\n")
    assert solved(env, row, half)["solved"] == 0.0
    monkeypatch.setattr(env, "partial", True)
    monkeypatch.setattr(random, "SystemRandom", InTurn)
    got = solved(env, row, half)
    assert (got["solved"], got["partial"]) == (0.0, 0.5)
    assert "assert 100 == 119" in str(got["why"])
    table = "\ndef with_tax(*a): return {(100, 19): 119, (200, 50): 300}.get(a, 0)\n"
    got = solved(env, row, added(table))  # what the tests expect, for the inputs that they have
    assert got["partial"] == 0.0
    assert "with other inputs" in str(got["why"])
    equal = added(f"\n{EQUAL}def with_tax(*a): return E()\n")
    assert solved(env, row, equal)["partial"] == 0.0  # though it passes one of the tests
    ended = added("\ndef with_tax(*a): raise KeyboardInterrupt\n")
    assert solved(env, row, ended)["partial"] == 0.0
    tests = dict(zip(("tests", "others"), ([test] for test in sorted(row["tests"])), strict=True))
    assert solved(env, {**row, **tests}, half)["partial"] == 0.0


def test_heldout_tasks_share_no_package(rows: list[dict[str, Any]]) -> None:
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
def test_a_quarter_of_repair_tasks_is_held_out(tasks: dict[str, int], most: int) -> None:
    """One package's tasks: 22 of 24 were held out, because one of two files was."""
    rows = [{"package": "p", "file": file} for file, count in tasks.items() for _ in range(count)]
    for seed in range(5):
        trained, held = repair_tasks.hold_out(rows, seed)
        assert 1 <= len(held) <= most
        assert not {row["file"] for row in trained} & {row["file"] for row in held}


def test_package_with_one_module_is_rejected_at_once(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_tasks, "make", None)
    with pytest.raises(
        ValueError, match=r"expected two modules that can be broken, got one. .* a second --repair"
    ):
        repair_tasks.write_rows([str(project)], tmp_path / "repair.toml", 1, "test")


def test_package_whose_tests_run_one_module_is_rejected_before_tasks_are_made(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tabulate, nine tasks were made first."""
    shutil.copytree(project / "shop", tmp_path / "shop")
    (tmp_path / "shop" / "version.py").write_text("NUMBER = 1 + 1\n")
    monkeypatch.setattr(repair_tasks, "prove_some", None)
    message = r"its tests run only shop/prices.py\. .* give a second --repair"
    with pytest.raises(ValueError, match=message):
        repair_tasks.write_rows([str(tmp_path)], tmp_path / "repair.toml", 1, "test")


FAILS = "def test_a(): assert 0\n"
PASSES = "def test_b(): assert 1\n"
SOME_FAIL = "import pytest\ndef test_c(): assert 0\ndef test_d(): pytest.skip()\n"
HASH = "def test_a(): assert hash('shop') == 8280406691163975568\n"  # with the hash seed 0
MISSING = "package: skipped m/tests/test_a.py: E   ModuleNotFoundError: No module named 'nowhere'"
SOME = "package: tasks use 1 of 3 tests; 1 fail, 1 are skipped"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"m/tests/test_a.py": "import nowhere\n"}, "nowhere is missing.*pip install nowhere"),
        ({"m/tests/test_a.py": "from m import _fast\n"}, "cannot import name '_fast'"),
        ({"m/tests/test_a.py": "import m._fast\n"}, "its extension m._fast is not built"),
        ({"m/tests/conftest.py": "import nowhere\n", "m/tests/test_b.py": PASSES}, "is missing"),
        ({"conftest.py": "import nowhere\n", "m/tests/test_b.py": PASSES}, "nowhere is missing"),
        ({"m/tests/other.py": PASSES}, "it has no tests"),
        ({"m/tests/test_a.py": FAILS}, "no test passes; the first error:[^$]*assert 0"),
        ({"m/tests/test_a.py": HASH}, "use 0 of 1 tests; 1 fail in other runs[^$]*assert"),
        ({"m/tests/test_a.py": "import nowhere\n", "m/tests/test_b.py": PASSES + SOME_FAIL}, ""),
    ],
)  # fmt: skip
def test_reason_why_no_test_passes(
    files: dict[str, str], message: str, project: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
            coverage, messages = repair_tasks.baseline(tree, pool)
            assert [*coverage] == ["m/tests/test_b.py::test_b"]
            assert messages == [MISSING, SOME]
            return
        with pytest.raises(ValueError, match=message):
            repair_tasks.baseline(tree, pool)
    assert len(runs) == 1 + ("other runs" in message)


def test_installed_requirements_decide_the_tree(
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


def test_another_copy_of_the_package_is_hidden(project: Path, tmp_path: Path) -> None:
    """Without a virtual environment, packages are installed below the interpreter."""
    prefix, folder = Path(Template().interpreter).parents[1], tmp_path / "project"
    packages = prefix / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    other = next(path for path in packages.iterdir() if (path / "__init__.py").is_file())
    shutil.copytree(project / "shop", folder / other.name)
    tree = repair_judge.prepare(str(folder))
    with tree.pool(Template(), Limits(), min_idle=0) as pool, pool.acquire() as session:
        assert str(packages) in pool.template.hidden
        assert session.step(f"import os; os.listdir({str(packages)!r})").value == "[]"
        assert session.step("import json; json.__name__").value == "'json'"


def test_changed_package_is_rejected(rows: list[dict[str, Any]], env: RepairEnv) -> None:
    with pytest.raises(ValueError, match="has changed since"):
        env.tree_and_pool(task_of({**rows[0], "tree": "0"}))
    with pytest.raises(ValueError, match=r"got none of .*tests"):
        env.reset(task_of({key: value for key, value in rows[0].items() if key != "tests"}))
    with pytest.raises(ValueError, match="expected a folder or an installed package"):
        repair_judge.prepare("no_such_package_anywhere")


@pytest.mark.slow
def test_init_and_score_a_folder(
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


def test_first_copy_of_a_requirement_is_used(
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
    """Unmodified, through the endpoint; its answer is what its commands changed."""
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
