"""Call user code with a time limit and uniform error messages.

The environments, agents, samplers, reward functions and modules that a config names run in this
process. Every call of one is made within user_call(): any exception, including sys.exit(), becomes
a UserCodeError with the function, the line, the task and the rollout. A watchdog thread checks the
unfinished calls: it prints what the run is waiting for, and ends calls that exceed their limit.

Bugs of agentgrpo are not attributed to users: an error without a line of user code, in a call of a
shipped class, passes unchanged.
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
"""Directories of installed packages and of Python's own modules."""
MAX_ERROR_CHARS = 500
FIRST_LINE_S = 30.0
"""First "waiting for" line, or at half the limit; later ones at twice that."""
CHECK_INTERVAL_S = 0.5
in_command = False
"""Whether to end the process when a call exceeds its limit; elsewhere a line is printed."""
T = TypeVar("T")


class InfrastructureError(Exception):
    """The machine failed, not the policy: the rollout leaves its group and is never trained on."""


class UserCodeError(Exception):
    """User code failed: the function, the failure ("raised KeyError: 'x'") and the line."""

    def __init__(
        self, function: str, failure: str, line: str = "", *,
        task: str | None = None, rollout: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(function, failure, line)
        self.function, self.failure, self.line = function, failure, line
        self.task, self.rollout = task, rollout

    def __str__(self) -> str:
        return f"{self.function} {self.failure}{_place(self.task, self.rollout, self.line)}"


class WrongResult(TypeError):
    """A user function returned an unusable value: expected and actual value."""


class CallTimeout(TimeoutError):
    """A user coroutine exceeded its limit and was cancelled."""


@dataclass(eq=False, slots=True)
class Call:
    """An unfinished call; see user_call()."""

    called: Any
    what: str
    task: str | None
    rollout: int | None
    limit_s: float | None
    late: Callable[[str], None] | None
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)
    report_at: float = FIRST_LINE_S
    over: bool = False
    """Its limit has passed."""

    def __post_init__(self) -> None:
        if self.limit_s is not None:
            self.report_at = min(self.report_at, self.limit_s / 2)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def place(self) -> str:
        """Task, rollout, and the line of user code that its thread executes."""
        top, where = sys._current_frames().get(self.thread), defined_at(self.called)
        for frame, line in traceback.walk_stack(top) if top is not None else ():
            if _is_users(frame.f_code.co_filename):
                where = f"{frame.f_code.co_filename}:{line}"
                break
        return _place(self.task, self.rollout, where)


_calls: dict[Call, None] = {}
"""Unfinished calls, oldest first."""


@contextlib.contextmanager
def user_call(
    called: Any, what: str = "", *, task: str | None = None, rollout: int | None = None,
    limit_s: float | None = None, late: Callable[[str], None] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Context in which a user function, or something that calls one, is called.

    Args:
        called: The function; None: unknown.
        what: Its description in messages; "": its name.
        task: The task's id, for messages.
        rollout: The rollout's index in its group, for messages.
        limit_s: Time limit in seconds; None: none.
        late: Called with a message, on another thread, when the limit has passed; None: the command
            ends with an error.

    Raises:
        UserCodeError: For every exception except InfrastructureError, Ctrl-C and the cancellation
            of a coroutine. A UserCodeError that passes gets the missing task and rollout.
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
        location, failure = error_location(error, called), describe_error(error)
        if location is None and isinstance(error, Exception) and not isinstance(error, CallTimeout):
            error.add_note(f"in {call.what}{_place(task, rollout)}")  # a bug of agentgrpo
            raise
        raise UserCodeError(
            call.what, failure, location or "", task=task, rollout=rollout
        ) from error
    finally:
        del _calls[call]


def name_of(called: Any) -> str:
    """The display name of a function: `Class.method` or `function`."""
    while isinstance(called, functools.partial):
        called = called.func
    name = getattr(called, "__name__", type(called).__name__)
    owner = getattr(called, "__self__", None)
    if owner is None or inspect.ismodule(owner):
        return str(getattr(called, "__qualname__", name)).replace("<locals>.", "")
    return f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}"


def describe_error(error: BaseException) -> str:
    """One line for an error: "raised KeyError: 'x'"."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r:.80})"
    try:
        text = " ".join(str(error).split())
    except Exception as str_error:  # __str__ of a user's class
        text = f"<its text is not available: {type(str_error).__name__}>"
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[:MAX_ERROR_CHARS].rstrip()} ..."
    if isinstance(error, CallTimeout):
        return text
    if isinstance(error, WrongResult):
        return f"gave a wrong result: {text}"
    return f"raised {type(error).__name__}{text and ': '}{text}"


def error_location(error: BaseException, called: Any) -> str | None:
    """File and line to look at for an error: the innermost line of user code.

    If the traceback has none, as with a wrong signature, the definition of `called` (None: a
    module, for which an installed file counts too). None: only agentgrpo and libraries that it uses
    failed.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, line) for frame, line in frames][::-1]
    users = (f"{file}:{line}" for file, line in lines if _is_users(file))
    installed = (f"{f}:{n}" for f, n in lines if not _is_ours(f) and not f.startswith("<"))
    return next(users, None) or (next(installed, None) if called is None else defined_at(called))


