"""`agentgrpo evaluate` under torchrun: the tasks are divided, and there is one report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentgrpo.recipe import evaluate as evaluation
from agentgrpo.support import parallel
from agentgrpo.train.evaluate import evaluate
from agentgrpo.types import Group, Task
from tests.end_to_end.test_run import write_config
from tests.given import scored_by
from tests.warm import run_ranks

TASKS = [Task(id=name, messages=(), spec={}) for name in "abcde"]


class Watched:
    """A sampler that remembers what it was asked to play."""

    def __init__(self) -> None:
        self.played: list[tuple[str, int]] = []

    def play(self, tasks: list[Task], group_size: int, *, seed: int, **_: Any) -> Any:
        self.played += [(task.id, seed) for task in tasks]
        return [Group(task=task, rollouts=[]) for task in tasks], None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_uses_its_own_tasks_and_seeds(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", str(rank))
    shares = [[Group(task=t, rollouts=[]) for t in TASKS[r::3]] for r in range(3)]
    gathered = iter([shares, [{}] * 3])  # the groups, then what rewards have logged
    monkeypatch.setattr(parallel, "gather", lambda value: next(gathered))
    sampler = Watched()
    groups, _ = evaluate(cast(Any, sampler), TASKS, scored_by(lambda r: {}), seed=7)
    seed = 7 + rank * parallel.RANK_SEED
    assert sampler.played == [(task.id, seed) for task in TASKS[rank::3]]
    assert [group.task.id for group in groups] == list("abcde"), "in their order, on every rank"


def test_only_rank_0_calls_the_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each rank would cost as much again, and the reports would differ."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: ([], {}))
    config: Any = type("Config", (), {"seed": 0, "measures": None, "evaluation": None})
    config.measures = type("Measures", (), {"attempts": 1, "temperature": 0.0})
    config.evaluation = type("Evaluation", (), {"filters": {}})
    player: Any = SimpleNamespace(sampler=None, heldout=[], reward=None)
    assert evaluation.evaluate_recipe(config, player) == {}


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.timeout(900)
def test_two_ranks_write_one_report_of_all_tasks(tmp_path: Path, agent_model: Path) -> None:
    config = str(write_config(tmp_path, agent_model))
    args = [config, "data.num_heldout=3", "--report", str(tmp_path / "report")]
    ran = run_ranks(2, "-m", "agentgrpo", "evaluate", *args)
    assert ran.returncode == 0, ran.stderr[-3000:]
    displayed = json.loads(ran.stdout)  # which it is not, if both ranks print
    written = json.loads((tmp_path / "report/report.json").read_text())
    assert ran.stderr.count("engine: starting vLLM") == 1, "the first rank alone speaks"
    assert [row["id"] for row in written["per_task"]] == [f"heldout.jsonl:{n}" for n in (1, 2, 3)]
    assert written["tasks"] == 3
    assert displayed["measures"] == written["measures"]
