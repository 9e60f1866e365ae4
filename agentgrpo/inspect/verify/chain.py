"""Each line of a record names the line before it by hash: what is missing, moved or edited shows.

Line n of metrics.jsonl or rollouts.jsonl has `previous_hash`: the BLAKE2b-128 of line n - 1 as it
stands on disk, its end included; of no bytes for the first. A line of metrics.jsonl also has
`rollouts_hash`, that of the last line that rollouts.jsonl then had, and run.json has the seal of
both files: how many bytes they had after the last line of metrics.jsonl, and the last line's hash.

There is no key: whoever writes all of it again, from the changed line to run.json, leaves no trace.
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
    """It lies before the seal."""
    number: int
    """From 1."""


class Chain:
    """A file of records, read line by line as bytes; `seal` is its `bytes` and `hash` in run.json.

    ValueError (while read): a whole line is not a JSON object; names file and line.
    """

    def __init__(self, path: Path, seal: Mapping[str, Any]) -> None:
        self.path, self._seal = path, seal
        self.faults: list[str] = []
        """Complete once all is read."""
        self.cut = False
        """The last line has no end, and is left out: a process was killed while it wrote it."""
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")

    def __iter__(self) -> Iterator[Line]:
        """Each line, in order."""
        before, size = _hash(b""), 0
        at_seal = {0: before}
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.cut = True
                    break
                row = _object(self.path, number, line)
                if row.get("previous_hash") != before:
                    said = f"{self.path.name}:{number}: does not follow the line before it"
                    self.faults.append(said)
                before, size = _hash(line), size + len(line)
                if size == self._seal["bytes"]:
                    at_seal[size] = before
                yield Line(row, before, size <= self._seal["bytes"], number)
        if at_seal.get(self._seal["bytes"]) != self._seal["hash"]:
            self.faults.append(
                f"{self.path.name}: its first {self._seal['bytes']} bytes do not end with the line "
                "that run.json names as the last one"
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