def defined_at(called: Any) -> str | None:
    """File and line of a function's definition; None for agentgrpo's own, or without source."""
    while isinstance(called, functools.partial):
        called = called.func
    if not (inspect.isroutine(called) or inspect.isclass(called)):
        called = type(called)
    try:
        called = inspect.unwrap(called)
        file, line = str(inspect.getsourcefile(called)), inspect.getsourcelines(called)[1]
    except (TypeError, OSError):  # compiled, or from an interactive session
        return None
    return None if _is_ours(file) else f"{file}:{line}"


def _is_ours(file: str) -> bool:
    return file.startswith(OURS) and not file.startswith(EXAMPLES)


def _is_users(file: str) -> bool:
    """A file that is neither agentgrpo's (except the examples), nor installed, nor generated."""
    return not (_is_ours(file) or file.startswith(("<", *INSTALLED)))


def _place(task: str | None, rollout: int | None, location: str | None = None) -> str:
    parts = [] if task is None else [f"task {task!r}"]
    parts += [] if rollout is None else [f"rollout {rollout}"]
    parts += [f"at {location}"] if location else []
    return f" ({', '.join(parts)})" if parts else ""


# --- coroutines


async def await_within(limit_s: float | None, value: Awaitable[T]) -> T:
    """Await a user's coroutine; CallTimeout after limit_s, whose traceback ends where it waited."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await value
    except TimeoutError as error:
        if not limit.expired():
            raise
        late = CallTimeout(f"did not return within {limit_s:g} s")
        if error.__cause__ is not None:
            late = late.with_traceback(error.__cause__.__traceback__)
        raise late from None


_lock = threading.RLock()  # a finalizer may call event_loop() on a thread that holds the lock
_loops: dict[str, asyncio.AbstractEventLoop] = {}


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """The process's event loop of this name, on a daemon thread of its own.

    sys.exit() or KeyboardInterrupt in a task stops a loop, and all other tasks would wait forever.
    Here the waiting caller gets the exception, and the loop is restarted.
    """

    def run_loop() -> None:
        while not loop.is_closed():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    with _lock:
        if name not in _loops:
            loop = _loops[name] = asyncio.new_event_loop()
            threading.Thread(target=run_loop, name=name, daemon=True).start()
        return _loops[name]


def run_sync(value: Any, name: str, limit_s: float | None = None) -> Any:
    """Return a function's result, awaited on the named loop if it is awaitable. For threads.

    Whether a function is a coroutine function can only be seen from its result: an ordinary wrapper
    (functools.wraps) hides it.
    """
    if not inspect.isawaitable(value):
        return value
    if threading.current_thread().name == name:
        raise RuntimeError(f"{value!r:.80}: code on the event loop must await it itself")
    return asyncio.run_coroutine_threadsafe(await_within(limit_s, value), event_loop(name)).result()


# --- calls that take too long


@functools.cache
def _watchdog() -> threading.Thread:
    thread = threading.Thread(target=_watch_calls, name="call watchdog", daemon=True)
    thread.start()
    return thread


def _watch_calls() -> None:
    while True:
        time.sleep(CHECK_INTERVAL_S)
        _check_calls([call for call in [*_calls] if not call.over])


def _check_calls(calls: list[Call]) -> None:
    """Print what the run is waiting for, and end calls over their limit; calls are oldest first."""
    for call in calls:
        if call.limit_s is not None and call.seconds >= call.limit_s:
            call.over = True
            message = f"{call.what} did not return within {call.limit_s:g} s{call.place()}"
            (call.late or end_command)(message)
    first = calls[0] if calls else None
    if first is not None and not first.over and first.seconds >= first.report_at:
        first.report_at *= 2
        others = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        print_stderr(f"waiting for {first.what}{first.place()}{others} for {first.seconds:.0f} s")


def end_command(message: str) -> None:
    """End a command at once, with all stacks and an error; elsewhere only print the error."""
    if in_command:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        faulthandler.dump_traceback(2)
    print_stderr(f"error: {message}")
    if in_command:
        os._exit(3)


def print_stderr(line: str) -> None:
    """Print a line on stderr; ignored if its terminal or pipe is closed."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def as_number(value: Any) -> float | None:
    """A finite number returned by user code, as a float; None: it is not one.

    Accepts Python's and numpy's numbers, and arrays and tensors without dimensions.
    """
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def named_numbers(values: Any) -> dict[str, float]:
    """Finite numbers by name from user code, as floats. Raises WrongResult for anything else."""
    named = values.items() if isinstance(values, Mapping) else [(None, values)]
    numbers = {name: as_number(value) for name, value in named}
    valid = {n: x for n, x in numbers.items() if x is not None and isinstance(n, str)}
    if len(valid) < len(numbers):
        raise WrongResult(f"expected {{name: finite number}}, got {values!r:.80}")
    return valid
