"""The interpreter inside a session: reads requests, runs untrusted code, answers once per request.

Everything here is at the mercy of the code it runs. The host believes nothing it says beyond
"this is what the session showed": how a step ended, how long it took and what it cost are
established elsewhere. What this file does promise is to survive ordinary accidents: it is loaded
with builtins of its own (load.py), takes every function it needs by name when it is imported, and
formats errors behind a guard.

Requests and answers are those of wire.py.
"""

import builtins
import os
import sys
from _signal import (  # type: ignore[import-not-found]
    SIGINT,
    signal,
)  # signal.signal() is Python and would look up isinstance
from ast import Expr, Expression, PyCF_ONLY_AST
from collections.abc import Callable
from linecache import cache as line_cache
from os import _exit, dup2, environ, getpid, read, write
from sys import setprofile, settrace
from traceback import TracebackException, format_tb
from types import FrameType, ModuleType
from typing import Any, Never

from console import Console  # type: ignore[import-not-found]
from load import isolated  # type: ignore[import-not-found]

REQUEST_FD, RESPONSE_FD = 3, 4
VENV_PYTHON = "/sandbox/venv/bin/python"
OURS = os.path.dirname(__file__) + "/"
wire = isolated("wire")
encode, decode, unpack_u32 = wire["encode"], wire["decode"], wire["unpack_u32"]
exchange = isolated("exchange")
host = isolated("host")
class_name = type.__dict__["__name__"].__get__


def reseed() -> None:
    """Forks share their random state: give each session its own (stdlib random does so itself).
    What a fork cannot change is named in docs/sandbox.md.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    process = sys.modules.get("multiprocessing.process")
    if process is not None:  # what its processes prove themselves to each other by
        process.current_process().authkey = os.urandom(32)


def receive() -> tuple[int, list[bytes]]:
    """The next request: its number and its fields. The host sends one after the other's answer, so
    what there is to read is of one. The process ends when the host has closed the pipe.
    """
    body, length = b"", 12
    while len(body) < length:
        more = read(REQUEST_FD, 1 << 16)
        if not more:
            _exit(0)
        body += more
        if len(body) >= 4:
            length = 4 + unpack_u32(body)[0]
    return decode(body, 4)  # type: ignore[no-any-return]


def send(number: int, fields: list[bytes]) -> None:
    """The answer to a request."""
    data = encode(number, fields)
    while data:
        data = data[write(RESPONSE_FD, data) :]


def clip(text: object, limit: int) -> bytes:
    """At most limit bytes of a text that untrusted code made. Of a longer one both ends, in whole
    characters, around a mark.
    """
    if not isinstance(text, str):
        return b"<not a string>"
    data = str.encode(text[: limit + 1], "utf-8", "backslashreplace")
    if len(data) <= limit:
        return data
    mark = b"\n... cut: %d characters in all ...\n" % len(text)
    half = (limit - len(mark)) // 2
    end = str.encode(text[-half:], "utf-8", "backslashreplace")[-half:]
    ends = [part.decode("utf-8", "ignore").encode() for part in (data[:half], end)]
    return mark.join(ends)


def hidden(path: str) -> bool:
    """Whether a frame is not the code's."""
    return path.startswith(OURS) or "/IPython/" in path


