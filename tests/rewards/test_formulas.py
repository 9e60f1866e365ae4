"""Formulas compared apart from the run: no text keeps it busy."""

from __future__ import annotations

import os
import signal

import pytest

from agentgrpo.rewards.formulas import TOO_MUCH, Child, Comparison, compare

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("wanted", "said", "expected"),
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
def test_what_is_equal(wanted: str, said: str, expected: Comparison) -> None:
    assert compare(wanted, said) == expected


def test_a_text_that_never_ends_is_equal_to_nothing_and_the_next_is_judged() -> None:
    child = Child(cpu_seconds=1)
    assert child.compare("$1/2$", "$9^{9^{9^{9}}}$") == TOO_MUCH
    assert child.compare("$1/2$", "$0.5$").equal
    child.stop()


def test_a_child_that_the_machine_ended_is_no_verdict() -> None:
    child = Child()
    child.compare("$1$", "$1$")
    process = child._process
    assert process is not None
    assert os.getpgid(process.pid) != os.getpgid(0), "Ctrl-C is not for it"
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with -9"):
        child.compare("$1$", "$1$")
    assert child.compare("$1$", "$1$").equal
    child.stop()
