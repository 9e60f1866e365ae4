"""A run whose rollouts are a program's: from its file to records that are proven."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agentgrpo.inspect.verify import verify
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.types import Rollout
from tests import tiny
from tests.warm import ROOT, Command

pytestmark = [pytest.mark.slow, pytest.mark.nsjail, pytest.mark.timeout(900)]
CONFIG = """
model = "{model}"
out_dir = "run"
steps = 2
eval_every = 0
[agent]
kind = "program"
options = {{ {options}, timeout_s = 120.0 }}
[sandbox]
{sandbox}
[rollout]
tasks_per_step = 2
group_size = 4
max_turn_tokens = 24
[engine]
max_model_len = 320
kv_cache_gib = 0.0625
[learner]
learning_rate = 1e-3
max_tokens = 2048
[reward]
functions = ["length"]
[data]
train = "rows.jsonl"
num_heldout = 2
"""
HEAD = """
tools = [{"type": "function", "function": {"name": "add", "description": "Add.",
          "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}]

def more(messages, said):
    messages.append(said)
    calls = said.tool_calls or []
    for call in calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
    if not calls:
        messages.append({"role": "user", "content": "go on"})
"""
FILE = f"""import json, os, sys
from openai import OpenAI
{HEAD}
task, client = json.load(sys.stdin), OpenAI()
messages = [{{"role": "user", "content": task["question"]}}]
for _ in range(2):
    said = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=messages, tools=tools, max_tokens=12,
    ).choices[0].message
    more(messages, said)
aside = [{{"role": "user", "content": "aside: " + task["question"]}}]
client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=aside, max_tokens=4)
print("Answer: 2")
"""
MODULE = f"""from openai import AsyncOpenAI
{HEAD}
async def agent(task, *, base_url, api_key, model):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{{"role": "user", "content": task["question"]}}]
        for _ in range(2):
            stream = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=12, stream=True
            )
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
            messages.append({{"role": "assistant", "content": text}})
            messages.append({{"role": "user", "content": "?"}})
    return "2"
"""
WAYS = {
    "session": (
        'command = ["python", "mine.py"], files = ["mine.py"]',
        'site_dirs = ["own"]\npreload = ["openai"]\nmemory_mib = 512\nmax_live = 8',
    ),
    "call": ('call = "mine:agent"', "max_live = 8"),
}


def write(folder: Path, way: str) -> None:
    """A user's folder: a config, a program, tasks and a model."""
    options, sandbox = WAYS[way]
    model = tiny.make_agent_dir(folder / "model")
    (folder / "c.toml").write_text(CONFIG.format(model=model, options=options, sandbox=sandbox))
    (folder / "mine.py").write_text(FILE if way == "session" else MODULE)
    lines = "".join(f'{{"question": "1+{i}?", "answer": "{1 + i}"}}\n' for i in range(12))
    (folder / "rows.jsonl").write_text(lines)


def ran(folder: Path, *arguments: str) -> str:
    path = os.pathsep.join((str(folder), str(ROOT)))
    command = Command(*arguments, cwd=folder, PYTHONPATH=path)
    out, err = command.communicate(800)
    assert command.returncode == 0, out + err
    return out


def trained_on(run: Path) -> list[Rollout]:
    lines = read_lines(run / "rollouts.jsonl")
    return [read_rollout(dict(line)) for line in lines if line["split"] == "train"]


def test_program_is_trained_and_verified(tmp_path: Path) -> None:
    write(tmp_path, "session")
    ran(tmp_path, "-m", "agentgrpo.train", "c.toml")
    report = verify.verify_run(tmp_path / "run")
    assert report.faults == []
    rollouts = trained_on(tmp_path / "run")
    assert len(rollouts) == 16
    assert all(len(r.rows) >= 2 and len(r.turns) == 3 for r in rollouts)
    assert report.terms > 0
    assert report.learned == report.terms


def test_curriculum_and_evaluate_play_programs(tmp_path: Path) -> None:
    """Candidates of a curriculum stage, and an evaluation, with a scripted engine."""
    write(tmp_path, "call")
    asked = [f"curriculum.{x}" for x in ("stages=1", "candidates=4", "chunk=4", "group_size=2")]
    asked += ["curriculum.select=2", 'curriculum.selection="random"']
    ran(
        tmp_path, "-m", "tests.quick", "curriculum", "c.toml", "out_dir=stages",
        "data.heldout=rows.jsonl", *asked, "--part", "0.select",
    )  # fmt: skip
    pool = read_lines(tmp_path / "stages/stage_0/pool.jsonl")
    assert [len(read_rollout(dict(line)).turns) for line in pool] == [2] * 8
    said = ran(tmp_path, "-m", "tests.quick", "evaluate", "c.toml")
    assert json.loads(said[said.index("{") :])["tasks"] == 2


def test_verifiers_environment_is_trained(tmp_path: Path) -> None:
    """The shipped example."""
    pytest.importorskip("verifiers.v1", reason="verifiers is in requirements-dev.txt")
    overrides = [
        f"model={tiny.make_agent_dir(tmp_path / 'model')}", "out_dir=run", "steps=2",
        "eval_every=0", "rollout.tasks_per_step=2", "rollout.group_size=4",
        "rollout.max_turn_tokens=24",
        "engine.max_model_len=1024", "engine.kv_cache_gib=0.0625", "learner.trained_layers=1",
        "learner.max_tokens=4096",
        'reward.functions=["length"]',
        'env.options.heldout={split="heldout", size=2}',
    ]  # fmt: skip
    ran(tmp_path, "-m", "agentgrpo.train", "verifiers", *overrides)
    report = verify.verify_run(tmp_path / "run")
    assert report.faults == []
    assert report.learned == report.terms > 0
    rollouts = trained_on(tmp_path / "run")
    assert len(rollouts) == 16
    assert all(len(r.rows) == 1 and "environment" in r.rewards for r in rollouts)
