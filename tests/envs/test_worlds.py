"""Hidden tests of programs, search in a corpus, and classes in TRL's form as environments."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.actions import CallTools, RunCode, ToolCall
from agentgrpo.config import DataConfig
from agentgrpo.data.sources import heldout_tasks, training_tasks
from agentgrpo.envs.factory import FactoryEnv
from agentgrpo.envs.graded import GradingPool, UnitTestEnv, program_in
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.envs.search import SearchEnv
from agentgrpo.sandbox import SandboxException, SandboxPool
from tests.playing import call, task, wrapped

# hidden tests


@pytest.fixture(scope="module")
def graded(pool: SandboxPool) -> Iterator[UnitTestEnv]:
    env = UnitTestEnv(pool, 2.0)
    yield env
    env.close()


TESTS = {"tests": "assert f(2) == 4\nassert f(-3) == 9"}
CASES = {"cases": [["2\n", "4"], ["-3\n", "9"]]}


@pytest.mark.nsjail
def test_tests_that_accept_one_value_are_named(graded: UnitTestEnv) -> None:
    rows = [task(tests="assert isinstance(f(2), int)"), task(**TESTS)]
    message = graded.check_tasks(rows)
    assert message.startswith("checked the tests of 2 of 2 tasks: ")
    assert "1 of 2 accept a program that always returns one value, such as those of " in message
    assert "one value" not in graded.check_tasks(rows[1:])


@pytest.mark.nsjail
@pytest.mark.parametrize(
    ("spec", "answer", "worth"),
    [
        (TESTS, "def f(x): return x * x", {"solved": 1.0, "partial": 0.0}),
        (TESTS, "Here:\n```python\ndef f(x): return x ** 2\n```\nDone.", {"solved": 1.0}),
        (TESTS, "```python\ndef f(x): return x ** 2\n```\n```python\nf(2)\n```", {"solved": 1.0}),
        (TESTS, "def f(x): return x + 2", {"solved": 0.0}),
        (TESTS, "import sys; sys.exit(0)", {"solved": 0.0}),
        (TESTS, "class E:\n  __eq__ = lambda *a: True\nf = lambda x: E()", {"solved": 0.0}),
        (TESTS, "def f(x):\n  while True: pass", {"solved": 0.0}),
        (TESTS, None, {"solved": 0.0}),
        (TESTS, "  ", {"solved": 0.0}),
        (CASES, "print(int(input()) ** 2)", {"solved": 1.0, "partial": 0.0}),
        (CASES, "print(4)", {"solved": 0.0, "partial": 0.5}),
    ],
)
def test_hidden_tests_score_programs(
    graded: UnitTestEnv, spec: Any, answer: str | None, worth: dict[str, float]
) -> None:
    episode = graded.reset(task(**spec))
    assert worth.items() <= episode.finish(answer).items()
    episode.close()


@pytest.mark.nsjail
def test_close_ends_the_grading_sandboxes(pool: SandboxPool) -> None:
    grading = GradingPool(pool)
    made = grading.pool()
    grading.close()
    with pytest.raises(SandboxException, match="closed"):
        made.acquire()


@pytest.mark.nsjail
def test_grading_uses_a_separate_sandbox(graded: UnitTestEnv) -> None:
    episode = graded.reset(task(**TESTS))
    episode.step(RunCode("f = lambda x: x * x\nopen('f.py', 'w').write('f = 1')"))
    assert episode.finish("print('nothing defined')")["solved"] == 0.0
    episode.close()
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "neither 'tests' nor 'cases'"),
        ({"tests": "assert ("}, "its 'tests' are not Python: "),
        ({"tests": 3}, "its 'tests' are not Python: "),
        ({"cases": []}, r"its 'cases': expected \[\[stdin, expected stdout\], ...\], got \[\]"),
        ({"cases": ["ab"]}, "its 'cases': expected"),
        ({"cases": {"inputs": ["1"], "outputs": ["2"]}}, r"got {'inputs.*zip\(inputs, outputs\)"),
        ({"cases": [["1", ""], ["2", " \n"]]}, "its 'cases' expect no output"),
        ({"tests": "assert True"}, "task .*: its 'tests' use nothing of the answer"),
        ({"cases": [["", "x" * 5_000_000]]}, "task .*: its expected output: expected at most"),
    ]
    for bad, message in refused:
        with pytest.raises(ValueError, match=message):
            graded.reset(task(**bad))


@pytest.mark.parametrize(
    "answer",
    [
        "```py\nf = 1\n```",
        "```\nf = 0\n```\n```\nf = 1\n```",
        "```text\n1\n```\nneeds\n```bash\nls\n```\n```python\nf = 1\n```",
        "```python\nf = 1\n```\nprints\n```\n1\n```\n```json\n{}\n```",
        "```Python3\r\nf = 1\r\n```\r\n",
        "1. so:\n\n   ```python title=a.py\n   f = 1\n   ```",
        "- ```text\n  1\n  ```\n- ```python\n  f = 1\n  ```",
        "~~~ python\nf = 1\n~~~",
        "````python\nf = 1\n'''\n```\n'''\n````",
        "In ```python fences, not ``` alone:\n```python\nf = 1\n```",
        "So: ```Python\nf = 1\n```\n**It prints** ```\n1\n```",
        "f = 1",
        "```\nf = 1\n```\n```\n",
        "```python\nf = 1",
        "```python\nf = 1```",
        "```python\nf = 1\n``` It works, see `f`.",
        "```python\nf = 1\n```</answer>",
        "```python\nf = len('```') - 2\n```",
        "```{.python}\nf = 1\n```\n```\nf = 0\n```",
    ],
)
def test_program_in_extracts_the_program(answer: str) -> None:
    scope: dict[str, Any] = {}
    exec(program_in(answer) or "", scope)
    assert scope["f"] == 1


def test_block_that_only_uses_the_program_is_ignored() -> None:
    uses, defines = (
        "```python\nprint(f(3) == f (3))\nf == 3\n```",
        "```python\ndef f(x): return {}\n```",
    )
    answer = "\n".join((defines.format(0), defines.format(1), "Example usage:", uses))
    assert program_in(answer, ["f"]) == "def f(x): return 1\n"
    for name in ("g", "lambda x: f(x)", "f2"):
        assert program_in(answer, [name]) == "print(f(3) == f (3))\nf == 3\n"
    for form in ("f: object = abs", "async  def f(x): ...", "f = abs"):
        drafted = f"{defines.format(0)}\nBetter:\n```python\n{form}\n```"
        assert program_in(drafted, ["f"]) == f"{form}\n"
    parts = "```python\nclass A:\n    pass\n\n\nb = 1\n```\nA is:\n```python\nclass A: ...\n```"
    assert "b = 1" in (program_in(parts, ["A().f", "b"]) or "")
    assert program_in(parts, ["A().f"]) == "class A: ...\n"


def test_unclosed_fences_are_parsed_in_linear_time() -> None:
    spaced, inline = "```" + " " * 500_000 + "`", "a ```x " * 80_000
    for answer in ("```x\n" * 100_000, "`" * 500_000, spaced, inline):
        started = time.process_time()
        program_in(answer)
        assert time.process_time() - started < 5


# search


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    rows = [
        {"id": i, "title": f"Person {name}", "text": f"{name} lives in {city}. " + "more " * 200}
        for i, (name, city) in enumerate([("Ada", "Bonn"), ("Bo", "Oslo"), ("Cy", "Bonn")])
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("query", ['"', "a OR", "NEAR(", "title:x*", "'; DROP TABLE texts;--", "é"])
def test_queries_are_not_parsed_as_fts_syntax(corpus: Path, query: str) -> None:
    env: Any = SearchEnv(corpus)
    told = env.reset(task()).step(call("search", query=query))
    assert "syntax error" not in told.text
    assert told.failed == (query == '"')


def test_invalid_corpus_is_rejected_by_file_and_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: expected an object with a 'text'"):
        SearchEnv(bad)


# factories


class Counter:
    """A user's environment in TRL's form."""

    def reset(self, start: int = 0, **row: Any) -> str:
        self.value = start
        return f"The counter is at {start}."

    def add(self, n: int) -> int:
        """Add to the counter."""
        self.value += n
        return self.value

    def stop(self) -> None:
        """End."""
        self.done, self.answer = True, self.value

    def get_reward(self) -> float:
        return float(self.value == 7)

    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        return [{"question": "Reach 7.", "start": i} for i in range(2)]


def test_factory_methods_are_tools_and_instances_are_separate() -> None:
    env = FactoryEnv(Counter)
    tasks = env.tasks("train")
    assert tasks[1].messages[0]["content"] == "Reach 7.\n\nThe counter is at 1."
    assert sorted(s["function"]["name"] for s in env.tools(tasks[0])) == ["add", "stop"]
    runner = EpisodeRunner(2)
    one, two = env.reset(tasks[1]), env.reset(tasks[1])
    assert runner.step(one, call("add", n=6)).result(9).text == "7"
    assert runner.step(two, call("add", n=1)).result(9).text == "2"
    assert runner.step(two, call("add", n="x")).result(9).failed
    ended = runner.step(one, call("stop")).result(9)
    assert (ended.done, ended.answer) == (True, "7")
    assert runner.finish(one, "7").result(9) == {"environment": 1.0}
    assert runner.finish(two, None).result(9) == {"environment": 0.0}
    assert env.judges


def test_tasks_of_a_file_show_the_text_of_reset(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [f'{{"question": "Reach 7.", "start": {start}}}\n' for start in range(4)]
    path.write_text("".join(rows))
    env = FactoryEnv(Counter)
    data = DataConfig(train=str(path), heldout="split", num_heldout=1)
    (given,) = training_tasks(data, 0, env, answers=False).next(1)
    start = given.spec["start"]
    assert given.messages[0]["content"] == f"Reach 7.\n\nThe counter is at {start}."
    (held,) = heldout_tasks(data, env, answers=False)
    assert held.spec["start"] != start
    assert held.messages[0]["content"] == f"Reach 7.\n\nThe counter is at {held.spec['start']}."
    plain = training_tasks(data, 0, None, answers=False).next(1)
    assert plain[0].messages[0]["content"] == "Reach 7."


class Wrapped(Counter):
    """Its coroutine functions are wrapped, as by anybody's retry or timing."""

    closed = False

    @wrapped
    async def add(self, n: int) -> int:
        """Add to the counter."""
        self.value += n
        return self.value

    @wrapped
    async def get_reward(self) -> float:
        return 0.5

    @wrapped
    async def close(self) -> None:
        self.closed = True


