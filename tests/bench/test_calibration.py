"""The study of calibration: what it says of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import calibration


def rows(arm: str, solved: str, calls: str, seed: int = 0) -> dict[str, Any]:
    about = {"variant": arm, "settings": "s", "shape": {"seed": seed}, "commit": "abc"}
    flags = [float(digit) for digit in solved]
    return {
        **about, "solved": solved, "calls": calls, "quality": sum(flags) / len(flags),
        "needless": 1.0, "calls_of_solved": 2.0, "seconds": 60,
    }  # fmt: skip


def test_differences_are_paired_by_seed_and_task(tmp_path: Path) -> None:
    written = [
        rows("full", "1101", "1213"), rows("full", "0110", "1111", seed=1),
        rows("tuned", "1000", "3333"), rows("tuned", "1110", "2222", seed=1),
        rows("no sigmas", "1111", "1111", seed=2),
    ]  # fmt: skip
    found = calibration.rows_by_arm(written)
    seen = calibration.difference(found["full"], found["tuned"], "quality")
    assert seen is not None
    assert seen[0] == pytest.approx((2 - 1) / 8)
    assert seen[1] < seen[0] < seen[2]
    calls = calibration.difference(found["full"], found["tuned"], "needless")
    assert calls is not None
    assert calls[0] == pytest.approx((-2 - 1 - 1) / 3)
    assert calibration.difference(found["full"], found["no sigmas"], "quality") is None
    assert "| full | 0.625 | 0.75, 0.50 |" in calibration.table(written)
    pytest.importorskip("matplotlib")
    calibration.draw(written, tmp_path / "g.png")
    assert (tmp_path / "g.png").stat().st_size > 1000
