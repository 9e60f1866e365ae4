"""The order of a recipe's parts, going on after a kill, and its report; parts are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.tasks import WordProblemTasks
from agentgrpo.recipe import evaluate as evaluation
from agentgrpo.recipe import processes
from agentgrpo.recipe import recipe as recipes
from agentgrpo.recipe.report import report
from agentgrpo.train.command_line import ChildFailed
from agentgrpo.train.prepare import models_of
from agentgrpo.types import Group
from tests.given import TASK, a_rollout
from tests.playing import CHAT, EOT, scripted
from tests.recipe.test_measures import rows
from tests.rollout.stubs import Turn
from tests.warm import ROOT, environment

ORDER = ["prompting", "flywheel", "sft", "tuned", "0.select", "0.train", "trained"]
SOLVED = {"prompting": [0.0, 0.0], "tuned": [1.0, 0.0], "trained": [1.0, 1.0]}
"""Which of two tasks, each with one call."""


def make_recipe(folder: Path, out: str = "out", **curriculum: Any) -> RecipeConfig:
    return RecipeConfig.model_validate(
        {
            "model": "base",
            "out_dir": folder / out,
            "endpoints": {"c": {"kind": "script", "function": "json:loads"}},
            "flywheel": {"critic": "c", "concurrency": 4},
            "curriculum": {"start": "sft", "stages": 1, "steps": [2], **curriculum},
            "measures": {"quality": "exact"},
        }
    )


def run(recipe: RecipeConfig, arguments: list[str]) -> None:
    config, *overrides = arguments
    args = Namespace(config=config, overrides=overrides, dry_run=False)
    recipes.run_recipe(recipe, args, lambda: None)


@pytest.mark.parametrize(
    ("name", "reference"), [("policy", False), ("reference", True), ("own", False)]
)
def test_judge_may_be_the_engines_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reference: bool
) -> None:
    """Of those that the run has under the endpoint's name; `own` is one of kind "engine"."""
    table = make_recipe(tmp_path).model_dump() | {"learner": {"lora": {"rank": 4}}}
    table["endpoints"] = {"c": table["endpoints"]["c"], "own": {"kind": "engine"}}
    table["measures"] |= {"quality": "judge", "judge": name, "conciseness_judge": name}
    recipe = RecipeConfig.model_validate(table)
    models = models_of(recipe, SimpleNamespace(rank=4), trained=False)  # type: ignore[arg-type]
    assert models.keys() == {"policy", "reference", "c", "own"}
    group = Group(task=TASK, rollouts=[a_rollout(answer="forty-two")])
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: ([group], {}))
    engine = scripted(lambda *_: Turn(f"Correct: no{EOT}"))
    player: Any = SimpleNamespace(
        sampler=None, engine=engine, played="m", heldout=[], reward=None, models=models, chat=CHAT
    )
    made = evaluation.evaluate_recipe(recipe, player)
    assert made["measures"]["quality"]["value"] == 1.0
    assert {r.options["reference"] for r in engine.requests} == {reference}
    assert len(engine.requests) == 11, "a verdict, ten votes"