def test_wrapped_coroutine_function_is_awaited() -> None:
    runner = EpisodeRunner(1)
    episode = FactoryEnv(Wrapped).reset(task(start=1))
    assert runner.step(episode, call("add", n=6)).result(9).text == "7"
    assert runner.finish(episode, None).result(9) == {"environment": 0.5}
    assert episode.environment.closed


class Mute(Counter):
    def get_reward(self) -> float:
        return None  # type: ignore[return-value]


class Slow(Counter):
    async def reset(self, start: int = 0, **row: Any) -> str:  # type: ignore[override]
        return ""


def test_factory_is_reset_before_get_reward_without_a_step() -> None:
    env = FactoryEnv(Counter)
    made, *_ = env.tasks("train")
    assert env.reset(made).finish(None) == {"environment": 0.0}


class Submits:
    __slots__ = ("answer", "done", "set_later")

    def __init__(self) -> None:
        self.done, self.answer = False, None

    @property
    def last(self) -> str:
        raise RuntimeError("not reset")

    def submit(self, x: str) -> str:
        self.done, self.answer = True, x  # type: ignore[assignment]
        return "ok"


def test_factory_submission_ends_the_turn() -> None:
    twice = CallTools(tuple(ToolCall("submit", {"x": x}) for x in ("wrong", "right")))
    told: Any = FactoryEnv(Submits).reset(task()).step(twice)
    assert (told.done, told.answer, told.outputs) == (True, "wrong", ("ok",))


