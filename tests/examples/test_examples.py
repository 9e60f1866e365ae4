"""The files that the configs are tried with: what they hold is right, and cheating does not pay."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo import cli
from agentgrpo.actions import CallTools, ToolCall
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_callable, load_config, shipped_configs, validate
from agentgrpo.envs.graded import UnitTestEnv
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.envs.search import SearchEnv
from agentgrpo.examples import FOLDER
from agentgrpo.examples.functions import env as functions
from agentgrpo.examples.recipe import search_demo
from agentgrpo.sandbox import SandboxPool
from tests.playing import task

SOLUTIONS = {
    "plus_31": "def plus_31(x):\n    return 31 + x",
    "from_365": "def from_365(x):\n    return -(x - 365)",
    "rest_7": "def rest_7(x):\n    return x - x // 7 * 7",
    "above_10": "def above_10(x):\n    return not x <= 10",
    "larger": "def larger(a, b):\n    return a if a > b else b",
    "distance": "def distance(a, b):\n    return b - a if a < b else a - b",
    "backwards": "def backwards(text):\n    return ''.join(reversed(text))",
    "ends_with_a": "def ends_with_a(text):\n    return text[-1] == 'a'",
    "count_e": "def count_e(text):\n    return len([c for c in text if c == 'e'])",
    "ordered": "def ordered(numbers):\n    numbers.sort()\n    return numbers",
    "count_above_2": "def count_above_2(numbers):\n    return len([n for n in numbers if n > 2])",
    "all_plus_5": "def all_plus_5(numbers):\n    return list(map((5).__add__, numbers))",
}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_init_copies_examples_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--examples", str(tmp_path / "new")]) == 0
    printed = {Path(path).name for path in capsys.readouterr().out.split()}
    assert printed == {*shipped_configs(), "harbor"}
    assert len(list((tmp_path / "new/harbor").glob("*/tests/test.sh"))) == 10
    (tmp_path / "old/letters").mkdir(parents=True)
    assert cli.main(["init", "--examples", str(tmp_path / "old")]) == 2
    assert capsys.readouterr().err.endswith("letters already exists\n")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["letters"]
    monkeypatch.chdir(tmp_path / "new/letters")
    assert load_config("config.toml").env.kind == "env:LettersEnv", "the code beside it"
    monkeypatch.chdir(tmp_path)
    assert (
        load_config("new/search/config.toml").data.train == f"{tmp_path}/new/search/questions.jsonl"
    )


@pytest.mark.parametrize("name", [*shipped_configs(), "harbor"])
def test_each_example_folder_has_a_readme(name: str) -> None:
    text = (FOLDER / name / "README.md").read_text()
    assert text.startswith("# ")
    assert name == "harbor" or re.search(rf"^agentgrpo (train|recipe) {name}\b", text, re.M)
    files = {path.name for path in (FOLDER / name).iterdir()} - {
        "__pycache__",
        "config.toml",
        "README.md",
    }
    assert ("curve.png" in files) == ("curve.png" in text)
    own = set(re.findall(rf"agentgrpo\.examples\.{name}\.(\w+)", str(load_config_text(name))))
    assert all((FOLDER / name / f"{module}.py").is_file() for module in own)


def load_config_text(name: str) -> str:
    path = FOLDER / name / "config.toml"
    return path.read_text() if path.exists() else ""


def test_data_files_equal_the_codes_output() -> None:
    texts = [{"id": id, "title": t, "text": text} for id, t, text in search_demo.corpus()]
    assert rows("search/texts.jsonl") == texts
    assert rows("search/questions.jsonl") == [
        {"question": task.messages[-1]["content"], "answer": task.spec["answer"]}
        for task in search_demo.lookups("train")
        if task.id.endswith("/person")  # SmolLM2-135M does not tell which fact is asked for
    ]
    assert rows("unit_tests/tasks.jsonl") == [*functions.rows()]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "agentgrpo.recipe.errands:ErrandsEnv",
            "agentgrpo.examples.recipe.tasks:ComputeAndSearchEnv",
        ),
        ("agentgrpo.examples.lessons:LettersEnv", "agentgrpo.examples.letters.env:LettersEnv"),
        (
            "agentgrpo.examples.lessons:FunctionsEnv",
            "agentgrpo.examples.functions.env:FunctionsEnv",
        ),
    ],
)
def test_moved_names_of_older_runs_are_resolved(old: str, new: str) -> None:
    table = {"model": "m", "out_dir": "o", "env": {"kind": old}}
    kind = validate(TrainConfig, table, "run.json").env.kind
    assert kind == new
    assert callable(load_callable(kind, key="env.kind"))


@pytest.mark.nsjail
def test_right_functions_pass_their_tests(pool: SandboxPool) -> None:
    tests = {
        row["question"].split("(")[0].split()[-1]: row["tests"]
        for row in rows("unit_tests/tasks.jsonl")
    }
    assert len(tests) == len(rows("unit_tests/tasks.jsonl")) == 84
    env = UnitTestEnv(pool, 2.0)
    try:
        for name, program in SOLUTIONS.items():
            (episode, wrong) = (env.reset(task(tests=tests[name])) for _ in range(2))
            assert episode.finish(program)["solved"] == 1.0, name
            assert wrong.finish(program.replace("return ", "return 0 and "))["solved"] == 0.0, name
    finally:
        env.close()


def test_constant_functions_fail_the_tests() -> None:
    for row in rows("unit_tests/tasks.jsonl"):
        expected = {line.split(" == ")[1] for line in row["tests"].splitlines()}
        assert len(expected) > 1, row["question"]


def test_search_finds_every_answer_by_the_questions_name(tmp_path: Path) -> None:
    texts = shutil.copy(FOLDER / "search/texts.jsonl", tmp_path)
    env: Any = SearchEnv(Path(texts), top_k=1, max_chars=200)
    names = [row["title"] for row in rows("search/texts.jsonl")]
    for row in rows("search/questions.jsonl"):
        (name,) = (name for name in names if name in re.findall(r"\w+", row["question"]))
        call = CallTools((ToolCall("search", {"query": name}),))
        assert row["answer"] in env.reset(task()).step(call).text, row


def test_mcp_server_does_not_log_the_policys_errors(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("mcp", reason="mcp is in requirements-cpu.txt")
    from agentgrpo.envs.adapters.mcp import McpEnv

    env = McpEnv(sys.executable, [str(FOLDER / "mcp/server.py")])
    calls = [ToolCall("calculate", {"expression": text}) for text in ("12*31+14", "12*")]
    runner = EpisodeRunner(1)
    episode = env.reset(task())
    observation = runner.step(episode, CallTools(tuple(calls))).result()
    runner.close(episode).result()
    right, wrong = observation.outputs
    assert right == "386"
    assert wrong == "Error executing tool calculate"
    assert capfd.readouterr().err == ""


def test_verifiers_environment_rewards_the_answer() -> None:
    vf = pytest.importorskip("verifiers.v1", reason="verifiers is in requirements-dev.txt")
    from agentgrpo.examples.verifiers.my_env import Problem, Problems, ProblemsConfig

    (problem,) = Problems(ProblemsConfig(size=1, split="heldout"))
    asked = vf.AssistantMessage(tool_calls=[vf.ToolCall(id="0", name="x", arguments="{}")])
    told, said = (
        vf.ToolMessage(tool_call_id="0", content="386"),
        vf.AssistantMessage(content="386."),
    )

    def pays(answer: str, *messages: Any) -> tuple[float, float]:
        one = Problem(problem.data.model_copy(update={"answer": answer}))
        trace: Any = SimpleNamespace(messages=[*problem.data.prompt, *messages])
        return asyncio.run(one.right(trace)), asyncio.run(one.called(trace))

    assert pays("386", asked, told, said) == (1.0, 1.0)
    assert pays("386", said) == (1.0, 0.0)
    assert pays("386", asked, told) == (0.0, 1.0), "what the tool says is no answer"
    assert pays("386") == (0.0, 0.0), "nor what the question says"
    assert pays("38", asked, told, said) == (0.0, 1.0)
