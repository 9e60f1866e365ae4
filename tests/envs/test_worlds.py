"""Other people's environments against the real packages, and our own: search, tests, factories."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from agentgrpo.actions import MAX_DEPTH, CallTools, InfrastructureError, RunCode, Say, ToolCall
from agentgrpo.config import DataConfig
from agentgrpo.data.sources import heldout_tasks, training_tasks
from agentgrpo.envs.adapters.gymnasium import GymnasiumEnv
from agentgrpo.envs.adapters.mcp import McpEnv
from agentgrpo.envs.adapters.reasoning_gym import ReasoningGymEnv
from agentgrpo.envs.factory import FactoryEnv
from agentgrpo.envs.graded import GradingPool, UnitTestEnv, program_in
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.envs.search import SearchEnv
from agentgrpo.sandbox import SandboxException, SandboxPool
from agentgrpo.types import Task
from tests.playing import task, wrapped


def call(name: str, **arguments: Any) -> CallTools:
    return CallTools((ToolCall(name, arguments),))


# gymnasium


def lake(**options: Any) -> GymnasiumEnv:
    pytest.importorskip("gymnasium")
    given: dict[str, Any] = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
    return GymnasiumEnv(**{**given, "actions": ["left", "down", "right", "up"], **options})


def test_frozen_lake_reaches_its_goal() -> None:
    env = lake(rules="Reach G.")
    (first, *_) = tasks = env.tasks("train")
    assert len(tasks) == 64
    assert first.messages[0]["content"].startswith("Reach G.\n\n")
    assert "FFFH" in re.sub(r"\x1b\[\d*m", "", first.messages[0]["content"])
    assert "one of left, down, right, up" in str(env.tools(first))
    episode = env.reset(first)
    for move in ["down", "down", "right", "right", "down", "right"]:
        told = episode.step(call("act", action=move))
    assert (told.done, told.rewards) == (True, {"environment": 1.0})
    assert episode.finish(None) == {}
    episode.close()


def test_invalid_move_is_an_error_without_cost() -> None:
    episode = lake().reset(lake().tasks("train")[0])
    told = episode.step(call("act", action="fly"))
    assert (told.failed, told.outputs[0]) == (
        True,
        "Error: no action 'fly'; there are: left, down, right, up",
    )
    assert episode.step(call("jump")).failed
    assert episode.step(call("act")).failed
    both = episode.step(CallTools((ToolCall("act", {"action": "down"}),) * 2))
    assert len(both.outputs) == 2
    episode.close()


def test_seeds_make_tasks_and_splits_are_disjoint() -> None:
    env = lake(id="Blackjack-v1", kwargs={}, actions=["stick", "hit"], num_tasks=5)
    train, heldout = env.tasks("train"), env.tasks("heldout")
    assert env.tasks("train") == train
    assert not {t.spec["seed"] for t in train} & {t.spec["seed"] for t in heldout}
    assert len({t.messages[0]["content"] for t in train}) > 1
    by_word = lake(act_by="reply")
    assert (by_word.has_user, by_word.tools(train[0])) == (True, ())
    episode = by_word.reset(by_word.tasks("train")[0])
    assert not episode.step(Say(" Down ")).failed
    episode.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "Nowhere-v0"}, "id: .*Nowhere"),
        ({"id": "nowhere:Own-v0"}, "id: No module named .nowhere"),
        ({"actions": ["a"]}, "actions: expected 4 names"),
        ({"act_by": "x"}, "act_by: expected 'tool' or 'reply'"),
        (
            {"seed": 999_937},
            "seed: expected no seeds of held-out tasks .*, got 64 training tasks from 999937 on",
        ),
        ({"num_tasks": 0}, "num_tasks"),
        ({"id": "Pendulum-v1", "kwargs": {}}, "expected discrete or text actions"),
    ],
)
def test_unsupported_gymnasium_environments_are_rejected(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lake(**options)


def own_world(space: Any) -> GymnasiumEnv:
    """One that answers with the action that it was given, and breaks on any other."""
    gymnasium = pytest.importorskip("gymnasium")

    class Own(gymnasium.Env):  # type: ignore[misc, name-defined]
        action_space, observation_space = space, gymnasium.spaces.Text(9)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return "go", {}

        def step(self, action: Any) -> Any:
            assert space.contains(action)
            assert action != "bb"
            return f"took {action}", 0.0, False, False, {}

    gymnasium.register("Own-v0", Own)
    try:
        env = GymnasiumEnv("Own-v0")
        env.make = lambda: Own()  # type: ignore[method-assign]
        return env
    finally:
        del gymnasium.registry["Own-v0"]


def test_text_outside_the_space_is_an_error_for_the_policy() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    env = own_world(spaces.Text(3, charset="ab"))
    episode = env.reset(Task(id="t", messages=(), spec={"seed": 0}))
    assert episode.step(Say("ab")).text == "took ab"
    for wrong in ("abba", "x", ""):
        told = episode.step(Say(wrong))
        assert (told.failed, told.done) == (True, False)
        assert told.text.startswith(f"Error: {wrong!r} is not of Text(")
    with pytest.raises(AssertionError):  # the world's own fault
        episode.step(Say("bb"))


# reasoning-gym


def test_reasoning_gym_splits_share_no_seed() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"config\.seed: set the option `seed` instead"):
        ReasoningGymEnv(cast(Any, None), 1.0, dataset="chain_sum", config={"seed": 3})


@pytest.fixture(scope="module")
def chains(pool: SandboxPool) -> Iterator[ReasoningGymEnv]:
    pytest.importorskip("reasoning_gym")
    env = ReasoningGymEnv(pool, 1.0, dataset="chain_sum", size=4, config={"max_terms": 3})
    yield env
    env.close()


@pytest.mark.nsjail
def test_reasoning_gym_uses_its_verifier(chains: ReasoningGymEnv) -> None:
    import reasoning_gym

    upstream = reasoning_gym.create_dataset("chain_sum", size=4, seed=0, max_terms=3)
    tasks = chains.tasks("train")
    assert [t.messages[0]["content"] for t in tasks] == [e["question"] for e in upstream]
    assert upstream[0]["answer"] not in str(tasks[0].spec)
    right = [chains.reset(t).finish(e["answer"]) for t, e in zip(tasks, upstream, strict=True)]
    assert right == [{"solved": 1.0, "partial": 0.0}] * 4
    for wrong in ("none", "12345", ""):
        expected = {"solved": 0.0, "partial": upstream.score_answer(wrong, upstream[0])}
        assert chains.reset(tasks[0]).finish(wrong) == expected
    assert chains.reset(tasks[0]).finish(None) == {"solved": 0.0, "partial": 0.0}
    assert {t.messages[0]["content"] for t in chains.tasks("heldout")}.isdisjoint(
        t.messages[0]["content"] for t in tasks
    )
    with pytest.raises(ValueError, match="dataset 'chain_sums'"):
        ReasoningGymEnv(chains.pool, 1.0, dataset="chain_sums")


@pytest.mark.nsjail
def test_reasoning_gym_answer_is_never_executed(chains: ReasoningGymEnv, tmp_path: Path) -> None:
    """Its countdown and n_queens evaluate what they are given; others raise, or never return."""
    import reasoning_gym

    mark = tmp_path / "pwned"
    touch = f"__import__('pathlib').Path({str(mark)!r}).touch() or 0"
    first = {
        name: reasoning_gym.create_dataset(name, size=1, seed=0)[0]["metadata"]
        for name in ("countdown", "n_queens")
    }
    used = "+".join(map(str, first["countdown"]["numbers"]))
    forged = f"exec('import numpy; numpy.isclose = lambda *a, **k: True') or {used}"
    numbers, target = first["countdown"]["numbers"], first["countdown"]["target"]
    patch = (
        "setattr(__import__('sys').modules['reasoning_gym.games.countdown'], '_extract_ints', "
        f"lambda text: {numbers}) or {target}"
    )
    letters = "+".join(f"lambdify((), 'builtins.chr')()({ord(letter)})" for letter in patch)
    spelled = f"lambdify((), 'builtins.eval')()({letters})"
    board = [row.split() for row in first["n_queens"]["valid_answers"][0].splitlines()]
    for dataset, answers in {
        "countdown": [touch, forged, "9**9**9**9", "().__class__", "S('open(0)')", spelled],
        "n_queens": [touch, "open(0)", f"list({board})"],
        "prime_factorization": ["none", "2" * (1 << 20)],
    }.items():
        env = ReasoningGymEnv(chains.pool, 1.0, dataset=dataset, size=1)
        # one set of sandboxes for all: what starts takes seconds
        env.graders = chains.graders
        (given,) = env.tasks("train")
        for answer in answers:
            assert env.score(given, answer) < 0.1, answer
        made = reasoning_gym.create_dataset(dataset, size=1, seed=0)
        right = made[0]["answer"] or made[0]["metadata"]["solutions"][0]
        env._timeout_s = 30.0
        assert env.score(given, str(right)) == 1.0, "and the right one is right"
        if dataset == "n_queens":
            assert env.score(given, str(board)) == 0.5, "a board as a literal is read"
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.nsjail
def test_reasoning_gym_questions_match_its_verifier(
    chains: ReasoningGymEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of some datasets hang on the seed of Python's hashes, which this process draws."""
    monkeypatch.setattr("agentgrpo.envs.adapters.reasoning_gym.PAGE", 3)  # several
    listing = (
        "import json, reasoning_gym as r\nprint(json.dumps([*r.create_dataset({!r}, **{!r})]))"
    )
    for dataset in ("polynomial_multiplication", "ransom_note"):
        env = ReasoningGymEnv(chains.pool, 1.0, dataset=dataset, size=7, seed=5)
        env.graders = chains.graders
        for split, seed in (("train", 5), ("heldout", 1_000_008)):
            options = {"size": 7, "seed": seed}
            entries = json.loads(
                subprocess.run(
                    [sys.executable, "-c", listing.format(dataset, options)],
                    env={**os.environ, "PYTHONHASHSEED": "0"},
                    capture_output=True,
                    check=True,
                ).stdout
            )
            tasks = env.tasks(split)
            asked = [task.messages[0]["content"] for task in tasks]
            assert asked == [entry["question"] for entry in entries]
            assert [task.id for task in tasks] == [f"{dataset}/{split}/{i}" for i in range(7)]
            env._timeout_s = 30.0
            assert [env.score(t, e["answer"]) for t, e in zip(tasks, entries, strict=True)] == [
                1
            ] * 7


