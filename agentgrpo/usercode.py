"""Calls of code that is not ours: what it raises, and how long it may take, is said in one way.

The environments, agents, samplers, reward functions and modules that a config names run in this
process. Every call of one is made within calling(): whatever it raises, sys.exit() included,
becomes a UserCodeError that names it, the line, the task and the rollout. A thread looks at the
calls that are under way: it says what is being waited for, and ends what takes longer than its
limit.

A bug of ours is none of theirs: an error without a line of the user's, in a call of a class that is
shipped, passes as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import os
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, NoReturn, TypeVar

OURS = os.path.join(Path(__file__).parent, "")
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
Made = TypeVar("Made")


class InfrastructureError(Exception):
    """The machine failed, not the policy: the rollout leaves its group and is never trained on."""


class UserCodeError(Exception):
    """Code of the user's has failed.

    Args:
        what: was called.
        said: what it did: "raised KeyError: 'x'".
        where: file and line.
        task: its id.
        rollout: its place in its group.
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


class Interrupted(KeyboardInterrupt):
    """Somebody has pressed Ctrl-C. Any other KeyboardInterrupt may be the user's code's own."""


class Overdue(BaseException):
    """Raised in the main thread because a call, there or elsewhere, has taken too long."""


@dataclass(eq=False, slots=True)
class Call:
    """One that is under way."""

    what: str
    task: str | None
    rollout: int | None
    limit_s: float | None
    late: Callable[[str], None] | None
    """Told at the limit, on the thread that looks; None: `ends` is."""
    coroutine: Any = None
    waits: Future[Any] | None = None
    """Of a thread: for what it has an event loop do."""
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)
    told_at: float = FIRST_LINE_S
    over: bool = False
    """Its limit has passed."""

    def __post_init__(self) -> None:
        if self.limit_s is not None:
            self.told_at = min(self.told_at, self.limit_s / 2)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def stands_at(self) -> str:
        """File and line of the user's, or of whose it is, where the call is now."""
        frames = _frames_awaited(self.coroutine) if self.coroutine is not None else []
        if not frames or getattr(self.coroutine, "cr_running", False):
            top = sys._current_frames().get(self.thread)
            frames = [] if top is None else [f for f, _ in traceback.walk_stack(top)][::-1]
        users = [f for f in frames if _is_users(f.f_code.co_filename)]
        foreign = [f for f in frames if not f.f_code.co_filename.startswith(OURS)]
        chosen = (users or foreign)[-1:]
        return "".join(f"{f.f_code.co_filename}:{f.f_lineno}" for f in chosen)

    def described(self) -> str:
        return f"{self.what}{_place(self.task, self.rollout, self.stands_at())}"


_calls: dict[int, Call] = {}
"""Under way, oldest first."""
_numbers = itertools.count()
ends: list[Callable[[str], None]] = []
"""Told what has taken too long; the last one counts, and ends the command. Empty in a program of
somebody else's, which nobody else ends: what has taken too long is said there, and waited for."""


def under_way() -> list[Call]:
    """The calls that have not come back, oldest first."""
    return [*_calls.values()]


@contextlib.contextmanager
def calling(
    called: Any, what: str = "", *, task: str | None = None, rollout: int | None = None,
    limit_s: float | None = None, late: Callable[[str], None] | None = None, coroutine: Any = None,
) -> Iterator[Call]:  # fmt: skip
    """Within this a function of the user's is called, or something that calls one.

    Args:
        called: the function; None: it is not known.
        what: in words; "": by its name.
        task: its id.
        rollout: its place in its group.
        limit_s: seconds that it may take; None: for ever.
        late: told then, on another thread. None: the command ends, with an error.
        coroutine: where that is what runs.

    Raises:
        UserCodeError: whatever it raised but an InfrastructureError, a UserCodeError (to which what
            it does not say itself is added) and Ctrl-C.
    """
    number = next(_numbers)
    what = what or name_of(called)
    call = _calls[number] = Call(what, task, rollout, limit_s, late, coroutine)
    _looker()
    try:
        yield call
    except (Interrupted, InfrastructureError, Overdue):
        raise
    except UserCodeError as error:
        error.task = task if error.task is None else error.task
        error.rollout = rollout if error.rollout is None else error.rollout
        raise
    except BaseException as error:
        if _is_ctrl_c(error) or _is_cancelled(error):
            raise
        where = where_of(error, called)
        if where is None and isinstance(error, Exception):  # a bug of ours
            error.add_note(f"in {what}{_place(task, rollout, '')}")
            raise
        raise UserCodeError(
            what, said_of(error), where or "", task=task, rollout=rollout
        ) from error
    finally:
        _calls.pop(number, None)


