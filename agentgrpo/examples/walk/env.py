"""A Gymnasium environment of two to six moves: walk to a thing and read the way after each move.

`env.options.id = "agentgrpo.examples.walk.env:Walk-v0"`. Seeds of held-out tasks and of training
tasks never have the same start.
"""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from agentgrpo.envs.adapters.gymnasium import HELDOUT_SEED
from agentgrpo.examples import shuffled

StepResult = tuple[str, float, bool, bool, dict[str, Any]]
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
"""Starts of walks: the thing, its distance to the right and up, whether up comes first."""


def start_of(seed: int) -> tuple[str, int, int, bool]:
    """The start of a seed: held-out seeds from the front, training seeds from the back."""
    return STARTS[seed - HELDOUT_SEED] if seed >= HELDOUT_SEED else STARTS[~seed]


class Walk(gymnasium.Env[str, Any]):
    """Walk to a thing one or two steps away in both directions, with at most two extra moves.

    A move earns the share of the way by which it shortens the distance; a wrong move costs as much.
    """

    def __init__(self) -> None:
        self.action_space, self.observation_space = Discrete(len(MOVES)), Text(99)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.thing, self.right, self.up, self.up_first = start_of(seed or 0)
        self.distance = abs(self.right) + abs(self.up)
        self.left = self.distance + SPARE_MOVES
        return self._text(), {}

    def step(self, action: Any) -> StepResult:
        dx, dy = [*MOVES.values()][action]
        before = abs(self.right) + abs(self.up)
        self.right, self.up, self.left = self.right - dx, self.up - dy, self.left - 1
        after = abs(self.right) + abs(self.up)
        return (self._text(), (before - after) / self.distance, after == 0, self.left == 0, {})

    def _text(self) -> str:
        parts = [_steps(self.right, "right", "left"), _steps(self.up, "up", "down")]
        directions = ", ".join(filter(None, parts[::-1] if self.up_first else parts))
        return f"The {self.thing} is {directions or 'here'}."


def _steps(count: int, ahead: str, back: str) -> str:
    return f"{abs(count)} {ahead if count > 0 else back}" if count else ""


gymnasium.register("Walk-v0", f"{__name__}:Walk", disable_env_checker=True)