SPELLED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "simple_integration": ({}, ["Integral({integrand}, {variable})", "{integrand}"], []),
    "intermediate_integration": (
        {"problem_type_weights": [0, 0, 1, 0, 0, 0, 0, 0]},
        ["Integral({integrand}, x)", "Integral({integrand}, x, evaluate=False) + C"],
        ["atan(1) + {answer}"],
    ),
    "polynomial_multiplication": (
        {}, ["{polynomial_expr}", "Poly({polynomial_expr})"], ["0 + {answer}"],
    ),
    "countdown": (
        {},
        [
            "({sum})*log(log(E)) + {target}.E0", "({sum})*0x0 + 0x{target:x}",
            "{target:_}e0 # {numbers}", "0x{target:x} # {numbers}",
            "({sum})*(log(E) - log(E)) + factorial(ceiling(pi))", "({sum})//1 + 0_0",
            "({expression})**1_0",
        ],
        ["( {answer} )", "{answer}."],
    ),
    "puzzle24": (
        {},
        [
            "({sum})*log(log(E)) + factorial(ceiling(pi))", "({sum})*0x0 + 0x18",
            "0x18 # {numbers}", "6*4*1*1", "9*5/(1 + 3)*2", "9 + 3*5 + 1/2", "9 + 3*5/1**2",
        ],
        ["( {answer} )", "9+5*1*3"],
    ),
    "complex_arithmetic": ({}, ["nan", "NaN+nanj", "1e999"], ["({answer})"]),
    "coin_flip": ({}, ["0", "1e300", "1/2"], ["2/2", "1.00001"]),
    "game_of_life_halting": ({}, ["False", "yes", "0", "False or True"], [" true ", "True."]),
}  # fmt: skip


