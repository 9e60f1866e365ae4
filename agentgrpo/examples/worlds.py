"""Two Gymnasium worlds in which a small model learns several moves: a walk, and a guessing game.

`env.options.id = "agentgrpo.examples.worlds:Walk-v0"` (config `walk`), `...:Guess-v0` (config
`guess`). A seed of the held-out tasks and one of the training tasks never begin alike.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from agentgrpo.envs.adapters.gymnasium import HELDOUT_SEED
from agentgrpo.examples.lessons import shuffled

Told = tuple[str, float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""
MOVES = {"left": (-1, 0), "right": (1, 0), "down": (0, -1), "up": (0, 1)}
SPARE_MOVES = 2
THINGS = "lamp door well gate tree bell tent boat fire cave rose drum kite barn pond nest"
HELDOUT_THINGS = 6
STARTS = [
    start
    for things in (THINGS.split()[:HELDOUT_THINGS], THINGS.split()[HELDOUT_THINGS:])
    for start in shuffled(itertools.product(things, (-2, -1, 1, 2), (-2, -1, 1, 2), (False, True)))
]
"""Of a walk: to what, how far right and up it is, whether up is said first."""
RANGES = shuffled((low, low + size) for low in range(1, 85) for size in range(10, 15))
"""Of a guessing game: the lowest and the highest number, 11 to 15 of them."""
GUESSES = 4
"""As many as halving needs at most."""


def chosen(every: list[Any], seed: int) -> Any:
    """What a seed begins with: held-out ones from the front, those of training from the back."""
    return every[seed - HELDOUT_SEED] if seed >= HELDOUT_SEED else every[~seed]


class Walk(gymnasium.Env[str, Any]):
    """To a thing one or two steps away in both directions, by at most two moves too many.

    A move earns the share of the way that it shortens; one that makes it longer costs as much.
    """

    def __init__(self) -> None:
        self.action_space, self.observation_space = Discrete(len(MOVES)), Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The start of a seed."""
        self.thing, self.right, self.up, self.up_first = chosen(STARTS, seed or 0)
        self.way = abs(self.right) + abs(self.up)
        self.left = self.way + SPARE_MOVES
        return self._seen(), {}

    def step(self, action: Any) -> Told:
        """Move by one."""
        dx, dy = [*MOVES.values()][action]
        before = abs(self.right) + abs(self.up)
        self.right, self.up, self.left = self.right - dx, self.up - dy, self.left - 1
        after = abs(self.right) + abs(self.up)
        return self._seen(), (before - after) / self.way, after == 0, self.left == 0, {}

    def _seen(self) -> str:
        parts = [_steps(self.right, "right", "left"), _steps(self.up, "up", "down")]
        said = ", ".join(filter(None, parts[::-1] if self.up_first else parts))
        return f"The {self.thing} is {said or 'here'}."


def _steps(count: int, ahead: str, back: str) -> str:
    return f"{abs(count)} {ahead if count > 0 else back}" if count else ""


class Guess(gymnasium.Env[str, str]):
    """A number, which four guesses find if each halves what is left.

    It is worth 0.5 to find it; the other half is earned by what each guess rules out, in bits.
    What is ruled out in the worst case is most by the middle.
    """

    def __init__(self) -> None:
        self.action_space, self.observation_space = Text(16), Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The range of a seed, and a number in it."""
        self.low, self.high = chosen(RANGES, seed or 0)
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


for world in (Walk, Guess):
    gymnasium.register(
        f"{world.__name__}-v0", f"{__name__}:{world.__name__}", disable_env_checker=True
    )
