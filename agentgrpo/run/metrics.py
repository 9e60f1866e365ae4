"""What a run leaves on disk besides checkpoints: metrics.jsonl and rollouts.jsonl.

Both only grow. A checkpoint remembers how long they were; a resumed run cuts them back to that, so
that no step is recorded twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgrpo import parallel
from agentgrpo.run.atomic import read_lines, write_text
from agentgrpo.run.records import rollout_record
from agentgrpo.run.trackers import Tracker
from agentgrpo.types import Group, Metrics

FILES = ("metrics.jsonl", "rollouts.jsonl")


class RunLog:
    """Appends to a run's records; on ranks other than the first, writes nothing.

    Args:
        out_dir: created if missing.
        trackers: told every line of metrics.jsonl too.
    """

    def __init__(self, out_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._out_dir = out_dir
        self._trackers = trackers
        out_dir.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, **areas: Metrics) -> None:
        """One line of metrics.jsonl: the step and `area/name: value` for all."""
        line: dict[str, float] = {"step": step}
        for area, metrics in areas.items():
            line.update({f"{area}/{name}": value for name, value in metrics.items()})
        self._append("metrics.jsonl", [line])
        numbers = {name: value for name, value in line.items() if name != "step"}
        for tracker in self._trackers:
            tracker.write(step, numbers)

    def solved(self) -> dict[int, float]:
        """The share of held-out tasks solved, by step, as recorded; empty on other ranks."""
        if parallel.rank() > 0:
            return {}
        rows = read_lines(self._out_dir / "metrics.jsonl")
        return {row["step"]: row["eval/solved"] for row in rows if "eval/solved" in row}

    def close(self) -> None:
        """Let the trackers finish."""
        for tracker in self._trackers:
            tracker.close()

    def rollouts(self, step: int, groups: Sequence[Group], *, split: str = "train") -> None:
        """One line of rollouts.jsonl per rollout; `split` is "train" or "heldout"."""
        self._append(
            "rollouts.jsonl",
            [
                {"step": step, "split": split, "group": g, "index": i, **rollout_record(rollout)}
                for g, group in enumerate(groups)
                for i, rollout in enumerate(group.rollouts)
            ],
        )

    def describe(self, **record: Any) -> None:
        """Write run.json: the resolved config, what was chosen, and the versions."""
        if parallel.rank() > 0:
            return
        write_text(self._out_dir / "run.json", json.dumps(record, indent=1, default=str) + "\n")

    def offsets(self) -> dict[str, int]:
        """The files' lengths in bytes, after all of it has reached the disk."""
        lengths = {}
        for name in FILES:
            path = self._out_dir / name
            if path.exists():
                with path.open("a") as file:
                    os.fsync(file.fileno())
                lengths[name] = path.stat().st_size
        return lengths

    def cut_back(self, offsets: dict[str, int]) -> None:
        """Drop what was written after `offsets` were taken.

        Raises:
            ValueError: a record is shorter than it was then, so the run's history is incomplete.
        """
        if parallel.rank() > 0:
            return
        for name in FILES:
            path, kept = self._out_dir / name, offsets.get(name, 0)
            size = path.stat().st_size if path.exists() else 0
            if size < kept:
                raise ValueError(f"{path}: {size} bytes, but the checkpoint's record had {kept}")
            if path.exists():
                os.truncate(path, kept)

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        if parallel.rank() > 0:
            return
        with (self._out_dir / name).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
