"""A whole recipe with real vLLM, real nsjail and a tiny model: flywheel, fine-tuning, stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.support.atomic_files import read_lines, write_lines
from tests import tiny, warm

pytestmark = [pytest.mark.slow, pytest.mark.nsjail, pytest.mark.timeout(1500)]

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
model = "{model}"
out_dir = "{folder}/run"
save_every = 1
eval_every = 0
[agent.options]
system_prompt = "S"
[rollout]
tasks_per_step = 2
group_size = 4
max_turns = 2
max_turn_tokens = 24
deterministic = true
[rollout.branching]
initial = 2
probability = 1.0
[loss]
branch_credit = "hard"
[engine]
max_model_len = 256
kv_cache_gib = 0.0625
[sandbox]
max_live = 32
[data]
train = "{folder}/train.jsonl"
heldout = "{folder}/heldout.jsonl"
num_heldout = 2
[reward]
sigma_tool = 0.2
[learner]
learning_rate = 1e-5
[endpoints.critic]
kind = "script"
function = "recipe_scripts:critic"
[endpoints.reflector]
kind = "script"
function = "recipe_scripts:reflector"
[flywheel]
tasks = 6
rounds = 1
critic = "critic"
reflector = "reflector"
concurrency = 4
step_hints = ["<code>"]
trajectory_hints = ["<code>"]
[sft]
learning_rate = 1e-5
epochs = 1
batch_size = 4
[curriculum]
start = "sft"
stages = 2
candidates = 8
chunk = 8
group_size = 4
select = 2
steps = [2, 1]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, agent_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    for name, count, seed in (("train", 40, 0), ("heldout", 4, 1)):
        write_lines(folder / f"{name}.jsonl", tiny.sums(count, seed=seed))
    (folder / "recipe_scripts.py").write_text(SCRIPTS)
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder, model=agent_model))
    return folder


def command(folder: Path) -> str:
    ran = warm.run("-m", "agentgrpo", "recipe", str(folder / "recipe.toml"), PYTHONPATH=str(folder))
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """The whole recipe, by one command."""
    output = command(folder)
    assert (folder / "run/report.md").read_text() in output
    return folder / "run"


def test_sft_trains_on_flywheel_trajectories(run: Path) -> None:
    summary = json.loads((run / "flywheel/summary.json").read_text())
    assert summary["questions"] == 6
    assert summary["failed_by_the_machine"] == 0
    assert summary["kept"] > 0
    everything = read_lines(run / "flywheel/rollouts.jsonl")
    assert {one["flywheel"]["operator"] for one in everything} >= {"fresh", "reflection"}
    metrics = read_lines(run / "sft/metrics.jsonl")
    assert metrics
    assert all(row["sft/nll"] > 0 for row in metrics)


def test_S3_15_each_stage_starts_from_previous_checkpoint(run: Path) -> None:
    start = str(sorted((run / "sft/checkpoints").glob("step_*"))[-1])
    for number, steps in enumerate((2, 1)):
        folder = run / f"stage_{number}"
        stage = json.loads((folder / "stage.json").read_text())
        assert (stage["from"], stage["candidates"], stage["steps"]) == (start, 8, steps)
        assert 0 < stage["selected"] <= stage["mixed"]
        start = stage["to"]
        selected = json.loads((folder / "select.json").read_text())["selected"]
        trained = read_lines(folder / "rl/rollouts.jsonl")
        assert {r["task"]["id"] for r in trained if r["split"] == "train"} <= {*selected}
        assert any("answer_efficiency" in record["rewards"] for record in trained)


def test_S3_4_rollouts_of_a_recipe_record_their_parent(run: Path) -> None:
    """And share its tokens and log-probabilities up to the branch point, after a tool's answer."""
    by_place = {
        (record["step"], record["group"], record["index"]): record
        for record in read_lines(run / "stage_0/rl/rollouts.jsonl")
        if record["split"] == "train"
    }
    branches = [place for place, record in by_place.items() if record["parent"] is not None]
    assert branches
    for step, group, index in branches:
        branch = by_place[step, group, index]
        parent = by_place[step, group, branch["parent"]]
        common: list[dict[str, Any]] = []
        length = 0
        while length < branch["forked_at"]:
            common.append(branch["segments"][len(common)])
            length += len(common[-1]["token_ids"])
        assert length == branch["forked_at"]
        assert parent["segments"][: len(common)] == common
        assert common[-2]["logprobs"] is not None  # the call, sampled
        assert common[-1]["logprobs"] is None  # its result
        assert branch["task"] == parent["task"]


def test_report_has_heldout_scores_before_and_after(run: Path, agent_model: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    last = json.loads((run / "stage_1/stage.json").read_text())["to"]
    models = {part: measured["model"] for part, measured in report["reports"].items()}
    assert models["prompting"] == str(agent_model)
    assert models["trained"] == last
    assert all(measured["tasks"] == 2 for measured in report["reports"].values())
    stages = report["stages"]
    assert [stage["rollouts"] for stage in stages] == [16, 8]
    assert stages[0]["branched"] > 0
    text = (run / "report.md").read_text()
    assert "| measure | prompting | tuned | trained | difference |" in text
    assert "critic: a script instead of a model (recipe_scripts:critic)" in text


def test_finished_recipe_is_not_repeated(run: Path, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.jsonl")}
    assert "==" not in command(folder)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.jsonl")} == before
