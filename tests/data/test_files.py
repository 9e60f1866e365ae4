"""Tasks from files of three kinds, and from where data.train and data.heldout say."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgrpo.config import DataConfig
from agentgrpo.config.read import load_config
from agentgrpo.data.files import hub_rows, read_tasks
from agentgrpo.data.sources import heldout_tasks, training_tasks
from agentgrpo.data.tasks import RowTasks, normalised_question
from agentgrpo.records.rollouts import require_recordable
from agentgrpo.train import init
from agentgrpo.types import Task
from tests.data.hub_cache import put_in_cache

ROWS = [{"q": f"question {i}", "gold": i, "extra": {"n": [i]}, "key": f"k{i}"} for i in range(20)]
COLUMNS: Any = {"question": "q", "answer": "gold", "id": "key"}


@pytest.fixture(params=["jsonl", "parquet", "saved"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"rows.{request.param}"
    if request.param == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif request.param == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=3)
    return path


def test_all_file_formats_give_the_same_rows(rows: Path) -> None:
    tasks = read_tasks(rows, **COLUMNS)
    assert [t.id for t in tasks.rows] == [f"k{i}" for i in range(20)]
    assert tasks.rows[3] == Task(
        id="k3",
        messages=({"role": "user", "content": "question 3"},),
        spec={"gold": 3, "extra": {"n": [3]}, "key": "k3", "answer": 3},
        is_text=True,
    )


def test_invalid_row_names_file_and_number(rows: Path) -> None:
    with pytest.raises(ValueError, match=rf"{rows.name}:1: no column 'nope'; the row has \['ext"):
        read_tasks(rows, question="nope")
    assert read_tasks(rows, question="q", answered=False).rows[0].id == f"{rows.name}:1"


def test_arrow_types_become_json(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    when = datetime.datetime(2020, 1, 2, 3, 4)
    row = {"q": "a", "gold": 1, "when": when, "cost": Decimal("1.50"), "days": [when.date()]}
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), path)
    (given,) = read_tasks(path, question="q", answer="gold").rows
    expected = {"when": "2020-01-02 03:04:00", "cost": "1.50", "days": ["2020-01-02"]}
    assert given.spec == {"gold": 1, "answer": 1, **expected}
    require_recordable(given)
    pyarrow.parquet.write_table(pa.Table.from_pylist([{**row, "image": {"b": b"x"}}]), path)
    message = r"rows\.parquet:1: column 'image': bytes cannot be in a task"
    with pytest.raises(ValueError, match=message):
        read_tasks(path, question="q", answer="gold")


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (datetime.date(2020, 1, 2), ".* date"),
        (nested(100_000), ".* recursion"),
        (b"ab", ".* bytes"),
        ([{"a": {1: 2}}], "expected keys of type str, got 1"),
    ],
)
def test_unrecordable_spec_is_an_error(value: Any, message: str) -> None:
    given = Task(id="t", messages=(), spec={"fine": np.zeros(2), "odd": value})
    with pytest.raises(ValueError, match=rf"task 't': spec\['odd'\] cannot be recorded: {message}"):
        require_recordable(given)


ROW = '{"question": "a", "answer": 1}'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", f"[{ROW},\n {ROW}]", 2),
        ("a.json", f"{ROW}\n{ROW}\n", 2),
        ("a.jsonl", f"\ufeff{ROW}\r\n\r\n{ROW}", 2),
        ("a.jsonl", f"{ROW}\n{ROW},", r"a.jsonl:2: not JSON: .*one JSON object per line, in UTF-8"),
        ("a.json", "[1]", "a.json:1: expected a JSON object, got int"),
        ("a.json", f"[{ROW}", "a.json: not JSON"),
        (
            "a.jsonl",
            '{"question": "a", "answer": 1, "answer": 2}',
            "a key appears twice in .*'answ",
        ),
        ("a.jsonl", '{"question": "caf\udce9", "answer": 1}', "a.jsonl:1: not JSON: 'utf-8' codec"),
    ],
)
def test_json_files_as_people_have_them(
    tmp_path: Path, name: str, content: str, expected: int | str
) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    if isinstance(expected, int):
        ids = [f"{name}:{number}" for number in (1, 2 + ("\r" in content))]
        assert [task.id for task in read_tasks(tmp_path / name).rows] == ids
        return
    with pytest.raises(ValueError, match=expected):
        read_tasks(tmp_path / name)


def test_unsupported_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    (tmp_path / "dir" / "train").mkdir(parents=True)
    (tmp_path / "dir" / "train" / "state.json").write_text("{}")
    for name, message in (
        ("a.csv", r"a\.csv: expected a \.jsonl or \.parquet file.*from_csv"),
        ("bad.parquet", "not a Parquet file"),
        ("dir", "use one of its splits: train"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tasks(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        read_tasks(tmp_path / "nowhere.jsonl")


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{i}", "answer": i}) for i in range(20)))
    return str(path)


def test_heldout_auto_uses_the_training_source(jsonl: str) -> None:
    file = DataConfig(train=jsonl, num_heldout=6)
    held = [task.id for task in heldout_tasks(file)]
    said = file.model_copy(update={"heldout": "split"})
    assert held == [task.id for task in heldout_tasks(said)]
    assert len(training_tasks(file, seed=1).rows) == 14  # type: ignore[attr-defined]
    assert DataConfig(train="env").heldout_source == "env"
    assert DataConfig().heldout_source == "word_problems"
    assert DataConfig(train=jsonl, heldout="word_problems").heldout_source == "word_problems"


def test_split_is_reproducible_and_disjoint(jsonl: str) -> None:
    config = DataConfig(train=jsonl, heldout="split", num_heldout=6)
    held = {t.id for t in heldout_tasks(config)}
    train = training_tasks(config, seed=1)
    assert isinstance(train, RowTasks)
    assert len(held) == 6
    assert held.isdisjoint(t.id for t in train.rows)
    assert len(train) == 14
    assert held == {t.id for t in heldout_tasks(config)}
    with pytest.raises(ValueError, match=r"expected below 20, .* in rows\.jsonl .*, got 20"):
        heldout_tasks(config.model_copy(update={"num_heldout": 20}))


def rows_of(path: Path, *rows: dict[str, Any]) -> DataConfig:
    path.write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(train=str(path), heldout="split", num_heldout=4)


def test_heldout_questions_are_not_trained_on(tmp_path: Path) -> None:
    """Of 60 rows with 12 questions, some written with other space and capital letters."""
    said = [f"What is {i}+{i}?" for i in range(12)]
    rows = [{"question": q, "answer": i} for i, q in enumerate(said)] * 3
    rows += [{"question": f"  {q.upper()} ", "answer": 7} for q in said] * 2
    config = rows_of(tmp_path / "rows.jsonl", *rows)
    held, train = heldout_tasks(config), training_tasks(config, seed=1)
    assert isinstance(train, RowTasks)
    asked = {normalised_question(task) for task in held}
    assert len(asked) == len(held) == 4
    assert asked.isdisjoint(map(normalised_question, train.rows))
    assert (len(train), train.left_out) == (40, 16)


def test_tasks_with_equal_questions_are_split_by_their_rows(tmp_path: Path) -> None:
    rows = [{"question": "Play.", "answer": 1, "board": i // 2} for i in range(20)]
    config = rows_of(tmp_path / "rows.jsonl", *rows)
    held, train = heldout_tasks(config), training_tasks(config, seed=1)
    assert isinstance(train, RowTasks)
    boards = [task.spec["board"] for task in held]
    assert len(set(boards)) == 4
    assert not {task.spec["board"] for task in train.rows} & set(boards)
    assert (len(train), train.left_out) == (12, 4)


def test_rows_with_mixed_key_types_are_compared() -> None:
    play = ({"role": "user", "content": "Play."},)
    boards = [{1: i // 2, "turn": 0} if i % 2 else {"turn": 0, 1: i // 2} for i in range(20)]
    tasks = [Task(id=str(i), messages=play, spec={"board": b}) for i, b in enumerate(boards)]
    held, train = RowTasks(tasks, source="boards").split(4, seed=0)
    assert (len(held), len(train), train.left_out) == (4, 12, 4)


@pytest.mark.parametrize("key", ["train", "heldout"])
def test_unknown_source_suggests_the_nearest(key: str) -> None:
    given: Any = {key: "word_problem"}
    config = DataConfig(**given)
    give: Any = (
        (lambda: training_tasks(config, 0)) if key == "train" else (lambda: heldout_tasks(config))
    )
    with pytest.raises(
        ValueError, match=rf"data\.{key}: .*got 'word_problem'; did you mean word_problems\?"
    ):
        give()


def test_unused_answers_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "gold": 7}\n{"question": "b"}\n')
    config = DataConfig(train=str(path), heldout="word_problems", answer="gold")
    with pytest.raises(ValueError, match=r"rows.jsonl:2: no column 'gold'"):
        training_tasks(config, 0)
    specs = [task.spec for task in training_tasks(config, 0, answers=False).next(2)]
    assert sorted(map(len, specs)) == [0, 2]
    assert {"gold": 7, "answer": 7} in specs


def test_missing_file_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.train: .*nowhere\.jsonl"):
        training_tasks(DataConfig(train=str(tmp_path / "nowhere.jsonl")), 0)


def test_environment_without_tasks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.train: expected a file, .*no tasks.*got 'env'"):
        training_tasks(DataConfig(train="env"), 0, env=None)


@pytest.fixture
def at_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    put_in_cache(tmp_path / "home", "org/rows", "main", {"train": ROWS, "test": ROWS[:3]})
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    monkeypatch.chdir(tmp_path)


def hub(**settings: Any) -> DataConfig:
    named = {"train": "org/rows", "question": "q", "answer": "gold", "num_heldout": 4}
    return DataConfig(**{**named, **settings})


@pytest.mark.slow
def test_hub_dataset_is_read_by_its_name(at_hub: None, tmp_path: Path) -> None:
    config = hub(split="train[:10]", subset="main", heldout="org/rows", columns=["key"])
    first, *_ = trained = training_tasks(config, 0).rows  # type: ignore[attr-defined]
    assert (len(trained), first.spec) == (10, {"gold": 0, "key": "k0", "answer": 0})
    assert first.id == "org/rows train[:10]:1"
    row = next(hub_rows("org/rows", subset=None, split="test", columns={"key", "absent"}))
    assert row == {"key": "k0"}, "what is not asked for is not read"
    assert [task.id for task in heldout_tasks(config)] == [f"org/rows test:{n}" for n in (1, 2, 3)]
    train, heldout = (heldout_tasks(hub()), training_tasks(hub(), 0).rows)  # type: ignore[attr-defined]
    assert (len(train), len(heldout)) == (4, 16), "by default rows are held out of the same split"
    (tmp_path / "org" / "rows").mkdir(parents=True)
    with pytest.raises(ValueError, match="not a dataset written by save_to_disk"):
        training_tasks(hub(), 0)  # what is here has its name first


@pytest.mark.slow
def test_init_writes_a_config_for_a_hub_dataset(at_hub: None) -> None:
    """What the overrides say of the data is read too: ids, columns, subset, split."""
    part = ["data.split=train[:10]", "data.subset=main", "data.id=key", 'data.columns=["extra"]']
    assert init.main(["m/m", "org/rows", "--question", "q", "--answer", "gold", *part]) == 0
    config = load_config("train.toml").data
    assert (config.train, config.split, config.num_heldout) == ("org/rows", "train[:10]", 2)
    trained = training_tasks(config, 0).rows  # type: ignore[attr-defined]
    assert {task.id for task in trained} < {f"k{n}" for n in range(10)}
    assert init.main(["m/m", "org/rows", "-o", "b.toml", "data.split=dev"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train": "org/absent"},
            "data.train: dataset 'org/absent', .* no local file or",
        ),
        ({"subset": "other"}, "(?s)subset 'other'.*Available configs in the cache: .'main'"),
        ({"split": "dev"}, "split 'dev': .*Unknown split"),
        ({"heldout": "org/rows", "heldout_split": "dev"}, "split 'dev'"),
        ({"train": "./org/rows"}, "data.train: org/rows: no such file or directory"),
        ({"train": "org/rows.jsonl"}, "data.train: org/rows.jsonl: no such file or directory"),
        ({"question": "prompt"}, "org/rows train:1: no column 'prompt'"),
        ({"heldout_split": "dev"}, "data.heldout_split: 'dev' does nothing without data.heldout"),
        ({"train": "rows.jsonl", "split": "dev"}, "data.split: 'dev' does nothing without"),
        ({"train": "rows.jsonl", "subset": "dev"}, "data.subset: 'dev' does nothing without"),
    ],
)
def test_missing_hub_dataset_names_its_key(
    at_hub: None, settings: dict[str, Any], message: str
) -> None:
    config = hub(**settings)
    with pytest.raises((ValueError, OSError), match=message):
        [heldout_tasks(config), training_tasks(config, 0)]
