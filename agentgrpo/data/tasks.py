"""The stream of training tasks: endless, seeded and resumable.

    tasks = WordProblemTasks(seed=0)
    batch = tasks.next(12)          # 12 tasks
    state = tasks.state_dict()      # plain JSON; load_state_dict(state) continues from here

The next tasks depend on the rows, the seed and the number drawn so far.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from agentgrpo.data import word_problems
from agentgrpo.records.rollouts import plain
from agentgrpo.types import Task


class Tasks(ABC):
    """A stream of tasks whose position is a number."""

    _drawn = 0
    steps_before = 0
    """Optimizer steps of earlier curriculum stages: sampling seeds continue after theirs."""

    @abstractmethod
    def _draw(self) -> Task:
        """The next task."""

    @abstractmethod
    def _source(self) -> str:
        """Description of the data, to which a saved position belongs."""

    def next(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        return [self._draw() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON values."""
        return {"source": self._source(), "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""
        if state["source"] != self._source():
            raise ValueError(
                f"the data position was saved for: {state['source']}; "
                f"this run reads: {self._source()}"
            )
        self._drawn = state["drawn"]


class WordProblemTasks(Tasks):
    """Generated word problems, which depend on the seed."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _draw(self) -> Task:
        self._drawn += 1
        return word_problems.task("train", self._drawn - 1, self.seed)

    def _source(self) -> str:
        return f"word problems {word_problems.fingerprint()}, seed {self.seed}"


def normalised_question(task: Task) -> str:
    """A task's messages without differences in white space and case."""
    messages = [
        (m.get("role"), f"{m.get('content')} {m.get('tool_calls', '')}".casefold().split())
        for m in task.messages
    ]
    return "\n".join(f"{role}: {' '.join(words)}" for role, words in messages)


def question_and_spec(task: Task) -> str:
    """A task's normalised messages and the rest of its row."""
    # twice through JSON: sort_keys fails for numbers next to strings as keys
    spec = json.dumps(plain(dict(task.spec)), default=str)
    return normalised_question(task) + json.dumps(json.loads(spec), sort_keys=True)


def digest_of(tasks: Iterable[Task]) -> str:
    """The number of tasks and the SHA-256 of their content."""
    texts = [*map(question_and_spec, tasks)]
    return f"{len(texts)} tasks (SHA-256 {hashlib.sha256(''.join(texts).encode()).hexdigest()})"


class RowTasks(Tasks):
    """A list of tasks, shuffled anew in each round."""

    def __init__(self, tasks: Sequence[Task], *, source: str, seed: int = 0) -> None:
        if not tasks:
            raise ValueError(f"{source}: no tasks")
        repeated = [id for id, count in Counter(task.id for task in tasks).items() if count > 1]
        if repeated:
            raise ValueError(f"{source}: the id {repeated[0]!r} appears twice")
        self.rows = list(tasks)
        self.source = source
        self.seed = seed
        self.left_out = 0
        """Number of rows left out because they repeat a held-out question."""
        self._order: tuple[int, list[int]] = (-1, [])  # (round, its order)

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, count: int, seed: int = 0) -> tuple[list[Task], RowTasks]:
        """Split off `count` held-out tasks, which depend on the rows and the seed only.

        Rows that repeat a held-out question are left out of the others. If too few questions differ
        (a game that always starts with the same words), whole rows are compared instead.
        """
        for key in (normalised_question, question_and_spec):
            first_with = {key(task): task for task in reversed(self.rows)}
            if count < len(first_with):
                break
        else:
            raise ValueError(
                f"data.num_heldout: expected below {len(first_with)}, the number of different "
                f"tasks in {self.source}, got {count}"
            )
        distinct = [task for task in self.rows if first_with[key(task)] is task]
        chosen = set(random.Random(f"{seed}/split").sample(range(len(distinct)), count))
        heldout = [task for i, task in enumerate(distinct) if i in chosen]
        heldout_keys = {key(task) for task in heldout}
        rest = [task for task in self.rows if key(task) not in heldout_keys]
        others = RowTasks(rest, source=self.source, seed=self.seed)
        others.left_out = len(self) - len(heldout) - len(others)
        return heldout, others

    def _draw(self) -> Task:
        round_index, place = divmod(self._drawn, len(self.rows))
        self._drawn += 1
        if self._order[0] != round_index:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}/round {round_index}").shuffle(order)
            self._order = (round_index, order)
        return self.rows[self._order[1][place]]

    def _source(self) -> str:
        return f"{len(self)} rows of {self.source}, shuffled with seed {self.seed}"
