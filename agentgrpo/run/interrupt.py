"""Ctrl-C, once: finish the step, save, stop. Twice: stop at once, whatever hangs.

A thread that hangs cannot be stopped, and code that keeps Python's lock lets no other line of this
process run. So each command has a guard, a small process of its own. The kernel's handler of a
signal writes its number to the guard, whatever this process does. The guard says it back, to a
thread that ends the process when it does not end by itself after the second one; and where even
that thread cannot run, it kills the process.

A forked child, such as a worker of a multiprocessing.Pool, has none of this: a signal to it is not
one to this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import FrameType

from agentgrpo import usercode

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what a scheduler sends before it takes the machine away, a terminal that is closed."""
GRACE_S = 3.0
"""For ending by itself, after the second signal and after a call that takes too long."""
KILL_S = 4.5
"""From the second signal until the guard kills."""
OVERDUE = signal.SIGRTMIN + 7
"""Sent by this process to its main thread where a call has taken too long."""
INTERRUPTED, FAILED = 130, 3
GUARD = f"""
import os, select, signal, sys, time
for number in {tuple(map(int, SIGNALS))}:
    signal.signal(number, signal.SIG_IGN)
parent, asked, kill_at = int(sys.argv[1]), 0, None
while os.getppid() == parent:
    if kill_at and time.monotonic() > kill_at:
        os.write(2, b"interrupted: code that keeps Python's lock was killed\\n")
        os.kill(parent, signal.SIGKILL)
        break
    if select.select([0], [], [], 0.2 if kill_at else 1.0)[0]:
        if not (numbers := os.read(0, 64)):
            break
        asked += sum(number in {tuple(map(int, SIGNALS))} for number in numbers)
        if asked > 1 and not kill_at:
            kill_at = time.monotonic() + {KILL_S}
            os.write(1, b"2")
"""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Within this a second signal ends the process in GRACE_S, and what takes too long does too.

    Ctrl-C raises Interrupted, so that no KeyboardInterrupt of the user's code is taken for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid())], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert guard.stdin is not None
    os.set_blocking(guard.stdin.fileno(), False)
    wakes = signal.set_wakeup_fd(guard.stdin.fileno(), warn_on_full_buffer=False)
    _pipes.append(guard.stdin.fileno())
    ended = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        raise usercode.Interrupted

    def end_overdue(said: str) -> None:
        if not ended.wait(GRACE_S):
            _end(f"error: {said}", FAILED)

    def end_after_two() -> None:
        assert guard.stdout is not None
        with guard.stdout as told:
            asked_twice = told.read(1)
        if asked_twice and not ended.wait(GRACE_S):
            hangs = "".join(f", in {call.described()}" for call in usercode.under_way()[:1])
            _end(f"interrupted{hangs}", INTERRUPTED)

    nobodys = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if nobodys:
        signal.signal(signal.SIGINT, on_interrupt)
    threading.Thread(target=end_after_two, daemon=True).start()
    try:
        with overdue_raised(end_overdue):
            yield
    finally:
        ended.set()
        if nobodys:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(wakes)
        _pipes.pop()
        guard.kill()
        guard.stdin.close()
        guard.wait()


@contextlib.contextmanager
def overdue_raised(then: Callable[[str], None]) -> Iterator[None]:
    """Within this a call that takes too long raises Overdue in the main thread, which this is.

    Args:
        then: told of it after that, on another thread.
    """
    main, overdue = threading.get_ident(), SimpleQueue[str]()
    left, leaving = False, threading.Lock()

    def on_overdue(number: int, frame: FrameType | None) -> None:
        if not left:
            raise usercode.Overdue(overdue.get())

    def end_overdue(said: str) -> None:
        with leaving:
            if left:
                return
            overdue.put(said)
            signal.pthread_kill(main, OVERDUE)
        then(said)

    signal.signal(OVERDUE, on_overdue)
    usercode.ends.append(end_overdue)
    try:
        yield
    finally:
        left = True  # the handler stays, and does nothing: a signal may be on its way
        with leaving:
            usercode.ends.remove(end_overdue)


