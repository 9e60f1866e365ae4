"""Read files with errors that name them, and keep checksums of a folder's files.

Every failure to read is a ValueError or an OSError whose message begins with the path. Nothing here
accesses the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

CHECKSUMS = "SHA256SUMS"
"""One line per file of a folder, as for `sha256sum -c`, and one with the hash of these lines."""


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a local path, not the name of a hub model.

    >>> [looks_like_path(n) for n in ("./a", "~/a", "a/b/c", "a/b.gguf", "a/", "a/b", "a/b-1.5B")]
    [True, True, True, True, True, False, False]
    """
    return (
        name.startswith(("/", ".", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or Path(name).suffix.lower() in SUFFIXES
    )


SUFFIXES = {
    *(".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".zip", ".tar", ".gz", ".py"),
    *(".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".txt", ".toml", ".yaml", ".yml"),
}
"""File suffixes. The part after the last dot of "Qwen2.5-0.5B" is not one."""


def not_found(path: Path) -> str:
    """The message for a missing file; for a relative path with the current directory."""
    return f"{path}: no such file or directory" + f" in {Path.cwd()}" * (not path.is_absolute())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading; an OSError or ValueError in the context names the file."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise type(error)(format_os_error(error, path)) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        message = str(error)
        raise ValueError(
            message if message.startswith(str(path)) else f"{path}: {message}"
        ) from error


def format_os_error(error: OSError, path: Path | None = None) -> str:
    """One line for an OSError, with the file."""
    name = path or error.filename
    if error.strerror is None or name is None:
        return str(error)
    if path is not None and isinstance(error, FileNotFoundError):
        return not_found(path)
    return f"{name}: {error.strerror[0].lower()}{error.strerror[1:]}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError raised in the context; Linux does not name it."""
    try:
        yield
    except OSError as error:
        raise type(error)(format_os_error(error, path)) from error


def require_output(path: Path) -> None:
    """Check that a file can be written at `--output`, before the work that produces it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--output {path}: expected a file in an existing directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--output {path}: no write permission")


def read_text(path: Path) -> str:
    """The text of a file; errors as in opened()."""
    with opened(path) as file:
        return file.read().decode("utf-8-sig")


def from_json(text: str | bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text; ValueError("not JSON: ..."). `unique`: also if a key repeats."""
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
        reason = _nested(error) if text.strip() else "it is empty"
        raise ValueError(f"not JSON: {reason}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError(f"a key appears twice in {[key for key, _ in pairs]!r:.200}")
    return table


def read_json(path: Path, *, unique: bool = False) -> Any:
    """The value of a JSON file; errors as in opened(), `unique` as in from_json()."""
    text = read_text(path)
    try:
        return from_json(text, unique=unique)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_table(path: Path) -> dict[str, Any]:
    """The object of a JSON file; errors as in opened()."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file; errors as in opened()."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits raises a plain ValueError
        raise ValueError(f"{path}: not valid TOML: {_nested(error)}") from None


def _nested(error: Exception) -> object:
    return "nested too deeply" if isinstance(error, RecursionError) else error


# -- checksums -------------------------------------------------------------------------------------


def write_checksums(folder: Path) -> None:
    """Flush all files of a folder to disk and write their checksums next to them.

    The files are hashed by other threads while they are flushed.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        sums = threads.map(sha256_of, paths)
        for path in paths:
            _flush(path)
    lines = [f"{n}  {p.relative_to(folder)}\n" for n, p in zip(sums, paths, strict=True)]
    path = folder / CHECKSUMS
    path.write_text("".join([*lines, f"# {_hash_of_lines(lines)}\n"]))
    _flush(path)
    flush_folder(folder)


def verify_checksums(folder: Path, *, foreign_ok: bool = False) -> None:
    """Check a folder's files against its checksums, if it has any.

    `foreign_ok`: ignore checksums that somebody else published with a model.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return
    *lines, last = read_text(path).splitlines(keepends=True) or [""]
    if foreign_ok and not last.startswith("# "):
        return
    if last != f"# {_hash_of_lines(lines)}\n":
        raise ValueError(f"{path}: is not as it was written: a line of it was changed or is gone")
    sums, names = zip(*(line.rstrip("\n").split("  ", 1) for line in lines), strict=True)
    files = [folder / name for name in names]
    if missing := [file for file in files if not file.exists()]:
        raise ValueError(f"{missing[0]}: is gone, and {path} lists it")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for file, expected, actual in zip(files, sums, threads.map(sha256_of, files), strict=True):
            if actual != expected:
                raise ValueError(
                    f"{file}: is not as it was written: expected SHA-256 {expected[:12]}... (from "
                    f"{path}), got {actual[:12]}...: the disk, a copy or a user changed it"
                )


def _hash_of_lines(lines: list[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal; errors as in opened()."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def expanded(path: str) -> str:
    """Expand "~"; a shell does not do so in `out_dir=~/runs`."""
    return os.path.expanduser(path)
