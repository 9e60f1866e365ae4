"""Count a letter in a word. A small model learns these tasks in minutes."""

from __future__ import annotations

from agentgrpo.envs.python import PythonEnv
from agentgrpo.examples import shuffled
from agentgrpo.types import Task

ROOTS = (
    "strawberry bookkeeper mississippi committee assassin parallel possess balloon success address "
    "tomorrow accommodate millennium occurrence embarrass necessary beginning banana cinnamon "
    "raccoon tennessee subcommittee engineer referee coffee keeper grammar terror mirror barrel "
    "puppet rabbit kitten butter letter pepper ladder summer dinner hammer"
)
ENDINGS = ("", "s", "er", "ing", "like")
HELDOUT_ROOTS = 12
QUESTION = "How many times does the letter {} appear in {}?"


class LettersEnv(PythonEnv):
    """Count a letter in a word. Held-out words have other roots than training words."""

    def tasks(self, split: str) -> list[Task]:
        roots = shuffled(ROOTS.split())
        split_roots = roots[:HELDOUT_ROOTS] if split == "heldout" else roots[HELDOUT_ROOTS:]
        words = [root + ending for root in split_roots for ending in ENDINGS]
        questions = shuffled((word, letter) for word in words for letter in _letters(word))
        return [
            Task(
                id=f"letters/{split}/{word}/{letter}",
                messages=({"role": "user", "content": QUESTION.format(letter, word)},),
                spec={"answer": str(word.count(letter))},
            )
            for word, letter in questions
        ]


def _letters(word: str) -> list[str]:
    """All letters that occur more than once, and one that does not, so that "1" is a bad guess."""
    letters = sorted(set(word), key=lambda letter: (-word.count(letter), letter))
    return [letter for i, letter in enumerate(letters) if not i or word.count(letters[i - 1]) > 1]
