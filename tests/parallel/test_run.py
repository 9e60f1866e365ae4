"""A full run on two ranks: an engine each, one learner, and its checkpoint resumed on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_config
from agentgrpo.inspect.verify import verify
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.types import Group
from tests import warm
from tests.end_to_end.test_run import write_config
from tests.learn.given import Holder, learner_on
from tests.warm import run_ranks


def recorded(run: Path, step: int) -> list[Group]:
    """The groups of a step, as rollouts.jsonl has them."""
    groups: dict[int, list[Any]] = {}
    for row in read_lines(run / "rollouts.jsonl"):
        if (row["split"], row["step"]) == ("train", step):
            groups.setdefault(row["group"], []).append(read_rollout(row))
    return [Group(task=r[0].task, rollouts=r) for _, r in sorted(groups.items())]


class Holder32(Holder):
    dtype = "float32"


def learner_of(config: TrainConfig) -> Learner:
    return learner_on(
        Holder32(), config.model, config.learner, config.loss, total_steps=config.steps,
        weights="copy",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.timeout(900)
@pytest.mark.parametrize("divided", [False, True], ids=["an engine each", "one engine"])
def test_two_ranks_learn_like_one_and_one_resumes(
    tmp_path: Path, agent_model: Path, divided: bool
) -> None:
    path = write_config(tmp_path, agent_model)
    overrides = [
        "engine.weights=copy", "learner.decay=constant", "learner.max_tokens=256", "eval_every=0",
        "rollout.tasks_per_step=4", "teacher.weight=0",
    ]  # fmt: skip
    parts = f"engine.tensor_parallel_size={1 + divided}"
    ran = run_ranks(2, "-m", "agentgrpo.train", str(path), *overrides, "steps=2", parts)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("step 2/2") == 1, "the first rank alone speaks"
    run, config = tmp_path / "run", load_config(path, [*overrides, "steps=2"])
    rows = [row for row in read_lines(run / "metrics.jsonl") if "learner/loss" in row]
    assert [row["step"] for row in rows] == [0, 1]
    alone = learner_of(config)
    for step, row in enumerate(rows):
        groups = recorded(run, step)
        assert len(groups) == row["rollout/groups"] >= 4
        assert len({g.task.id for g in groups}) >= 3, "ranks play different tasks"
        learned = alone.step(plan_updates(groups, config, step=step))
        for name in ("loss", "grad_norm", "num_tokens", "mismatch_kl", "entropy_mean"):
            assert row[f"learner/{name}"] == pytest.approx(learned[name], rel=1e-3, abs=1e-6), name
        assert row["learner/sampler_gap_max"] <= 1e-4, "either engine samples from the policy"
    record = json.loads((run / "run.json").read_text())
    assert record["learner"]["ranks"] == 2
    assert verify.verify_run(run).faults == []
    if divided:  # what it has saved is saved as by the other
        return
    again = warm.run("-m", "agentgrpo.train", str(path), *overrides, "steps=3")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "resumed from" in again.stdout
    steps = [row["step"] for row in read_lines(run / "metrics.jsonl") if "learner/loss" in row]
    assert steps == [0, 1, 2]
    assert verify.verify_run(run).faults == []
