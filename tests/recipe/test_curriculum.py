"""Stages with a stand-in for the policy: what is played, selected, skipped and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.sources import heldout_tasks, training_tasks
from agentgrpo.data.tasks import WordProblemTasks
from agentgrpo.recipe.curriculum import (
    difficulty_pools,
    finish_stage,
    folder_of,
    parts_of,
    prepared,
    select,
    stages,
    steps_of,
    training_config,
)
from agentgrpo.recipe.difficulty import DifficultyTasks
from agentgrpo.run.atomic import read_lines
from agentgrpo.run.progress import Progress
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
            "data": {"levels": [1], "promote_at": 0.5, "heldout_levels": [2]},
            "curriculum": {
                "stages": 2, "candidates": 10, "group_size": 4, "select": 4, "chunk": 3,
                **steps,
                **settings,
            },
            "rollout": {"tasks_per_step": tasks_per_step},
        }
    )  # fmt: skip


class Player:
    """Task n of the stream is solved by its first n % 5 of 4 rollouts, with as many calls."""

    def __init__(self) -> None:
        self.model = "the policy"
        self.progress = Progress(1)
        self.progress.say = lambda line: None  # type: ignore[method-assign]
        self.calls: list[tuple[list[str], int]] = []
        self.sampler = self
        self.reward = scored_by(lambda r: {"answer": float(r.answer == "True"), "format": 0.0})
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


def play_stage(recipe: RecipeConfig, stage: int, player: Player) -> dict[str, Any]:
    stream = WordProblemTasks(levels=(1,), seed=recipe.seed)
    return select(recipe, stage, player, stream)  # type: ignore[arg-type]


def test_S3_15_candidates_are_played_and_mixed_ones_selected(tmp_path: Path) -> None:
    recipe, player = make_recipe(tmp_path), Player()
    summary = play_stage(recipe, 0, player)
    assert [len(ids) for ids, _ in player.calls] == [3, 3, 3, 1]
    assert len({seed for _, seed in player.calls}) == 4
    assert (summary["candidates"], summary["mixed"], summary["model"]) == (10, 6, "the policy")
    assert summary["quality"] == pytest.approx((0 + 1 + 2 + 3 + 4) / 20)
    chosen = [int(name.rsplit("/", 1)[1]) % 5 for name in summary["selected"]]
    assert len(chosen) == 4
    assert 0 not in chosen
    assert 4 not in chosen  # all right, all wrong
    rows = read_lines(folder_of(recipe, 0) / "tasks.jsonl")
    assert [row["level"] for row in rows] == [1] * 4
    assert all(row["answer"] is not None for row in rows)
    written = json.loads((folder_of(recipe, 0) / "select.json").read_text())
    assert written == summary


def test_S3_15_the_stream_hears_what_became_of_its_tasks(tmp_path: Path) -> None:
    """So that levels that join with success join in a curriculum too."""
    recipe, stream = make_recipe(tmp_path), WordProblemTasks(levels=(1,), seed=3)
    heard: list[str] = []
    stream.feedback = lambda groups: heard.extend(g.task.id for g in groups)  # type: ignore[method-assign]
    player = Player()
    select(recipe, 0, player, stream)  # type: ignore[arg-type]
    assert heard == [name for ids, _ in player.calls for name in ids]


def test_S3_15_each_stage_plays_other_candidates(tmp_path: Path) -> None:
    recipe, first, second = make_recipe(tmp_path), Player(), Player()
    play_stage(recipe, 0, first)
    play_stage(recipe, 1, second)
    seen = [{name for ids, _ in player.calls for name in ids} for player in (first, second)]
    assert not seen[0] & seen[1]
    assert {seed for _, seed in first.calls}.isdisjoint(seed for _, seed in second.calls)


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_S3_15_a_killed_selection_goes_on_behind_its_last_whole_chunk(
    tmp_path: Path, cut: int
) -> None:
    whole = make_recipe(tmp_path / "whole")
    expected = play_stage(whole, 0, Player())
    recipe, player = make_recipe(tmp_path / "killed"), Player()
    player.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        play_stage(recipe, 0, player)
    pool = folder_of(recipe, 0) / "pool.jsonl"
    if cut:  # the kill came while a line was written
        pool.write_bytes(pool.read_bytes()[:-cut])
    again = Player()
    assert play_stage(recipe, 0, again) == expected
    assert [len(ids) for ids, _ in again.calls] == ([3, 1] if not cut else [3, 3, 1])
    for name in ("pool.jsonl", "tasks.jsonl", "select.json"):
        files = [(folder_of(r, 0) / name).read_text() for r in (whole, recipe)]
        assert files[0] == files[1]


def test_a_pool_of_other_tasks_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    play_stage(recipe, 0, Player())
    stream = WordProblemTasks(levels=(2,), seed=0)
    with pytest.raises(ValueError, match=r"holds task .* where this recipe plays"):
        select(recipe, 0, Player(), stream)  # type: ignore[arg-type]


def test_a_random_selection_takes_any_candidates(tmp_path: Path) -> None:
    """Those that are all right or all wrong too, and the same ones in a repetition."""
    asked: dict[str, Any] = {"selection": "random", "select": 6}
    chosen = [
        play_stage(make_recipe(tmp_path / str(i), **asked), 0, Player())["selected"]
        for i in range(2)
    ]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 6
    assert {int(name.rsplit("/", 1)[1]) % 5 for name in chosen[0]} & {0, 4}
    more = make_recipe(tmp_path / "more", **{**asked, "select": 11})
    assert len(play_stage(more, 0, Player())["selected"]) == 10


def test_nothing_mixed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player()
    monkeypatch.setattr(player, "reward", scored_by(lambda rollout: {"answer": 0.0}))
    with pytest.raises(ValueError, match="of 10 candidates none has both right and wrong"):
        play_stage(make_recipe(tmp_path), 0, player)


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    return path


def test_S3_15_a_stage_trains_from_the_last_checkpoint_on_what_was_selected(
    tmp_path: Path,
) -> None:
    recipe = make_recipe(tmp_path)
    first = training_config(recipe, 0)
    assert (first.model, first.steps, first.seed) == ("start", 5, 3)
    assert first.out_dir == tmp_path / "stage_0" / "rl"
    assert first.data.train == str(tmp_path / "stage_0" / "tasks.jsonl")
    assert first.data.heldout_levels == (2,)
    with pytest.raises(ValueError, match=r"stage 1 starts from the last checkpoint in .*: none"):
        training_config(recipe, 1)
    last = checkpoint(tmp_path / "stage_0" / "rl", 5)
    second = training_config(recipe, 1)
    assert (second.model, second.steps, second.seed) == (str(last), 7, 4)
    tuned = make_recipe(tmp_path, start="sft")
    with pytest.raises(ValueError, match="sft: none there"):
        training_config(tuned, 0)
    assert training_config(tuned, 1).model == str(last)
    cold = checkpoint(tmp_path / "sft", 9)
    assert training_config(tuned, 0).model == str(cold)


@pytest.fixture(autouse=True)
def no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are checked before the first one begins; the model here is a name."""
    monkeypatch.setattr("agentgrpo.recipe.curriculum.planned", lambda *_, **__: "the plan")


