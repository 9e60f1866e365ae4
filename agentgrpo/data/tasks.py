"""The stream of tasks a run trains on: endless, seeded, and resumable from a few numbers.

    tasks = WordProblemTasks(seed=0)
    batch = tasks.next(12)          # 12 tasks
    state = tasks.state_dict()      # plain JSON; a run that loads it gets the same tasks as before

What comes next depends on the rows, the seed and how many were drawn.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentgrpo.data import word_problems
from agentgrpo.records.rollouts import plain
from agentgrpo.types import Task


class Tasks(ABC):
    """A stream of tasks: one after another, from a few numbers."""

    _drawn = 0
    """Tasks given so far."""
    steps_before = 0
    """Optimizer steps of the stages before this one: what is sampled has seeds behind theirs."""

    @abstractmethod
    def _draw(self) -> Task:
        """The next task."""

    @abstractmethod
    def _source(self) -> str:
        """What a saved position belongs to."""

    def next(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        return [self._draw() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """All that decides about the tasks to come, as plain JSON values."""
        return {"source": self._source(), "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, exactly."""
        if state["source"] != self._source():
            raise ValueError(
                f"the saved data position is of: {state['source']}; "
                f"this run reads: {self._source()}"
            )
        self._drawn = state["drawn"]


class WordProblemTasks(Tasks):
    """Training word problems; another seed, other problems."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _draw(self) -> Task:
        self._drawn += 1
        return word_problems.task("train", self._drawn - 1, self.seed)

    def _source(self) -> str:
        return f"word problems {word_problems.fingerprint()}, seed {self.seed}"


def normalised_question(task: Task) -> str:
    """What a task asks, but for white space and capital letters."""
    said = [
        (m.get("role"), f"{m.get('content')} {m.get('tool_calls', '')}".casefold().split())
        for m in task.messages
    ]
    return "\n".join(f"{role}: {' '.join(words)}" for role, words in said)


def repr_of(task: Task) -> str:
    """What a task asks, and all that its row has besides."""
    said = json.dumps(plain(dict(task.spec)), default=str)  # keys may be numbers beside texts
    return normalised_question(task) + json.dumps(json.loads(said), sort_keys=True)


def digest_of(tasks: Iterable[Task]) -> str:
    """How many tasks they are, and the SHA-256 of all that they say."""
    said = [*map(repr_of, tasks)]
    return f"{len(said)} tasks (SHA-256 {hashlib.sha256(''.join(said).encode()).hexdigest()})"


class RowTasks(Tasks):
    """A list of tasks, shuffled again each time round."""

    def __init__(self, tasks: Sequence[Task], *, source: str, seed: int = 0) -> None:
        if not tasks:
            raise ValueError(f"{source}: no tasks")
        twice = [id for id, times in Counter(task.id for task in tasks).items() if times > 1]
        if twice:
            raise ValueError(f"{source}: the id {twice[0]!r} appears twice")
        self.rows = list(tasks)
        self.source = source
        self.seed = seed
        self.left_out = 0
        """Rows that ask what is held out."""
        self._order: tuple[int, list[int]] = (-1, [])  # of the round it was last computed for

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, keep: Callable[[Task], bool]) -> RowTasks:
        """The tasks that `keep` is true of, in the same order."""
        kept = [task for task in self.rows if keep(task)]
        return RowTasks(kept, source=self.source, seed=self.seed)

    def split(self, count: int, seed: int = 0) -> tuple[list[Task], RowTasks]:
        """`count` tasks set aside, a function of the rows and the seed alone, and the others.

        No task of the others asks what one set aside does: repetitions of those are left out. Where
        too few questions differ (a game that is always begun with the same words) tasks are told
        apart by all that their rows say.
        """
        for told in (normalised_question, repr_of):
            firsts = {told(task): task for task in reversed(self.rows)}
            if count < len(firsts):
                break
        else:
            raise ValueError(
                f"{self.source}: {len(firsts)} tasks that differ, of which {count} cannot be held "
                "out; lower data.num_heldout"
            )
        order = [task for task in self.rows if firsts[told(task)] is task]
        aside = set(random.Random(f"{seed}/split").sample(range(len(order)), count))
        held = [task for i, task in enumerate(order) if i in aside]
        asked = {told(task) for task in held}
        others = self.only(lambda task: told(task) not in asked)
        others.left_out = len(self) - len(held) - len(others)
        return held, others

    def _draw(self) -> Task:
        turn, place = divmod(self._drawn, len(self.rows))
        self._drawn += 1
        if self._order[0] != turn:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}/round {turn}").shuffle(order)
            self._order = (turn, order)
        return self.rows[self._order[1][place]]

    def _source(self) -> str:
        return f"{len(self)} rows of {self.source}, shuffled with seed {self.seed}"
