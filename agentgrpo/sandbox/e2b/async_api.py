"""``AsyncSandbox``: ``Sandbox`` for asyncio. Each call waits in a thread, without the GIL."""

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
"""How long a listener may take: its loop may have ended, and the thread would wait for ever."""
_waiters: ThreadPoolExecutor


def _make_waiters() -> None:
    """Of asyncio's own executor, with six threads on two cores, sixty rollouts would wait for each
    other. In a process that was forked off, the threads are its parent's.
    """
    global _waiters
    _waiters = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="sandbox-wait")


_make_waiters()
os.register_at_fork(after_in_child=_make_waiters)


def _begin(call: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    loop = asyncio.get_running_loop()
    args = tuple(_awaiting(loop, value) for value in args)
    kwargs = {name: _awaiting(loop, value) for name, value in kwargs.items()}
    return _waiters.submit(call, *args, **kwargs)


async def _wait(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = await asyncio.wrap_future(_begin(call, *args, **kwargs))
    return _Awaitable(result) if isinstance(result, CommandHandle) else result


def _awaiting(loop: asyncio.AbstractEventLoop, value: Any) -> Any:
    """A listener as the thread calls it: one that is a coroutine is awaited, in the loop."""
    if not callable(value):
        return value

    async def finish(made: Awaitable[object]) -> object:
        return await made

    def call(*args: object) -> object:
        made = value(*args)
        if not inspect.isawaitable(made):
            return made
        return asyncio.run_coroutine_threadsafe(finish(made), loop).result(LISTENER_S)

    return call


def _interrupt(runs: list[Session], running: "Future[Execution]") -> None:
    while not wait([running], 0.05).done:
        for session in runs:
            session.interrupt()


def _kill_made(making: "Future[Sandbox]") -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().kill()


class _Awaitable:
    """Files, commands, a command or a page: its methods, each to be awaited, and its attributes."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plain, name)
        return functools.partial(_wait, found) if callable(found) else found


class _AsyncCommands(_Awaitable):
    async def run(
        self, cmd: str, background: bool = False, *args: Any,
        on_stdout: Any = None, on_stderr: Any = None, timeout: float | None = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As Commands.run(). Cancelled, it ends the command."""
        handle = await _wait(self._plain.run, cmd, True, *args, **kwargs)
        if background:
            return handle
        try:
            return await handle.wait(on_stdout, on_stderr, timeout=timeout or None)
        except asyncio.CancelledError:
            _waiters.submit(handle._plain.kill)
            raise
        finally:
            _waiters.submit(self._plain.list)  # lets go of it


class AsyncSandbox:
    """A Sandbox whose methods are awaited. Use ``await AsyncSandbox.create()``."""

    def __init__(self, plain: Sandbox | None = None) -> None:
        if not isinstance(plain, Sandbox):
            raise InvalidArgumentException("use `await AsyncSandbox.create()`")
        self._plain = plain
        self.files: Any = _Awaitable(plain.files)
        self.commands: Any = _AsyncCommands(plain.commands)

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> Self:
        """A new sandbox; arguments and errors as for Sandbox.create()."""
        making = _begin(Sandbox.create, *args, **kwargs)
        try:
            return cls(await asyncio.wrap_future(making))
        except asyncio.CancelledError:  # nobody will have what is made now
            making.add_done_callback(_kill_made)
            raise

    @classmethod
    async def connect(cls, sandbox_id: str, timeout: float | None = None, **options: Any) -> Self:
        """As Sandbox.connect()."""
        return cls(await _wait(Sandbox.connect, sandbox_id, timeout, **options))

    @classmethod
    def list(cls, **options: Any) -> Any:
        """As Sandbox.list(), with ``await ...next_items()``."""
        return _Awaitable(Sandbox.list(**options))

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self._plain.sandbox_id

    async def run_code(self, code: str, *args: Any, **kwargs: Any) -> Execution:
        """As Sandbox.run_code(). Listeners are called in another thread, coroutines are awaited in
        the loop. Cancelled, it interrupts the code, as its timeout would.
        """
        runs: list[Session] = []
        running = _begin(self._plain.run_code, code, *args, **kwargs, _begun=runs.append)
        try:
            execution: Execution = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            _waiters.submit(_interrupt, runs, running)
            raise
        return execution

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Every other method of Sandbox (kill, set_timeout ...), to be awaited."""
        return functools.partial(_wait, getattr(self._plain, name))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.kill()
