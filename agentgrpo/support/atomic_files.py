"""Write files that are complete or absent, and lines that are on disk when the call returns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentgrpo.support.files import from_json, opened, writing


def write_text(path: Path, text: str) -> None:
    """Write a temporary file, flush it to disk, then rename it."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path), partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write a JSON-lines file atomically."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path | str) -> list[Any]:
    """The rows of a JSON-lines file; errors as in numbered_rows()."""
    return [row for _, row in numbered_rows(path)]


def numbered_rows(
    path: Path | str, *, growing: bool = False, unique: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, row) of a JSON-lines file; blank lines are skipped.

    `growing`: a last line without a newline is still being written, and is skipped. `unique`: as in
    from_json().
    """
    with opened(Path(path)) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip() or (growing and not line.endswith(b"\n")):
                continue
            try:
                row = from_json(line, unique=unique)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            yield number, row


def append_lines(path: Path, rows: Iterable[Any]) -> None:
    """Append rows to a JSON-lines file; they are on disk when this returns."""
    with writing(path), path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def complete_lines(path: Path) -> list[bytes]:
    """The complete lines of a file of append_lines(); an incomplete last line is truncated."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    os.truncate(path, sum(len(line) + 1 for line in lines))
    return lines
