"""Every shipped config does what its header says: agent, environment, tasks and rewards.

The policy is scripted, everything else is the config's own. test_run.py tests engine and learner
with the quickstart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.actions import CallTools, ToolCall
from agentgrpo.config.read import load_config, load_config_of, shipped_configs
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.envs.adapters.tau2 import pieces_of
from agentgrpo.envs.adapters.tau_bench import pieces_of as requests_of
from agentgrpo.envs.runner import await_if_needed
from agentgrpo.examples import FOLDER
from agentgrpo.examples.functions.env import FUNCTIONS
from agentgrpo.recipe.recipe import parts_of
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.support.atomic_files import write_lines
from agentgrpo.support.user_calls import event_loop
from agentgrpo.train.dry_run import _options_column, playing_lines
from agentgrpo.train.prepare import prepare_run, prompt_length, training_stream
from agentgrpo.train.progress import Progress
from agentgrpo.types import Status, Task
from bench import real_tau_bench
from tests.playing import EOT, says

Stage = Any


def played(stage: Stage, config: Any, task: Any, *turns: str) -> Any:
    """The scored rollout of a policy with these turns."""
    engine: Any = says(
        *turns, tokenizer=stage.chat.tokenizer, max_model_len=config.engine.max_model_len
    )
    rollout_config = config.rollout.model_copy(update={"max_turns": 99})
    sampler = Sampler(engine, stage.agent, stage.env, stage.chat, rollout_config)
    groups, _ = sampler.play([task], 1, seed=0)
    stage.reward.score(groups)
    (rollout,) = groups[0].rollouts
    assert rollout.status is Status.COMPLETED, (rollout.status, rollout.error)
    assert len(engine.requests) == len(turns), "the whole script was played"
    return rollout


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{EOT}"


def observed(stage: Stage, rollout: Any) -> str:
    """All observations, as text."""
    observations = [s.token_ids for s in rollout.segments[1:] if not s.sampled]
    return "".join(stage.chat.decode(ids) for ids in observations)


def by_python(stage: Stage, play: Any, task: Any) -> None:
    """Python code returns its output; the right answer has a reward, another has none."""
    code = "<code>print(40 + 2)</code>"
    right = play(task, code, f"Answer: {task.spec['answer']}{EOT}")
    assert right.stats["tool_calls"] == 1
    assert "42" in observed(stage, right)
    assert right.reward > play(task, code, f"Answer: -1{EOT}").reward + 0.5


def acts_first(stage: Stage, play: Any, task: Any) -> None:
    assert play(task, "<code>print('wrong')</code>", f"-1{EOT}").reward == 1.0
    assert play(task, "<code>1/0</code>", f"-1{EOT}").reward < 1.0
    assert play(task, f"{task.spec['answer']}{EOT}").reward == 0.0


def searches_by_code(stage: Stage, play: Any, task: Any) -> None:
    query = f"<code>print(web_search({task.messages[-1]['content']!r}))</code>"
    right = play(task, query, f"Answer: {task.spec['answer']}{EOT}")
    assert (right.stats["host_calls"], right.stats["tool_errors"]) == (1, 0)
    assert task.spec["answer"] in observed(stage, right)
    assert right.reward > play(task, f"Answer: nobody{EOT}").reward + 0.5


def types_at_a_console(stage: Stage, play: Any, task: Any) -> None:
    """A syntax error has a negative reward on the tokens of its line."""
    end = f"submit_final_answer({task.spec['answer']})\n"
    right, wrong = play(task, "40+2\n", end), play(task, "40+\n", end)
    assert "42" in observed(stage, right)
    (cost,) = wrong.span_rewards
    assert stage.chat.decode(wrong.token_ids[cost.start : cost.end]) == "40+\n"
    assert (cost.value, right.span_rewards) == (-0.3, [])
    assert right.reward - wrong.reward == pytest.approx(0.3)


def walks(stage: Stage, play: Any, task: Any) -> None:
    """Each move earns its share of the distance, negative in the wrong direction."""
    way = re.findall(r"(\d) (\w+)", task.messages[-1]["content"])
    moves = [f'<fn>act("{word}")</fn>' for count, word in way for _ in range(int(count))]
    right = play(task, *moves)
    assert right.reward == pytest.approx(1.0)
    assert "<fn_results>\nThe " in observed(stage, right)
    back = {"left": "right", "right": "left", "up": "down", "down": "up"}[way[0][1]]
    assert play(task, f'<fn>act("{back}")</fn>', EOT).reward == pytest.approx(-1 / len(moves))


def halves(stage: Stage, play: Any, task: Any) -> None:
    low, high = map(int, re.findall(r"\d+", task.messages[-1]["content"]))
    world = stage.env.make().unwrapped
    world.reset(seed=task.spec["seed"])
    guesses = [(low + high) // 2]
    while guesses[-1] != world.number:
        low = max(low, guesses[-1] + 1) if guesses[-1] < world.number else low
        high = min(high, guesses[-1] - 1) if guesses[-1] > world.number else high
        guesses.append((low + high) // 2)
    assert len(guesses) <= 4
    assert play(task, *(f"{guess}{EOT}" for guess in guesses)).reward == pytest.approx(1.0)
    assert play(task, *[f"none{EOT}"] * 4).reward == 0.0


def calls_inline(stage: Stage, play: Any, task: Any) -> None:
    """The answer to a call is in the same message."""
    right = play(task, '<fn>calculate("12*31+14")</fn>', f"Answer: {task.spec['answer']}{EOT}")
    assert "386" in observed(stage, right)
    assert "<|im_start|>" not in observed(stage, right)
    assert right.reward > play(task, f"Answer: -1{EOT}").reward + 0.5


def calls_a_calculator(stage: Stage, play: Any, task: Any) -> None:
    asked = call("calculate", expression="12*31+14")
    right = play(task, asked, f"{task.spec['answer']}{EOT}")
    assert "<|im_start|>tool\n386" in observed(stage, right)
    assert right.reward > play(task, f"-1{EOT}").reward + 0.5


def calls_servers_of_its_own(stage: Stage, play: Any, task: Any) -> None:
    calls_a_calculator(stage, play, task)
    episodes = [stage.env.reset(task) for _ in range(2)]
    asked = CallTools((ToolCall("calculate", {"expression": "1+1"}),))

    async def together() -> int:
        for episode in episodes:
            assert (await await_if_needed(episode.step(asked))).text == "2"
        servers = processes_below("server.py")
        for episode in episodes:
            await await_if_needed(episode.close())
        return servers

    assert asyncio.run_coroutine_threadsafe(together(), event_loop("episodes")).result(60) == 2


def processes_below(word: str) -> int:
    """Descendant processes with this word in their command line."""
    count, parents = 0, {os.getpid()}
    for stat in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda p: int(p.parent.name)):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) in parents:
                parents.add(int(stat.parent.name))
                count += word in (stat.parent / "cmdline").read_text()
    return count


def searches(stage: Stage, play: Any, task: Any) -> None:
    found = call("search", query=task.messages[-1]["content"])
    right = play(task, found, f"{task.spec['answer']}{EOT}")
    assert task.spec["answer"] in observed(stage, right)
    assert right.reward > play(task, f"nobody{EOT}").reward + 0.5
    assert right.rewards["tool_cost"] < 0


def is_verified(stage: Stage, play: Any, task: Any) -> None:
    (terms,) = re.findall(r"problem: (.*) =", task.messages[-1]["content"])
    code = f"<code>print({terms})</code>"
    assert play(task, code, f"Answer: {eval(terms)}{EOT}").rewards["solved"] == 1.0
    assert play(task, f"Answer: {eval(terms) + 1}{EOT}").rewards["solved"] == 0.0


def is_graded(stage: Stage, play: Any, task: Any) -> None:
    asked = task.messages[-1]["content"]
    name, arguments = re.findall(r"function (\w+)\((.*?)\)", asked)[0]
    (function,) = (
        f
        for f in FUNCTIONS
        if f.arguments == arguments and re.fullmatch(f.name.replace("{k}", "[a-z0-9]+"), name)
    )
    value = function.expression.replace("{k}", name.rpartition("_")[2])
    assert "assert" not in "".join(str(m["content"]) for m in task.messages)

    def wrote(body: str) -> Any:
        return play(task, f"```python\ndef {name}({arguments}):\n    return {body}\n```{EOT}")

    assert wrote(value).reward == 1.0
    assert wrote("None").reward == 0.0


def talks_with_a_customer(stage: Stage, play: Any, task: Any) -> None:
    """With a simulated user; the benchmark's ground truth is rewarded, doing nothing is not."""
    upstream = stage.env._upstream["train"][int(task.spec["place"].partition("/")[2])]
    calls = [call(a.name, **a.kwargs) for a in upstream.actions]
    told = [f"What else?{EOT}" for _ in requests_of(task.spec["instruction"])[1:]]
    right = play(task, *told, *calls, f"Done.{EOT}")
    assert "<|im_start|>user\nMy name is " in observed(stage, right)
    assert right.rewards["solved"] == 1.0
    assert len(stage.env.tasks("train")) == 500


