"""A row of a benchmark is of the code that it names."""

from __future__ import annotations

import json
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
    (tmp_path / ".git").mkdir()
    harness.require_built()
    os.utime(tmp_path / "csrc/new.h", (built + 5, built + 5))
    with pytest.raises(RuntimeError, match=r"older than csrc/new\.h"):
        harness.append_row("name", "variant", [1.0], unit="s", shape={})
    assert not (tmp_path / "bench/results/name.jsonl").exists()


def a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree on another machine: no .git, and sources that came after the extension."""
    monkeypatch.setattr(harness, "RESULTS", folder / "bench/results")
    for age, name in ((9, "agentgrpo/_C.abi3.so"), (1, "csrc/new.h")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
        os.utime(folder / name, (1e9 - age, 1e9 - age))


def test_a_copy_without_git_writes_rows_of_the_commit_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_copy(tmp_path / "copy", monkeypatch)
    monkeypatch.setenv("BENCH_OUT", str(tmp_path / "brought/back"))
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    for value in (1.0, 2.0):
        harness.append_row("name", "variant", [value], unit="s", shape={})
    lines = (tmp_path / "brought/back/name.jsonl").read_text().splitlines()
    assert [(row["commit"], row["p50"]) for row in map(json.loads, lines)] == [
        ("abc1234", 1.0), ("abc1234", 2.0),
    ]  # fmt: skip
    assert not (tmp_path / "copy/bench").exists(), "nothing beside the code"


def test_a_copy_that_is_not_told_its_commit_makes_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_copy(tmp_path / "copy", monkeypatch)
    monkeypatch.setenv("BENCH_OUT", str(tmp_path / "out"))
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    with pytest.raises(RuntimeError, match="set BENCH_COMMIT to what"):
        harness.append_row("name", "variant", [1.0], unit="s", shape={})
    assert not (tmp_path / "out").exists()


def test_where_git_is_nobody_tells_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_copy(tmp_path / "tree", monkeypatch)
    (tmp_path / "tree/.git").mkdir()
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    with pytest.raises(RuntimeError, match=r"older than csrc/new\.h"):
        harness.append_row("name", "variant", [1.0], unit="s", shape={})
