"""Stages with a stand-in for the policy: what is played, selected, skipped and resumed."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.tasks import RowTasks, WordProblemTasks
from agentgrpo.recipe import processes as parts
from agentgrpo.recipe.curriculum import (
    finish_stage,
    folder_of,
    of_stages,
    parts_of,
    play_candidates,
    run_curriculum,
    selected_tasks,
    steps_of,
    training_config,
)
from agentgrpo.train.collect import _rounds
from agentgrpo.train.progress import Progress
from agentgrpo.types import Group, Task
from tests.given import a_rollout, scored_by


def make_recipe(
    folder: Path, steps: Any = (5, 7), tasks_per_step: int = 2, **settings: Any
) -> RecipeConfig:
    steps = {} if steps is None else {"steps": steps}
    return RecipeConfig.model_validate(
        {
            "model": "start",
            "out_dir": folder,
            "seed": 3,
            "curriculum": {
                "stages": 2, "candidates": 10, "group_size": 4, "select": 4, "chunk": 3,
                **steps,
                **settings,
            },
            "rollout": {"tasks_per_step": tasks_per_step},
        }
    )  # fmt: skip


class FakeParts:
    """Task n of the stream is solved by its first n % 5 of 4 rollouts, with as many calls."""

    def __init__(self) -> None:
        self.played = "the policy"
        progress = Progress(1)
        progress.print = lambda line: None  # type: ignore[method-assign]
        self.calls: list[tuple[list[str], int]] = []
        self.sampler = self
        self.reward = scored_by(lambda r: {"answer": float(r.answer == "True"), "format": 0.0})
        self.progress = progress
        self.stop_at: int | None = None

    def play(
        self, tasks: Sequence[Task], group_size: int, *, seed: int
    ) -> tuple[list[Group], None]:
        if len(self.calls) == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append(([task.id for task in tasks], seed))
        return [self._group(task, group_size) for task in tasks], None

    def _group(self, task: Task, group_size: int) -> Group:
        number = int(task.id.rsplit("/", 1)[1]) % 5
        outcomes: list[dict[str, Any]] = [
            {"answer": str(i < number), "stats": {"tool_calls": float(i if i < number else 0)}}
            for i in range(group_size)
        ]
        return Group(task=task, rollouts=[a_rollout(task=task, **of) for of in outcomes])


def play_stage(recipe: RecipeConfig, stage: int, player: FakeParts) -> dict[str, Any]:
    stream = WordProblemTasks(seed=recipe.seed)
    return play_candidates(recipe, stage, player, stream)  # type: ignore[arg-type]


def test_S3_15_candidates_are_played_and_mixed_ones_selected(tmp_path: Path) -> None:
    recipe, player = make_recipe(tmp_path), FakeParts()
    summary = play_stage(recipe, 0, player)
    assert [len(ids) for ids, _ in player.calls] == [3, 3, 3, 1]
    assert len({seed for _, seed in player.calls}) == 4
    assert (summary["candidates"], summary["mixed"], summary["model"]) == (10, 6, "the policy")
    assert summary["quality"] == pytest.approx((0 + 1 + 2 + 3 + 4) / 20)
    chosen = [int(name.rsplit("/", 1)[1]) % 5 for name in summary["selected"]]
    assert len(chosen) == 4
    assert 0 not in chosen
    assert 4 not in chosen  # all right, all wrong
    tasks: Any = selected_tasks(recipe, 0, WordProblemTasks())
    assert [task.id for task in tasks.rows] == summary["selected"]
    written = json.loads((folder_of(recipe, 0) / "select.json").read_text())
    assert written == summary


def test_S3_15_each_stage_plays_different_candidates(tmp_path: Path) -> None:
    recipe, first, second = make_recipe(tmp_path), FakeParts(), FakeParts()
    play_stage(recipe, 0, first)
    play_stage(recipe, 1, second)
    seen = [{name for ids, _ in player.calls for name in ids} for player in (first, second)]
    assert not seen[0] & seen[1]
    assert {seed for _, seed in first.calls}.isdisjoint(seed for _, seed in second.calls)


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_S3_15_selection_resumes_after_the_last_complete_chunk(tmp_path: Path, cut: int) -> None:
    whole = make_recipe(tmp_path / "whole")
    expected = play_stage(whole, 0, FakeParts())
    recipe, player = make_recipe(tmp_path / "killed"), FakeParts()
    player.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        play_stage(recipe, 0, player)
    pool = folder_of(recipe, 0) / "pool.jsonl"
    if cut:  # the kill came while a line was written
        pool.write_bytes(pool.read_bytes()[:-cut])
    again = FakeParts()
    assert play_stage(recipe, 0, again) == expected
    assert [len(ids) for ids, _ in again.calls] == ([3, 1] if not cut else [3, 3, 1])
    for name in ("pool.jsonl", "select.json"):
        files = [(folder_of(r, 0) / name).read_text() for r in (whole, recipe)]
        assert files[0] == files[1]


def test_pool_of_other_tasks_is_rejected(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    play_stage(recipe, 0, FakeParts())
    stream = WordProblemTasks(seed=0)
    with pytest.raises(ValueError, match=r"expected task .* of this recipe, got"):
        play_candidates(recipe, 0, FakeParts(), stream)  # type: ignore[arg-type]


def test_random_selection_takes_any_candidates(tmp_path: Path) -> None:
    """Those that are all right or all wrong too, and the same ones in a repetition."""
    asked: dict[str, Any] = {"selection": "random", "select": 6}
    chosen = [
        play_stage(make_recipe(tmp_path / str(i), **asked), 0, FakeParts())["selected"]
        for i in range(2)
    ]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 6
    assert {int(name.rsplit("/", 1)[1]) % 5 for name in chosen[0]} & {0, 4}
    more = make_recipe(tmp_path / "more", **{**asked, "select": 11})
    assert len(play_stage(more, 0, FakeParts())["selected"]) == 10


def test_selection_without_mixed_candidates_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = FakeParts()
    monkeypatch.setattr(player, "reward", scored_by(lambda rollout: {"answer": 0.0}))
    with pytest.raises(ValueError, match="both right and wrong rollouts, got none of 10"):
        play_stage(make_recipe(tmp_path), 0, player)


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    return path


def test_S3_15_stage_trains_from_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    recipe = make_recipe(tmp_path)
    first = training_config(recipe, 0)
    assert (first.model, first.steps, first.seed) == ("start", 5, 3)
    assert first.out_dir == tmp_path / "stage_0" / "rl"
    assert first.data == recipe.data
    with pytest.raises(
        ValueError, match=r"stage 1: expected a checkpoint in .* to start from, got none"
    ):
        training_config(recipe, 1)
    last = checkpoint(tmp_path / "stage_0" / "rl", 5)
    second = training_config(recipe, 1)
    assert (second.model, second.steps) == (str(last), 7)
    assert second.seed == recipe.of_run().seed, "what its environment knows the played tasks by"
    tuned = make_recipe(tmp_path, start="sft")
    with pytest.raises(ValueError, match=r"expected a checkpoint in .*sft to start from"):
        training_config(tuned, 0)
    assert training_config(tuned, 1).model == str(last)
    cold = checkpoint(tmp_path / "sft", 9)
    assert training_config(tuned, 0).model == str(cold)


@pytest.fixture(autouse=True)
def no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are checked before the first one begins; the model here is a name."""
    parts = MagicMock(tasks=None)
    monkeypatch.setattr("agentgrpo.recipe.curriculum.prepare", lambda config: parts)


