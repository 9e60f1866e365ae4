"""``AsyncSandbox``: ``Sandbox`` for asyncio. Each call blocks in a thread, without the GIL."""

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

from agentgrpo.sandbox.e2b.api import Sandbox
from agentgrpo.sandbox.e2b.commands import DEFAULT_TIMEOUT_S, CommandHandle
from agentgrpo.sandbox.e2b.execution import Execution
from agentgrpo.sandbox.isolation.errors import InvalidArgumentException
from agentgrpo.sandbox.session.session import Session

MAX_WAITING = 1024
LISTENER_S = 60.0
"""Time limit of a listener. If its loop has ended, the thread would wait forever."""
_threads: ThreadPoolExecutor


def _make_threads() -> None:
    """Make the executor: asyncio's default has too few threads (six on two cores)."""
    global _threads
    _threads = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="sandbox-wait")


_make_threads()
os.register_at_fork(after_in_child=_make_threads)  # a child has none of the parent's threads


def _submit(call: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    loop = asyncio.get_running_loop()
    args = tuple(_wrap_listener(loop, value) for value in args)
    kwargs = {name: _wrap_listener(loop, value) for name, value in kwargs.items()}
    return _threads.submit(call, *args, **kwargs)


async def _wait(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = await asyncio.wrap_future(_submit(call, *args, **kwargs))
    return _Awaitable(result) if isinstance(result, CommandHandle) else result


def _wrap_listener(loop: asyncio.AbstractEventLoop, value: Any) -> Any:
    """Wrap a listener for a thread: the result of a coroutine function is awaited in the loop."""
    if not callable(value):
        return value

    async def finish(awaitable: Awaitable[object]) -> object:
        return await awaitable

    def call(*args: object) -> object:
        result = value(*args)
        if not inspect.isawaitable(result):
            return result
        return asyncio.run_coroutine_threadsafe(finish(result), loop).result(LISTENER_S)

    return call


def _interrupt(sessions: list[Session], running: "Future[Execution]") -> None:
    while not wait([running], 0.05).done:
        for session in sessions:
            session.interrupt()


def _kill_created(creating: "Future[Sandbox]") -> None:
    if not creating.cancelled() and creating.exception() is None:
        creating.result().kill()


class _Awaitable:
    """Files, commands, a command or a page, with awaitable methods."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._wrapped, name)
        return functools.partial(_wait, attribute) if callable(attribute) else attribute


class _AsyncCommands(_Awaitable):
    async def run(
        self, cmd: str, background: bool = False, *args: Any,
        on_stdout: Any = None, on_stderr: Any = None, timeout: float | None = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Like Commands.run(). Cancellation kills the command."""
        handle = await _wait(self._wrapped.run, cmd, True, *args, **kwargs)
        if background:
            return handle
        try:
            return await handle.wait(on_stdout, on_stderr, timeout=timeout or None)
        except asyncio.CancelledError:
            _threads.submit(handle._wrapped.kill)
            raise
        finally:
            _threads.submit(self._wrapped.list)  # closes the descriptors of ended commands


class AsyncSandbox:
    """A Sandbox with awaitable methods. Use ``await AsyncSandbox.create()``."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        if not isinstance(sandbox, Sandbox):
            raise InvalidArgumentException("use `await AsyncSandbox.create()`")
        self._sandbox = sandbox
        self.files: Any = _Awaitable(sandbox.files)
        self.commands: Any = _AsyncCommands(sandbox.commands)

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> Self:
        """Start a sandbox; arguments and errors as for Sandbox.create()."""
        creating = _submit(Sandbox.create, *args, **kwargs)
        try:
            return cls(await asyncio.wrap_future(creating))
        except asyncio.CancelledError:  # no one will receive the sandbox
            creating.add_done_callback(_kill_created)
            raise

    @classmethod
    async def connect(cls, sandbox_id: str, timeout: float | None = None, **options: Any) -> Self:
        """Like Sandbox.connect()."""
        return cls(await _wait(Sandbox.connect, sandbox_id, timeout, **options))

    @classmethod
    def list(cls, **options: Any) -> Any:
        """Like Sandbox.list(), with ``await ...next_items()``."""
        return _Awaitable(Sandbox.list(**options))

    @property
    def sandbox_id(self) -> str:
        return self._sandbox.sandbox_id

    async def run_code(self, code: str, *args: Any, **kwargs: Any) -> Execution:
        """Like Sandbox.run_code(). Listeners are called in another thread; coroutines are awaited
        in the loop. Cancellation interrupts the code, as its timeout would.
        """
        sessions: list[Session] = []
        running = _submit(self._sandbox.run_code, code, *args, **kwargs, _on_start=sessions.append)
        try:
            execution: Execution = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            _threads.submit(_interrupt, sessions, running)
            raise
        return execution

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Every other method of Sandbox (kill, set_timeout ...), awaitable."""
        return functools.partial(_wait, getattr(self._sandbox, name))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.kill()