def call(called: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function of the user's gives; errors as of calling()."""
    with calling(called):
        return called(*args, **options)


def name_of(called: Any) -> str:
    """What a function is called by: `Class.method`, `function`."""
    while isinstance(called, functools.partial):
        called = called.func
    name = getattr(called, "__name__", type(called).__name__)
    owner = getattr(called, "__self__", None)
    if owner is None or inspect.ismodule(owner):
        return str(getattr(called, "__qualname__", name)).replace("<locals>.", "")
    return f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}"


def said_of(error: BaseException) -> str:
    """What an error is, in one line: "raised KeyError: 'x'"."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r:.80})"
    try:
        text = " ".join(str(error).split())
    except Exception as failed:  # of the user's own class
        text = f"<its text cannot be had: {type(failed).__name__}>"
    if len(text) > LONGEST_SAID:
        text = f"{text[:LONGEST_SAID].rstrip()} ..."
    if isinstance(error, WrongResult):
        return f"gave a wrong result: {text}"
    return f"raised {type(error).__name__}{text and ': '}{text}"


def where_of(error: BaseException, called: Any) -> str | None:
    """File and line to look at for an error: the last that is the user's.

    Args:
        error: caught.
        called: the function in which it was raised: where the user has no line in the traceback, as
            with a wrong signature, its own is it. None: a module, which may be an installed one.

    Returns:
        None where nothing but our own code and libraries that it uses has failed.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{error.filename}:{error.lineno}"
    lines = _lines(error.__traceback__)[::-1]
    users = (f"{file}:{line}" for file, line in lines if _is_users(file))
    installed = (f"{f}:{n}" for f, n in lines if not _is_ours(f) and not f.startswith("<"))
    return next(users, None) or (next(installed, None) if called is None else defined_at(called))


def defined_at(called: Any) -> str | None:
    """File and line of a function that is not ours; None of one that is, or has none."""
    while isinstance(called, functools.partial):
        called = called.func
    if called is None:
        return None
    if not (inspect.isroutine(called) or inspect.isclass(called)):
        called = type(called)
    own = getattr(called, "__init__", None) if inspect.isclass(called) else called
    code = getattr(inspect.unwrap(own), "__code__", None) if own is not None else None
    if code is not None and not code.co_filename.startswith("<"):
        file, line = code.co_filename, code.co_firstlineno
    else:
        try:
            file, line = str(inspect.getsourcefile(called)), inspect.getsourcelines(called)[1]
        except (TypeError, OSError):  # compiled, or typed in
            return None
    return None if _is_ours(file) else f"{file}:{line}"


def _is_ours(file: str) -> bool:
    return file.startswith(OURS) and not file.startswith(EXAMPLES)


def _is_users(file: str) -> bool:
    """A file that is neither ours, but for the examples, nor installed, nor made up."""
    return not (_is_ours(file) or file.startswith(("<", *INSTALLED)))


def _lines(trace: TracebackType | None) -> list[tuple[str, int]]:
    return [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]


def _frames_awaited(coroutine: Any) -> list[FrameType]:
    """The frames of a coroutine that waits, the one that waits last."""
    frames = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return frames


def _place(task: str | None, rollout: int | None, where: str) -> str:
    said = (
        "" if task is None else f"task {task!r}",
        "" if rollout is None else f"rollout {rollout}",
        where and f"at {where}",
    )
    told = ", ".join(filter(None, said))
    return told and f" ({told})"


def _is_ctrl_c(error: BaseException) -> bool:
    """Where nobody has set how Ctrl-C is raised, no other KeyboardInterrupt can be told from it."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def _is_cancelled(error: BaseException) -> bool:
    """From outside: what is awaited() cannot cancel the task that this runs in."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return False
    return task is not None and task.cancelling() > 0


