"""What selecting 8,000 of 20,000 questions costs: python -m bench.pareto."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from agentgrpo.recipe.pareto import select
from bench.harness import append_row, cpu_seconds

QUESTIONS, WANTED, ROLLOUTS = 20_000, 8_000, 8


def questions(rng: np.random.Generator, *, graded: bool) -> np.ndarray[Any, Any]:
    """Variances over rollouts: of 0 to 6 tool calls, and of right or wrong (or of an F1)."""
    calls = rng.integers(0, 7, (QUESTIONS, ROLLOUTS))
    outcomes = rng.random((QUESTIONS, ROLLOUTS))
    return np.stack([calls.var(1), (outcomes if graded else outcomes.round()).var(1)], axis=1)


def main() -> None:
    rng = np.random.default_rng(0)
    cases = {"right or wrong": questions(rng, graded=False), "F1": questions(rng, graded=True)}
    cases["one front"] = np.stack([np.arange(QUESTIONS), -np.arange(QUESTIONS)], 1).astype(float)
    cases["a chain"] = np.repeat(np.arange(QUESTIONS), 2).reshape(-1, 2).astype(float)
    for variant, points in cases.items():
        assert len(select(points, WANTED)) == WANTED
        seconds = cpu_seconds(partial(select, points, WANTED), repeats=20)
        shape = {"questions": QUESTIONS, "wanted": WANTED}
        append_row("pareto", variant, seconds, unit="s", shape=shape, note="CPU time")


if __name__ == "__main__":
    main()
