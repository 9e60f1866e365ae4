"""The curves: each lesson's config, and what the page says of its rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agentgrpo import examples
from agentgrpo.config.read import load_config, shipped_configs
from agentgrpo.data.tasks import normalised_question
from agentgrpo.envs.adapters.gymnasium import HELDOUT_SEED
from agentgrpo.examples.functions.env import FunctionsEnv
from agentgrpo.examples.guess.env import Guess
from agentgrpo.examples.letters.env import LettersEnv
from agentgrpo.examples.walk.env import Walk
from bench import curves


@pytest.mark.parametrize("name", curves.LESSONS)
def test_example_is_a_short_config_with_enough_heldout_tasks(name: str) -> None:
    lesson = curves.LESSONS[name]
    path = lesson.config or shipped_configs()[name]
    assert len(path.read_text().splitlines()) <= 45
    config = load_config(str(path), lesson.changes)
    assert config.data.num_heldout >= curves.HELDOUT
    assert config.on("cpu").rollout.deterministic or name == "program"


@pytest.mark.parametrize("env", [LettersEnv, FunctionsEnv])
def test_no_question_is_in_both_splits(env: Any) -> None:
    train, heldout = (env.tasks(None, split) for split in ("train", "heldout"))
    asked = [normalised_question(task) for task in [*train, *heldout]]
    assert len(set(asked)) == len(asked)
    assert len(heldout) >= curves.HELDOUT


def test_no_start_is_in_both_splits() -> None:
    for world, train in ((Walk, 192), (Guess, 192)):
        seeds = [*range(train), *range(HELDOUT_SEED, HELDOUT_SEED + 192)]
        begun = [world().reset(seed=seed)[0] for seed in seeds]
        assert len(set(begun)) == len(begun)


def test_only_binary_search_earns_the_full_reward() -> None:
    world = Guess()
    for seed in range(192):
        world.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            middle = (world.low + world.high) // 2
            _, reward, ended, truncated, _ = world.step(str(middle))
            assert ended or not truncated
            total += reward
        assert total == pytest.approx(1.0)
        world.reset(seed=seed)
        left = [number for number in range(world.low, world.high + 1) if number != world.number]
        assert sum(world.step(str(n))[1] for n in (*left[:2], *left[-2:])) <= 0.5
        assert world.step("12 or 13")[1] == 0.0


def row(seed: int, after: float, settings: str = "new") -> dict[str, Any]:
    return {
        "variant": "letters", "settings": settings, "shape": {"seed": seed, "tasks": 8},
        "commit": "abc", "device": "2 x X", "heldout": [[0, 0.5], [8, after]],
        "train": [0.4, 0.6], "tokens": 100, "tool_calls": 7.0, "cpu_s": 120, "seconds": 300,
        "shown": ["Q\n1", "Q\n2"],
    }  # fmt: skip


def test_curves_page_uses_only_the_newest_settings(tmp_path: Path) -> None:
    nothing = {"variant": "letters", "settings": "new", "shape": {"seed": -1}, "commit": "abc",
               "device": "2 x X", "solved": {"silent": 0.0, "always '2'": 0.46}}  # fmt: skip
    none = {**nothing, "variant": "walk", "solved": {"silent": 0.0}}
    rows = [row(0, 0.1, "old"), row(0, 0.9), nothing, none]
    rows += [{**row(1, 0.8), "cpu_s": 180}]
    rows += [{**row(0, 1.0), "variant": "walk"}]
    said = curves.page(rows)
    (line,) = [line for line in said.splitlines() if line.startswith("| `letters`")]
    assert "| 0.90, 0.80 | 0.46 (always '2') | 2 | 100 | 7 | 2.0 to 3.0 |" in line
    assert "| `walk` | 0.50 | 1.00 | 0 | 2 |" in said
    of_loss = {**row(0, 0.7), "variant": "letters/gspo"}
    assert "| `gspo` | 0.70; 0.50 |  |" in curves.loss_table([*rows, of_loss])
    pytest.importorskip("matplotlib")
    curves.draw("letters", curves.by_task(rows)["letters"], tmp_path / "made" / "g.png")
    assert (tmp_path / "made" / "g.png").stat().st_size > 1000


def test_p_value_of_a_difference_in_losses() -> None:
    def said(*shares: tuple[float, ...]) -> str:
        return curves._chance([[row(0, share) for share in of] for of in shares])

    same_means = said((0.1, 0.2, 0.3), (0.2, 0.3, 0.1), (0.3, 0.1, 0.2))
    assert same_means.startswith("100.0%; ")
    ordered = said((0.1, 0.21, 0.3), (0.4, 0.5, 0.62), (0.7, 0.81, 0.9))
    chance = float(ordered.partition("%")[0]) / 100  # one order of six in each of three seeds
    assert chance == pytest.approx(1 / 36, abs=0.005)
    assert said((0.1,), (0.2, 0.3)) == ""


def test_changed_source_changes_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of_letters = ["letters", *(f"letters/{loss}" for loss in curves.LOSSES)]
    before = {name: curves.key_of(name) for name in (*of_letters, "walk", "console")}
    assert len({*before.values()}) == len(before)
    made = Path(shutil.copytree(examples.FOLDER, tmp_path / "examples"))
    (made / "letters/env.py").write_text("# other words")
    monkeypatch.setattr(examples, "FOLDER", made)
    changed = [name for name, key in before.items() if curves.key_of(name) != key]
    assert changed == of_letters
