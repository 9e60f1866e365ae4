"""Runs started with TRL reward functions, a hub dataset, the Python API and a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentgrpo.inspect.verify import verify
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.support.atomic_files import read_lines
from tests import tiny
from tests.data.hub_cache import put_in_cache
from tests.project.test_docs import ROOT, blocks
from tests.warm import Command, environment

pytestmark = [pytest.mark.slow, pytest.mark.nsjail, pytest.mark.timeout(1800)]
PATIENCE_S = 800
CONFIG = """
model = "{model}"
out_dir = "runs/first"
steps = 2
save_every = 1
eval_every = 0
agent.options.system_prompt = "S"
rollout = {{ tasks_per_step = 2, group_size = 4, max_turns = 2, max_turn_tokens = 24 }}
engine = {{ max_model_len = 192, kv_cache_gib = 0.0625 }}
sandbox.max_live = 8
reward.functions = ["my_rewards:accuracy", "my_rewards:brevity"]
learner = {{ learning_rate = 1e-3, max_tokens = 2048 }}
[data]
train = "org/sums"
subset = "main"
split = "train[:16]"
heldout = "org/sums"
heldout_split = "test"
num_heldout = 4
"""
ACCURACY = """
def accuracy(completions, solution, log_metric, **kwargs):
    matches = [text.count(answer) > 0 for text, answer in zip(completions, solution)]
    log_metric("found", sum(matches) / len(matches))
    return [None if answer == "unknown" else float(hit) for hit, answer in zip(matches, solution)]
