"""Ctrl-C, once: finish the step, save, stop. Twice: the process ends at once.

After the first one the next is the kernel's to handle: it ends the process whatever runs in it, and
the last checkpoint stands. Code that never gives up Python's lock keeps Python from hearing of the
first: it needs `kill -9`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import FrameType

from agentgrpo.support import user_calls

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what a scheduler sends before it takes the machine away, a terminal that is closed."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within this the process is a command's: the first Ctrl-C raises KeyboardInterrupt, a second
    ends it, and so does a call of the user's that takes too long.
    """

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    ours = _in_main_thread() and before is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, on_interrupt)
    user_calls.in_command = True
    try:
        yield
    finally:
        user_calls.in_command = False
        if ours and signal.getsignal(signal.SIGINT) is on_interrupt:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def stop_after_step(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yields whether somebody has asked to stop. A second Ctrl-C ends a command; elsewhere, as in a
    notebook, it does what it always did.

    `say` is called from a thread, since the signal may come in the middle of a line that is being
    said, which would be said twice then.
    """
    if not _in_main_thread():  # nothing else may handle signals
        yield lambda: False
        return
    asked = False
    again = signal.SIG_DFL if user_calls.in_command else signal.getsignal(signal.SIGINT)
    words: SimpleQueue[str] = SimpleQueue()

    def tell() -> None:
        if line := words.get():
            say(line)

    def on_signal(number: int) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, again)
        words.put("stopping after this step, then saving; Ctrl-C again: at once, unsaved")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        with _handled(on_signal):
            yield lambda: asked
    finally:
        words.put("")  # nothing, if nobody has asked
        teller.join()


def run_child(command: Sequence[str], stdout: int | None = None) -> tuple[int, bool]:
    """Run a command and wait for it; whoever asks this process to stop asks that one.

    Ctrl-C and the end of the terminal reach both; SIGTERM is passed on. Returns its status,
    negative for a signal, and whether somebody has asked to stop.
    """
    begun: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def on_signal(number: int) -> None:
        asked.append(number)
        if number == signal.SIGTERM and begun:
            begun[0].terminate()

    with _handled(on_signal):
        begun.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout))
        return begun[0].wait(), bool(asked)


def die_with_parent() -> None:
    """From now on the end of the process that has started this one, by whatever, is a SIGTERM.

    The kernel's own (PR_SET_PDEATHSIG) comes once for each thread that the other one had.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _handled(on_signal: Callable[[int], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup: the run is to outlive its terminal
        del before[signal.SIGHUP]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _let_go_of_terminal()
        on_signal(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_child() -> None:
    """What the user's code forks, as the workers of a Pool, has none of this: signals end it."""
    for number in SIGNALS:
        if getattr(signal.getsignal(number), "__module__", None) == __name__:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)


def _let_go_of_terminal() -> None:
    """What is still printed, but to a file, is lost: an error of print() would end the run."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if not stat.S_ISREG(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