def fake_parts(recipe: RecipeConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parts that only leave what the real ones leave; returns the list of those that ran."""
    ran: list[str] = []

    def run(command: Sequence[str], stdout: None, check: bool) -> Any:
        assert not check
        assert command[:3] == [sys.executable, "-m", "agentgrpo.recipe.curriculum"]
        assert command[3:5] == ["config.toml", "seed=3"]
        part = command[-1]
        ran.append(part)
        stage, _, what = part.partition(".")
        folder = folder_of(recipe, int(stage))
        if what == "select":
            folder.mkdir(parents=True)
            about = {"model": f"m{stage}", "candidates": 10, "mixed": 6, "quality": 0.5}
            (folder / "select.json").write_text(json.dumps({**about, "selected": ["a", "b"]}))
        else:
            checkpoint(folder / "rl", steps_of(recipe, int(stage)))
            finish_stage(recipe, int(stage))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def run_curriculum(recipe: RecipeConfig) -> None:
    with prepared(recipe, ["config.toml", "seed=3"]) as work:
        work()


def left(recipe: RecipeConfig) -> list[str]:
    return [part.name for part in parts_of(recipe) if part.left({})]


def test_S3_15_stages_run_in_order_and_leave_their_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    ran = fake_parts(recipe, monkeypatch)
    run_curriculum(recipe)
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
    run_curriculum(recipe)
    assert f"done: {last}" in capsys.readouterr().out
    assert len(ran) == 4


def test_other_settings_are_refused_but_more_stages_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_parts(make_recipe(tmp_path), monkeypatch)
    run_curriculum(make_recipe(tmp_path))
    with pytest.raises(ValueError, match=r"curriculum\.select = 4, now it is 5"):
        run_curriculum(make_recipe(tmp_path, select=5))
    longer = make_recipe(tmp_path, stages=3)
    assert left(longer) == ["2.select", "2.train"]
    with monkeypatch.context() as patch:
        assert fake_parts(longer, patch) == []
        run_curriculum(longer)
    assert left(longer) == []


def test_a_stage_that_is_half_trained_goes_on(tmp_path: Path) -> None:
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
def test_a_stage_is_finished_when_its_training_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    recipe = make_recipe(tmp_path, stages=1)
    folder = folder_of(recipe, 0)
    checkpoint(folder / "rl", 5)
    about = {"model": "m", "candidates": 10, "mixed": 6, "quality": 0.5, "selected": []}
    (folder / "select.json").write_text(json.dumps(about))
    monkeypatch.setattr("agentgrpo.train.prepared", lambda *_: nullcontext(lambda: status))
    with prepared(recipe, [], "0.train") as work:
        assert work() == status
    assert (folder / "stage.json").exists() == (status == 0)


def test_a_split_of_each_stages_own_tasks_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    table = recipe.model_dump(exclude_unset=True)
    table["data"] = {"train": "x.jsonl", "heldout": "split"}
    with pytest.raises(ValueError, match=r"data\.heldout: 'split' would be of each stage's own"):
        training_config(RecipeConfig.model_validate(table), 0)


COLUMNS: dict[str, Any] = {"heldout": "b.jsonl", "question": "prompt", "answer": "gold"}
HUB = {"train": "owner/name", "split": "train[:9]", "subset": "main"}


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        {**COLUMNS, "train": "a.jsonl", "id": "uid", "columns": ["level"]},
        {**COLUMNS, "train": "env", "columns": ["unit"]},
        {**COLUMNS, **HUB},
        {**HUB, "heldout": "owner/other", "heldout_split": "dev"},
        {**HUB, "heldout": "word_problems", "heldout_levels": [2]},
    ],
)
def test_a_stage_reads_what_was_selected_and_what_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], is_text: bool
) -> None:
    """By the recipe's own columns, and without settings of a source that it does not read."""
    monkeypatch.chdir(tmp_path)
    held = {"prompt": "Q?", "gold": "4", "uid": "h", "level": 1, "unit": "m"}
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(held) + "\n")
    table = make_recipe(tmp_path / "out").model_dump(exclude_unset=True)
    recipe = RecipeConfig.model_validate({**table, "data": data})
    assert [*stages(recipe)]
    gold = {"gold": "4"} if data["train"] == "a.jsonl" else {}
    asked = {"role": "user", "content": "Q?"}
    made = [
        Task(
            id=f"t/{n}", messages=(asked,), is_text=is_text,
            spec={**gold, "answer": "4", "uid": n, "level": 1},
        )
        for n in range(10)
    ]  # fmt: skip
    given = iter(made)
    stream: Any = SimpleNamespace(
        next=lambda count: [next(given) for _ in range(count)],
        feedback=lambda groups: None,
        state_dict=dict,
    )
    chosen = select(recipe, 0, Player(), stream)["selected"]  # type: ignore[arg-type]
    config = training_config(recipe, 0).data
    rows: Any = training_tasks(config, 0)
    expected = [task for task in made if task.id in chosen]
    assert [task.messages for task in rows.rows] == [task.messages for task in expected]
    assert [task.is_text for task in rows.rows] == [is_text] * len(chosen)
    assert all(
        task.spec.items() <= read.spec.items()
        for task, read in zip(expected, rows.rows, strict=True)
    )
    if data["heldout"] == "b.jsonl":
        (task,) = heldout_tasks(config)
        assert (task.messages, task.spec["answer"]) == ((asked,), "4")
    else:
        assert config.subset == ("main" if data["heldout"] == "owner/other" else None)


