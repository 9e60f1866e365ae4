"""Calls of code that is not ours: what it raises, and how long it may take, is said in one way.

The environments, agents, samplers, reward functions and modules that a config names run in this
process. Every call of one is made within user_call(): whatever it raises, sys.exit() included,
becomes a UserCodeError that names it, the line, the task and the rollout. A thread looks at the
calls that have not come back: it says what is being waited for, and ends what takes longer than its
limit.

A bug of ours is none of theirs: an error without a line of the user's, in a call of a class that is
shipped, passes as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import inspect
import math
import os
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

OURS = os.path.join(Path(__file__).parents[1], "")
EXAMPLES = os.path.join(OURS, "examples", "")
INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in {
        *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)
"""Where packages and Python's own modules lie."""
LONGEST_SAID = 500
FIRST_LINE_S = 30.0
"""When it is first said what is being waited for, or at half the limit; then at twice that."""
LOOK_S = 0.5
in_command = False
"""Whether this process is a command's, which ends where a call takes too long. In a notebook, or
another program, that is only said."""
Made = TypeVar("Made")


class InfrastructureError(Exception):
    """The machine failed, not the policy: the rollout leaves its group and is never trained on."""


class UserCodeError(Exception):
    """Code of the user's has failed: what was called, what it did ("raised KeyError: 'x'"), and
    where.
    """

    def __init__(
        self, what: str, said: str, where: str = "", *,
        task: str | None = None, rollout: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(what, said, where)
        self.what, self.said, self.where, self.task, self.rollout = what, said, where, task, rollout

    def __str__(self) -> str:
        return f"{self.what} {self.said}{_place(self.task, self.rollout, self.where)}"


class WrongResult(TypeError):
    """A function of the user's gave what cannot be used: what was expected, and what came."""


class CallTimeout(TimeoutError):
    """A coroutine of the user's took longer than it may, and was cancelled."""


@dataclass(eq=False, slots=True)
class Call:
    """One that has not come back; see user_call()."""

    called: Any
    what: str
    task: str | None
    rollout: int | None
    limit_s: float | None
    late: Callable[[str], None] | None
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)
    say_at: float = FIRST_LINE_S
    over: bool = False
    """Its limit has passed."""

    def __post_init__(self) -> None:
        if self.limit_s is not None:
            self.say_at = min(self.say_at, self.limit_s / 2)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def place(self) -> str:
        """Task, rollout, and the user's line in which its thread is, or where it is defined."""
        top, where = sys._current_frames().get(self.thread), defined_at(self.called)
        for frame, line in traceback.walk_stack(top) if top is not None else ():
            if _is_users(frame.f_code.co_filename):
                where = f"{frame.f_code.co_filename}:{line}"
                break
        return _place(self.task, self.rollout, where)


_calls: dict[Call, None] = {}
"""Those that have not come back, oldest first."""