def leave(recipe: RecipeConfig, part: str, command: list[str]) -> None:
    """What a part leaves behind."""
    out = recipe.out_dir
    if part in SOLVED:
        (model,) = (word.removeprefix("model=") for word in command if word.startswith("model="))
        made = report(rows(SOLVED[part]), model=model)
        files: dict[str, Any] = {f"measures/{part}/report.json": made}
    elif part == "flywheel":
        counts = {"fresh": {"made": 4, "right": 3, "kept": 2}}
        files = {
            "flywheel/summary.json": {
                "trajectories": 4,
                "questions": 2,
                "kept": 2,
                "rule": "RULE",
                "operators": counts,
            }
        }
    elif part == "sft":
        files = {"sft/checkpoints/step_000003/model.json": {}}
    elif part == "0.select":
        files = {"stage_0/select.json": {}}
    else:
        stage = {"stage": 0, "candidates": 8, "mixed": 5, "selected": 4, "steps": 2}
        files = {"stage_0/rl/checkpoints/step_000002/model.json": {}, "stage_0/stage.json": stage}
    for name, value in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(json.dumps(value))
    if part == "0.train":
        played = [("heldout", None), ("train", None), ("train", 0), ("train", 0)]
        lines = [json.dumps({"split": split, "parent": parent}) for split, parent in played]
        (out / "stage_0/rl/rollouts.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe is checked before its first part; the model here is a name."""
    parts = MagicMock(tasks=WordProblemTasks())
    monkeypatch.setattr(recipes, "prepare", lambda config: parts)


def fake_parts(
    recipe: RecipeConfig, monkeypatch: pytest.MonkeyPatch, fails_at: str = ""
) -> dict[str, list[str]]:
    """Parts that leave what real ones do; returns their command lines as they are run."""
    ran: dict[str, list[str]] = {}

    def run(command: list[str], **options: Any) -> tuple[int, bool]:
        part = ORDER[next(i for i, name in enumerate(ORDER) if name not in done(recipe))]
        ran[part] = command[3:]
        if part == fails_at:
            return 2, False
        leave(recipe, part, command)
        return 0, False

    monkeypatch.setattr(processes, "run_child", run)
    return ran


def done(recipe: RecipeConfig) -> dict[str, float]:
    path = recipe.out_dir / "recipe.json"
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return found


def test_parts_run_in_order_with_their_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path)
    ran = fake_parts(recipe, monkeypatch)
    run(recipe, ["r.toml", "seed=3"])
    assert list(ran) == ORDER
    assert all(command[1:3] == ["r.toml", "seed=3"] for command in ran.values())
    assert ran["flywheel"] == ["flywheel", "r.toml", "seed=3", "--of-recipe"]
    select = ["curriculum", "r.toml", "seed=3", "--of-recipe"]
    assert ran["0.select"] == [*select, "--part", "0.select"]
    out = recipe.out_dir
    models = {
        "prompting": "base",
        "tuned": str(out / "sft/checkpoints/step_000003"),
        "trained": str(out / "stage_0/rl/checkpoints/step_000002"),
    }
    for part, model in models.items():
        folder = str(out / "measures" / part)
        assert ran[part][3:] == ["--of-recipe", f"model={model}", "--report", folder]


@pytest.mark.parametrize("fails_at", ORDER)
def test_recipe_resumes_at_the_failed_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    recipe = make_recipe(tmp_path)
    with monkeypatch.context() as patch:
        before = fake_parts(recipe, patch, fails_at)
        with pytest.raises(ChildFailed, match=f"{fails_at} ended with status 2"):
            run(recipe, ["r.toml"])
        assert list(before)[-1] == fails_at
    after = fake_parts(recipe, monkeypatch)
    run(recipe, ["r.toml"])
    assert [*before, *after] == [*ORDER[: len(before)], *ORDER[len(before) - 1 :]]
    run(recipe, ["r.toml"])  # nothing is left
    assert len(after) == len(ORDER) - len(before) + 1


def test_model_is_measured_again_after_more_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after more steps of the last stage: what was measured is another checkpoint."""
    recipe = make_recipe(tmp_path)
    fake_parts(recipe, monkeypatch)
    run(recipe, ["r.toml"])
    later = recipe.out_dir / "stage_0/rl/checkpoints/step_000004"
    (later.parent / "step_000002").rename(later)
    ran: list[list[str]] = []

    def measured(command: list[str], **options: Any) -> tuple[int, bool]:
        ran.append(command)
        leave(recipe, "trained", command)
        return 0, False

    monkeypatch.setattr(processes, "run_child", measured)
    for _ in range(2):  # and no third time
        run(recipe, ["r.toml"])
    ((*_, model, _, folder),) = ran
    assert model == f"model={later}"
    assert folder == str(recipe.out_dir / "measures/trained")


PART = """
import pathlib, sys, time
from agentgrpo.recipe.processes import command
from agentgrpo.train.interrupt import stop_after_step

def work(config, args, begin):
    begin()
    with stop_after_step(print) as stopping:
        print("begun", flush=True)
        patience = time.monotonic() + 60
        while not stopping():
            assert time.monotonic() < patience
            time.sleep(0.02)
        time.sleep(0.5)  # the rest of its step
        pathlib.Path("saved").touch()
    return int(pathlib.Path("status").read_text())