def talks_of_retail(stage: Stage, play: Any, task: Any) -> None:
    criteria = stage.env._tasks[task.spec["tau2_id"]].evaluation_criteria
    calls = [call(a.name, **a.arguments) for a in criteria.actions]
    said = [f"{' '.join(criteria.communicate_info or ['Anything else?'])}{EOT}"]
    patience = len(pieces_of(task.spec["scenario"]))
    right = play(task, *[f"Go on.{EOT}"] * patience, *calls, *said)
    assert "<|im_start|>user\n" in observed(stage, right)
    assert right.rewards["solved"] == 1.0


def works_alone(stage: Stage, play: Any, task: Any) -> None:
    criteria = stage.env._tasks[task.spec["tau2_id"]].evaluation_criteria
    calls = [call(a.name, **a.arguments) for a in criteria.actions]
    assert play(task, *calls, call("done")).rewards["solved"] == 1.0
    assert play(task, call("done")).rewards["solved"] == 0.0
    assert [len(stage.env.tasks(split)) for split in ("train", "heldout")] == [74, 40]


def computes_and_looks_up(stage: Stage, play: Any, task: Any) -> None:
    """With one call each; the recipe's parts are those in its header."""
    tool = "search" if task.spec["kind"] == "lookup" else "python"
    asked = task.spec["name"] if tool == "search" else "40 + 2"
    right = play(task, f"<think>x</think><{tool}>{asked}</{tool}>",
                 f"<answer>{task.spec['answer']}</answer>{EOT}")  # fmt: skip
    shown = str(task.spec["answer"]) if tool == "search" else "42"
    assert shown in observed(stage, right)
    assert right.reward > play(task, f"<answer>-1</answer>{EOT}").reward
    recipe = load_config_of(RecipeConfig, "recipe")
    assert [part.name for part in parts_of(recipe)] == [
        "prompting", "flywheel", "sft", "tuned", "0.select", "0.train", "1.select", "1.train",
        "trained",
    ]  # fmt: skip
    assert 0 < recipe.rollout.branching.initial < recipe.rollout.group_size


