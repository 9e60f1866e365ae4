"""Task streams: order, resuming, and what bad files say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from agentgrpo.data import word_problems
from agentgrpo.data.files import read_tasks
from agentgrpo.data.tasks import Tasks, WordProblemTasks


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": f"q{i}", "answer": i, "hint": "h"}) for i in range(5)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_word_problems_neither_repeat_nor_skip() -> None:
    tasks = WordProblemTasks()
    drawn = [task.id for task in tasks.next(10) + tasks.next(60)]
    assert drawn == [f"word/train/seed0/{i}" for i in range(70)]


def run(tasks: Tasks, steps: int) -> list[str]:
    return [task.id for _ in range(steps) for task in tasks.next(7)]


@pytest.mark.parametrize("stop_after", [0, 1, 4, 9])
def test_resumed_stream_equals_an_uninterrupted_one(stop_after: int, rows: Path) -> None:
    def streams() -> list[Tasks]:
        return [WordProblemTasks(seed=4), read_tasks(rows, seed=4)]

    triples: list[tuple[Tasks, ...]] = list(zip(streams(), streams(), streams(), strict=True))
    for whole, begun, resumed in triples:
        want = run(whole, 12)
        start = run(begun, stop_after)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert start + run(resumed, 12 - stop_after) == want


def test_state_of_another_stream_is_an_error(rows: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text().replace("q3", "Q3"))
    streams: list[Tasks] = [
        WordProblemTasks(seed=1), WordProblemTasks(seed=2),
        read_tasks(rows), read_tasks(rows, seed=1), read_tasks(other),
    ]  # fmt: skip
    for one in streams:
        for another in streams:
            if one is not another:
                with pytest.raises(ValueError, match="the data position was saved for: "):
                    one.load_state_dict(another.state_dict())


def test_state_of_other_templates_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = WordProblemTasks().state_dict()
    WordProblemTasks().load_state_dict(state)
    first, *others = word_problems.KINDS
    changed = dataclasses.replace(first, train=("What is {a} x {b}?",))
    monkeypatch.setattr(word_problems, "KINDS", (changed, *others))
    with pytest.raises(ValueError, match="the data position was saved for: word problems"):
        WordProblemTasks().load_state_dict(state)


def test_each_round_shuffles_all_rows(rows: Path) -> None:
    tasks = read_tasks(rows)
    rounds = [tuple(task.id for task in tasks.next(5)) for _ in range(8)]
    assert {frozenset(ids) for ids in rounds} == {frozenset(rounds[0])}
    assert len(frozenset(rounds[0])) == 5
    assert len(set(rounds)) > 1
    assert rounds != [tuple(t.id for t in read_tasks(rows, seed=1).next(5)) for _ in range(8)]


GOOD = b'{"question": "q", "answer": 1, "id": "x"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"rows.jsonl: no rows; expected one JSON object per line"),
        (b"\n \n", r"rows.jsonl: no rows"),
        (GOOD + b"{'a': 1}\n", r"rows.jsonl:2: not JSON: Expecting property name"),
        (GOOD + b"\n\xff\n", r"rows.jsonl:3: not JSON: "),
        (GOOD + b"[" * 99_999, r"rows.jsonl:2: not JSON: nested too deeply"),
        (b"[1]\n", r"rows.jsonl:1: expected a JSON object, got list"),
        (b'{"q": 1, "id": 2}', r"rows.jsonl:1: no column 'question'; the row has \['id', 'q'\]"),
        (b'{"question": "q", "answer": 1}', r"rows.jsonl:1: no column 'id'"),
        (b'{"question": [], "answer": 1, "id": 1}', r"'question': expected text or messages, got"),
        (b'{"question": [{"role": "user", "content": 3}], "answer": 1, "id": 1}', r"got \{"),
        (GOOD + GOOD, r"rows.jsonl:2: the id 'x' appears twice"),
    ],
)
def test_invalid_row_names_file_and_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_tasks(path, id="id")
