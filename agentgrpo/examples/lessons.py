"""Tasks that a small model learns in minutes, enough of them to hold some out by construction.

`env.kind = "agentgrpo.examples.lessons:LettersEnv"` (config `letters`) asks how often a letter is
in a word, FunctionsEnv (config `functions`) for small functions. worlds.py has those with moves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TypeVar

from agentgrpo.envs.graded import UnitTestEnv
from agentgrpo.envs.python import PythonEnv
from agentgrpo.examples import functions
from agentgrpo.types import Task

T = TypeVar("T")

ROOTS = (
    "strawberry bookkeeper mississippi committee assassin parallel possess balloon success address "
    "tomorrow accommodate millennium occurrence embarrass necessary beginning banana cinnamon "
    "raccoon tennessee subcommittee engineer referee coffee keeper grammar terror mirror barrel "
    "puppet rabbit kitten butter letter pepper ladder summer dinner hammer"
)
ENDINGS = ("", "s", "er", "ing", "like")
HELDOUT_ROOTS = 12


def shuffled(every: Iterable[T]) -> list[T]:
    """All that there are, in an order that is always the same."""
    order = list(every)
    random.Random("lessons").shuffle(order)
    return order


class LettersEnv(PythonEnv):
    """How often is a letter in a word? The words of held-out questions have roots of their own."""

    def tasks(self, split: str) -> list[Task]:
        """All questions of a split."""
        roots = shuffled(ROOTS.split())
        chosen = roots[:HELDOUT_ROOTS] if split == "heldout" else roots[HELDOUT_ROOTS:]
        words = [root + ending for root in chosen for ending in ENDINGS]
        asked = shuffled((word, letter) for word in words for letter in _letters(word))
        return [
            _task(
                f"letters/{split}/{word}/{letter}",
                f"How many times does the letter {letter} appear in {word}?",
                answer=str(word.count(letter)),
            )
            for word, letter in asked
        ]


def _letters(word: str) -> list[str]:
    """All that are there more than once, and one that is not: "1" is not to be a good guess."""
    letters = sorted(set(word), key=lambda letter: (-word.count(letter), letter))
    return [letter for i, letter in enumerate(letters) if not i or word.count(letters[i - 1]) > 1]


HELDOUT_FUNCTIONS = 128


class FunctionsEnv(UnitTestEnv):
    """Small functions with hidden tests. No function is in both splits; what is computed, is."""

    def tasks(self, split: str) -> list[Task]:
        """All functions of a split."""
        rows = shuffled(functions.rows(range(2, 40)))
        chosen = rows[:HELDOUT_FUNCTIONS] if split == "heldout" else rows[HELDOUT_FUNCTIONS:]
        return [
            _task(f"functions/{split}/{place}", row["question"], tests=row["tests"])
            for place, row in enumerate(chosen)
        ]


def _task(id: str, question: str, **spec: str) -> Task:
    return Task(id=id, messages=({"role": "user", "content": question},), spec=spec)
