"""The parts of a lap are what was measured, and add up to it."""

from __future__ import annotations

import pytest

from agentgrpo.train.progress import Stopwatch


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_parts_and_rest_add_up_to_the_total() -> None:
    clock = Clock()
    watch = Stopwatch(clock, rest="starting")
    clock.wait(5)
    with watch.part("playing"):
        clock.wait(2)
        with watch.part("syncing"):
            clock.wait(1)
        clock.wait(3)
    assert watch.lap() == {"starting_s": 5, "playing_s": 5, "syncing_s": 1, "total_s": 11}
    clock.wait(4)
    with watch.part("playing"):
        clock.wait(1)
    with watch.part("playing"):
        clock.wait(1)
    assert watch.lap() == {"other_s": 4, "playing_s": 2, "total_s": 6}
    assert clock.now == 100 + 11 + 6


def test_lap_inside_a_part_counts_its_elapsed_time() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.part("learning"):
        clock.wait(2)
        assert watch.lap()["learning_s"] == 2
        clock.wait(3)
    assert watch.lap() == {"learning_s": 3, "other_s": 0, "total_s": 3}


def test_part_that_raises_is_counted() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        clock.wait(2)
        raise OSError

    with pytest.raises(OSError), watch.part("saving"):  # noqa: PT011
        fail()
    clock.wait(1)
    assert watch.lap() == {"other_s": 1, "saving_s": 2, "total_s": 3}
