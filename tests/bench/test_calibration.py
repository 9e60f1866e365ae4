"""The calibration study computes paired differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import calibration


def row(arm: str, solved: str, calls: str, seed: int = 0) -> dict[str, Any]:
    about = {"variant": arm, "settings": "s", "shape": {"seed": seed}, "commit": "abc"}
    flags = [float(digit) for digit in solved]
    return {
        **about, "solved": solved, "calls": calls, "quality": sum(flags) / len(flags),
        "needless": 1.0, "calls_of_solved": 2.0, "seconds": 60,
    }  # fmt: skip


def test_differences_are_paired_by_seed_and_task(tmp_path: Path) -> None:
    written = [
        row("full", "1101", "1213"), row("full", "0110", "1111", seed=1),
        row("tuned", "1000", "3333"), row("tuned", "1110", "2222", seed=1),
        row("no sigmas", "1111", "1111", seed=2),
    ]  # fmt: skip
    by_arm = calibration.rows_by_arm(written)
    result = calibration.difference(by_arm["full"], by_arm["tuned"], "quality")
    assert result is not None
    assert result[0] == pytest.approx((2 - 1) / 8)
    assert result[1] < result[0] < result[2]
    calls = calibration.difference(by_arm["full"], by_arm["tuned"], "needless")
    assert calls is not None
    assert calls[0] == pytest.approx((-2 - 1 - 1) / 3)
    assert calibration.difference(by_arm["full"], by_arm["no sigmas"], "quality") is None
    assert "| full | 0.625 | 0.75, 0.50 |" in calibration.table(written)
    pytest.importorskip("matplotlib")
    calibration.draw(written, tmp_path / "g.png")
    assert (tmp_path / "g.png").stat().st_size > 1000
