"""Tasks from rows: of JSON lines, Parquet, datasets that `save_to_disk` wrote, and a hub's.

Of a hub's dataset Hugging Face's own variables hold: HF_HOME and HF_DATASETS_CACHE (where the cache
is), HF_HUB_OFFLINE (ask no hub), HF_ENDPOINT and HF_TOKEN. No code of a dataset is run.

A row's question becomes the user's message, or is a list of chat messages; the whole row but the
question becomes the spec, with the answer under "answer" (data/cells.py). Whatever is wrong with a
row is said with its file and its line (a row's number, from 1, in files without lines).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentgrpo.data.cells import MISSING, cell, messages_of, require_cell, require_plain
from agentgrpo.data.tasks import RowTasks
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.support.files import looks_like_path, not_found, opened
from agentgrpo.support.optional_deps import import_optional
from agentgrpo.types import Task


def read_tasks(
    path: Path | str,
    *,
    question: str = "question",
    answer: str = "answer",
    answered: bool = True,
    drop_last: bool = False,
    id: str | None = None,
    columns: Sequence[str] | None = None,
    subset: str | None = None,
    split: str = "train",
    seed: int = 0,
) -> RowTasks:
    """The tasks of a file, of a dataset's directory or of a hub's dataset.

    The options are those of DataConfig, `drop_last` its drop_last_message. `answered`: every row
    must have an answer; else the environment knows what is right, or a reward that reads other
    columns.
    """
    needed = [question, *([answer] if answered else []), *([] if id is None else [id])]
    read = {name for path in [*needed, answer] for name in [path, *re.findall(r"[^{}.]+", path)]}
    kept = None if columns is None else {*read, *columns}
    if is_from_hub(str(path)):
        name = source = f"{path} {split}"
        rows = _numbered(name, hub_rows(str(path), subset=subset, split=split, columns=kept))
    else:
        path = Path(path)
        name, rows = path.name, _reader(path)(path)
        source = named(path)
    tasks: dict[str, Task] = {}
    for place, number, value in rows:
        try:
            row = _row(value, kept)
            asked, *others = [require_cell(row, column) for column in needed]
            own = f"{name}:{number}" if id is None else str(others[-1])
            if own in tasks:
                raise ValueError(f"the id {own!r} appears twice")
            messages = [m.shown() for m in messages_of(asked, question, drop_last=drop_last)]
            if answered:
                require_plain(others[0], answer)
            tasks[own] = Task(
                id=own,
                messages=tuple(messages),
                spec=_spec(row, question, answer),
                is_text=messages == [{"role": "user", "content": asked}],
            )
        except ValueError as error:
            raise ValueError(f"{place}:{number}: {error}") from None
    if not tasks:
        raise ValueError(f"{path}: no rows; expected one JSON object a line")
    return RowTasks(list(tasks.values()), source=source, seed=seed)


Rows = Iterator[tuple[Path | str, int, Any]]
"""The file or dataset a row lies in, its number there from 1, and the row."""


def _numbered(name: str, rows: Iterable[Any]) -> Rows:
    yield from ((name, number, row) for number, row in enumerate(rows, start=1))


def _reader(path: Path) -> Callable[[Path], Rows]:
    if not path.exists():
        raise FileNotFoundError(not_found(path))
    if path.is_dir():
        return _saved_dataset
    if path.suffix == ".parquet":
        return _parquet
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _json_lines
    raise ValueError(f"{path}: expected a .jsonl or .parquet file, or a saved dataset's directory")


def _json_lines(path: Path) -> Rows:
    yield from ((path, number, row) for number, row in numbered_rows(path))


def _parquet(path: Path) -> Rows:
    parquet = import_optional("pyarrow.parquet", str(path))
    with opened(path):
        pass
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from None
    yield from ((path, number, row) for number, row in enumerate(table.to_pylist(), start=1))


def _saved_dataset(path: Path) -> Rows:
    state = path / "state.json"
    if not state.is_file():
        splits = sorted(entry.parent.name for entry in path.glob("*/state.json"))
        hint = f"; it holds the splits {', '.join(splits)}: name one of them" if splits else ""
        raise ValueError(f"{path}: not a dataset that save_to_disk wrote{hint}")
    datasets = import_optional("datasets", str(path))
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a dataset that save_to_disk wrote: {error!r}") from error
    yield from ((path, number, row) for number, row in enumerate(found, start=1))


def is_from_hub(name: str) -> bool:
    """Whether it is `owner/name`, nothing that looks like a path, and nothing that is here."""
    return name.count("/") == 1 and not looks_like_path(name) and not Path(name).exists()


def hub_rows(
    name: str, *, subset: str | None, split: str, columns: Collection[str] | None
) -> Iterator[dict[str, Any]]:
    """The rows of a dataset, `owner/name`; what of `columns` it lacks is missing in all rows.

    `split` is as `datasets` reads it: "train", "train[:1000]", "train+validation".
    """
    datasets = import_optional(
        "datasets", f"{name!r} is no file here, and of a hub it is read by datasets"
    )
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ValueError(
            f"{name!r} is no file here, and the package 'datasets' {datasets.__version__} would "
            "run a dataset's own code; remedy: pip install 'datasets>=4'"
        )
    try:
        found = datasets.load_dataset(name, subset, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"dataset {name!r}, subset {subset!r}, split {split!r}: no file or directory here has "
            f"that name, and from the hub and its cache: {type(error).__name__}: {error}"
        ) from error
    if columns is not None:
        found = found.select_columns([c for c in found.column_names if c in columns])
    yield from found


def named(path: Path) -> str:
    """A file's or saved dataset's name, with the SHA-256 of what it holds."""
    files = [path] if path.is_file() else sorted(path.glob("*.arrow"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return f"{path.name} (SHA-256 {digest.hexdigest()})"


def _row(value: Any, kept: Collection[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    chosen = value if kept is None else {name: value[name] for name in value if name in kept}
    return {column: _as_json(column, value) for column, value in chosen.items()}


def _as_json(column: str, value: Any) -> Any:
    """What a cell of Arrow's types is in a record of a rollout: times and decimals are text."""

    def text(value: Any) -> str:
        if isinstance(value, bytes):
            raise ValueError(f"column {column!r}: bytes cannot be in a task (data.columns)")
        return str(value)

    return value if isinstance(value, str) else json.loads(json.dumps(value, default=text))


def _spec(row: dict[str, Any], question: str, answer: str) -> dict[str, Any]:
    spec = {column: value for column, value in row.items() if column != question}
    expected = cell(row, answer)
    return spec if expected is MISSING else {**spec, "answer": expected}
