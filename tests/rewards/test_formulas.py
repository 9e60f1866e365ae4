"""Comparison of formulas in a child process that no text can keep busy."""

from __future__ import annotations

import os
import signal

import pytest

from agentgrpo.rewards.formulas import LIMIT_EXCEEDED, Comparison, ComparisonProcess, compare

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("$1/2$", "$0.5$", Comparison(True, True, True)),
        ("$1/2$", r"\boxed{\frac{2}{4}}", Comparison(True, True, True)),
        ("$1/2$", "$1/3$", Comparison(True, True, False)),
        ("$1/2$", "", Comparison(True, False, False)),
        ("", "$1/2$", Comparison(False, True, False)),
        ("$1/2$", "\ud800", Comparison(True, False, False)),
        ("$1/2$", "a\n$0.5$\n", Comparison(True, True, True)),
    ],
)
def test_compare_formulas(gold: str, answer: str, expected: Comparison) -> None:
    assert compare(gold, answer) == expected


def test_endless_formula_equals_nothing_and_the_next_is_compared() -> None:
    child = ComparisonProcess(cpu_seconds=1)
    assert child.compare("$1/2$", "$9^{9^{9^{9}}}$") == LIMIT_EXCEEDED
    assert child.compare("$1/2$", "$0.5$").equal
    child.stop()


def test_killed_process_raises_and_restarts() -> None:
    child = ComparisonProcess()
    child.compare("$1$", "$1$")
    process = child._process
    assert process is not None
    assert os.getpgid(process.pid) != os.getpgid(0), "Ctrl-C is not for it"
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with -9"):
        child.compare("$1$", "$1$")
    assert child.compare("$1$", "$1$").equal
    child.stop()
