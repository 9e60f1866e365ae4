"""Two Gymnasium worlds in which a small model learns several moves: a walk, and a guessing game.

`env.options.id = "agentgrpo.examples.worlds:Walk-v0"` (config `walk`), `...:Guess-v0` (config
`guess`). A seed of the held-out tasks and one of the training tasks never begin alike.
"""

from __future__ import annotations

import random
import re
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from agentgrpo.envs.gymnasium import HELDOUT_SEED
from agentgrpo.examples.lessons import shuffled

Told = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""
MOVES = {"left": (-1, 0), "right": (1, 0), "down": (0, -1), "up": (0, 1)}
SPARE_MOVES = 2
STARTS = shuffled(
    (x, y, x + dx, y + dy)
    for x in range(1, 10)
    for y in range(1, 10)
    for dx in (-2, -1, 1, 2)
    for dy in (-2, -1, 1, 2)
    if 1 <= x + dx <= 9 and 1 <= y + dy <= 9
)
"""Of a walk: where it begins, and where the door is."""
RANGES = shuffled((low, low + size) for low in range(1, 85) for size in range(10, 15))
"""Of a guessing game: the lowest and the highest number, 11 to 15 of them."""
GUESSES = 4
"""As many as halving needs at most."""


def chosen(every: list[Any], seed: int) -> Any:
    """What a seed begins with: held-out ones from the front, those of training from the back."""
    return every[seed - HELDOUT_SEED] if seed >= HELDOUT_SEED else every[~seed]


class Walk(gymnasium.Env[str, int]):
    """To a door one or two steps away in both directions, by at most two moves too many."""

    def __init__(self) -> None:
        self.action_space, self.observation_space = Discrete(len(MOVES)), Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The start of a seed."""
        self.x, self.y, *self.door = chosen(STARTS, seed or 0)
        distance = abs(self.door[0] - self.x) + abs(self.door[1] - self.y)
        self.left = distance + SPARE_MOVES
        return self._seen(), {}

    def step(self, action: int) -> Told:
        """Move by one."""
        dx, dy = [*MOVES.values()][action]
        self.x, self.y, self.left = self.x + dx, self.y + dy, self.left - 1
        there = [self.x, self.y] == self.door
        return self._seen(), float(there), there, self.left == 0, {}

    def _seen(self) -> str:
        return f"You: x={self.x} y={self.y}. Door: x={self.door[0]} y={self.door[1]}."


class Guess(gymnasium.Env[str, str]):
    """A number, which four guesses find if each halves what is left."""

    def __init__(self) -> None:
        self.action_space, self.observation_space = Text(16), Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The range of a seed, and a number in it."""
        self.low, self.high = chosen(RANGES, seed or 0)
        self.number = random.Random(f"{self.low}-{self.high}").randint(self.low, self.high)
        self.left = GUESSES
        return self._seen(), {}

    def step(self, action: str) -> Told:
        """Guess; what is no number, or none of the range, is a guess too."""
        found = re.fullmatch(r"\d{1,3}", action)
        guess = int(action) if found else -1
        self.left -= 1
        if guess == self.number:
            return "Right.", 1.0, True, False, {}
        if self.low <= guess < self.number:
            self.low = guess + 1
        elif self.number < guess <= self.high:
            self.high = guess - 1
        return self._seen(), 0.0, False, self.left == 0, {}

    def _seen(self) -> str:
        return f"From {self.low} to {self.high}."


gymnasium.register("Walk-v0", entry_point=Walk, disable_env_checker=True)
gymnasium.register("Guess-v0", entry_point=Guess, disable_env_checker=True)
