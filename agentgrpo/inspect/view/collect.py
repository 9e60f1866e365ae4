"""Converts a run's records to the index and token chunks of the page.

The page reads the index (tasks, rewards, metrics) when it opens, and unpacks the chunk with the
tokens of a step when one of its rollouts is shown. A chunk stores segments with equal tokens, such
as a group's prompt, once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.inspect.view.vocabulary import Vocabulary, find_tokenizer
from agentgrpo.records.metrics import HASHES
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.records.run_folder import flatten
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.support.files import read_table
from agentgrpo.types import Float32, Int32, Rollout, Segment

PROMPT, SAMPLED, GIVEN = range(3)
"""Origin of a segment: the task, the policy, the environment."""
STREAMS = ("logprobs", "learner_logprobs", "entropies")
"""Values per sampled token in nats, in a chunk's order; nan where not recorded. The first is a
field of a segment, the others are lists of a rollout with an entry for each segment of all rows."""
FIELDS = ("answer", "rewards", "reward", "advantage", "stats")
OPTIONAL_FIELDS = ("error", "parent", "forked_at", "treatment", "timings")
"""Stored only if not empty."""


@dataclass(slots=True)
class Chunk:
    """The tokens of one step and split."""

    ids: list[Int32] = field(default_factory=list)
    streams: dict[str, list[Float32]] = field(
        default_factory=lambda: {name: [] for name in STREAMS}
    )
    num_ids: int = 0
    num_sampled: int = 0
    _places: dict[bytes, int] = field(default_factory=dict)

    def place(self, ids: Int32) -> int:
        """The offset of these ids in the chunk; adds them on first use."""
        key = ids.tobytes()
        if key not in self._places:
            self._places[key] = self.num_ids
            self.ids.append(ids)
            self.num_ids += len(ids)
        return self._places[key]

    def add_streams(self, columns: dict[str, Float32 | None], length: int) -> int:
        """Append the values of a sampled segment, nan for None; returns their offset."""
        start = self.num_sampled
        for name, column in columns.items():
            missing = np.full(length, np.nan, np.float32)
            self.streams[name].append(missing if column is None else column)
        self.num_sampled += length
        return start

    def to_bytes(self) -> bytes:
        """The ids as int32, then the streams as float32, little-endian."""
        arrays: list[NDArray[Any]] = [*self.ids]
        for name in STREAMS:
            arrays += [_rounded(column) for column in self.streams[name]]
        return b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays)


@dataclass(slots=True)
class RunData:
    """A run in the format of the page."""

    index: dict[str, Any]
    chunks: list[bytes]


def read_run(folder: Path, name: str | None = None, *, rollouts: bool = True) -> RunData:
    """Read a run's folder."""
    metrics, records = folder / "metrics.jsonl", folder / "rollouts.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{folder}: no metrics.jsonl, which a run's folder (out_dir) has")
    run_json = folder / "run.json"
    table = read_table(run_json) if run_json.is_file() else {}
    columns = _Columns()
    if rollouts and records.is_file():
        for number, row in _lines(records):
            try:
                columns.add(row, read_rollout(row))
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"{records}:{number}: not a rollout: {error!r}") from error
    metrics_rows = [
        {name: value for name, value in row.items() if name not in HASHES}
        for _, row in _lines(metrics)
    ]
    facts = {
        "config": flatten(table.get("config", {})),
        "facts": flatten({k: v for k, v in table.items() if k != "config"}),
        "metrics": metrics_rows,
    }
    tokenizer = find_tokenizer(tokenizer_places(folder, table))
    return columns.data(name or folder.resolve().name, facts, Vocabulary(tokenizer))


