"""Writes metrics.jsonl, rollouts.jsonl and run.json.

Both .jsonl files are append-only. A checkpoint stores their sizes; a resumed run truncates them to
these sizes, so no step is recorded twice. Each line has the hash of the line before
(`previous_hash`), a line of metrics.jsonl also that of the last line of rollouts.jsonl
(`rollouts_hash`), and run.json has the size and last hash of both: `agentgrpo verify` detects
missing, moved and edited lines.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from agentgrpo.records.rollouts import rollout_record
from agentgrpo.records.trackers import Tracker
from agentgrpo.support import parallel
from agentgrpo.support.atomic_files import read_lines, write_text
from agentgrpo.support.files import read_table, writing
from agentgrpo.types import Group, Metrics

REMEDY = (
    "Restore the file from a copy; or move this checkpoint away to continue from an older one; or "
    "choose another out_dir (model = the checkpoint's folder starts a new run from it)"
)
FILES = ("metrics.jsonl", "rollouts.jsonl")
HASHES = ("previous_hash", "rollouts_hash")
"""Keys of a line of metrics.jsonl besides the step and the numbers."""


class FileTail(TypedDict):
    """The size of a file of records and the hash of its last line."""

    bytes: int
    hash: str


def line_hash(line: bytes) -> str:
    """Hexadecimal BLAKE2b-128 of a line, newline included."""
    return hashlib.blake2b(line, digest_size=16).hexdigest()


EMPTY = FileTail(bytes=0, hash=line_hash(b""))


def tail_of(path: Path, size: int | None = None) -> FileTail:
    """The tail of a file, or of its first `size` bytes."""
    last, read = b"", 0
    if path.exists():
        with path.open("rb") as file:
            while (size is None or read < size) and (line := file.readline()):
                last, read = line, read + len(line)
    return FileTail(bytes=read, hash=line_hash(last))


class RunLog:
    """Appends to a run's records; ranks other than 0 write nothing."""

    def __init__(self, out_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._out_dir = out_dir
        self._trackers = trackers
        out_dir.mkdir(parents=True, exist_ok=True)
        self._heads: dict[str, FileTail] = {}
        if parallel.rank() == 0:
            self._heads = {name: tail_of(out_dir / name) for name in FILES}

    def write(self, step: int, **areas: Metrics) -> Metrics:
        """Append a line to metrics.jsonl; returns its numbers as `area/name: value`."""
        numbers = {
            f"{area}/{name}": value
            for area, metrics in areas.items()
            for name, value in metrics.items()
        }
        last = self._heads.get("rollouts.jsonl", EMPTY)["hash"]
        self._append("metrics.jsonl", [{"step": step, **numbers, "rollouts_hash": last}])
        self._seal()
        for tracker in self._trackers:
            tracker.write(step, numbers)
        return numbers

    def solved(self) -> dict[int, float]:
        """The recorded share of solved held-out tasks by step; empty on other ranks."""
        if parallel.rank() > 0:
            return {}
        rows = read_lines(self._out_dir / "metrics.jsonl")
        return {row["step"]: row["eval/solved"] for row in rows if "eval/solved" in row}

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """Append a line to rollouts.jsonl per rollout; `split` is "train" or "heldout"."""
        self._append(
            "rollouts.jsonl",
            (
                {"step": step, "split": split, "group": g, "index": i, **rollout_record(rollout)}
                for g, group in enumerate(groups)
                for i, rollout in enumerate(group.rollouts)
            ),
        )

    def write_run_json(self, **record: Any) -> None:
        """Write run.json: the resolved config, the chosen values and the versions."""
        if parallel.rank() > 0:
            return
        table = {**record, "records": self._heads}
        write_text(self._out_dir / "run.json", json.dumps(table, indent=1, default=str) + "\n")

    def offsets(self) -> dict[str, FileTail]:
        """Flush both files to disk and return their tails; empty on other ranks."""
        self.require_unchanged()
        for name in self._heads:
            path = self._out_dir / name
            if path.exists():
                with writing(path), path.open("a") as file:
                    os.fsync(file.fileno())
        return dict(self._heads)

    def truncate_to(self, offsets: Mapping[str, FileTail]) -> None:
        """Truncate both files to the tails that offsets() returned.

        Raises:
            ValueError: a file is shorter than that or was changed, so the records do not lead to
                the checkpoint.
        """
        for name in self._heads:
            path, tail = self._out_dir / name, offsets.get(name, EMPTY)
            size = path.stat().st_size if path.exists() else 0
            if size < tail["bytes"]:
                raise ValueError(
                    f"{path}: expected at least {tail['bytes']:,} bytes, its size when the "
                    f"checkpoint was saved, got {size:,}. {REMEDY}"
                )
            if tail_of(path, tail["bytes"]) != tail:
                raise ValueError(
                    f"{path}: the line that ends at byte {tail['bytes']:,} was changed after the "
                    f"checkpoint was saved. {REMEDY}"
                )
            self._heads[name] = tail
        # seal first: verify accepts lines after the seal, as of a killed run, but no missing ones
        self._seal()
        for name, head in self._heads.items():
            if (path := self._out_dir / name).exists():
                os.truncate(path, head["bytes"])

    def require_unchanged(self) -> None:
        """Raise OSError unless both files have the size that this run left."""
        for name, head in self._heads.items():
            path = self._out_dir / name
            size = path.stat().st_size if path.exists() else 0
            if size != head["bytes"]:
                raise OSError(
                    f"{path}: expected {head['bytes']:,} bytes, got "
                    f"{f'{size:,}' if path.exists() else 'no file'}: another process changed it "
                    "during the run"
                )

    def _seal(self) -> None:
        """Store the tails in run.json, if it exists."""
        path = self._out_dir / "run.json"
        if self._heads and path.exists():
            table = read_table(path)
            write_text(path, json.dumps({**table, "records": self._heads}, indent=1) + "\n")

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        if parallel.rank() > 0:
            return
        path = self._out_dir / name
        with writing(path), path.open("ab") as file:
            for row in rows:
                head = self._heads[name]
                line = json.dumps({**row, "previous_hash": head["hash"]}).encode() + b"\n"
                file.write(line)
                self._heads[name] = FileTail(bytes=head["bytes"] + len(line), hash=line_hash(line))