@contextlib.contextmanager
def user_call(
    called: Any, what: str = "", *, task: str | None = None, rollout: int | None = None,
    limit_s: float | None = None, late: Callable[[str], None] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Within this a function of the user's is called, or something that calls one.

    `called`: None: it is not known. `what`: it in words; "": by its name. `late` is told, on
    another thread, when it takes longer than limit_s; None: the command ends, with an error.
    UserCodeError: whatever it raised but an InfrastructureError, Ctrl-C and what cancels a
    coroutine; to one that passes, what it does not say itself is added.
    """
    call = Call(called, what or name_of(called), task, rollout, limit_s, late)
    _calls[call] = None
    _watchdog()
    try:
        yield
    except (InfrastructureError, KeyboardInterrupt, asyncio.CancelledError):
        raise
    except UserCodeError as error:
        error.task = task if error.task is None else error.task
        error.rollout = rollout if error.rollout is None else error.rollout
        raise
    except BaseException as error:
        where, said = error_location(error, called), describe_error(error)
        if where is None and isinstance(error, Exception) and not isinstance(error, CallTimeout):
            error.add_note(f"in {call.what}{_place(task, rollout)}")  # a bug of ours
            raise
        raise UserCodeError(call.what, said, where or "", task=task, rollout=rollout) from error
    finally:
        del _calls[call]


def name_of(called: Any) -> str:
    """What a function is called by: `Class.method`, `function`."""
    while isinstance(called, functools.partial):
        called = called.func
    name = getattr(called, "__name__", type(called).__name__)
    owner = getattr(called, "__self__", None)
    if owner is None or inspect.ismodule(owner):
        return str(getattr(called, "__qualname__", name)).replace("<locals>.", "")
    return f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}"


def describe_error(error: BaseException) -> str:
    """What an error is, in one line: "raised KeyError: 'x'"."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r:.80})"
    try:
        text = " ".join(str(error).split())
    except Exception as failed:  # of the user's own class
        text = f"<its text cannot be had: {type(failed).__name__}>"
    if len(text) > LONGEST_SAID:
        text = f"{text[:LONGEST_SAID].rstrip()} ..."
    if isinstance(error, CallTimeout):
        return text
    if isinstance(error, WrongResult):
        return f"gave a wrong result: {text}"
    return f"raised {type(error).__name__}{text and ': '}{text}"


def error_location(error: BaseException, called: Any) -> str | None:
    """File and line to look at for an error: the last that is the user's.

    Where the user has no line in the traceback, as with a wrong signature, that of `called` is it;
    None there: a module, which may be an installed one. None: nothing but our own code and
    libraries that it uses has failed.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, line) for frame, line in frames][::-1]
    users = (f"{file}:{line}" for file, line in lines if _is_users(file))
    installed = (f"{f}:{n}" for f, n in lines if not _is_ours(f) and not f.startswith("<"))
    return next(users, None) or (next(installed, None) if called is None else defined_at(called))


def defined_at(called: Any) -> str | None:
    """File and line of a function that is not ours; None of one that is, or has none."""
    while isinstance(called, functools.partial):
        called = called.func
    if not (inspect.isroutine(called) or inspect.isclass(called)):
        called = type(called)
    try:
        called = inspect.unwrap(called)
        file, line = str(inspect.getsourcefile(called)), inspect.getsourcelines(called)[1]
    except (TypeError, OSError):  # compiled, or typed in
        return None
    return None if _is_ours(file) else f"{file}:{line}"


def _is_ours(file: str) -> bool:
    return file.startswith(OURS) and not file.startswith(EXAMPLES)


def _is_users(file: str) -> bool:
    """A file that is neither ours, but for the examples, nor installed, nor made up."""
    return not (_is_ours(file) or file.startswith(("<", *INSTALLED)))


def _place(task: str | None, rollout: int | None, where: str | None = None) -> str:
    told = [] if task is None else [f"task {task!r}"]
    told += [] if rollout is None else [f"rollout {rollout}"]
    told += [f"at {where}"] if where else []
    return f" ({', '.join(told)})" if told else ""


# --- coroutines


async def within(limit_s: float | None, value: Awaitable[Made]) -> Made:
    """What a coroutine of the user's gives; CallTimeout after limit_s: its traceback ends where it
    waited.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await value
    except TimeoutError as error:
        if not limit.expired():
            raise
        late = CallTimeout(f"has not come back after {limit_s:g} s")
        if error.__cause__ is not None:
            late = late.with_traceback(error.__cause__.__traceback__)
        raise late from None


_lock = threading.RLock()  # a finalizer may ask on the thread that makes another
_loops: dict[str, asyncio.AbstractEventLoop] = {}


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """The process's loop of this name, on a thread that nothing ends.

    A task that ends by sys.exit() or KeyboardInterrupt stops its loop, and would leave all others
    waiting for ever: what waits for it is told, and the loop goes on.
    """

    def run() -> None:
        while not loop.is_closed():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    with _lock:
        if name not in _loops:
            loop = _loops[name] = asyncio.new_event_loop()
            threading.Thread(target=run, name=name, daemon=True).start()
        return _loops[name]


def run_sync(value: Any, name: str, limit_s: float | None = None) -> Any:
    """What a function has given; where that is to be awaited, what it comes to. For threads.

    A coroutine function that an ordinary wrapper (functools.wraps) wraps looks like any other
    function: that it is one can only be seen by what it gives.
    """
    if not inspect.isawaitable(value):
        return value
    if threading.current_thread().name == name:
        raise RuntimeError(f"{value!r:.80}: what runs on the loop is to await it itself")
    return asyncio.run_coroutine_threadsafe(within(limit_s, value), event_loop(name)).result()


# --- what takes too long


@functools.cache
def _watchdog() -> threading.Thread:
    thread = threading.Thread(target=_watch, name="watches calls", daemon=True)
    thread.start()
    return thread


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        _look_at([call for call in [*_calls] if not call.over])


def _look_at(calls: list[Call]) -> None:
    """Say what is waited for, and end what is over; calls are oldest first."""
    for call in calls:
        if call.limit_s is not None and call.seconds >= call.limit_s:
            call.over = True
            said = f"{call.what} has not come back after {call.limit_s:g} s{call.place()}"
            (call.late or end)(said)
    first = calls[0] if calls else None
    if first is not None and not first.over and first.seconds >= first.say_at:
        first.say_at *= 2
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        tell(f"waiting for {first.what}{first.place()}{more} for {first.seconds:.0f} s")


def end(said: str) -> None:
    """End the command as it stands, with the lines of all threads and an error; else say it."""
    if in_command:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        faulthandler.dump_traceback(2)
    tell(f"error: {said}")
    if in_command:
        os._exit(3)


def tell(line: str) -> None:
    """A line on stderr, for whoever reads it: nobody, if its terminal or pipe is closed."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def as_number(value: Any) -> float | None:
    """A finite number that somebody's code gave, as a float; None: it is none.

    Python's and numpy's numbers, and arrays and tensors of no dimension.

    >>> as_number(2), as_number("2"), as_number(math.nan)
    (2.0, None, None)
    """
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def named_numbers(values: Any) -> dict[str, float] | None:
    """Finite numbers by name that somebody's code gave, as floats; None: they are no such thing."""
    if not isinstance(values, Mapping):
        return None
    numbers = {name: as_number(value) for name, value in values.items()}
    made = {n: x for n, x in numbers.items() if x is not None and isinstance(n, str)}
    return made if len(made) == len(numbers) else None
