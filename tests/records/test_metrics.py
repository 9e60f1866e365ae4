"""Records read back exactly and are truncated to a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgrpo.records.metrics import HASHES, RunLog
from agentgrpo.records.rollouts import read_rollout, read_rollouts, rollout_record
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.types import Rollout, Segment, Status, Task
from tests.given import a_group

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8)
segments = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), max_size=5).map(
        lambda ids: Segment(np.array(ids, np.int32))
    ),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), float32s), max_size=5).map(
        lambda pairs: Segment(
            np.array([id for id, _ in pairs], np.int32),
            np.array([logp for _, logp in pairs], np.float32),
        )
    ),
)
rollouts = st.builds(
    Rollout,
    task=st.builds(
        Task,
        id=texts,
        messages=st.lists(st.fixed_dictionaries({"role": texts, "content": texts})).map(tuple),
        spec=st.dictionaries(texts, st.one_of(st.integers(), texts, st.none())),
    ),
    segments=st.lists(segments, max_size=4),
    status=st.sampled_from(Status),
    answer=st.one_of(st.none(), texts),
    rewards=st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False)),
    stats=st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False)),
    advantage=st.floats(allow_nan=False, allow_infinity=False),
)


@given(rollouts)
def test_rollout_reads_back_exactly(written: Rollout) -> None:
    read = read_rollout(json.loads(json.dumps(rollout_record(written))))
    for field in ("task", "status", "answer", "rewards", "stats", "advantage"):
        assert getattr(read, field) == getattr(written, field)
    assert len(read.segments) == len(written.segments)
    for ours, theirs in zip(read.segments, written.segments, strict=True):
        assert ours.token_ids.tobytes() == theirs.token_ids.tobytes()
        assert ours.sampled == theirs.sampled
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()


def numbers(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without the chain's hashes."""
    rows = read_lines(folder / "metrics.jsonl")
    return [{name: row[name] for name in row if name not in HASHES} for row in rows]


def test_metrics_are_named_by_area(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "new" / "folder")
    log.write(0, rollout={"reward": 0.5}, learner={"loss": -1.0})
    log.write(1, eval={"solved": 1.0})
    assert numbers(tmp_path / "new" / "folder") == [
        {"step": 0, "rollout/reward": 0.5, "learner/loss": -1.0},
        {"step": 1, "eval/solved": 1.0},
    ]


def test_rollout_lines_have_their_place(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.rollouts(3, [a_group([1, 2]), a_group([1])])
    log.rollouts(4, [a_group([1])], split="heldout")
    rows = read_lines(tmp_path / "rollouts.jsonl")
    assert [(r["step"], r["split"], r["group"], r["index"]) for r in rows] == [
        (3, "train", 0, 0),
        (3, "train", 0, 1),
        (3, "train", 1, 0),
        (4, "heldout", 0, 0),
    ]
    assert read_rollout(rows[1]).num_sampled == 2


def test_path_may_be_str(tmp_path: Path) -> None:
    RunLog(tmp_path).rollouts(3, [a_group([1, 2])])
    read = [*read_rollouts(str(tmp_path / "rollouts.jsonl"))]
    assert [(place["step"], place["index"]) for place, _ in read] == [(3, 0), (3, 1)]
    assert read_lines(str(tmp_path / "rollouts.jsonl"))[0]["task"]["id"] == read[0][1].task.id


def test_lines_after_the_offsets_are_removed(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(0, a={"x": 1.0})
    log.rollouts(0, [a_group([1])])
    kept = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "rollouts.jsonl")}
    offsets = log.offsets()
    log.write(1, a={"x": 2.0})
    log.rollouts(1, [a_group([1])])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "half')
    log = RunLog(tmp_path)
    log.truncate_to(offsets)
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    log.write(1, a={"x": 2.5})
    assert numbers(tmp_path)[-1] == {"step": 1, "a/x": 2.5}


def test_without_checkpoint_all_lines_are_removed(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.truncate_to({})
    log.write(0, a={"x": 1.0})
    log.truncate_to({})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_record_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(0, a={"x": 1.0})
    offsets = log.offsets()
    path = tmp_path / "metrics.jsonl"
    for content in (b"", b"{}\n"):
        path.write_bytes(content)
        message = rf"expected at least 1\d\d bytes, .*, got {len(content)}\. Restore .*; or move"
        with pytest.raises(ValueError, match=message):
            log.truncate_to(offsets)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
@pytest.mark.parametrize("what", ["removed", "emptied", "written to", "with its folder"])
def test_records_changed_by_another_process_stop_the_run(
    tmp_path: Path, name: str, what: str
) -> None:
    """Before this check they were started anew and the run ended as if nothing had happened."""
    log = RunLog(tmp_path / "out")
    log.write(0, a={"x": 1.0})
    log.rollouts(0, [a_group([1])])
    log.require_unchanged()
    path = tmp_path / "out" / name
    if what == "with its folder":
        shutil.rmtree(tmp_path / "out")
    elif what == "removed":
        path.unlink()
    else:
        path.write_text("" if what == "emptied" else path.read_text() + "{}\n")
    for check in (log.offsets, log.require_unchanged):
        with pytest.raises(OSError, match="another process changed it during the run"):
            check()
    assert what != "with its folder" or not (tmp_path / "out").exists()


def test_run_json_accepts_paths(tmp_path: Path) -> None:
    RunLog(tmp_path).write_run_json(config={"out_dir": Path("x")}, model="m")
    described = json.loads((tmp_path / "run.json").read_text())
    assert described.pop("records").keys() == {"metrics.jsonl", "rollouts.jsonl"}
    assert described == {"config": {"out_dir": "x"}, "model": "m"}