class Interpreter:
    """Runs one cell at a time in one namespace and says how it went."""

    def __init__(self, value_bytes: int, traceback_bytes: int) -> None:
        self.value_bytes, self.traceback_bytes = value_bytes, traceback_bytes
        self.pid = getpid()
        self.flush_streams = (sys.stdout.flush, sys.stderr.flush)
        self.cells = 0
        self.running = self.waiting = self.missed = False
        self.number = 0
        self.calls: Any = None
        self.notebook: Any = None
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        self.namespace["__builtins__"] = builtins
        self.console = Console(self.namespace)
        self.peer = exchange["ObjectServer"](self.namespace)
        self.asked: list[bytes] = []
        self.answer: list[bytes] = []

    def on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """Stop user code; between cells there is nothing to stop."""
        if self.waiting:  # for the host, which has been told the same deadline
            self.missed = True
        elif self.running:
            raise KeyboardInterrupt

    def serve(self, fields: list[bytes]) -> list[bytes]:
        """Do what a request asks; the fields of its answer."""
        if fields[0] in (b"put", b"ask", b"get"):
            return self.exchange(*fields)
        kind, *rest = [field.decode("utf-8", "surrogatepass") for field in fields]
        if kind == "push":
            return self.run(self.push, rest[0])
        if kind == "tools":
            return self.take_tools(rest)
        if kind == "console":
            dup2(1, 2)
            return [b"ok"]
        if kind == "env":
            environ.update(zip(rest[::2], rest[1::2], strict=True))
            return [b"ok"]
        work = self.evaluate if kind == "run" or self.notebook is None else self.cell
        if not rest[1:]:
            return self.run(work, rest[0])
        before = dict(environ)
        environ.update(zip(rest[1::2], rest[2::2], strict=True))
        try:
            return self.run(work, rest[0])
        finally:
            environ.clear()
            environ.update(before)

    def run(self, work: Callable[..., list[bytes]], *arguments: object) -> list[bytes]:
        """Run user code under guard; the fields of its answer."""
        signal(SIGINT, self.on_interrupt)  # the last cell may have replaced it
        if self.calls is not None:
            self.calls.open = True
        try:
            answer: list[bytes] = self.interruptible(work, *arguments)
        except SystemExit as stop:
            code = stop.code
            if getpid() != self.pid:
                self.leave(code)
            answer = [b"exit", self.guarded(lambda: repr(code), 200)]
        except BaseException as error:
            answer = self.describe(error)
        if getpid() != self.pid:  # a fork of user code reached the end of the cell
            self.leave(None)
        if self.calls is not None:
            self.calls.shut()
        self.flush()
        return answer

    def interruptible(self, work: Callable[..., Any], *arguments: object) -> Any:
        """The only place where SIGINT raises."""
        try:
            self.running = True
            return work(*arguments)
        finally:
            settrace(None)  # one left behind would run in our frames too
            setprofile(None)
            self.running = False

    def take_tools(self, told: list[str]) -> list[bytes]:
        """Functions of the host: how long arguments and answers may be, then names and texts."""
        self.calls = host["Calls"](self, self.put, self.take, int(told[0]), int(told[1]))
        for name, doc in zip(told[2::2], told[3::2], strict=True):
            self.namespace[name] = self.calls.function(name, doc)
        return [b"ok"]

    def put(self, fields: list[bytes]) -> None:
        """Ask the host for something; what was printed before is seen before."""
        self.flush()
        send(self.number, fields)

    def take(self) -> list[bytes]:
        """What the host answers. It is the request that the step goes on with."""
        self.number, fields = receive()
        return fields

    def push(self, line: str) -> list[bytes]:
        """A line of the interactive console."""
        more, error = self.console.push(line)
        if error is not None:
            return self.describe(error)
        return [b"more"] if more else [b"ok"]

    def exchange(self, kind: bytes, *piece: bytes) -> list[bytes]:
        """A question that comes in pieces, and its answer, which goes in pieces."""
        if kind == b"get":
            return self.next_piece()
        self.asked += piece
        return [b"ok"] if kind == b"put" else self.run(self.answer_question)

    def answer_question(self) -> list[bytes]:
        """The first piece of the answer to the question that was asked."""
        question, self.asked = b"".join(self.asked).decode("ascii", "replace"), []
        told = self.peer.answer(question).encode("utf-8", "backslashreplace")
        size = self.value_bytes
        self.answer = [told[at : at + size] for at in range(0, len(told), size)][::-1]
        return self.next_piece()

    def next_piece(self) -> list[bytes]:
        """Of the last answer; whether there are more says its kind."""
        piece = self.answer.pop()
        return [b"more" if self.answer else b"ok", b"piece", piece]

    def cell(self, source: str) -> list[bytes]:
        """Run a cell of a notebook and show what it displays."""
        size = self.value_bytes
        error, shown = self.notebook.run(source, 8 * size, lambda text: clip(text, size).decode())
        if isinstance(error, SystemExit):
            raise error
        answer = [b"ok"] if error is None else self.describe(error)
        return [*answer, b"results", b"[" + b",".join(shown) + b"]"]

    def evaluate(self, source: str) -> list[bytes]:
        """Run a cell and show the value of its last expression."""
        self.cells += 1
        name = f"<cell {self.cells}>"
        line_cache[name] = (len(source), None, source.splitlines(True), name)
        tree: Any = compile(source, name, "exec", PyCF_ONLY_AST)
        last: Any = None
        if tree.body and isinstance(tree.body[-1], Expr):
            last = Expression(tree.body.pop().value)
        exec(compile(tree, name, "exec"), self.namespace)
        value = None if last is None else eval(compile(last, name, "eval"), self.namespace)
        return [b"ok"] if value is None else [b"ok", b"value", clip(repr(value), self.value_bytes)]

    def guarded(self, produce: Callable[[], object], limit: int) -> bytes:
        """A text that untrusted code has a hand in, or a note that there is none."""
        try:
            return self.interruptible(lambda: clip(produce(), limit))  # type: ignore[no-any-return]
        except BaseException as error:
            return b"<unprintable: " + clip(class_name(type(error)), 99) + b">"

    def describe(self, error: BaseException) -> list[bytes]:
        """An exception as name, text and traceback without frames of ours."""
        name = clip(class_name(type(error)), 200)
        value = self.guarded(lambda: str(error), 4096)
        if value.startswith(b"<unprintable"):  # nothing more is asked of it
            text = self.guarded(
                lambda: "".join(format_tb(error.__traceback__, limit=-40)), self.traceback_bytes
            )
        else:
            text = self.guarded(lambda: self.whole_traceback(error), self.traceback_bytes)
        return [b"error", name, value, text]

    def whole_traceback(self, error: BaseException) -> str:
        """What Python would print."""
        told = TracebackException(type(error), error, error.__traceback__, limit=-40)
        told.stack[:] = [frame for frame in told.stack if not hidden(frame.filename)]
        if not told.stack:
            told.stack = None  # type: ignore[assignment]  # no "Traceback ..." without frames
        return "".join(told.format())

    def flush(self) -> None:
        """Bring what was printed into the pipes, before the answer that ends the step."""
        for flush in self.flush_streams:
            try:
                flush()
            except BaseException:  # closed or full: the host sees what arrived on the pipes
                continue

    def leave(self, code: Any) -> Never:
        """End a fork of user code as Python would have."""
        self.flush()
        _exit(code if isinstance(code, int) else 0 if code is None else 1)