@pytest.mark.nsjail
@pytest.mark.parametrize("dataset", SPELLED)
def test_reasoning_gym_does_not_reward_repeating_the_question(
    chains: ReasoningGymEnv, dataset: str
) -> None:
    """Nor numbers that were not given, however they are spelled, nor what it takes for any."""
    import reasoning_gym
    import sympy

    config, wrong, right = SPELLED[dataset]
    env = ReasoningGymEnv(chains.pool, 1.0, dataset=dataset, size=1, config=config)
    env.graders = chains.graders
    (given,) = env.tasks("train")
    entry = reasoning_gym.create_dataset(dataset, size=1, seed=0, **config)[0]
    if dataset == "polynomial_multiplication":  # hangs on the seed of this process's hashes
        asked = given.messages[0]["content"].split("\n")[0].partition(": ")[2]
        product = sympy.expand(sympy.parse_expr(asked))
        entry = {"answer": str(product), "metadata": {"polynomial_expr": asked}}
    facts = {**entry["metadata"], "answer": entry["answer"]}
    facts["sum"] = "+".join(map(str, facts.get("numbers", [])))
    for answer in ["{answer}", *right]:
        assert env.score(given, answer.format(**facts)) == 1.0, answer
    for answer in wrong:
        assert env.score(given, answer.format(**facts)) < 0.1, answer


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