def fake_parts(recipe: RecipeConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts that only leave what the real ones leave; returns the list of those that ran."""
    ran: list[str] = []

    def run(command: Sequence[str], stdout: None) -> tuple[int, bool]:
        assert command[:4] == [sys.executable, "-m", "agentgrpo", "curriculum"]
        assert command[4:6] == ["config.toml", "seed=3"]
        part = command[-1]
        ran.append(part)
        stage, _, what = part.partition(".")
        folder = folder_of(recipe, int(stage))
        if what == "select":
            folder.mkdir(parents=True)
            (folder / "pool.jsonl").touch()
            about = {"model": f"m{stage}", "candidates": 10, "mixed": 6, "quality": 0.5}
            (folder / "select.json").write_text(json.dumps({**about, "selected": ["a", "b"]}))
        else:
            checkpoint(folder / "rl", steps_of(recipe, int(stage)))
            finish_stage(recipe, int(stage))
        return 0, False

    monkeypatch.setattr(parts, "run_child", run)
    return ran


def do(recipe: RecipeConfig, part: str = "") -> int | None:
    args = Namespace(config="config.toml", overrides=["seed=3"], dry_run=False, part=part)
    return run_curriculum(recipe, args, lambda: None)


def left(recipe: RecipeConfig) -> list[str]:
    return [part.name for part in parts_of(recipe) if part.is_pending({})]


def test_S3_15_stages_run_in_order_and_write_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    ran = fake_parts(recipe, monkeypatch)
    do(recipe)
    assert ran == ["0.select", "0.train", "1.select", "1.train"]
    last = tmp_path / "stage_1" / "rl" / "checkpoints" / "step_000007"
    assert f"done: {last}" in capsys.readouterr().out
    assert json.loads((tmp_path / "stage_1" / "stage.json").read_text()) == {
        "stage": 1,
        "from": "m1",
        "to": str(last),
        "steps": 7,
        "candidates": 10,
        "mixed": 6,
        "quality": 0.5,
        "selected": 2,
    }
    assert left(recipe) == []
    do(recipe)
    assert f"done: {last}" in capsys.readouterr().out
    assert len(ran) == 4


def test_other_settings_are_rejected_except_more_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_parts(make_recipe(tmp_path), monkeypatch)
    do(make_recipe(tmp_path))
    for wrong, said in (
        (make_recipe(tmp_path, select=5), r"curriculum\.select = 4, now it is 5"),
        (make_recipe(tmp_path, tasks_per_step=3), r"rollout\.tasks_per_step = 2, now it is 3"),
        (
            make_recipe(tmp_path, steps=(6, 7)),
            "steps: expected the old value for stage 0, since stage 1 has",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            do(wrong)
    assert left(make_recipe(tmp_path, steps=(5, 8))) == ["1.train"], "the last may be longer"
    longer = make_recipe(tmp_path, stages=3)
    assert left(longer) == ["2.select", "2.train"]
    with monkeypatch.context() as patch:
        assert fake_parts(longer, patch) == []
        do(longer)
    assert left(longer) == []


def test_partly_trained_stage_resumes(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, stages=1)
    folder = folder_of(recipe, 0)
    about = {"model": "m", "candidates": 10, "mixed": 6, "quality": 0.5, "selected": []}
    checkpoint(folder / "rl", 4)  # of 5
    (folder / "select.json").write_text(json.dumps(about))
    assert left(recipe) == ["0.train"]
    finish_stage(recipe, 0)
    assert left(recipe) == ["0.train"]
    checkpoint(folder / "rl", 5)
    finish_stage(recipe, 0)
    assert left(recipe) == []


@pytest.mark.parametrize("status", [0, 130])
def test_stage_is_finished_after_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    recipe = make_recipe(tmp_path, stages=1)
    folder = folder_of(recipe, 0)
    checkpoint(folder / "rl", 5)
    about = {"model": "m", "candidates": 10, "mixed": 6, "quality": 0.5, "selected": []}
    (folder / "select.json").write_text(json.dumps(about))
    monkeypatch.setattr("agentgrpo.train.__main__.train", lambda *_: status)
    assert do(recipe, "0.train") == status
    assert (folder / "stage.json").exists() == (status == 0)


def test_stage_trains_on_the_played_tasks(tmp_path: Path) -> None:
    """Whatever their rows were called: a `question` of their own, which is not what was asked."""
    recipe = make_recipe(tmp_path, selection="random", select=10)
    spec = {"board": ((1, 2),), "sums": np.arange(3)}  # an environment's own: JSON has lists
    asked = ({"role": "user", "content": "Q?"}, {"role": "assistant", "content": "And?"})
    made = [
        Task(id=f"t/{n}", messages=asked, is_text=n % 2 > 0, spec={"question": n, **spec})
        for n in range(5)
    ]
    stream = RowTasks(made, source="rows")  # in the second round the same tasks again
    chosen = play_candidates(recipe, 0, FakeParts(), stream)["selected"]  # type: ignore[arg-type]
    tasks: Any = selected_tasks(recipe, 0, stream)
    assert sorted(chosen) == [task.id for task in made]
    assert all(task.spec is made[int(task.id[2:])].spec for task in tasks.rows)
    assert {task.id for task in tasks.next(len(chosen))} == {*chosen}
    state = tasks.state_dict()
    selected_tasks(recipe, 0, stream).load_state_dict(state)
    selected_tasks(recipe, 0, WordProblemTasks()).load_state_dict(state)  # as they were recorded
    other = RowTasks([replace(task, messages=asked[1:]) for task in made], source="rows")
    selected_tasks(recipe, 0, other).load_state_dict(state)  # a reset said it in other words
    pool = folder_of(recipe, 0) / "pool.jsonl"
    pool.write_text(pool.read_text().replace("[[1, 2]]", "[[1, 3]]").replace("[[1,2]]", "[[1,3]]"))
    with pytest.raises(ValueError, match=r"data position was saved for: .*stage 0, "):
        selected_tasks(recipe, 0, WordProblemTasks()).load_state_dict(state)
    with pytest.raises(ValueError, match=r"task .t/0.: it differs from the task played in .*pool"):
        selected_tasks(recipe, 0, stream)


def test_stages_use_different_seeds(tmp_path: Path) -> None:
    """A task of both would be played with the same luck again."""
    recipe = make_recipe(tmp_path, steps=(2, 3), stages=3)
    seeds = []
    for stage in range(3):
        play_stage(recipe, stage, FakeParts())
        tasks: Any = selected_tasks(recipe, stage, WordProblemTasks())
        assert tasks.seed == recipe.seed + stage, "nor their order"
        parts: Any = SimpleNamespace(tasks=tasks)
        config = recipe.of_run()
        for step in range(steps_of(recipe, stage)):
            seeds += [seed for _, seed in _rounds(config, parts, step)]
        checkpoint(folder_of(recipe, stage) / "rl", steps_of(recipe, stage))
        finish_stage(recipe, stage)
    assert len(seeds) == len({*seeds}) > 2 + 3 + 3


@pytest.mark.parametrize("by_kind", [False, True])
def test_kinds_are_selected_separately_with_by_kind(tmp_path: Path, by_kind: bool) -> None:
    """Task n % 5 in 1, 2, 3 are mixed; the kind of which there are more must not take all."""
    recipe, player = make_recipe(tmp_path, by_kind=by_kind, select=2), FakeParts()

    given = (Task(id=f"t/{n}", messages=(), spec={"kind": "ab"[n % 5 == 1]}) for n in range(10))
    stream: Any = SimpleNamespace(
        next=lambda count: [next(given) for _ in range(count)],
        state_dict=dict,
    )
    chosen = play_candidates(recipe, 0, player, stream)["selected"]  # type: ignore[arg-type]
    kinds = {int(name[2:]) % 5 == 1 for name in chosen}
    assert kinds == ({True, False} if by_kind else {False})


def test_last_number_of_steps_applies_to_further_stages(tmp_path: Path) -> None:
    assert [steps_of(make_recipe(tmp_path), stage) for stage in range(4)] == [5, 7, 7, 7]


def test_epochs_are_passes_over_the_selected_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two tasks that each stage selects, one a step; with more epochs it goes on."""
    recipe = make_recipe(tmp_path, steps=None, epochs=3, tasks_per_step=1)
    ran = fake_parts(recipe, monkeypatch)
    do(recipe)
    assert ran == ["0.select", "0.train", "1.select", "1.train"]
    assert json.loads((tmp_path / "stage_1" / "stage.json").read_text())["steps"] == 6
    assert training_config(recipe, 1).steps == 6
    assert left(recipe) == []
    assert left(make_recipe(tmp_path, steps=None, epochs=4, tasks_per_step=1))
    by_four, unbegun = (
        make_recipe(folder, steps=None, epochs=3, tasks_per_step=4)
        for folder in (tmp_path, tmp_path / "new")
    )
    assert steps_of(by_four, 0) == 2, "6 tasks, the last step rounded up"
    assert "at most 3, 3 steps" in of_stages(unbegun).found
