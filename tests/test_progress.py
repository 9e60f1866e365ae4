"""Progress says how far the run is, and in the end what it was for."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from agentgrpo.progress import Progress


def lines_of(*evaluations: tuple[int, float]) -> str:
    out = io.StringIO()
    progress = Progress(12, Console(file=out, highlight=False, soft_wrap=True))
    for step, solved in evaluations:
        progress.evaluated(
            step,
            {"solved": solved, "rollouts": 64, "answered": 1, "tool_errors": 0, "infra_errors": 0},
        )
    progress.finished(Path("run"))
    return out.getvalue()


def test_the_end_compares_the_first_and_the_last_evaluation() -> None:
    said = lines_of((0, 0.422), (6, 0.688), (12, 0.844))
    assert "held-out solved: 0.422 after 0 steps, 0.844 after 12" in said


def test_one_evaluation_is_compared_with_nothing() -> None:
    assert "held-out solved:" not in lines_of((12, 0.844))


def test_the_end_names_every_file_a_run_leaves() -> None:
    said = lines_of()
    assert str(Path("run").resolve()) in said
    for name in ("run.json", "metrics.jsonl", "rollouts.jsonl", "checkpoints/"):
        assert name in said
