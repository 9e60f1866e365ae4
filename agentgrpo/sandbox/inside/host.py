"""Functions of the host, as a session calls them.

A call is an answer of the kind ``call`` to the step that makes it, and the step goes on with the
next request, ``returned`` or ``raised``. One call is under way at a time: others wait for it, as
does the answer that ends the step. The host believes nothing of this; it checks what comes
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
"""Of what a function raised: would end something else than the call."""


class Calls:
    """The functions that a session may call.

    put() sends the fields of an answer to the step that runs, take() gives those of the next
    request; the last two are bytes of the arguments and of the answer of a call.
    """

    def __init__(
        self,
        interpreter: Any,
        put: Callable[[list[bytes]], None],
        take: Callable[[], list[bytes]],
        most_asked: int,
        most_told: int,
    ) -> None:
        self.interpreter, self.put, self.take = interpreter, put, take
        self.most_asked, self.most_told = most_asked, most_told
        self.lock, self.main = allocate_lock(), get_ident()
        self.open = False

    def function(self, name: str, doc: str) -> Callable[..., Any]:
        """What stands for a function in the session's namespace."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        call.__doc__ = doc
        call.__module__ = "__main__"
        return call

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the host's function returns, or the exception that it raised."""
        if getpid() != self.interpreter.pid:
            raise RuntimeError(f"{name}(): only the session's own process can call the host")
        try:
            asked = encode([[*args], kwargs], self.most_asked)
        except EncodeError as error:
            raise TypeError(f"{name}(): its arguments cannot be passed: {error}") from None
        with self.lock:
            if not self.open:
                raise RuntimeError(f"{name}(): the host can be called while a step runs only")
            kind, *told = self.exchange([b"call", name.encode(), asked])
        if kind == b"returned":
            return decode(told[0], self.most_told)
        raise raised(told[0].decode(), told[1].decode())

    def exchange(self, fields: list[bytes]) -> list[bytes]:
        """Ask and wait. An interrupt waits too, so that no answer is left in the pipe: the host
        answers at the step's deadline at the latest.
        """
        if get_ident() != self.main:
            self.put(fields)
            return self.take()
        interpreter = self.interpreter
        try:
            interpreter.waiting = True
            self.put(fields)
            told = self.take()
        finally:
            interpreter.waiting = False
        if interpreter.missed:
            interpreter.missed = False
            raise KeyboardInterrupt
        return told

    def shut(self) -> None:
        """The step ends: no further call, once that of another thread is answered."""
        with self.lock:
            self.open = False


def raised(name: str, text: str) -> Exception:
    """An exception of Python's own by its name, or RuntimeError."""
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NEVER):
        try:
            error: Exception = kind(text)
            return error
        except Exception:  # one that takes other arguments
            pass
    return RuntimeError(f"{name}: {text}")
