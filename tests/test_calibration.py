"""The study of calibration with stand-ins for its parts: what is run, shared and said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.recipe.curriculum import finish_stage, folder_of, steps_of
from agentgrpo.run.atomic import read_lines
from bench import calibration, tallies

TASKS = tallies.tasks("heldout")[:4]


class Parts:
    """Leaves what the recipe's parts leave."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.recipes: list[RecipeConfig] = []
        self.right = 1.0

    def __call__(self, command: Sequence[str], **_: Any) -> Any:
        module = command[3]
        settings = command[5 : command.index("--of-recipe")]
        more = command[command.index("--of-recipe") + 1 :]
        self.ran.append(more[-1] if module == "curriculum" else module)
        recipe = load_config_of(RecipeConfig, command[4], settings)
        self.recipes.append(recipe)
        if module == "evaluate":
            self._measured(Path(more[-1]))
        elif module == "sft":
            (recipe.out_dir / "sft" / "checkpoints" / "step_000009").mkdir(parents=True)
        elif module == "curriculum":
            self._staged(recipe, *more[-1].split("."))
        return 0, False

    def _measured(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        rows = [
            {
                "id": task.id, "kind": task.spec["kind"], "attempts": 1,
                "solved": int(self.right and index < 2), "columns": {"tool_calls": 2.0 + index},
            }
            for index, task in enumerate(TASKS)
        ]  # fmt: skip
        (folder / "report.json").write_text(json.dumps({"per_task": rows}))

    def _staged(self, recipe: RecipeConfig, stage: str, what: str) -> None:
        folder = folder_of(recipe, int(stage))
        folder.mkdir(parents=True, exist_ok=True)
        if what == "select":
            about = {"model": "m", "candidates": 4, "mixed": 2, "quality": 0.5, "selected": []}
            (folder / "select.json").write_text(json.dumps(about))
            (folder / "pool.jsonl").touch()
        else:
            step = steps_of(recipe, int(stage))
            (folder / "rl" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
            finish_stage(recipe, int(stage))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parts:
    made = Parts()
    monkeypatch.setattr("agentgrpo.recipe.parts.run_child", made)
    monkeypatch.setenv("BENCH_OUT", str(tmp_path / "rows"))
    for module in ("bench.calibration", "bench.harness"):
        monkeypatch.setattr(f"{module}.measured_commit", lambda: "abc")
    return made


def study(folder: Path, *more: str) -> list[tuple[str, int]]:
    calibration.main(["--folder", str(folder / "work"), *more])
    rows = read_lines(folder / "rows" / "calibration.jsonl")
    return [(row["variant"], row["shape"]["seed"]) for row in rows]


TUNED = ["evaluate", "flywheel", "sft", "evaluate"]
STAGES = ["0.select", "0.train", "1.select", "1.train", "evaluate"]


def test_a_seeds_arms_share_its_fine_tuning_and_are_a_row_each(
    parts: Parts, tmp_path: Path
) -> None:
    assert study(tmp_path, "--seeds", "0") == [(arm, 0) for arm in calibration.ARMS]
    one = ["0.select", "0.train", "evaluate"]
    assert parts.ran == [*TUNED, *STAGES * 4, *one]
    work = tmp_path / "work" / "seed_0"
    tuned = str(*work.glob("tuned-*/sft/checkpoints/step_000009"))
    trained = {r.out_dir.name.partition("-")[0]: r for r in parts.recipes[len(TUNED) :]}
    assert {recipe.curriculum.start for recipe in trained.values()} == {"model"}
    firsts = parts.recipes[len(TUNED) :: len(STAGES)]
    assert [recipe.model for recipe in firsts] == [tuned] * 5
    assert trained["no_sigmas"].reward.sigma_tool < 1e-6 > trained["no_sigmas"].reward.sigma_length
    assert not trained["no_branching"].rollout.branching.initial
    assert trained["no_selection"].curriculum.selection == "random"
    full, single = (trained[name] for name in ("full", "one_stage"))
    assert single.curriculum.candidates == full.curriculum.candidates * 2
    assert single.curriculum.select == full.curriculum.select * 2
    assert steps_of(single, 0) == steps_of(full, 0) + steps_of(full, 1)
    assert not list(work.glob("*/stage_*/rl/checkpoints"))
    measuring = [part == "evaluate" for part in parts.ran]
    assert [recipe.data.num_heldout == 128 for recipe in parts.recipes] == measuring
    assert study(tmp_path, "--seeds", "0", "1")[len(calibration.ARMS) :] == [
        (arm, 1) for arm in calibration.ARMS if arm != "prompting"
    ]


def test_a_row_says_what_was_needless(parts: Parts, tmp_path: Path) -> None:
    study(tmp_path, "--seeds", "0", "--arms", "tuned")
    (row,) = read_lines(tmp_path / "rows" / "calibration.jsonl")
    assert (row["solved"], row["calls"], row["least"]) == ("1100", "2345", "1221")
    assert (row["quality"], row["calls_of_solved"], row["needless"]) == (0.5, 2.5, 1.0)
    assert row["kinds"]["lookup"]["calls_of_solved"] == 2.0
    assert row["kinds"]["told"]["needless"] is None
    parts.right = 0.0
    study(tmp_path, "--seeds", "1", "--arms", "tuned")
    assert read_lines(tmp_path / "rows" / "calibration.jsonl")[1]["needless"] is None


def rows(arm: str, solved: str, calls: str, seed: int = 0) -> dict[str, Any]:
    about = {"variant": arm, "settings": "s", "shape": {"seed": seed}, "commit": "abc"}
    flags = [float(digit) for digit in solved]
    return {
        **about, "solved": solved, "calls": calls, "quality": sum(flags) / len(flags),
        "needless": 1.0, "calls_of_solved": 2.0, "seconds": 60,
    }  # fmt: skip


def test_differences_are_paired_by_seed_and_task(tmp_path: Path) -> None:
    written = [
        rows("full", "1101", "1213"), rows("full", "0110", "1111", seed=1),
        rows("tuned", "1000", "3333"), rows("tuned", "1110", "2222", seed=1),
        rows("no sigmas", "1111", "1111", seed=2),
    ]  # fmt: skip
    found = calibration.rows_by_arm(written)
    seen = calibration.difference(found["full"], found["tuned"], "quality")
    assert seen is not None
    assert seen[0] == pytest.approx((2 - 1) / 8)
    assert seen[1] < seen[0] < seen[2]
    calls = calibration.difference(found["full"], found["tuned"], "needless")
    assert calls is not None
    assert calls[0] == pytest.approx((-2 - 1 - 1) / 3)
    assert calibration.difference(found["full"], found["no sigmas"], "quality") is None
    assert "| full | 0.625 | 0.75, 0.50 |" in calibration.table(written)
    pytest.importorskip("matplotlib")
    calibration.draw(written, tmp_path / "g.png")
    assert (tmp_path / "g.png").stat().st_size > 1000
