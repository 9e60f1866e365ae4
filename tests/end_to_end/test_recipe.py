"""A whole recipe with real vLLM, real nsjail and a tiny model: flywheel, fine-tuning, one stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.sandbox import SandboxPool, SandboxUnavailable
from tests import tiny

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SCRIPTS = """
import re

def critic(messages):
    text = messages[0]["content"]
    return "Step: no" if "redundant" in text else "Step: 1\\nAnalysis: it computes something else"

def reflector(messages):
    question = re.search(r"Question: (.*)", messages[0]["content"])[1]
    return f"<code>{question}</code>"
"""

RECIPE = """
model = "{folder}/agent"
out_dir = "{folder}/run"
save_every = 1
eval_every = 0
[agent]
system_prompt = "S"
[rollout]
tasks_per_step = 2
group_size = 4
max_turns = 2
max_turn_tokens = 24
deterministic = true
[engine]
max_model_len = 256
kv_cache_gib = 0.0625
[sandbox]
max_live = 32
[data]
train = "{folder}/train.jsonl"
heldout = "{folder}/heldout.jsonl"
num_heldout = 4
[reward]
sigma_tool = 0.2
[learner]
learning_rate = 1e-3
[endpoints.critic]
kind = "script"
function = "recipe_scripts:critic"
[endpoints.reflector]
kind = "script"
function = "recipe_scripts:reflector"
[flywheel]
tasks = 12
rounds = 1
critic = "critic"
reflector = "reflector"
concurrency = 4
step_hints = ["<code>"]
trajectory_hints = ["<code>"]
[sft]
epochs = 1
batch_size = 4
[curriculum]
start = "sft"
stages = 1
candidates = 16
chunk = 8
group_size = 4
select = 4
steps = [2]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        SandboxPool(max_live=1).close()
    except SandboxUnavailable as reason:
        pytest.skip(f"this machine cannot isolate: {reason}")
    made = tmp_path_factory.mktemp("recipe")
    tiny.make_agent_dir(made / "agent", steps=150)
    for name, count, seed in (("train", 40, 0), ("heldout", 4, 1)):
        rows = tiny.sums(count, seed=seed)
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "recipe_scripts.py").write_text(SCRIPTS)
    (made / "recipe.toml").write_text(RECIPE.format(folder=made))
    return made


def command(folder: Path, module: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", f"agentgrpo.{module}", str(folder / "recipe.toml"), *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_S3_15_a_recipe_runs_from_flywheel_to_report(folder: Path) -> None:
    command(folder, "data.flywheel")
    summary = json.loads((folder / "run/flywheel/summary.json").read_text())
    assert summary["questions"] == 12
    assert summary["failed_by_the_machine"] == 0
    assert summary["kept"] > 0
    everything = lines(folder / "run/flywheel/rollouts.jsonl")
    assert {one["flywheel"]["operator"] for one in everything} >= {"fresh", "reflection"}

    command(folder, "sft")
    tuned = sorted((folder / "run/sft/checkpoints").glob("step_*"))[-1]
    metrics = lines(folder / "run/sft/metrics.jsonl")
    assert metrics
    assert all(row["sft/nll"] > 0 for row in metrics)

    said = command(folder, "data.curriculum")
    stage = json.loads((folder / "run/stage_0/stage.json").read_text())
    assert stage["from"] == str(tuned)
    assert said.splitlines()[-1] == f"done: {stage['to']}"
    assert stage["candidates"] == 16
    assert 0 < stage["selected"] <= stage["mixed"]
    selected = lines(folder / "run/stage_0/tasks.jsonl")
    trained = lines(folder / "run/stage_0/rl/rollouts.jsonl")
    questions = {row["question"][0]["content"] for row in selected}
    played = {r["task"]["messages"][0]["content"] for r in trained if r["split"] == "train"}
    assert played <= questions
    assert any("efficiency" in record["rewards"] for record in trained)

    before = ("--report", str(folder / "before"))
    command(folder, "evaluate", *before)
    after = ("--report", str(folder / "after"), "--compare", str(folder / "before/report.json"))
    shown = json.loads(command(folder, "evaluate", f"model={stage['to']}", *after))
    assert shown["model"] == stage["to"]
    assert shown["measures"]["quality"]["value"] == shown["solved"]
    assert "| measure | before | after | difference |" in (folder / "after/report.md").read_text()
