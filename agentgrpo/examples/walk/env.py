"""A Gymnasium world of two to six moves: walk to a thing whose way is told anew after each.

`env.options.id = "agentgrpo.examples.walk.env:Walk-v0"`. A seed of the held-out tasks and one of
the training tasks never begin alike.
"""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from agentgrpo.envs.adapters.gymnasium import HELDOUT_SEED
from agentgrpo.examples import shuffled

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


def start_of(seed: int) -> tuple[str, int, int, bool]:
    """What a seed begins with: held-out ones from the front, those of training from the back."""
    return STARTS[seed - HELDOUT_SEED] if seed >= HELDOUT_SEED else STARTS[~seed]


class Walk(gymnasium.Env[str, Any]):
    """To a thing one or two steps away in both directions, by at most two moves too many.

    A move earns the share of the way that it shortens; one that makes it longer costs as much.
    """

    def __init__(self) -> None:
        self.action_space, self.observation_space = Discrete(len(MOVES)), Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """The start of a seed."""
        self.thing, self.right, self.up, self.up_first = start_of(seed or 0)
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


gymnasium.register("Walk-v0", f"{__name__}:Walk", disable_env_checker=True)
