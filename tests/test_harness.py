"""A row of a benchmark is of the code that it names."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentgrpo.run.atomic import read_lines
from bench import harness
from bench.cached import NotToBeHad, made_once


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


@pytest.mark.parametrize(
    ("git", "commit", "message"),
    [
        (False, "abc1234", ""),
        (False, "", "set BENCH_COMMIT to what"),
        (True, "", "older"),
        (True, "abc1234", ""),
        (True, "abc1234f0", ""),
        (True, "def5678", "but the tree is abc1234"),
    ],
)
def test_a_copy_without_git_writes_rows_of_the_commit_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git: bool, commit: str, message: str
) -> None:
    """A tree on another machine, whose sources came after the extension; git, if there, agrees."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "copy/bench/results")
    monkeypatch.setattr(harness, "_commit", lambda: "abc1234")
    for age, name in ((9, "agentgrpo/_C.abi3.so"), (1, "csrc/new.h"), *[(0, ".git/HEAD")][:git]):
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setenv("BENCH_OUT", str(tmp_path / "brought/back"))
    monkeypatch.setenv("BENCH_COMMIT", commit)
    written = tmp_path / "brought/back/name.jsonl"
    if message:
        with pytest.raises(RuntimeError, match=message):
            harness.append_row("name", "variant", [1.0], unit="s", shape={})
        assert not written.exists()
        return
    for value in (1.0, 2.0):
        harness.append_row("name", "variant", [value], unit="s", shape={})
    rows = [(row["commit"], row["p50"]) for row in read_lines(written)]
    assert rows == [("abc1234", 1.0), ("abc1234", 2.0)]
    assert not (tmp_path / "copy/bench").exists(), "nothing beside the code"


@pytest.mark.parametrize(("run", "tries"), [("", 4), ("a run of the tests", 1)])
def test_a_folder_that_cannot_be_made_is_tried_once_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, tries: int
) -> None:
    """Or processes of a run would collect different tests."""
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", run)
    tried: list[Path] = []

    def make(place: Path) -> Path:
        tried.append(place)
        raise NotToBeHad("no network")

    for _ in range(4):
        with pytest.raises(NotToBeHad, match=r"^no network$"):
            made_once(tmp_path / "a", make)
    assert len(tried) == tries
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "the next")
    assert made_once(tmp_path / "a", lambda place: place) == tmp_path / "a"


def test_a_folder_of_the_cache_is_made_by_one(tmp_path: Path) -> None:
    """Of those that ask at once; what was left of one that was killed is in no other."""
    began = threading.Barrier(4)
    made: list[Path] = []
    (tmp_path / "a" / ".b.partial" / "inner" / "rubbish").mkdir(parents=True)

    def make(place: Path) -> Path:
        made.append(place)
        time.sleep(0.2)  # the others come meanwhile
        (place / "inner").mkdir()
        (place / "inner" / "file").touch()
        return place / "inner"

    def ask(_: int) -> str:
        began.wait(20)
        return " ".join(p.name for p in made_once(tmp_path / "a" / "b", make).iterdir())

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(ask, range(4))] == ["file"] * 4
    assert len(made) == 1
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [".b.lock", "b"]
