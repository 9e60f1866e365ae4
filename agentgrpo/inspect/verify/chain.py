"""Reads records as a hash chain, which shows missing, moved and edited lines.

Line n of metrics.jsonl or rollouts.jsonl has `previous_hash`: the BLAKE2b-128 of line n - 1 on
disk, newline included; of no bytes for the first line. A line of metrics.jsonl also has
`rollouts_hash`, the hash of the last line of rollouts.jsonl at that time. run.json has the seal of
both files: their size in bytes after the last line of metrics.jsonl, and the last line's hash.

There is no key: rewriting everything from the changed line to run.json leaves no trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A line of a file of records."""

    row: dict[str, Any]
    hash: str
    sealed: bool
    """Whether it lies before the seal."""
    number: int
    """From 1."""


class Chain:
    """A file of records, read line by line as bytes; `seal` is its `bytes` and `hash` in run.json.

    Raises ValueError while it is read, with file and line, if a line is not a JSON object.
    """

    def __init__(self, path: Path, seal: Mapping[str, Any]) -> None:
        self.path, self._seal = path, seal
        self.faults: list[str] = []
        """Complete after the last line is read."""
        self.cut = False
        """The last line has no newline and is left out: a process was killed while writing it."""
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")

    def __iter__(self) -> Iterator[Line]:
        before, size = _hash(b""), 0
        at_seal = {0: before}
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.cut = True
                    break
                row = _object(self.path, number, line)
                if row.get("previous_hash") != before:
                    fault = (
                        f"{self.path.name}:{number}: previous_hash is not that of the line before"
                    )
                    self.faults.append(fault)
                before, size = _hash(line), size + len(line)
                if size == self._seal["bytes"]:
                    at_seal[size] = before
                yield Line(row, before, size <= self._seal["bytes"], number)
        if at_seal.get(self._seal["bytes"]) != self._seal["hash"]:
            self.faults.append(
                f"{self.path.name}: the line that ends at byte {self._seal['bytes']} is not the "
                "last one in run.json"
            )


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{path}:{number}: not a JSON object")
    return row


def _hash(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=16).hexdigest()
