"""Signal handling: the first Ctrl-C finishes the step, saves and stops; the second kills.

The first signal restores the kernel's default action, so a second one ends the process whatever it
is doing; the last checkpoint stays. Native code that never releases the GIL blocks even the first:
use `kill -9`.
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
"""Ctrl-C; a scheduler's notice before it takes the machine; a closed terminal."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Mark the process as a command.

    The first Ctrl-C raises KeyboardInterrupt. A second one ends the process, and so does a call of
    user code that exceeds its time limit.
    """

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    previous_handler = signal.getsignal(signal.SIGINT)
    installs = _in_main_thread() and previous_handler is signal.default_int_handler
    if installs:
        signal.signal(signal.SIGINT, on_interrupt)
    user_calls.in_command = True
    try:
        yield
    finally:
        user_calls.in_command = False
        if installs and signal.getsignal(signal.SIGINT) is on_interrupt:
            signal.signal(signal.SIGINT, previous_handler)


@contextlib.contextmanager
def stop_after_step(print_line: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a signal has asked the run to stop.

    A second Ctrl-C ends a command; elsewhere, as in a notebook, it has its previous handler.
    """
    if not _in_main_thread():  # Python handles signals in the main thread only
        yield lambda: False
        return
    stop_requested = False
    second_handler = signal.SIG_DFL if user_calls.in_command else signal.getsignal(signal.SIGINT)
    # printed by a thread: the signal may arrive while the main thread is printing a line, and
    # printing in the handler would then write that line twice
    lines: SimpleQueue[str] = SimpleQueue()

    def print_once() -> None:
        if line := lines.get():
            print_line(line)

    def on_signal(number: int) -> None:
        nonlocal stop_requested
        stop_requested = True
        signal.signal(signal.SIGINT, second_handler)
        lines.put("stopping after this step, then saving; Ctrl-C again stops at once, unsaved")

    printer = threading.Thread(target=print_once, daemon=True)
    printer.start()
    try:
        with _handle_signals(on_signal):
            yield lambda: stop_requested
    finally:
        lines.put("")  # ends the thread if there was no signal
        printer.join()


def run_child(command: Sequence[str], stdout: int | None = None) -> tuple[int, bool]:
    """Run a command and wait for it; a signal that stops this process stops the command.

    Ctrl-C and SIGHUP reach both processes by themselves; SIGTERM is passed on. Returns the exit
    status, negative for a signal, and whether a signal arrived.
    """
    children: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def on_signal(number: int) -> None:
        signals.append(number)
        if number == signal.SIGTERM and children:
            children[0].terminate()

    with _handle_signals(on_signal):
        children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout))
        return children[0].wait(), bool(signals)


def die_with_parent() -> None:
    """Send SIGTERM to this process as soon as its parent has ended, for whatever reason."""
    # not by PR_SET_PDEATHSIG: the kernel sends that once for each thread of the parent
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _handle_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    if previous[signal.SIGHUP] is signal.SIG_IGN:  # nohup: the run outlives its terminal
        del previous[signal.SIGHUP]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _detach_terminal()
        on_signal(number)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_forking = threading.local()


def _before_fork() -> None:
    """Hold signals back: Python drops one that reaches a fork before its first line.

    Not those whose handler may raise: Python ignores exceptions of these functions.
    """
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ours = f"{_handle_signals.__name__}.<locals>.handle"
    held = [n for n in SIGNALS if getattr(signal.getsignal(n), "__qualname__", "") == ours]
    signal.pthread_sigmask(signal.SIG_BLOCK, held)


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    """Restore the default handlers in processes that user code forks, such as Pool workers."""
    for number in SIGNALS:
        if getattr(signal.getsignal(number), "__module__", None) == __name__:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def _detach_terminal() -> None:
    """Send output that does not go to a file to /dev/null: print() would raise and end the run."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if not stat.S_ISREG(os.fstat(stream).st_mode):
            os.dup2(devnull, stream)
    os.close(devnull)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