SAYS: dict[str, Any] = {
    "code_format": acts_first,
    "code_search": searches_by_code,
    "console": types_at_a_console,
    "functions": is_graded,
    "guess": halves,
    "inline": calls_inline,
    "letters": by_python,
    "mcp": calls_servers_of_its_own,
    "quickstart": by_python,
    "reasoning_gym": is_verified,
    "recipe": computes_and_looks_up,
    "search": searches,
    "tau2_retail": talks_of_retail,
    "tau2_telecom": works_alone,
    "tau_bench": talks_with_a_customer,
    "tools": calls_a_calculator,
    "unit_tests": is_graded,
    "walk": walks,
    "qwen3_math": by_python,
    "qwen3_tools": searches,
}
"""The check of each config's header. test_gpu_configs.py checks the memory that some name."""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the model check: the configs' own models are deeper and longer."""
    monkeypatch.setattr("agentgrpo.train.prepare.check_model", lambda config, model, **how: None)


@pytest.mark.nsjail
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("mcp", "reasoning_gym") else [])
        for name in sorted(shipped_configs())
        if name
        not in (
            "program",
            "verifiers",
            "custom_sampler",
        )  # whose turns are their own: test_program.py
    ],
)
def test_shipped_config_does_what_its_header_says(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(90)]
    write_lines(tmp_path / "math.jsonl", sums)
    for path in (FOLDER / "search").glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(real_tau_bench.folder())
    overrides = [
        f"out_dir={tmp_path}/run",
        "engine.max_model_len=90000",
        "learner.max_tokens=90000",
        "rollout.max_turn_tokens=9000",  # of a tokenizer that has bytes
        "rollout.max_observation_tokens=9000",
    ]
    if name == "mcp":
        overrides.append(
            f'env.options={{command="{sys.executable}", args=["{FOLDER}/mcp/server.py"]}}'
        )
    config = load_config_of(RecipeConfig, name, overrides)
    stage = prepare_run(config, model=str(tiny_model), progress=Progress(1))
    try:
        tasks: Any = training_stream(config, stage)
        (task, *_) = tasks.next(3)
        assert 10 < prompt_length(stage.agent, stage.chat, task) < 90000
        assert len(stage.heldout) >= 9
        assert "answer" not in str(task.messages[-1]) or "spec" not in str(task.messages)
        SAYS[name](stage, partial(played, stage, config), task)
    finally:
        stage.close()


