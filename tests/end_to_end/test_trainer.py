"""Runs as people of this field begin them: TRL's functions, a hub's data, Python, a notebook."""

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
    log_extra("seen", [sorted(columns)] * len(completion_ids))
    return [-trainer_state.global_step - len(ids) / 64 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a user: a config, a module of reward functions, and a dataset in the hub's cache."""
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
    """The folder of a run and what its command has said."""
    return folder / "runs" / "first", ran(folder, "-m", "agentgrpo.train", "train.toml")


def test_trls_functions_and_a_hubs_dataset_are_a_config_away(first_run: tuple[Path, str]) -> None:
    run, said = first_run
    assert "16 training tasks, 4 held out" in said
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
            "seen": ["answer", "completions", "log_metric", "prompts", "solution", "unread"]
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

seen = {"closed": error_of(trainer.train, RuntimeError), "history": len(trainer.history)}
second = dict(config="train.toml", out_dir="runs/second", reward_funcs=[right], reward_weights=[2])
with Trainer(**second, callbacks=[Stops(), StopWhenSolved()]) as trainer:
    parts = [weakref.ref(x) for x in (trainer.parts.learner, trainer.parts.engine.model)]
    trainer.train()
    seen["stopped at"] = trainer.step
    trainer.train()
    trainer.train()
    seen["then at"] = trainer.step
    seen["functions"] = trainer.config.reward.functions
    seen["again"] = error_of(lambda: Trainer(**second), ValueError)
seen["left"] = [part() is not None for part in parts]
trainer = Trainer(**second, steps=3, callbacks=[Broken()])
parts = [weakref.ref(x) for x in (trainer.parts.learner, trainer.parts.engine.model)]
seen["broken"] = error_of(trainer.train, KeyError)
seen["left broken"] = [part() is not None for part in parts]
seen["wrong"] = error_of(lambda: Trainer("train.toml", stepz=1), ValueError)
seen["lambda"] = error_of(lambda: Trainer("train.toml", reward_funcs=[lambda x: 1]), ValueError)
print(json.dumps(seen))
"""


def test_the_page_of_python_runs_and_one_trainer_follows_another(
    folder: Path, first_run: tuple[Path, str]
) -> None:
    """Its first block goes on with the command's run; what a Trainer held is free after it."""
    code = blocks(ROOT / "docs" / "python.md", "python")
    code = [block for block in code if "agentgrpo.testing" not in block]
    (folder / "page.py").write_text("".join(code) + CHECKS)
    out = ran(folder, "page.py")
    assert f"resumed from {Path('runs/first/checkpoints/step_000002')}" in out
    seen = json.loads(out.splitlines()[-1])
    assert "this Trainer is closed" in seen["closed"]
    assert seen["history"] == 5, "evaluations before and after 3 steps; evaluate() is not recorded"
    assert (seen["stopped at"], seen["then at"]) == (1, 2)
    assert seen["functions"] == {"__main__:right": 2.0}
    assert "is in use by another run" in seen["again"]
    assert seen["left"] == seen["left broken"] == [False, False]
    assert seen["broken"] == "'of mine'"
    assert "unknown config key stepz; did you mean steps?" in seen["wrong"]
    assert "has no name" in seen["lambda"]
    first = read_rollout(read_lines(folder / "runs" / "second" / "rollouts.jsonl")[0])
    assert set(first.rewards) == {"right"}
    assert verify.main([str(folder / "runs" / "first")]) == 0


def test_the_notebook_runs(tmp_path: Path) -> None:
    """In a fresh process, as Jupyter begins it: torch is not there before the first cell."""
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


def test_the_notebook_shows_what_it_made(tmp_path: Path) -> None:
    """What is stored in it was run: every cell has its number, one a picture."""
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    made = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in made] == list(range(1, len(made) + 1))
    shown = [output["output_type"] for cell in made for output in cell["outputs"]]
    assert "display_data" in shown