"""
BREVITY = """
async def brevity(completion_ids, trainer_state, log_extra, **columns):
    log_extra("results", [sorted(columns)] * len(completion_ids))
    return [-trainer_state.global_step - len(ids) / 64 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a config, a module of reward functions, a dataset in the hub's cache."""
    pytest.importorskip("datasets")
    made = tmp_path_factory.mktemp("user")
    model = tiny.make_agent_dir(made / "model")
    (made / "train.toml").write_text(CONFIG.format(model=model))
    (made / "my_rewards.py").write_text(ACCURACY + BREVITY)
    rows = [{**row, "solution": row["answer"], "unread": [1]} for row in tiny.sums(24)]
    put_in_cache(made / "home", "org/sums", "main", {"train": rows[:20], "test": rows[20:]})
    return made


def ran(folder: Path, *arguments: str) -> str:
    command = Command(
        *arguments, cwd=folder, HF_HOME=str(folder / "home"), PYTHONPATH=str(folder),
        AGENTGRPO_CACHE=os.environ.get("AGENTGRPO_CACHE", ""),
    )  # fmt: skip
    out, err = command.communicate(PATIENCE_S)
    assert command.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def first_run(folder: Path) -> tuple[Path, str]:
    """The folder of a run and the output of its command."""
    return folder / "runs" / "first", ran(folder, "-m", "agentgrpo.train", "train.toml")


def test_trl_reward_functions_and_hub_dataset_by_config(first_run: tuple[Path, str]) -> None:
    run, output = first_run
    assert "16 training tasks, 4 held out" in output
    rows = read_lines(run / "rollouts.jsonl")
    assert {row["task"]["id"].rpartition(":")[0] for row in rows} == {
        "org/sums train[:16]", "org/sums test",
    }  # fmt: skip
    tokenizer = tiny.make_tokenizer()
    for row in rows:
        rollout = read_rollout(row)
        after = [t for segment in rollout.segments[1:] for t in segment.token_ids.tolist()]
        text = tokenizer.decode(after, skip_special_tokens=True)
        solution = rollout.task.spec["solution"]
        brevity = -row["step"] - len(after) / 64
        assert rollout.rewards == pytest.approx(
            {"accuracy": float(text.count(solution) > 0), "brevity": brevity}
        )
        assert rollout.extra == {
            "results": ["answer", "completions", "log_metric", "prompts", "solution", "unread"]
        }
    steps = [row for row in read_lines(run / "metrics.jsonl") if "learner/loss" in row]
    assert all(0 <= step["rollout/log/found"] <= 1 for step in steps)
    assert verify.main([str(run)]) == 0


CHECKS = """
import gc, json, weakref

class Broken(Callback):
    def on_step_end(self, trainer, step, metrics):
        raise KeyError("of mine")

class Stops(Callback):
    def on_step_end(self, trainer, step, metrics):
        trainer.stop()

def error_of(call, kind):
    try:
        call()
    except kind as error:
        return str(error)

results = {"closed": error_of(trainer.train, RuntimeError), "history": len(trainer.history)}
second = dict(config="train.toml", out_dir="runs/second", reward_funcs=[right], reward_weights=[2])
with Trainer(**second, callbacks=[Stops(), StopWhenSolved()]) as trainer:
    parts = [weakref.ref(x) for x in (trainer.parts.learner, trainer.parts.engine.model)]
    trainer.train()
    results["stopped at"] = trainer.step
    trainer.train()
    trainer.train()
    results["then at"] = trainer.step
    results["functions"] = trainer.config.reward.functions
    results["again"] = error_of(lambda: Trainer(**second), ValueError)
results["left"] = [part() is not None for part in parts]
trainer = Trainer(**second, steps=3, callbacks=[Broken()])
parts = [weakref.ref(x) for x in (trainer.parts.learner, trainer.parts.engine.model)]
results["broken"] = error_of(trainer.train, KeyError)
results["left broken"] = [part() is not None for part in parts]
results["wrong"] = error_of(lambda: Trainer("train.toml", stepz=1), ValueError)
results["lambda"] = error_of(lambda: Trainer("train.toml", reward_funcs=[lambda x: 1]), ValueError)
print(json.dumps(results))
"""


def test_python_page_runs_and_trainers_follow_each_other(
    folder: Path, first_run: tuple[Path, str]
) -> None:
    """The first block continues the command's run; a closed Trainer releases its parts."""
    code = blocks(ROOT / "docs" / "python.md", "python")
    code = [block for block in code if "agentgrpo.testing" not in block]
    (folder / "page.py").write_text("".join(code) + CHECKS)
    out = ran(folder, "page.py")
    assert f"resumed from {Path('runs/first/checkpoints/step_000002')}" in out
    results = json.loads(out.splitlines()[-1])
    assert "this Trainer is closed" in results["closed"]
    assert results["history"] == 5, (
        "evaluations before and after 3 steps; evaluate() is not recorded"
    )
    assert (results["stopped at"], results["then at"]) == (1, 2)
    assert results["functions"] == {"__main__:right": 2.0}
    assert "is in use by another run" in results["again"]
    assert results["left"] == results["left broken"] == [False, False]
    assert results["broken"] == "'of mine'"
    assert "unknown config key stepz; did you mean steps?" in results["wrong"]
    assert "Assign it to a name" in results["lambda"]
    first = read_rollout(read_lines(folder / "runs" / "second" / "rollouts.jsonl")[0])
    assert set(first.rewards) == {"right"}
    assert verify.main([str(folder / "runs" / "first")]) == 0


def test_notebook_runs(tmp_path: Path) -> None:
    """In a fresh process, as in Jupyter: torch is not imported before the first cell."""
    tiny.put_standin(tmp_path / "cache")
    env = {"PYTHONPATH": str(ROOT), "AGENTGRPO_CACHE": str(tmp_path / "cache"), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.notebook", str(ROOT / "docs" / "notebook.ipynb")],
        cwd=tmp_path, env=environment(**env), capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout
    run = tmp_path / "runs" / "notebook"
    rows = [row for row in read_lines(run / "metrics.jsonl") if "learner/loss" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert verify.main([str(run)]) == 0


def test_notebook_has_stored_outputs(tmp_path: Path) -> None:
    """Its stored outputs are complete: every cell has its number, one has a figure."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    made = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in made] == list(range(1, len(made) + 1))
    shown = [output["output_type"] for cell in made for output in cell["outputs"]]
    assert "display_data" in shown
