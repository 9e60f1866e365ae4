"""Ctrl-C, once: finish the step, save, stop. Twice: stop at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what a scheduler sends before it takes the machine away."""


@contextlib.contextmanager
def stop_after_step(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yields whether somebody has asked to stop. The second time they get what they always got.

    Args:
        say: told once that the step is being finished.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may handle signals
        return
    asked = False
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()
        say("stopping after this step, then saving. Ctrl-C again stops at once, without saving")

    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield lambda: asked
    finally:
        restore()
