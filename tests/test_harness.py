"""A row of a benchmark is of the code that it names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import harness


def test_an_extension_older_than_its_sources_makes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "bench/results")
    for name in ("csrc/old.c", "csrc/new.h", "agentgrpo/_C.abi3.so"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    built = (tmp_path / "agentgrpo/_C.abi3.so").stat().st_mtime
    for name, age in (("old.c", 10), ("new.h", 5)):
        os.utime(tmp_path / "csrc" / name, (built - age, built - age))
    harness.require_built()
    os.utime(tmp_path / "csrc/new.h", (built + 5, built + 5))
    with pytest.raises(RuntimeError, match=r"older than csrc/new\.h"):
        harness.append_row("name", "variant", [1.0], unit="s", shape={})
    assert not (tmp_path / "bench/results/name.jsonl").exists()
