"""Reads tasks from JSON lines, Parquet, saved datasets and the Hugging Face Hub.

For the Hub, Hugging Face's environment variables apply: HF_HOME and HF_DATASETS_CACHE (location of
the cache), HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN. A dataset's own code is never run.

A row's question becomes the user message, or is a list of chat messages. The rest of the row
becomes the spec, with the answer under "answer" (data/cells.py). Errors name the file and the line
(or the row's number, from 1, in files without lines).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentgrpo.data.cells import MISSING, cell, messages_of, require_cell, require_plain
from agentgrpo.data.tasks import RowTasks
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.support.files import looks_like_path, not_found, opened, read_json, read_text
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
    """Read the tasks of a file, a saved dataset's directory or a Hub dataset.

    The options are those of DataConfig; `drop_last` is drop_last_message. `answered`: every row
    must have an answer. Otherwise the environment, or a reward that uses other columns, judges.
    """
    required = [question, *([answer] if answered else []), *([] if id is None else [id])]
    used = {name for path in [*required, answer] for name in [path, *re.findall(r"[^{}.]+", path)]}
    kept_columns = None if columns is None else {*used, *columns}
    if is_from_hub(str(path)):
        name = source = f"{path} {split}"
        place = name
        records = hub_rows(str(path), subset=subset, split=split, columns=kept_columns)
        rows: Rows = enumerate(records, start=1)
    else:
        place = str(path)
        path = Path(path)
        name, rows, source = path.name, _rows_in(path), named(path)
    tasks: dict[str, Task] = {}
    for number, value in rows:
        try:
            row = _row(value, kept_columns)
            raw_question, *others = [require_cell(row, column) for column in required]
            task_id = f"{name}:{number}" if id is None else others[-1]
            if not isinstance(task_id, str | int | float) or task_id == "":
                raise ValueError(
                    f"data.id = {id!r}: expected text or a number, got {task_id!r:.80}"
                )
            task_id = str(task_id)
            if task_id in tasks:
                raise ValueError(f"the id {task_id!r} appears twice")
            messages = [
                m.for_template() for m in messages_of(raw_question, question, drop_last=drop_last)
            ]
            if answered:
                require_plain(others[0], answer)
            tasks[task_id] = Task(
                id=task_id,
                messages=tuple(messages),
                spec=_spec(row, question, answer),
                is_text=messages == [{"role": "user", "content": raw_question}],
            )
        except ValueError as error:
            raise ValueError(f"{place}:{number}: {error}") from None
    if not tasks:
        raise ValueError(f"{path}: no rows; expected one JSON object per line")
    return RowTasks(list(tasks.values()), source=source, seed=seed)


Rows = Iterable[tuple[int, Any]]
"""Rows with their number in the file or dataset, from 1."""


def _rows_in(path: Path) -> Rows:
    if not path.exists():
        raise FileNotFoundError(not_found(path))
    if path.is_dir():
        return enumerate(_saved_dataset(path), start=1)
    if path.suffix == ".parquet":
        return enumerate(_parquet(path), start=1)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _json_rows(path)
    raise ValueError(
        f"{path}: expected a .jsonl or .parquet file, or a saved dataset's directory. Convert "
        'others, such as CSV by datasets.Dataset.from_csv("a.csv").to_json("a.jsonl")'
    )


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of JSON lines, or of a .json file that is one list."""
    try:
        if path.suffix == ".json" and read_text(path).lstrip()[:1] == "[":
            yield from enumerate(read_json(path, unique=True), start=1)
        else:
            yield from numbered_rows(path, unique=True)
    except ValueError as error:
        raise ValueError(f"{error}; expected one JSON object per line, in UTF-8") from None


def _parquet(path: Path) -> Iterable[Any]:
    parquet = import_optional("pyarrow.parquet", str(path))
    with opened(path):
        pass
    try:
        rows: Iterable[Any] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from None
    return rows


def _saved_dataset(path: Path) -> Iterable[Any]:
    state = path / "state.json"
    if not state.is_file():
        splits = sorted(entry.parent.name for entry in path.glob("*/state.json"))
        hint = f"; use one of its splits: {', '.join(splits)}" if splits else ""
        raise ValueError(f"{path}: not a dataset written by save_to_disk{hint}")
    datasets = import_optional("datasets", str(path))
    try:
        rows: Iterable[Any] = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a dataset written by save_to_disk: {error!r}") from error
    return rows


def is_from_hub(name: str) -> bool:
    """Whether the name is `owner/name`, does not look like a path, and does not exist as one."""
    return name.count("/") == 1 and not looks_like_path(name) and not Path(name).exists()


def hub_rows(
    name: str, *, subset: str | None, split: str, columns: Collection[str] | None
) -> Iterator[dict[str, Any]]:
    """The rows of the Hub dataset `owner/name`, limited to those of `columns` that it has.

    `split` has the syntax of `datasets`: "train", "train[:1000]", "train+validation".
    """
    datasets = import_optional(
        "datasets", f"{name!r} is not a local file, and reading it from the Hub requires datasets"
    )
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ValueError(
            f"{name!r} is not a local file, and the package 'datasets' {datasets.__version__} "
            "would run a Hub dataset's own code. Run: pip install 'datasets>=4'"
        )
    try:
        dataset = datasets.load_dataset(name, subset, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"dataset {name!r}, subset {subset!r}, split {split!r}: there is no local file or "
            f"directory of that name, and the Hub failed: {type(error).__name__}: {error}"
        ) from error
    if columns is not None:
        dataset = dataset.select_columns([c for c in dataset.column_names if c in columns])
    yield from dataset


def named(path: Path) -> str:
    """The name of a file or saved dataset with the SHA-256 of its content."""
    files = [path] if path.is_file() else sorted(path.glob("*.arrow"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return f"{path.name} (SHA-256 {digest.hexdigest()})"


def _row(value: Any, columns: Collection[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return {
        column: _as_json(column, cell)
        for column, cell in value.items()
        if columns is None or column in columns
    }


def _as_json(column: str, value: Any) -> Any:
    """Convert a cell of Arrow's types to JSON, for records: times and decimals become text."""

    def text(value: Any) -> str:
        if isinstance(value, bytes):
            raise ValueError(f"column {column!r}: bytes cannot be in a task (data.columns)")
        return str(value)

    return value if isinstance(value, str) else json.loads(json.dumps(value, default=text))


def _spec(row: dict[str, Any], question: str, answer: str) -> dict[str, Any]:
    spec = {column: value for column, value in row.items() if column != question}
    expected = cell(row, answer)
    return spec if expected is MISSING else {**spec, "answer": expected}
