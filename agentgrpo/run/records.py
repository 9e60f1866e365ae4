"""A rollout on disk: one JSON line, or one row of a Parquet file; both read back exactly.

`agentgrpo export RUN ROLLOUTS.parquet` writes rollouts.jsonl of a run as Parquet.

float32 numbers are written as the shortest decimals that read back as the same bits. What a field
of Rollout becomes follows from its type, so a new field is recorded without a line here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from agentgrpo.config.arguments import parser_of
from agentgrpo.extras import needed
from agentgrpo.run.atomic import cut, numbered_rows
from agentgrpo.types import Rollout, Task

PLACE = ("step", "split", "group", "index", "previous_hash", "flywheel")
"""Where in its run a rollout was played (or how it was made), beside its fields."""


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """A rollout as JSON values; read_rollout() gives it back exactly."""
    recorded = (f.name for f in fields(Rollout) if f.metadata.get("recorded", True))
    return {name: plain(getattr(rollout, name)) for name in recorded}


def require_recordable(task: Task) -> None:
    """That rollouts of the task can be written down.

    Raises:
        ValueError: its spec holds what JSON does not, or would give back as something else; names
            the task and the entry.
    """
    for key, value in task.spec.items():
        try:
            json.dumps(made := plain({key: value}))
            for name in _keys(made):
                if not isinstance(name, str):
                    raise TypeError(f"the key {name!r} is no text")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"task {task.id!r}: spec[{key!r}] cannot be recorded: {error}"
            ) from error


def read_rollout(record: dict[str, Any]) -> Rollout:
    """The rollout that rollout_record() wrote; fields that it lacks have their default.

    Raises:
        ValueError: a field has another form than its type; names it.
    """
    own = {key: value for key, value in record.items() if key not in PLACE}
    rollout: Rollout = _made(Rollout, own, "rollout")
    return rollout


def read_rollouts(path: Path) -> Iterator[tuple[dict[str, Any], Rollout]]:
    """(place, rollout) of each line of a rollouts.jsonl; the last is left out while half written.

    Raises:
        ValueError: a line is not a record; names file and line.
    """
    for number, record in numbered_rows(path, growing=True):
        try:
            place = {key: record[key] for key in PLACE if key in record}
            yield place, read_rollout(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error


def write_parquet(path: Path, rollouts: Iterable[tuple[dict[str, Any], Rollout]]) -> None:
    """Write (place, rollout) pairs as a Parquet file, one row each.

    Columns: the place, `status`, `reward`, `advantage`; `token_ids`, `mask` and `logprobs` of all
    rows (logprobs null where not sampled), `segment_lengths`, `row_lengths` (in segments); and
    `record`: all else, as JSON.

    Raises:
        ValueError: pyarrow is not installed.
    """
    pa, pq = needed("pyarrow", str(path)), needed("pyarrow.parquet", str(path))

    columns: dict[str, list[Any]] = {}
    for place, rollout in rollouts:
        for name, value in {**place, **_columns(rollout)}.items():
            columns.setdefault(name, []).append(value)
    kinds = {
        "token_ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.uint8()),
        "logprobs": pa.list_(pa.float32()),
        "segment_lengths": pa.list_(pa.int32()),
        "row_lengths": pa.list_(pa.int32()),
    }
    arrays = {name: pa.array(values, kinds.get(name)) for name, values in columns.items()}
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.table(arrays), partial, compression="zstd")
    partial.replace(path)


def read_parquet(path: Path) -> Iterator[tuple[dict[str, Any], Rollout]]:
    """The (place, rollout) pairs that write_parquet() wrote."""
    for batch in needed("pyarrow.parquet", str(path)).ParquetFile(path).iter_batches(256):
        for row in batch.to_pylist():
            place = {key: row[key] for key in PLACE if key in row}
            yield place, read_rollout({**json.loads(row["record"]), **_segments(row)})


def _columns(rollout: Rollout) -> dict[str, Any]:
    record = rollout_record(rollout)
    del record["segments"], record["closed_rows"]
    segments = [segment for row in rollout.rows for segment in row]
    ids = np.concatenate([s.token_ids for s in segments] or [np.empty(0, np.int32)])
    logprobs: list[Any] = []
    for segment in segments:
        size = len(segment.token_ids)
        logprobs += [None] * size if segment.logprobs is None else segment.logprobs.tolist()
    lengths = [len(segment.token_ids) for segment in segments]
    return {
        "status": str(rollout.status),
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "token_ids": ids,
        "mask": np.repeat(np.array([s.sampled for s in segments], np.uint8), lengths),
        "logprobs": logprobs,
        "segment_lengths": lengths,
        "row_lengths": [len(row) for row in rollout.rows],
        "sampled": [segment.sampled for segment in segments],
        "record": json.dumps(record),
    }


def _segments(row: dict[str, Any]) -> dict[str, Any]:
    """The `segments` and `closed_rows` of a record, from a Parquet row."""
    bounds = np.cumsum([0, *row["segment_lengths"]]).tolist()
    segments = [
        {
            "token_ids": row["token_ids"][start:end],
            "logprobs": row["logprobs"][start:end] if sampled else None,
        }
        for start, end, sampled in zip(bounds, bounds[1:], row["sampled"], strict=False)
    ]
    ends = np.cumsum([0, *row["row_lengths"]]).tolist()
    *closed, last = [segments[start:end] for start, end in pairwise(ends)]
    return {"segments": last, "closed_rows": closed}


# --- values and their types ---


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:
            return [float(str(number)) for number in value]
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return [plain(item) for item in value]
    return dict(value) if hasattr(value, "items") else value


def _keys(value: Any) -> Iterator[Any]:
    """Of all dicts in what plain() made."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _keys(item)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _made(kind: Any, value: Any, name: str) -> Any:
    """The value of type `kind` that plain() made JSON of."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        options = [option for option in inner if option is not NoneType]
        return None if value is None else _made(options[0], value, name)
    if origin is np.ndarray:
        (dtype,) = get_args(inner[1])
        return np.array(value, dtype)
    if origin is list:
        return [_made(inner[0], item, f"{name}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        return tuple(value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        try:
            return kind(**{key: _made(hints[key], item, key) for key, item in value.items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name}: not a {kind.__name__}: {error}") from error
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    return value


def main(arguments: list[str]) -> int:
    """Parse the command line, convert the rollouts. Returns the exit status."""
    about = "Write the rollouts of a run as a Parquet file, one row each (docs/rollouts.md)."
    parser = parser_of("export", about)
    parser.add_argument("run", type=Path, help="a run's folder: the config's out_dir")
    parser.add_argument("output", type=Path, help="the file to write, ROLLOUTS.parquet")
    args = parser.parse_args(arguments)
    source = args.run / "rollouts.jsonl"
    try:
        write_parquet(args.output, read_rollouts(source))
        if said := cut(source):
            print(said)  # noqa: T201
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0