@pytest.mark.nsjail
@pytest.mark.parametrize("limit", [65, 20])
def test_length_filter_reports_dropped_tasks(
    limit: int, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "q" * (1 + 40 * (i % 2)), "answer": 1} for i in range(20)]
    path = tmp_path / "rows.jsonl"
    write_lines(path, rows)
    overrides = [
        f"out_dir={tmp_path}/run",
        f"data.train={path}",
        f"data.heldout={path}",
        "agent.options.system_prompt=S",
        "agent.options.shots=[]",
        "agent.options.observation_role=user",
        f"data.max_prompt_tokens={limit}",
    ]
    config = load_config("quickstart", overrides)
    if limit == 20:
        with pytest.raises(ValueError, match=r"data\.heldout: no prompt has at most 20 tokens"):
            prepare_run(config, model=str(tiny_model))
        return
    stage = prepare_run(config, model=str(tiny_model))
    try:
        tasks: Any = training_stream(config, stage)
        assert len(tasks) == len(stage.heldout) == 10
        assert {t.messages[0]["content"] for t in tasks.rows} == {"q"}
        said = capsys.readouterr().out
        assert "10 of 20 tasks left out: prompts longer than" in said.replace("\n", " ")
        assert "data: 10 training tasks, 10 held out" in said
    finally:
        stage.close()


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.nsjail
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "User", "content": "q"}, None),
        ({"role": "critic", "content": "q"}, r"the role of message 2 \('critic'\) changes nothing"),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            r"the tool_calls of message 2 \('assistant'\) changes nothing",
        ),
    ],
)
def test_orders_of_roles_and_given_answers_are_reported(
    message: dict[str, Any], reason: str | None, tiny_model: Path, tmp_path: Path
) -> None:
    """The held-out tasks and the first training tasks are valid."""
    fine = [{"question": f"q {i}", "answer": i % 2 * 90 + i} for i in range(12)]
    odd = {"question": [message, {"role": "user", "content": "odd"}], "answer": 1}
    write_lines(tmp_path / "heldout.jsonl", fine)
    write_lines(tmp_path / "train.jsonl", [*fine, odd])
    overrides = [f"data.{key}={tmp_path}/{key}.jsonl" for key in ("train", "heldout")]
    overrides += [f"out_dir={tmp_path}/run", "agent.options={system_prompt='S'}"]
    config = load_config("quickstart", overrides)
    stage = prepare_run(config, model=str(tiny_model))
    try:
        if reason is not None:
            with pytest.raises(ValueError, match=rf"(?s){reason}; use .*task 'train\.jsonl:13'"):
                training_stream(config, stage)
            return
        tasks: Any = training_stream(config, stage)
        (check,) = [c for c in playing_lines(config, stage, tasks.rows) if c.name == "answers"]
        assert (check.ok, check.found) == (
            True, "6 of 13 questions contain their expected answer literally",
        )  # fmt: skip
        (check,) = [c for c in playing_lines(config, stage, tasks.rows[:1]) if c.name == "answers"]
        assert not check.ok
    finally:
        stage.close()


@pytest.mark.parametrize(
    ("answers", "column"), [([0, 3, "1"], "choices"), ([0, 4], ""), ([0.5], ""), (["a"], "")]
)
def test_answers_that_are_option_indices_are_detected(answers: list[Any], column: str) -> None:
    """As in MMLU: the policy does not see the options, so the index means nothing to it."""
    specs = [{"q": "x", "choices": [*"abcd"], "answer": answer} for answer in answers]
    tasks = [Task(id=str(i), messages=(), spec=spec) for i, spec in enumerate(specs)]
    assert _options_column(tasks) == column
