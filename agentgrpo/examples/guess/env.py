"""A guessing game as a Gymnasium environment: 11 to 15 numbers, four guesses.

`env.options.id = "agentgrpo.examples.guess.env:Guess-v0"`. Seeds of held-out tasks and of training
tasks never have the same start.
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

StepResult = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""
RANGES = shuffled((low, low + size) for low in range(1, 85) for size in range(10, 15))
"""Ranges of 11 to 15 numbers: the lowest and the highest number."""
GUESSES = 4
"""The maximum that binary search needs."""


def range_of(seed: int) -> tuple[int, int]:
    """The range of a seed: held-out seeds from the front, training seeds from the back."""
    return RANGES[seed - HELDOUT_SEED] if seed >= HELDOUT_SEED else RANGES[~seed]


class Guess(gymnasium.Env[str, str]):
    """Find a number. Binary search finds it with at most four guesses.

    Finding it earns 0.5. The other 0.5 is earned by the information of each guess, in bits; the
    middle of the range gives the most in the worst case.
    """

    def __init__(self) -> None:
        self.action_space, self.observation_space = Text(16), Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Start with the range of a seed, and a number in it."""
        self.low, self.high = range_of(seed or 0)
        self.number = random.Random(f"{self.low}-{self.high}").randint(self.low, self.high)
        self.guesses_left, self.bits = GUESSES, self._bits()
        return self._text(), {}

    def step(self, action: str) -> StepResult:
        """Guess. A text that is not a number of the range also uses up a guess."""
        is_number = re.fullmatch(r"\d{1,3}", action)
        guess = int(action) if is_number else -1
        self.guesses_left, bits_before = self.guesses_left - 1, self._bits()
        if guess == self.number:
            self.low = self.high = guess
        elif self.low <= guess < self.number:
            self.low = guess + 1
        elif self.number < guess <= self.high:
            self.high = guess - 1
        right = guess == self.number
        earned = 0.5 * right + 0.5 * (bits_before - self._bits()) / self.bits
        return "Right." if right else self._text(), earned, right, self.guesses_left == 0, {}

    def _bits(self) -> float:
        return math.log2(self.high - self.low + 1)

    def _text(self) -> str:
        return f"From {self.low} to {self.high}."


gymnasium.register("Guess-v0", f"{__name__}:Guess", disable_env_checker=True)
