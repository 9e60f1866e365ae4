"""One vLLM engine on two ranks (twice, on four): weights, agreement check, broadcast requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agentgrpo.config import EngineConfig
from agentgrpo.support import parallel
from tests import tiny
from tests.warm import run_ranks

if TYPE_CHECKING:
    from agentgrpo.engine.engine import Engine


pytestmark = pytest.mark.timeout(900)  # ranks wait for their turn, see warm.run_ranks


@pytest.fixture(scope="module")
def seen(slow_setup: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of each of four ranks."""
    folder = tmp_path_factory.mktemp("divided")
    tiny.make_model_dir(folder / "model")
    left_over = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")  # of a run that was killed, in vLLM's naming
    left_over.touch()
    try:
        return what_ranks_saw(folder)
    finally:
        left_over.unlink(missing_ok=True)  # of the whole machine


def what_ranks_saw(folder: Path) -> list[dict[str, Any]]:
    ran = run_ranks(4, "tests/parallel/divided.py", str(folder))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_each_rank_updates_its_part_in_place(seen: list[dict[str, Any]]) -> None:
    assert [rank["place"] for rank in seen] == [0, 1, 0, 1]
    assert {rank["weights"] for rank in seen} == {"copy"}
    for rank in seen:
        assert rank["wrong_parts"] == []
        assert rank["in_place"], "an update must not move what vLLM decodes with"
        assert len(rank["stale_parts"]) == rank["tensors"], "every tensor was changed"


def test_agreement_check_passes_on_every_rank(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["first"] <= 1e-5
        assert rank["moved"] <= 1e-5
        assert "after the weight update" in rank["stale"]


def test_teams_sample_like_one_engine(seen: list[dict[str, Any]], engine: Engine) -> None:
    """The same requests, with the same seeds, on one rank and the whole model."""
    from agentgrpo.engine.agreement import probe_prompts

    assert seen[0]["sampled"] == seen[2]["sampled"]
    assert seen[1]["sampled"] == seen[3]["sampled"] == {}
    prompts, expected = probe_prompts(tiny.VOCAB), dict[str, Any]()
    for index in range(6):
        engine.add_request(
            str(index), prompts[index % 2][: 20 + index], max_tokens=4 + 3 * index,
            temperature=1.0, seed=index,
        )  # fmt: skip
        expected |= {done.request_id: done.token_ids.tolist() for done in engine.step()}
    while engine.num_in_flight:
        expected |= {done.request_id: done.token_ids.tolist() for done in engine.step()}
    assert seen[0]["sampled"] == expected
    assert {len(ids) for ids in expected.values()} != {1}


# What cannot be is refused, with its key.


def test_rank_count_must_be_a_multiple_of_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"engine.tensor_parallel_size 2 needs a multiple of 2 processes, got 1"
    ):
        parallel.require_teams_of(2)
    monkeypatch.setenv("WORLD_SIZE", "6")
    parallel.require_teams_of(3)
    with pytest.raises(ValueError, match="tensor_parallel_size 4 needs a multiple of 4"):
        parallel.require_teams_of(4)


def test_more_than_two_cpu_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's shared-memory sum begins with the rank's own part: only two commute."""
    from agentgrpo.engine.engine import Engine

    if torch.cuda.is_available():
        pytest.skip("of CPU only")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"engine.tensor_parallel_size must be at most 2 on CPU"):
        Engine("nothing", EngineConfig(tensor_parallel_size=3))