def test_invalid_corpus_is_rejected_by_file_and_line(tmp_path: Path, corpus: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: expected an object with a 'text'"):
        SearchEnv(bad)
    with pytest.raises(ValueError, match="top_k: expected a number of at least 1, got 0"):
        SearchEnv(corpus, top_k=0)


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
            episode.step(CallTools((ToolCall("add", {"n": 1}),)))
        episode.finish(None)
    assert reached == (where or "step")


def test_task_without_begin_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawn, "draws", iter(["b"]))
    FactoryEnv(Drawn).reset(task("Q", start=1)).finish(None)


@pytest.mark.parametrize(("same", "where"), [(1, "reset(seed=0)"), (2, "reset(seed=0)"), (9, "")])
def test_environment_that_ignores_its_seed_is_rejected(same: int, where: str) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    count = itertools.count()

    class Unseeded(gymnasium.Env):  # type: ignore[misc, name-defined]
        action_space = gymnasium.spaces.Discrete(2)
        observation_space = gymnasium.spaces.Discrete(99)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return next(count) // same, {}

        def step(self, action: Any) -> Any:
            return 0, 0.0, False, False, {}

    name = f"Unseeded{same}-v0"
    gymnasium.register(name, entry_point=Unseeded)
    env = GymnasiumEnv(name, num_tasks=1)
    with pytest.raises(ValueError, match=re.escape(where)) if where else contextlib.nullcontext():
        (begun,) = env.tasks("train")
        env.reset(begun).step(CallTools((ToolCall("act", {"action": "0"}),)))


def test_invalid_factories_are_rejected() -> None:
    expected = r"Mute.get_reward: expected a number or named parts, got None"
    with pytest.raises(TypeError, match=expected):
        FactoryEnv(Mute).reset(task()).finish(None)
    with pytest.raises(
        ValueError, match=r"Slow\.reset: expected a function, got a coroutine function"
    ):
        FactoryEnv(Slow).tasks("train")


# the Model Context Protocol

SERVER = '''
from mcp.server.mcpserver import MCPServer
server = MCPServer("test")
seen = []

@server.tool()
def remember(word: str) -> str:
    """Remember a word."""
    seen.append(word)
    return ",".join(seen)

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no")

@server.tool()
def end() -> str:
    """End the server."""
    import os
    os._exit(3)

server.run("stdio")
'''


@pytest.fixture(scope="module")
def mcp(tmp_path_factory: pytest.TempPathFactory) -> McpEnv:
    pytest.importorskip("mcp")
    script = tmp_path_factory.mktemp("mcp") / "server.py"
    script.write_text(SERVER)
    return McpEnv(sys.executable, [str(script)])


