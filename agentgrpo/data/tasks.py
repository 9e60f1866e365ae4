"""The stream of tasks a run trains on: endless, seeded, and resumable from a few numbers.

    tasks = WordProblemTasks(seed=0)
    batch = tasks.next(12)          # 12 tasks
    tasks.feedback(groups)          # what became of them: the next ones may depend on it
    state = tasks.state_dict()      # plain JSON; a run that loads it gets the same tasks as before

Any object with these four methods can stand in for the two streams here.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from agentgrpo.data import word_problems
from agentgrpo.types import Group, Status, Task


class Tasks(Protocol):
    """A stream of tasks, as the training loop uses it."""

    def next(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        ...

    def feedback(self, groups: Sequence[Group]) -> None:
        """Learn what became of tasks that `next` gave; called once a step, after the rewards."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that decides about the tasks to come, as plain JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, exactly.

        Raises:
            ValueError: the state belongs to another stream.
        """
        ...


class WordProblemTasks:
    """Training word problems, easy first.

    At first all tasks come from the lowest level. When the last `window` groups of the newest level
    earned `promote_at` on average, the next level joins: half of the tasks are then of the newest
    level, the others spread evenly over the easier ones.

    Args:
        levels: in the order in which they join.
        promote_at: mean reward of a rollout, in reward units; rollouts that the machine broke do
            not count.
        window: groups of the newest level that the mean is taken over, at least 1.
        seed: another seed, other problems.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        *,
        levels: Sequence[int] = word_problems.LEVELS,
        promote_at: float = 0.7,
        window: int = 32,
        seed: int = 0,
    ) -> None:
        if not levels or len(set(levels)) != len(levels):
            raise ValueError(f"levels: expected different levels, got {list(levels)}")
        for level in levels:
            word_problems.wordings("train", level)
        if window < 1:
            raise ValueError(f"window: expected at least 1, got {window}")
        self.levels = tuple(levels)
        self.promote_at = promote_at
        self.window = window
        self.seed = seed
        self._drawn = 0  # tasks given so far
        self._next_index = dict.fromkeys(self.levels, 0)
        self._open = 1  # how many of the levels have joined
        self._recent: list[float] = []  # mean reward of the newest level's last groups

    @property
    def newest_level(self) -> int:
        """The hardest level that has joined."""
        return self.levels[self._open - 1]

    def next(self, count: int) -> list[Task]:
        return [self._draw() for _ in range(count)]

    def feedback(self, groups: Sequence[Group]) -> None:
        for group in groups:
            rewards = [r.reward for r in group.rollouts if r.status is not Status.INFRA_ERROR]
            if rewards and group.task.spec["level"] == self.newest_level:
                self._recent = [*self._recent, fmean(rewards)][-self.window :]
        ripe = len(self._recent) == self.window and fmean(self._recent) >= self.promote_at
        if ripe and self._open < len(self.levels):
            self._open += 1
            self._recent = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self._source(),
            "drawn": self._drawn,
            "next_index": [self._next_index[level] for level in self.levels],
            "open": self._open,
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _require_same_source(state["source"], self._source())
        self._drawn = state["drawn"]
        self._next_index = dict(zip(self.levels, state["next_index"], strict=True))
        self._open = state["open"]
        self._recent = list(state["recent"])

    def _draw(self) -> Task:
        rng = random.Random(f"{self.seed}/level of task {self._drawn}")
        easier = self.levels[: self._open - 1]
        level = rng.choice(easier) if easier and rng.random() < 0.5 else self.newest_level
        index = self._next_index[level]
        self._next_index[level] += 1
        self._drawn += 1
        return word_problems.task("train", level, index, self.seed)

    def _source(self) -> str:
        templates = word_problems.fingerprint()
        return f"word problems {templates}, levels {list(self.levels)}, seed {self.seed}"


class JsonlTasks:
    """The rows of a JSON-lines file, shuffled anew each time round.

    A row is an object. Its question becomes the user's message, or is a list of chat messages; the
    whole row but the question becomes the spec, with the answer under "answer".

    Args:
        path: the file; blank lines are skipped.
        question: the column of the question: text, or a list of {"role", "content"}.
        answer: the column of the expected answer.
        id: the column of a unique id; None numbers the lines: "name.jsonl:17".
        shuffle: False keeps the file's order.
        seed: another seed, another order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no rows, or one is bad; the message starts with file:line.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        question: str = "question",
        answer: str = "answer",
        id: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        content = Path(path).read_bytes()
        self.path = Path(path)
        self.shuffle = shuffle
        self.seed = seed
        self._tasks = _parse_rows(self.path, content, question=question, answer=answer, id=id)
        self._digest = hashlib.sha256(content).hexdigest()
        self._drawn = 0
        self._order: tuple[int, list[int]] = (-1, [])  # of the round it was last computed for

    @property
    def rows(self) -> list[Task]:
        """All tasks, in the file's order."""
        return list(self._tasks)

    def __len__(self) -> int:
        """How many tasks one round has."""
        return len(self._tasks)

    def next(self, count: int) -> list[Task]:
        start, self._drawn = self._drawn, self._drawn + count
        return [self._at(position) for position in range(start, start + count)]

    def feedback(self, groups: Sequence[Group]) -> None:
        """Nothing: the order of a file does not depend on how its tasks went."""

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._source(), "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _require_same_source(state["source"], self._source())
        self._drawn = state["drawn"]

    def _at(self, position: int) -> Task:
        turn, place = divmod(position, len(self._tasks))
        if not self.shuffle:
            return self._tasks[place]
        if self._order[0] != turn:
            order = list(range(len(self._tasks)))
            random.Random(f"{self.seed}/round {turn}").shuffle(order)
            self._order = (turn, order)
        return self._tasks[self._order[1][place]]

    def _source(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in order"
        return f"{len(self)} rows of SHA-256 {self._digest}, {order}"


def _parse_rows(
    path: Path, content: bytes, *, question: str, answer: str, id: str | None
) -> list[Task]:
    tasks: dict[str, Task] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = _row(line, columns=(c for c in (question, answer, id) if c is not None))
            task = Task(
                id=f"{path.name}:{number}" if id is None else str(row[id]),
                messages=_messages(row[question], column=question),
                spec={**{c: v for c, v in row.items() if c != question}, "answer": row[answer]},
            )
            if task.id in tasks:
                raise ValueError(f"the id {task.id!r} appears twice")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        tasks[task.id] = task
    if not tasks:
        raise ValueError(f"{path}: no rows; expected one JSON object a line")
    return list(tasks.values())


def _row(line: bytes, columns: Iterable[str]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    for column in columns:
        if row.get(column) is None:
            raise ValueError(f"no column {column!r}; the row has {sorted(row)}")
    return row


def _messages(question: Any, *, column: str) -> tuple[dict[str, str], ...]:
    if isinstance(question, str) and question.strip():
        return ({"role": "user", "content": question},)
    if isinstance(question, list) and question and all(map(_is_message, question)):
        return tuple({"role": m["role"], "content": m["content"]} for m in question)
    raise ValueError(
        f"column {column!r}: expected text or a list of "
        f"{{'role': text, 'content': text}}, got {question!r:.80}"
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(part, str) for part in value.values())
    )


def _require_same_source(saved: str, current: str) -> None:
    if saved != current:
        raise ValueError(f"the saved data position is of: {saved}; this run reads: {current}")
