"""What a run leaves on disk besides checkpoints: metrics.jsonl and rollouts.jsonl.

Both only grow. A checkpoint remembers how long they were; a resumed run cuts them back to that, so
that no step is recorded twice. Each line names the line before it by hash (`previous_hash`), a line
of metrics.jsonl also the last one of rollouts.jsonl (`rollouts_hash`), and run.json both files'
lengths and last lines: `agentgrpo verify` sees what is missing, moved or edited.
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
    "Put back the whole file from a copy; or move this checkpoint away, to continue from an older "
    "one; or choose another out_dir (model = the checkpoint's folder starts a new run from it)"
)
FILES = ("metrics.jsonl", "rollouts.jsonl")
HASHES = ("previous_hash", "rollouts_hash")
"""What a line of metrics.jsonl holds besides the step and numbers."""


class FileTail(TypedDict):
    """Where a file of records ends."""

    bytes: int
    hash: str
    """Of its last line."""


def line_hash(line: bytes) -> str:
    """BLAKE2b-128 of a line, its end included, in hexadecimal digits."""
    return hashlib.blake2b(line, digest_size=16).hexdigest()


EMPTY = FileTail(bytes=0, hash=line_hash(b""))


def tail_of(path: Path, size: int | None = None) -> FileTail:
    """Where a file ends, or its first `size` bytes do."""
    last, read = b"", 0
    if path.exists():
        with path.open("rb") as file:
            while (size is None or read < size) and (line := file.readline()):
                last, read = line, read + len(line)
    return FileTail(bytes=read, hash=line_hash(last))


class RunLog:
    """Appends to a run's records; on ranks other than the first, writes nothing."""

    def __init__(self, out_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._out_dir = out_dir
        self._trackers = trackers
        out_dir.mkdir(parents=True, exist_ok=True)
        self._heads: dict[str, FileTail] = {}
        if parallel.rank() == 0:
            self._heads = {name: tail_of(out_dir / name) for name in FILES}

    def write(self, step: int, **areas: Metrics) -> Metrics:
        """One line of metrics.jsonl: the step and `area/name: value` for all, which it returns."""
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
        """The share of held-out tasks solved, by step, as recorded; empty on other ranks."""
        if parallel.rank() > 0:
            return {}
        rows = read_lines(self._out_dir / "metrics.jsonl")
        return {row["step"]: row["eval/solved"] for row in rows if "eval/solved" in row}

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """One line of rollouts.jsonl per rollout; `split` is "train" or "heldout"."""
        self._append(
            "rollouts.jsonl",
            (
                {"step": step, "split": split, "group": g, "index": i, **rollout_record(rollout)}
                for g, group in enumerate(groups)
                for i, rollout in enumerate(group.rollouts)
            ),
        )

    def write_run_json(self, **record: Any) -> None:
        """Write run.json: the resolved config, what was chosen, and the versions."""
        if parallel.rank() > 0:
            return
        described = {**record, "records": self._heads}
        write_text(self._out_dir / "run.json", json.dumps(described, indent=1, default=str) + "\n")

    def offsets(self) -> dict[str, FileTail]:
        """Where the files end, after all of it has reached the disk; empty on other ranks."""
        self.require_there()
        for name in self._heads:
            path = self._out_dir / name
            if path.exists():
                with writing(path), path.open("a") as file:
                    os.fsync(file.fileno())
        return dict(self._heads)

    def truncate_to(self, offsets: Mapping[str, FileTail]) -> None:
        """Drop what was written after `offsets` were taken.

        ValueError: a record is shorter than it was then, or was changed since, so the run's history
        is not what the checkpoint followed from.
        """
        for name in self._heads:
            path, kept = self._out_dir / name, offsets.get(name, EMPTY)
            size = path.stat().st_size if path.exists() else 0
            if size < kept["bytes"]:
                raise ValueError(
                    f"{path}: {f'{size:,} bytes are left' if size else 'it is gone or empty'}; "
                    f"when the checkpoint was saved it had {kept['bytes']:,}. {REMEDY}"
                )
            if tail_of(path, kept["bytes"]) != kept:
                raise ValueError(
                    f"{path}: its line that ends at byte {kept['bytes']:,} is not the one that the "
                    f"checkpoint was saved after. {REMEDY}"
                )
            self._heads[name] = kept
        self._seal()  # first: lines behind the seal are those of a run that was ended
        for name, head in self._heads.items():
            if (path := self._out_dir / name).exists():
                os.truncate(path, head["bytes"])

    def require_there(self) -> None:
        """That the records are as long as this run left them."""
        for name, head in self._heads.items():
            path = self._out_dir / name
            size = path.stat().st_size if path.exists() else 0
            if size != head["bytes"]:
                raise OSError(
                    f"{path}: {f'it has {size:,} bytes' if path.exists() else 'it is gone'}, this "
                    f"run left it with {head['bytes']:,}: somebody removed or changed it meanwhile"
                )

    def _seal(self) -> None:
        """Write into run.json, once it is there, where the records end."""
        path = self._out_dir / "run.json"
        if self._heads and path.exists():
            described = read_table(path)
            write_text(path, json.dumps({**described, "records": self._heads}, indent=1) + "\n")

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