def prepare(environment: dict[str, str], value_bytes: int, traceback_bytes: int) -> Interpreter:
    """An interpreter that is ready to serve(), in this process or in its forks."""
    environ.clear()
    environ.update(environment)
    sys.argv = [""]
    if os.path.exists(VENV_PYTHON):
        sys.executable = VENV_PYTHON  # which finds the template's packages, as cells do
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (the session's, for good)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    interpreter = Interpreter(value_bytes, traceback_bytes)
    if "IPython" in sys.modules:
        interpreter.notebook = isolated("notebook")["made"](sys.modules["__main__"])
    signal(SIGINT, interpreter.on_interrupt)
    return interpreter


def warm_up(interpreter: Interpreter) -> None:
    """Run a few cells of ours, in the zygote: what Python and IPython do only the first times
    (specialize byte code, fill caches) is then done once, and not in pages that every session has
    to copy.
    """
    global REQUEST_FD, RESPONSE_FD
    theirs, before = (REQUEST_FD, RESPONSE_FD), dict(interpreter.namespace)
    (REQUEST_FD, ask), (answer, RESPONSE_FD) = os.pipe(), os.pipe()
    for kind in (b"run", b"cell") * 20:
        reseed()
        for cell in (b"x = 1 + 1\nprint(x, end='')", b"x", b"1 / 0"):
            write(ask, encode(7, [kind, cell]))
            number, fields = receive()
            send(number, interpreter.serve(fields))
            read(answer, 1 << 16)
    for fd in (REQUEST_FD, RESPONSE_FD, ask, answer):
        os.close(fd)
    REQUEST_FD, RESPONSE_FD = theirs
    if interpreter.notebook is not None:
        interpreter.notebook.reset()
    interpreter.cells = 0
    interpreter.namespace.clear()
    interpreter.namespace.update(before)
    line_cache.clear()


def serve(interpreter: Interpreter) -> Never:
    """Serve the host until it closes the request pipe."""
    reseed()
    interpreter.pid = getpid()
    try:
        while True:
            interpreter.number, fields = receive()
            answer = interpreter.serve(fields)
            send(interpreter.number, answer)
    finally:  # a protocol that cannot go on: closed descriptors, no memory left
        _exit(70)