def test_what_the_run_of_a_later_stage_would_refuse_is_said_before_the_first(
    tmp_path: Path,
) -> None:
    table = make_recipe(tmp_path).model_dump(exclude_unset=True)
    last = RecipeConfig.model_validate({**table, "seed": 2**31 - 1})
    with pytest.raises(ValueError, match="seed"):
        [*stages(last)]


@pytest.mark.parametrize("by_kind", [False, True])
def test_kinds_are_selected_apart_if_asked_for(tmp_path: Path, by_kind: bool) -> None:
    """Task n % 5 in 1, 2, 3 are mixed; the kind of which there are more must not take all."""
    recipe, player = make_recipe(tmp_path, by_kind=by_kind, select=2), Player()

    given = (Task(id=f"t/{n}", messages=(), spec={"kind": "ab"[n % 5 == 1]}) for n in range(10))
    stream: Any = SimpleNamespace(
        next=lambda count: [next(given) for _ in range(count)],
        feedback=lambda groups: None,
        state_dict=dict,
    )
    chosen = select(recipe, 0, player, stream)["selected"]  # type: ignore[arg-type]
    kinds = {int(name[2:]) % 5 == 1 for name in chosen}
    assert kinds == ({True, False} if by_kind else {False})


def test_difficulty_pools_are_drawn_from_if_asked_for(tmp_path: Path) -> None:
    from agentgrpo.data.tasks import RowTasks

    rows = RowTasks([Task(id="t", messages=(), spec={"answer": 1})], source="t")
    assert difficulty_pools(make_recipe(tmp_path), rows) is rows
    asked = make_recipe(tmp_path, sampling="difficulty", easy_share=0.5)
    drawn = difficulty_pools(asked, rows)
    assert isinstance(drawn, DifficultyTasks)
    assert drawn.next(2) == rows.next(1) * 2
    assert drawn._shares == (0.5, 0.2)
    with pytest.raises(ValueError, match="needs a list of tasks"):
        difficulty_pools(asked, WordProblemTasks())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"sampling": "difficulty", "easy_share": 0.6, "hard_share": 0.6},
            "must be at most 1, got 0.6 . 0.6",
        ),
        ({"group_size": 1}, "group_size"),
        ({"steps": []}, "steps"),
        ({"epochs": 2}, r"curriculum\.steps \[5, 7\] and curriculum\.epochs 2 exclude each other"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_recipe(tmp_path, **wrong)


def test_the_last_number_of_steps_stands_for_all_further_stages(tmp_path: Path) -> None:
    assert [steps_of(make_recipe(tmp_path), stage) for stage in range(4)] == [5, 7, 7, 7]


def test_epochs_are_rounds_through_what_a_stage_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two tasks that each stage selects, one a step; with more epochs it goes on."""
    recipe = make_recipe(tmp_path, steps=None, epochs=3, tasks_per_step=1)
    ran = fake_parts(recipe, monkeypatch)
    run_curriculum(recipe)
    assert ran == ["0.select", "0.train", "1.select", "1.train"]
    assert json.loads((tmp_path / "stage_1" / "stage.json").read_text())["steps"] == 6
    assert training_config(recipe, 1).steps == 6
    assert left(recipe) == []
    assert left(make_recipe(tmp_path, steps=None, epochs=4, tasks_per_step=1))
    by_four = make_recipe(tmp_path, steps=None, epochs=3, tasks_per_step=4)
    assert steps_of(by_four, 0) == 2, "6 tasks, the last step rounded up"
    assert "at most 3, 3 steps" in str([*stages(by_four)])
