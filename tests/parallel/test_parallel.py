"""Two ranks over gloo equal one: same losses, same weights, interchangeable checkpoints."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgrpo.config import LossConfig
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.support import parallel
from agentgrpo.types import Group, Rollout, Segment, Status, Task
from tests import tiny
from tests.parallel.learn import learn
from tests.warm import run_ranks

pytestmark = pytest.mark.timeout(900)  # ranks wait for their turn, see warm.run_ranks

Record = dict[str, Any]


def make_groups() -> list[Group]:
    rng = np.random.default_rng(5)
    groups = []
    for _ in range(3):
        prompt = Segment(rng.integers(3, tiny.VOCAB, size=30, dtype=np.int32))
        rollouts = []
        for i in range(3):
            ids = rng.integers(3, tiny.VOCAB, size=6 + 20 * i, dtype=np.int32)
            turn = Segment(ids, rng.normal(-5.5, 0.3, len(ids)).astype(np.float32))
            rollouts.append(
                Rollout(
                    task=Task(id="t", messages=(), spec={}), segments=[prompt, turn],
                    status=Status.COMPLETED, rewards={"r": float(i * i)},
                )
            )  # fmt: skip
        groups.append(Group(task=rollouts[0].task, rollouts=rollouts))
    assign_advantages(groups, LossConfig())
    return groups


CASES: dict[str, dict[str, Any]] = {
    "plain": {"loss": {}, "learner": {}},
    "updates": {
        "loss": {
            "num_iterations": 2, "num_mini_batches": 2, "beta": 0.1, "top_entropy_quantile": 0.5,
            "entropy_coef": 0.1,
        },
        "learner": {"gradient_checkpointing": True},
    },
    "layers": {"loss": {}, "learner": {"trained_layers": 1}},
    "adapter": {"loss": {"beta": 0.1, "num_iterations": 2}, "learner": {"lora": {"rank": 2}}},
    # of unlike lengths: one rank's batch has more passes than the other's
    "rows": {"loss": {"beta": 0.1}, "learner": {}, "rows": "told so"},
}  # fmt: skip


@pytest.fixture(scope="module")
def records(slow_setup: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Two steps on one rank and on two; two more from either's checkpoint on the other."""
    folder = tmp_path_factory.mktemp("parallel")
    tiny.make_model_dir(folder / "model")
    (folder / "groups.pickle").write_bytes(pickle.dumps(make_groups()))

    def job(case: str, name: str, source: str | None = None) -> dict[str, Any]:
        came_from = None if source is None else f"{case}-{source}"
        return {"folder": str(folder), "name": f"{case}-{name}", "source": came_from, **CASES[case]}

    for case in CASES:
        learn(**job(case, "one"))
    jobs = [job(case, *rest) for case in CASES for rest in (("two",), ("grown", "one"))]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ran = run_ranks(2, "tests/parallel/learn.py", str(folder / "jobs.json"))
    assert ran.returncode == 0, ran.stderr[-3000:]
    for case in CASES:
        learn(**job(case, "whole", "one"))
        learn(**job(case, "shrunk", "two"))
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*-*.json")}


def assert_same(one: Record, two: Record) -> None:
    for ours, theirs in zip(two["steps"], one["steps"], strict=True):
        for name in ours.keys() - {"seconds"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-9), name
    assert two["score"] == pytest.approx(one["score"], abs=1e-5)
    assert two["norms"].keys() == one["norms"].keys()
    for name, norm in two["norms"].items():
        assert norm == pytest.approx(one["norms"][name], rel=1e-7), name


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(records: dict[str, Record], case: str) -> None:
    one, two = records[f"{case}-one"], records[f"{case}-two"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert any(count % 2 for count in one["batches"]), "one rank has a batch less"
    assert one["to_allocate"] == two["to_allocate"] > 0, (
        "each rank takes moments of its shards alone"
    )
    assert_same(one, two)


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_resumes_between_one_and_two_ranks(
    records: dict[str, Record], case: str
) -> None:
    whole = records[f"{case}-whole"]
    assert whole["steps"][0]["loss"] != records[f"{case}-one"]["steps"][0]["loss"]
    assert_same(whole, records[f"{case}-shrunk"])
    assert_same(whole, records[f"{case}-grown"])


# On one rank everything is identity.


def test_one_rank_is_identity() -> None:
    assert (parallel.world_size(), parallel.rank()) == (1, 0)
    assert parallel.gather("x") == ["x"]
    assert parallel.total(2.5) == 2.5
    assert list(parallel.share("ab")) == [(0, "a", True), (1, "b", True)]
    parallel.start()
    parallel.stop()


@pytest.mark.parametrize("count", range(6))
def test_shares_are_equal_and_complete(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    items, recorded, lengths, apart = list(range(count)), [], set(), []
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        share = list(parallel.share(items))
        assert all(items[index] == item for index, item, _ in share)
        recorded += [item for _, item, counts in share if counts]
        lengths.add(len(share))
        apart.append(parallel.own_items(items))
    assert sorted(recorded) == items
    assert len(lengths) == 1
    assert parallel.interleave(apart) == items


def test_largest_is_nan_if_any_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "gather", lambda value: [1.0, float("nan"), 2.0])
    assert np.isnan(parallel.largest(0.0))
    monkeypatch.setattr(parallel, "gather", lambda value: [1.0, 3.0, 2.0])
    assert parallel.largest(0.0) == 3.0


SHARDED = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from agentgrpo.support import parallel
from agentgrpo.learn.optimizer import MasterAdamW

parallel.start()
whole = torch.zeros(4, dtype=torch.bfloat16)
mine = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
optimizer = MasterAdamW([mine], lr=1.0, weight_decay=0.0)
torch.cuda.synchronize, torch.Tensor.pin_memory = lambda: None, lambda x: x
optimizer._offloads = True
for number in range(2):
    mine.grad = torch.ones_like(mine)
    optimizer.step(max_grad_norm=9.0)
host = optimizer._host
assert {name: x.shape for (_, name), x in host.items()} == dict.fromkeys(
    ("master", "exp_avg", "exp_avg_sq"), torch.Size([2])
)
with torch.no_grad():
    master = optimizer._masters[0].to_local()
    assert master.data_ptr() == host[0, "master"].data_ptr()
    assert torch.equal(mine.to_local().float(), master.bfloat16().float())
    assert master.round(decimals=4).tolist() == [-2.0, -2.0]
parallel.stop()
"""


@pytest.mark.slow
def test_sharded_master_moves_with_its_shard(tmp_path: Path) -> None:
    """On a GPU, to host memory but while it is updated, and its moments."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    ran = run_ranks(2, str(tmp_path / "sharded.py"))
    assert ran.returncode == 0, ran.stderr[-3000:]
