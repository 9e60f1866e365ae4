"""A guessing game in Gymnasium's form: 11 to 15 numbers, four guesses.

`env.options.id = "agentgrpo.examples.guess.env:Guess-v0"`. A seed of the held-out tasks and one of
the training tasks never begin alike.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from agentgrpo.envs.adapters.gymnasium import HELDOUT_SEED
from agentgrpo.examples import shuffled

Told = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""
RANGES = shuffled((low, low + size) for low in range(1, 85) for size in range(10, 15))
"""Of a guessing game: the lowest and the highest number, 11 to 15 of them."""
GUESSES = 4
"""As many as halving needs at most."""


def range_of(seed: int) -> tuple[int, int]:
    """What a seed begins with: held-out ones from the front, those of training from the back."""
    return RANGES[seed - HELDOUT_SEED] if seed >= HELDOUT_SEED else RANGES[~seed]


class Guess(gymnasium.Env[str, str]):
    """A number, which four guesses find if each halves what is left.

    It is worth 0.5 to find it; the other half is earned by what each guess rules out, in bits.
    What is ruled out in the worst case is most by the middle.
    """

    def __init__(self) -> None:
        self.action_space, self.observation_space = Text(16), Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The range of a seed, and a number in it."""
        self.low, self.high = range_of(seed or 0)
        self.number = random.Random(f"{self.low}-{self.high}").randint(self.low, self.high)
        self.left, self.bits = GUESSES, self._bits()
        return self._seen(), {}

    def step(self, action: str) -> Told:
        """Guess; what is no number, or none of the range, is a guess too."""
        found = re.fullmatch(r"\d{1,3}", action)
        guess = int(action) if found else -1
        self.left, before = self.left - 1, self._bits()
        if guess == self.number:
            self.low = self.high = guess
        elif self.low <= guess < self.number:
            self.low = guess + 1
        elif self.number < guess <= self.high:
            self.high = guess - 1
        right = guess == self.number
        earned = 0.5 * right + 0.5 * (before - self._bits()) / self.bits
        return "Right." if right else self._seen(), earned, right, self.left == 0, {}

    def _bits(self) -> float:
        return math.log2(self.high - self.low + 1)

    def _seen(self) -> str:
        return f"From {self.low} to {self.high}."


gymnasium.register("Guess-v0", f"{__name__}:Guess", disable_env_checker=True)
