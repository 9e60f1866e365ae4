"""How often is a letter in a word? Tasks that a small model learns in minutes."""

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
    """How often is a letter in a word? The words of held-out questions have roots of their own."""

    def tasks(self, split: str) -> list[Task]:
        """All questions of a split."""
        roots = shuffled(ROOTS.split())
        chosen = roots[:HELDOUT_ROOTS] if split == "heldout" else roots[HELDOUT_ROOTS:]
        words = [root + ending for root in chosen for ending in ENDINGS]
        asked = shuffled((word, letter) for word in words for letter in _letters(word))
        return [
            Task(
                id=f"letters/{split}/{word}/{letter}",
                messages=({"role": "user", "content": QUESTION.format(letter, word)},),
                spec={"answer": str(word.count(letter))},
            )
            for word, letter in asked
        ]


def _letters(word: str) -> list[str]:
    """All that are there more than once, and one that is not: "1" is not to be a good guess."""
    letters = sorted(set(word), key=lambda letter: (-word.count(letter), letter))
    return [letter for i, letter in enumerate(letters) if not i or word.count(letters[i - 1]) > 1]