@contextlib.contextmanager
def timeouts() -> Iterator[None]:
    """The same in a program of somebody else's, such as a notebook, which nothing of ours ends.

    Raises:
        TimeoutError: a call has taken too long. Its thread is left to itself.
    """
    if usercode.ends or threading.current_thread() is not threading.main_thread():
        yield  # a command's; or no signal can be handled
        return
    try:
        with overdue_raised(lambda said: None):
            yield
    except usercode.Overdue as error:
        usercode.event_loop.cache_clear()  # the next one's calls must not wait for this one
        raise TimeoutError(str(error)) from None


_pipes: list[int] = []
"""To the guards: what set_wakeup_fd() was given."""
_masked = threading.local()


def _before_fork() -> None:
    """Until the child has let go of the pipe and the handlers, signals wait."""
    _masked.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masked.before)


def _in_child() -> None:
    if _pipes:
        signal.set_wakeup_fd(-1)
    for number in (*SIGNALS, OVERDUE):
        if getattr(signal.getsignal(number), "__module__", None) == __name__:
            ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if ctrl_c else signal.SIG_DFL)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _end(said: str, status: int) -> None:
    """End the process as it stands: every line of its records is on its way to the disk."""
    usercode.tell(said)
    usercode.flush()
    os._exit(status)


def _leave_closed_terminals() -> None:
    """Standard output and errors that are a terminal which is gone: lines are lost from now on.

    Whoever writes them: an error of print() in a reward would end what is to be saved.
    """
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # another one where it never was a terminal
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


def run_beside(command: Sequence[str], stdout: int | None = None) -> tuple[int, bool]:
    """Run a command and wait for it; whoever asks this process to stop asks that one.

    It has a process group of its own: from a terminal Ctrl-C would reach it twice, and end it. So
    Ctrl-Z is passed on to that group, and the SIGCONT after it.

    Returns:
        Its status, negative for a signal, and whether somebody has asked to stop.
    """
    begun: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []
    left: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        left.append(number)
        if number == signal.SIGHUP:
            _leave_closed_terminals()
        pass_on()

    def pass_on() -> None:
        while begun and left:
            begun[0].send_signal(left.pop())

    def on_ctrl_z(number: int, frame: FrameType | None) -> None:
        to_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        to_group(signal.SIGCONT)

    def to_group(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            for process in begun:
                os.killpg(process.pid, number)

    with contextlib.ExitStack() as undo:
        undo.enter_context(_handled(on_signal))
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            undo.callback(signal.signal, signal.SIGTSTP, signal.signal(signal.SIGTSTP, on_ctrl_z))
        begun.append(subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, process_group=0
        ))  # fmt: skip
        pass_on()
        return begun[0].wait(), bool(asked)


def end_with_parent() -> None:
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
def _handled(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[Callable[[], None]]:
    """Yields what gives SIGNALS back to whom they were; done at the end too."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup: the run is to outlive its terminal
        del before[signal.SIGHUP]

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield restore
    finally:
        restore()


@contextlib.contextmanager
def stop_after_step(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yields whether somebody has asked to stop. The second time they get what they always got.

    Args:
        say: told once that the step is being finished; called from a thread, since the signal may
            come in the middle of a line that is being said, which would be said twice then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may handle signals
        return
    asked = False
    words: SimpleQueue[str] = SimpleQueue()

    def tell() -> None:
        if line := words.get():
            say(line)

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if number == signal.SIGHUP:
            _leave_closed_terminals()
        restore()
        words.put("stopping after this step, then saving; Ctrl-C again: at once, unsaved")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        with _handled(on_signal) as restore:
            yield lambda: asked
    finally:
        words.put("")  # nothing, if nobody has asked
        teller.join()
