"""Files that are read whole, with errors that name them, and checksums of a folder's files.

Whatever cannot be read is a ValueError or an OSError whose message begins with the path. Nothing
here asks a hub.
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
"""A line for each file of a folder, as `sha256sum -c` reads them, and one for these lines."""


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a place on this machine, and is no name of a hub's.

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
"""Of files; what follows the last dot of "Qwen2.5-0.5B" is none."""


def not_found(path: Path) -> str:
    """That there is no such file or directory; of a relative path also where it was looked for."""
    return f"{path}: no such file or directory" + f" in {Path.cwd()}" * (not path.is_absolute())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A file, to be read; an OSError or ValueError of the block names it."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise type(error)(format_os_error(error, path)) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        said = str(error)
        raise ValueError(said if said.startswith(str(path)) else f"{path}: {said}") from error


def format_os_error(error: OSError, path: Path | None = None) -> str:
    """What stopped the machine, with the file."""
    name = path or error.filename
    if error.strerror is None or name is None:
        return str(error)
    if path is not None and isinstance(error, FileNotFoundError):
        return not_found(path)
    return f"{name}: {error.strerror[0].lower()}{error.strerror[1:]}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the file in what goes wrong while it is written; Linux does not."""
    try:
        yield
    except OSError as error:
        raise type(error)(format_os_error(error, path)) from error


def require_output(path: Path) -> None:
    """That a file can be written at `--output`, before the work that makes it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--output {path}: expected a file in a directory that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--output {path}: it cannot be written to")


def read_text(path: Path) -> str:
    """A text file's text; errors as of opened()."""
    with opened(path) as file:
        return file.read().decode("utf-8-sig")


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
        said = _nested(error) if text.strip() else "it is empty"
        raise ValueError(f"not JSON: {said}") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file; errors as of opened()."""
    text = read_text(path)
    try:
        return from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_table(path: Path) -> dict[str, Any]:
    """The object of a JSON file; errors as of opened()."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file; errors as of opened()."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # thousands of digits are no TOMLDecodeError
        raise ValueError(f"{path}: not valid TOML: {_nested(error)}") from None


def _nested(error: Exception) -> object:
    return "nested too deeply" if isinstance(error, RecursionError) else error


# -- checksums -------------------------------------------------------------------------------------


def write_checksums(folder: Path) -> None:
    """Bring all of a folder's files to the disk, and write what they hold, as checksums, beside.

    Files are hashed beside one another while they are written to the disk.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        sums = threads.map(sha256_of, paths)
        for path in paths:
            _flush(path)
    lines = [f"{n}  {p.relative_to(folder)}\n" for n, p in zip(sums, paths, strict=True)]
    path = folder / CHECKSUMS
    path.write_text("".join([*lines, f"# {_of_lines(lines)}\n"]))
    _flush(path)
    flush_folder(folder)


def verify_checksums(folder: Path, *, ours: bool = True) -> None:
    """That a folder's files hold what was written, where there are checksums that say what that is.

    Not `ours`: those that somebody else has published with a model are not read.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return
    *lines, last = read_text(path).splitlines(keepends=True) or [""]
    if not ours and not last.startswith("# "):
        return
    if last != f"# {_of_lines(lines)}\n":
        raise ValueError(f"{path}: is not as it was written: a line of it was changed or is gone")
    sums, names = zip(*(line.rstrip("\n").split("  ", 1) for line in lines), strict=True)
    files = [folder / name for name in names]
    if gone := [file for file in files if not file.exists()]:
        raise ValueError(f"{gone[0]}: is gone, and {path} lists it")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for file, wanted, found in zip(files, sums, threads.map(sha256_of, files), strict=True):
            if found != wanted:
                raise ValueError(
                    f"{file}: is not as it was written: its SHA-256 is {found[:12]}..., {path} "
                    f"says {wanted[:12]}...: the disk or a copy changed it, or somebody did"
                )


def _of_lines(lines: list[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal; errors as of opened()."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def expanded(path: str) -> str:
    """A path with its "~" being the home directory, as no shell makes of `out_dir=~/runs`."""
    return os.path.expanduser(path)
