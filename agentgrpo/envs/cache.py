"""Answers that were had elsewhere, kept in an SQLite file that runs and processes share."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from agentgrpo.actions import InfrastructureError

Answer = TypeVar("Answer")
BUSY_S = 60.0
"""How long a file may be locked by other processes."""


class DiskCache:
    """Answers by what was asked.

    The first answer that is kept is everybody's, also of who asked at the same time: whoever plays
    the same rollouts again is told the same. Only answers are kept, never that there was none.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(
                path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers (asked TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"cache: {path}: {error}") from error

    def get(self, asked: Any, answer: Callable[[], Answer]) -> Answer:
        """The answer that is kept; if there is none, the one that is had now, then kept."""
        key = json.dumps(asked, sort_keys=True)
        told = self._told(key)
        if told is None:
            new = json.dumps(answer())
            self._execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", key, new)
            told = self._told(key) or new
        kept: Answer = json.loads(told)
        return kept

    def _told(self, key: str) -> str | None:
        rows = self._execute("SELECT answer FROM answers WHERE asked = ?", key)
        return rows[0][0] if rows else None

    def _execute(self, statement: str, *values: str) -> list[Any]:
        try:
            with self._lock:
                return self._file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise InfrastructureError(f"cache {self._path}: {error}") from error

    def close(self) -> None:
        self._file.close()