async def awaited(awaitable: Awaitable[Made]) -> Made:
    """What the user's coroutine gives, in a task of its own: the only one that it can cancel."""

    async def kept() -> Callable[[], Made]:
        try:
            made = await awaitable
        except (SystemExit, KeyboardInterrupt) as error:  # in a task they would end the loop
            return functools.partial(_raise, error)
        return lambda: made

    try:
        return (await asyncio.ensure_future(kept()))()
    finally:
        if inspect.iscoroutine(awaitable):
            awaitable.close()  # of one that was cancelled before it began: it says so otherwise


def _raise(error: BaseException) -> NoReturn:
    raise error


class Once(Generic[Made]):
    """As functools.cache, which calls `make` on each of the threads that ask before it has come
    back: what all are to share is made by one.
    """

    def __init__(self, make: Callable[..., Made]) -> None:
        self._made = functools.cache(make)
        self._lock = threading.RLock()  # a finalizer may ask on the thread that makes another
        self.cache_clear = self._made.cache_clear

    def __call__(self, *args: Any) -> Made:
        with self._lock:
            return self._made(*args)


@Once
def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """The process's loop of this name, on a thread that nothing ends.

    A task that ends by sys.exit() or KeyboardInterrupt stops its loop, and would leave all others
    waiting for ever: what waits for it is told, and the loop goes on.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        while not loop.is_closed():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


def waited(value: Any, name: str, limit_s: float | None = None) -> Any:
    """What a function has given; where that is to be awaited, what it comes to. For threads.

    A coroutine function that an ordinary wrapper (functools.wraps) wraps looks like any other
    function: that it is one can only be seen by what it gives.

    Args:
        value: what it has given.
        name: of the loop that runs it.
        limit_s: seconds after which it is cancelled; None: any.

    Raises:
        RuntimeError: this is that loop's own thread, which cannot wait for itself.
        TimeoutError: of limit_s.
    """
    if not inspect.isawaitable(value):
        return value
    if threading.current_thread().name == name:
        raise RuntimeError(f"{value!r:.80}: what runs on the loop is to await it itself")

    own = [call for call in under_way() if call.thread == threading.get_ident()][-1:]

    async def wait() -> Any:
        async with asyncio.timeout(limit_s):
            return await awaited(value)

    done = asyncio.run_coroutine_threadsafe(wait(), event_loop(name))
    for call in own:
        call.coroutine, call.waits = value, done
    try:
        return done.result()
    finally:
        for call in own:
            call.coroutine = call.waits = None


# --- what takes too long


@Once
def _looker() -> threading.Thread:
    thread = threading.Thread(target=_look, name="looks at calls", daemon=True)
    thread.start()
    return thread


def _look() -> None:
    while True:
        time.sleep(LOOK_S)
        try:
            _look_at(under_way())
        except BaseException as error:  # without this thread no limit holds
            end(f"a bug: looking at calls {said_of(error)}")


def _look_at(all_of_them: list[Call]) -> None:
    calls = [c for c in all_of_them if not c.over]
    for late in calls:
        if late.limit_s is not None and late.seconds >= late.limit_s:
            _end(late)
    calls = [c for c in calls if not c.over]
    if calls and calls[0].seconds >= calls[0].told_at:
        calls[0].told_at *= 2
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        tell(f"waiting for {calls[0].described()}{more} for {calls[0].seconds:.0f} s")


def _end(call: Call) -> None:
    said, where = f"has not come back after {call.limit_s:g} s", call.stands_at()
    error = UserCodeError(call.what, said, where, task=call.task, rollout=call.rollout)
    if call.late is None and not ends:
        call.limit_s = None  # it is waited for: that is still told
    else:
        call.over = True
    (call.late or end)(str(error))


def end(said: str) -> None:
    """End the command with an error; where there is none, as in a notebook, say it."""
    if ends:
        ends[-1](said)
    else:
        tell(f"error: {said}")


def tell(line: str) -> None:
    """A line on stderr, for whoever reads it: nobody, if its terminal or pipe is closed."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def flush() -> None:
    """Bring to standard output and errors what is still to be written, before os._exit()."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