@pytest.mark.slow
def test_mcp_server_per_rollout(mcp: McpEnv) -> None:
    names = [schema["function"]["name"] for schema in mcp.tools(task())]
    assert names == ["remember", "fail", "end"]
    runner = EpisodeRunner(1)
    one, two = mcp.reset(task()), mcp.reset(task())
    steps = [runner.step(one, call("remember", word=w)) for w in "a"]
    assert steps[0].result(60).text == "a"
    assert runner.step(two, call("remember", word="b")).result(60).text == "b"
    assert runner.step(one, call("remember", word="c")).result(60).text == "a,c"
    told = runner.step(one, CallTools((ToolCall("fail", {}), ToolCall("nowhere", {})))).result(60)
    assert "Error executing tool fail" in told.outputs[0]
    assert told.counts == {"tool_exception": 1.0, "unknown_tool": 1.0}
    deep: Any = "d"
    for _ in range(MAX_DEPTH - 1):  # of lists in an object
        deep = [deep]
    said = runner.step(two, call("remember", word=deep)).result(60)
    assert "Input should be a valid string" in said.text
    with pytest.raises(InfrastructureError, match="the MCP server ended in end"):
        runner.step(one, call("end")).result(60)
    assert runner.finish(one, None).result(60) == {}
    runner.close(two).result(60)


@pytest.mark.slow
def test_program_that_is_not_an_mcp_server_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"command .*: no MCP server answered"):
        McpEnv(sys.executable, ["-c", "print('hello')"])


RAW_SERVER = """
import json, sys

NAMES = ["wrong", "text", "link", "both", "image", "data", "null", "internal", "params"]
BLOCKS = {
    "text": [{"type": "resource", "resource": {"uri": "file:///a", "text": "the file"}}],
    "link": [{"type": "resource_link", "uri": "file:///a.txt", "name": "a.txt"}],
    "both": [{"type": "text", "text": "see"}, {"type": "image", "data": "aGk=", "mimeType": "i/p"}],
    "image": [{"type": "image", "data": "aGk=", "mimeType": "i/p"}],
    "null": None,
}
def listed(cursor):
    start = int(cursor or 0)
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES[start : start + 4]]
    for tool in tools:
        if tool["name"] == "wrong":
            tool["outputSchema"] = {"type": "object", "required": ["n"]}
    end = {} if start + 4 >= len(NAMES) else {"nextCursor": str(start + 4)}
    return {"tools": tools, **end}

def called(name):
    if name in ("internal", "params"):
        return {"error": {"code": {"internal": -32603, "params": -32602}[name], "message": "no"}}
    data = {"data": {"n": 1}, "wrong": {}}
    told = {"structuredContent": data[name]} if name in data else {}
    return {"result": {"content": BLOCKS.get(name, []), **told}}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    given, method = asked.get("params", {}), asked["method"]
    told = {"error": {"code": -32601, "message": "no such method"}}
    if method == "initialize":
        server = {"capabilities": {"tools": {}}, "serverInfo": {"name": "raw", "version": "1"}}
        told = {"result": {"protocolVersion": given["protocolVersion"], **server}}
    elif method == "tools/list":
        told = {"result": listed(given.get("cursor"))}
    elif method == "tools/call":
        told = called(given["name"])
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
"""


def test_mcp_errors_are_results_for_the_policy() -> None:
    pytest.importorskip("mcp")
    env = McpEnv(sys.executable, ["-c", RAW_SERVER])
    names = [schema["function"]["name"] for schema in env.tools(task())]
    assert names == ["wrong", "text", "link", "both", "image", "data", "null", "internal", "params"]
    runner, episode = EpisodeRunner(1), env.reset(task())
    told = runner.step(episode, CallTools(tuple(ToolCall(n, {}) for n in names))).result(60)
    runner.close(episode).result(60)
    shown = dict(zip(names, told.outputs, strict=True))
    assert shown["text"] == "the file"
    assert shown["link"] == "a.txt: file:///a.txt"
    assert shown["both"] == "see\n(image: not shown)"
    assert shown["image"] == "(image: not shown)"
    assert shown["data"] == '{"n": 1}'
    assert shown["wrong"].startswith("wrong: the server's answer is not valid: Invalid structured")
    assert shown["null"].startswith("null: the server's answer is not valid: ")
    assert shown["internal"].startswith("MCPError: ")
    assert shown["params"].startswith("BadArguments: ")
    assert told.counts == {"tool_exception": 3.0, "bad_arguments": 1.0}
