"""Calls of host functions from a session.

A call is sent as an answer of kind ``call`` to the running step; the next request, ``returned`` or
``raised``, has its value. One call runs at a time: other threads and the answer that ends the step
wait for it. The host trusts nothing of this and checks every message
(sandbox/session/host_tools.py).
"""

import builtins
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from os import getpid
from typing import Any

from load import isolated  # type: ignore[import-not-found]

data = isolated("data")
encode, decode = data["encode"], data["decode"]
EncodeError = data["EncodeError"]
NEVER = (StopIteration, StopAsyncIteration)
"""Not raised for a host function's exception: they would end an iteration, not the call."""


class Calls:
    """A session's host functions. put() sends an answer's fields, take() receives a request's."""

    def __init__(
        self,
        interpreter: Any,
        put: Callable[[list[bytes]], None],
        take: Callable[[], list[bytes]],
        max_arguments: int,
        max_answer: int,
    ) -> None:
        self.interpreter, self.put, self.take = interpreter, put, take
        self.max_arguments, self.max_answer = max_arguments, max_answer
        self.lock, self.main = allocate_lock(), get_ident()
        self.open = False

    def function(self, name: str, doc: str) -> Callable[..., Any]:

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = doc
        call.__module__ = "__main__"
        return call

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getpid() != self.interpreter.pid:
            raise RuntimeError(f"{name}(): only the session's own process can call the host")
        try:
            arguments = encode([[*args], kwargs], self.max_arguments)
        except EncodeError as error:
            raise TypeError(f"{name}(): its arguments cannot be passed: {error}") from None
        with self.lock:
            if not self.open:
                raise RuntimeError(f"{name}(): the host can be called only while a step runs")
            kind, *parts = self.exchange([b"call", name.encode(), arguments])
        if kind == b"returned":
            return decode(parts[0], self.max_answer)
        raise exception_of(parts[0].decode(), parts[1].decode())

    def exchange(self, fields: list[bytes]) -> list[bytes]:
        """Send a call and wait for its answer. An interrupt is raised only after the answer, so
        that none stays in the pipe; the host answers by the step's deadline.
        """
        if get_ident() != self.main:
            self.put(fields)
            return self.take()
        interpreter = self.interpreter
        try:
            interpreter.waiting = True
            self.put(fields)
            answer = self.take()
        finally:
            interpreter.waiting = False
        if interpreter.missed:
            interpreter.missed = False
            raise KeyboardInterrupt
        return answer

    def shut(self) -> None:
        """Refuse calls from now on, after waiting for the call of another thread."""
        with self.lock:
            self.open = False


def exception_of(name: str, text: str) -> Exception:
    """Make the builtin exception of that name, or a RuntimeError."""
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NEVER):
        try:
            error: Exception = kind(text)
            return error
        except Exception:  # the class needs other arguments
            pass
    return RuntimeError(f"{name}: {text}")