class _Columns:
    """Collects rollouts."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[int, str], Chunk] = {}
        self.used: set[int] = set()
        self._recorded: set[str] = set()
        self._tasks: dict[str, int] = {}
        self._task_rows: list[Any] = []
        self._rollouts: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any], rollout: Rollout) -> None:
        place = row["step"], row["split"]
        chunk = self.chunks.setdefault(place, Chunk())
        segments = [
            self._segment(chunk, rollout, number, segment, first=segment is part[0])
            for number, (part, segment) in enumerate(
                (part, segment) for part in rollout.rows for segment in part
            )
        ]
        optional = {name: getattr(rollout, name) for name in OPTIONAL_FIELDS}
        optional["spans"] = [[s.start, s.end, s.name, s.value] for s in rollout.span_rewards]
        optional["rows"] = _rows(rollout)
        self._rollouts.append(
            {name: row[name] for name in ("step", "split", "group", "index")}
            | {name: getattr(rollout, name) for name in FIELDS}
            | {"chunk": list(self.chunks).index(place), "task": self._task(row["task"])}
            | {"status": str(rollout.status), "segments": segments}
            | {name: value for name, value in optional.items() if value not in (None, [])}
        )

    def data(self, name: str, facts: Mapping[str, Any], vocabulary: Vocabulary) -> RunData:
        ids = sorted(self.used)
        index = {
            "name": name,
            **facts,
            "tokenizer": vocabulary.known,
            "vocabulary": {
                "ids": ids,
                "shown": [vocabulary.shown(token) for token in ids],
                "special": vocabulary.special(ids),
            },
            "tasks": self._task_rows,
            "rollouts": self._rollouts,
            "recorded": sorted(self._recorded),
            "chunks": [[chunk.num_ids, chunk.num_sampled] for chunk in self.chunks.values()],
        }
        return RunData(index, [chunk.to_bytes() for chunk in self.chunks.values()])

    def _task(self, task: dict[str, Any]) -> int:
        key = json.dumps(task, sort_keys=True)
        if key not in self._tasks:
            self._tasks[key] = len(self._task_rows)
            self._task_rows.append(task)
        return self._tasks[key]

    def _segment(
        self, chunk: Chunk, rollout: Rollout, number: int, segment: Segment, *, first: bool
    ) -> list[float | None]:
        """[origin, offset of ids, tokens, offset in streams or -1, own advantage or None]."""
        ids = segment.token_ids
        self.used.update(np.unique(ids).tolist())
        advantages = rollout.segment_advantages
        advantage = None if advantages is None else advantages[number]
        if not segment.sampled:
            origin = PROMPT if first else GIVEN
            return [origin, chunk.place(ids), len(ids), -1, advantage]
        streams = {"logprobs": segment.logprobs}
        for name in STREAMS[1:]:
            column = getattr(rollout, name)
            streams[name] = None if column is None else column[number]
        self._recorded.update(
            name
            for name, values in streams.items()
            if values is not None and not np.isnan(values).all()
        )
        start = chunk.add_streams(streams, len(ids))
        return [SAMPLED, chunk.place(ids), len(ids), start, advantage]


def _rows(rollout: Rollout) -> list[list[Any]]:
    """[number of segments, turns, parent row or -1, shared tokens] of each row.

    The parent is the row with an earlier first turn that shares the longest prefix with this row's
    prompt. [] for a single row, or if turns are not recorded.
    """
    turns = [
        [n for n, t in enumerate(rollout.turns) if t.row == i] for i in range(len(rollout.rows))
    ]
    if len(turns) == 1 or not all(turns):
        return []
    ids = [np.concatenate([segment.token_ids for segment in row]) for row in rollout.rows]
    described = []
    for number, row in enumerate(rollout.rows):
        earlier = [n for n in range(len(turns)) if turns[n][0] < turns[number][0]]
        prompt = row[0].token_ids
        shared, parent = max(((_common(prompt, ids[n]), n) for n in earlier), default=(0, -1))
        described.append([len(row), turns[number], parent if shared else -1, shared])
    return described


def _common(a: Int32, b: Int32) -> int:
    """The length of the common prefix."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _rounded(values: Float32) -> Float32:
    """Round to 11 significant bits (0.05 %), which halves the compressed size."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in numbered_rows(path, growing=True):
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected an object, got {type(row).__name__}")
        yield number, row


def tokenizer_places(folder: Path, run: dict[str, Any]) -> list[Path]:
    """Folders that may have the run's tokenizer: checkpoints first, which move with the run."""
    checkpoints = sorted((folder / "checkpoints").glob("step_*"), reverse=True)
    return [*checkpoints, *([Path(run["model"])] if "model" in run else [])]
