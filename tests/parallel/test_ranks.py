"""Nodes without a shared folder all continue from rank 0's checkpoint, or none does."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agentgrpo.records import checkpoint
from agentgrpo.support.files import write_checksums
from tests.warm import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANK = """
import sys
from pathlib import Path
from agentgrpo.support import parallel
from agentgrpo.config import TrainConfig
from agentgrpo.train.command_line import report_errors
from agentgrpo.train.ranks import common_checkpoint
with report_errors() as outcome:
    parallel.start()
    try:
        print(common_checkpoint(TrainConfig(model="m", out_dir=Path(sys.argv[1]))))
    finally:
        parallel.stop()
sys.exit(outcome.status)
"""


def common(*out_dirs: Path) -> tuple[list[int | None], list[str]]:
    """Exit status and output of a rank on each node."""
    script = out_dirs[0].parent / "rank.py"
    script.write_text(RANK)
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = [
        Command(
            str(script), str(out_dir), RANK=str(rank), LOCAL_RANK="0",
            WORLD_SIZE=str(len(out_dirs)), MASTER_ADDR="localhost", MASTER_PORT=port,
        )
        for rank, out_dir in enumerate(out_dirs)
    ]  # fmt: skip
    outs = ["".join(rank.communicate(timeout=200)) for rank in ranks]
    return [rank.returncode for rank in ranks], outs


def save(out_dir: Path, step: int, weights: bytes) -> Path:
    folder = checkpoint.folder_of(out_dir, step)
    (folder / "sub").mkdir(parents=True)
    files = {"config.json": b"{}", "a.safetensors": weights, checkpoint.STATE: b"s", "sub/e": b""}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    write_checksums(folder)
    (out_dir / "metrics.jsonl").write_text("")
    return folder


def test_other_nodes_copy_the_checkpoint(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("a", "b", "c"))
    original = save(first, 7, os.urandom((1 << 25) + 3))
    save(third, 7, b"of another run")
    statuses, outs = common(first, second, third)
    assert statuses == [0, 0, 0], outs
    for out_dir, out in zip((first, second, third), outs, strict=True):
        copy = checkpoint.folder_of(out_dir, 7)
        assert str(copy) in out
        files = sorted(p.relative_to(original) for p in original.rglob("*") if p.is_file())
        assert sorted(p.relative_to(copy) for p in copy.rglob("*") if p.is_file()) == files
        for name in files:
            assert (copy / name).read_bytes() == (original / name).read_bytes(), name


def test_records_outside_rank_0_stop_all(tmp_path: Path) -> None:
    save(tmp_path / "b", 7, b"weights")
    statuses, outs = common(tmp_path / "a", tmp_path / "b")
    assert statuses == [2, 2], outs
    assert "".join(outs).count("Start rank 0 where they are") == 1
    assert f"rank 1 ({socket.gethostname()}) has the records" in outs[0]
    assert not (tmp_path / "a").exists()