class Drawn(Counter):
    """Its state is drawn anew in each reset, from `draws`."""

    draws: Iterator[str | None] = iter(())

    def reset(self, start: int = 0, **row: Any) -> Any:
        super().reset(start)
        return next(Drawn.draws)


DRAWN = [
    (["a 1", "a 2"], "begin", "'a 1' for the prompt, then 'a 2'. Derive the state from the"),
    (["a", None], "begin", "'a' for the prompt, then None"),
    ([None, "a"], "begin", "None for the prompt, then 'a'"),
    (["a", "a", "b"], "step", "'a' for the prompt, then 'b'"),
    (["a", "a", None], "finish", "'a' for the prompt, then None"),
    (["1", "1", "11"], "step", "'1' for the prompt, then '11'"),
    (["a", "a", "a"], "", ""),
    ([None, None, None], "", ""),
]


@pytest.mark.parametrize(("draws", "where", "message"), DRAWN)
def test_reset_with_another_state_than_the_prompt_is_rejected(
    draws: list[str | None], where: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawn, "draws", iter(draws))
    env = FactoryEnv(Drawn)
    reached = "begin"
    expected = re.escape(message)
    with pytest.raises(ValueError, match=expected) if where else contextlib.nullcontext():
        begun = env.begin(task("Q", start=1))
        episode, reached = env.reset(begun), "step" if where != "finish" else "finish"
        if where != "finish":
            episode.step(call("add", n=1))
        episode.finish(None)
    assert reached == (where or "step")


def test_task_without_begin_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawn, "draws", iter(["b"]))
    FactoryEnv(Drawn).reset(task("Q", start=1)).finish(None)


def test_invalid_factories_are_rejected() -> None:
    expected = r"Mute.get_reward: expected a number or named parts, got None"
    with pytest.raises(TypeError, match=expected):
        FactoryEnv(Mute).reset(task()).finish(None)
    with pytest.raises(
        ValueError, match=r"Slow\.reset: expected a function, got a coroutine function"
    ):
        FactoryEnv(Slow).tasks("train")
