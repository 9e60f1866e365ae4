"""The files that the configs are tried with: what they hold is right, and cheating does not pay."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo import cli, examples
from agentgrpo.actions import CallTools, ToolCall
from agentgrpo.envs.graded import UnitTestEnv
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.envs.search import SearchEnv
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
    return [json.loads(line) for line in examples.files()[name].splitlines()]


def test_a_command_writes_them_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "--examples", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out.split()
    assert {Path(path).name for path in said} == {Path(p).parts[0] for p in examples.files()}
    assert len(list((tmp_path / "new/harbor").glob("*/tests/test.sh"))) == 10
    (tmp_path / "old").mkdir()
    (tmp_path / "old/my_env.py").write_text("mine")
    assert cli.main(["init", "--examples", str(tmp_path / "old")]) == 2
    assert capsys.readouterr().err.endswith("my_env.py is there already\n")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["my_env.py"]


@pytest.mark.nsjail
def test_right_functions_pass_their_tests(pool: SandboxPool) -> None:
    tests = {row["question"].split("(")[0].split()[-1]: row["tests"] for row in rows("tasks.jsonl")}
    assert len(tests) == len(rows("tasks.jsonl")) == 84
    env = UnitTestEnv(pool, 2.0)
    try:
        for name, program in SOLUTIONS.items():
            (episode, wrong) = (env.reset(task(tests=tests[name])) for _ in range(2))
            assert episode.finish(program)["solved"] == 1.0, name
            assert wrong.finish(program.replace("return ", "return 0 and "))["solved"] == 0.0, name
    finally:
        env.close()


def test_no_function_passes_by_always_returning_the_same() -> None:
    for row in rows("tasks.jsonl"):
        expected = {line.split(" == ")[1] for line in row["tests"].splitlines()}
        assert len(expected) > 1, row["question"]


def test_the_search_finds_every_answer_by_the_name_in_the_question(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(examples.files()["texts.jsonl"])
    env: Any = SearchEnv(tmp_path / "texts.jsonl", top_k=1, max_chars=200)
    names = [row["title"] for row in rows("texts.jsonl")]
    for row in rows("questions.jsonl"):
        (name,) = (name for name in names if name in re.findall(r"\w+", row["question"]))
        call = CallTools((ToolCall("search", {"query": name}),))
        assert row["answer"] in env.reset(task()).step(call).text, row


def test_the_server_answers_and_logs_nothing_of_what_the_policy_gets_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mcp", reason="mcp is in requirements-cpu.txt")
    from agentgrpo.envs.adapters.mcp import McpEnv

    examples.write(tmp_path)
    env = McpEnv(sys.executable, [str(tmp_path / "server.py")])
    calls = [ToolCall("calculate", {"expression": text}) for text in ("12*31+14", "12*")]
    runner = EpisodeRunner(1)
    episode = env.reset(task())
    observation = runner.step(episode, CallTools(tuple(calls))).result()
    runner.close(episode).result()
    right, wrong = observation.outputs
    assert right == "386"
    assert wrong == "Error executing tool calculate"
    assert capfd.readouterr().err == ""


def test_the_verifiers_environment_pays_what_the_policy_answers() -> None:
    vf = pytest.importorskip("verifiers.v1", reason="verifiers is in requirements-dev.txt")
    from agentgrpo.examples.my_env import Problem, Problems, ProblemsConfig

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