def main(arguments):
    return command("sft", None, arguments, work)
"""
AS_A_COMMAND = 'from agentgrpo import cli; cli.COMMANDS["slow_part"] = ("slow_part", "")'
PARENT = """
import pathlib, sys
from types import SimpleNamespace
from agentgrpo.train.command_line import report_errors
from agentgrpo.recipe.processes import Part, run_parts
from agentgrpo.train.interrupt import interruptible

parts = [Part(name=name, command="slow_part") for name in ("first", "second")]
with interruptible(), report_errors() as outcome:
    run_parts(SimpleNamespace(out_dir=pathlib.Path()), parts, ["quickstart"])
sys.exit(outcome.status)
"""


@pytest.mark.parametrize(
    ("number", "status", "ends"),
    [(signal.SIGINT, 130, 130), (signal.SIGTERM, 130, 130), (signal.SIGKILL, 130, -9),
     (signal.SIGINT, 0, 130)],
)  # fmt: skip
def test_ctrl_c_stops_the_running_part_which_saves(
    tmp_path: Path, number: int, status: int, ends: int
) -> None:
    """Once, from a terminal too, whose Ctrl-C is sent to all that it has started."""
    (tmp_path / "slow_part.py").write_text(PART)
    (tmp_path / "sitecustomize.py").write_text(AS_A_COMMAND)
    (tmp_path / "status").write_text(str(status))
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=tmp_path, text=True, start_new_session=True,
        env=environment(PYTHONPATH=f"{ROOT}:{tmp_path}"), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    with process, process.stdout as lines:
        assert any(line == "begun\n" for line in lines)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        rest = lines.read()  # until the part has ended too
        assert process.wait(60) == ends
    assert (tmp_path / "saved").exists()
    assert "== second" not in rest
    assert (tmp_path / "recipe.json").exists() == (status == 0)


def test_report_has_gains_and_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    fake_parts(recipe, monkeypatch)
    run(recipe, ["r.toml"])
    text = (recipe.out_dir / "report.md").read_text()
    assert text in capsys.readouterr().out
    assert "| measure | prompting | tuned | trained | difference |" in text
    row = next(line for line in text.splitlines() if line.startswith("| quality"))
    assert [cell.split()[0] for cell in row.split("|")[2:6]] == ["0.000", "0.500", "1.000", "1.000"]
    assert "Quality: `exact`, no model judges." in text
    assert "critic: a script instead of a model (json:loads)" in text
    assert "reflector: the run's own model" in text
    assert "| fresh | 4 | 3 | 2 |" in text
    assert "| 0 | 8 | 5 | 4 | 2 | 3 | 2 |" in text  # 3 rollouts of training, 2 of them branched
    assert "| l | 0.000, 0.000, 1.000 | 1.000, 1.000, 1.000 | 1.000, 1.000, 1.000 |" in text
    tuned = recipe.out_dir / "measures/tuned/report.json"
    broken = [replace(row, columns=dict.fromkeys(row.columns)) for row in rows([1.0, 1.0])]
    made = report(broken, model=json.loads(tuned.read_text())["model"])
    tuned.write_text(json.dumps(made))  # the machine broke all of them
    run(recipe, ["r.toml"])
    assert "| l | 0.000, 0.000, 1.000 | -, -, - | 1.000," in capsys.readouterr().out


def test_other_settings_and_starts_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_parts(make_recipe(tmp_path), monkeypatch)
    run(make_recipe(tmp_path), ["r.toml"])
    (tmp_path / "out").rename(tmp_path / "moved")
    run(make_recipe(tmp_path, "moved"), ["r.toml"])
    (tmp_path / "moved").rename(tmp_path / "out")
    with pytest.raises(ValueError, match=r"curriculum\.select = 64, now it is 5"):
        run(make_recipe(tmp_path, select=5), ["r.toml"])
    with pytest.raises(ValueError, match=r"curriculum\.start: expected 'sft' .*, got 'model'"):
        run(make_recipe(tmp_path, start="model"), ["r.toml"])
