"""The interpreter inside a session: reads requests, runs untrusted code, sends one answer each.

The untrusted code can change anything here. So the host uses its answers only as the output of the
session; it determines by itself how a step ended, how long it took and what it cost. This file only
has to survive ordinary accidents: it is loaded with private builtins (load.py), imports every
function that it needs by name, and formats errors under a guard.

wire.py describes the requests and answers.
"""

import builtins
import os
import sys
from _signal import (  # type: ignore[import-not-found]
    SIGINT,
    signal,
)  # signal.signal() is Python code and would use the builtins that user code can replace
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
OUR_DIR = os.path.dirname(__file__) + "/"
wire = isolated("wire")
encode, decode, unpack_u32 = wire["encode"], wire["decode"], wire["unpack_u32"]
exchange = isolated("exchange")
host = isolated("host")
class_name = type.__dict__["__name__"].__get__


def reseed() -> None:
    """Give this fork its own random state. docs/sandbox.md lists what stays shared."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    process = sys.modules.get("multiprocessing.process")
    if process is not None:  # the secret with which multiprocessing's processes authenticate
        process.current_process().authkey = os.urandom(32)


def receive() -> tuple[int, list[bytes]]:
    """Read the next request: its number and its fields. Exits when the host has closed the pipe.

    The host sends a request only after the previous answer, so the pipe has at most one.
    """
    body, length = b"", 12
    while len(body) < length:
        data = read(REQUEST_FD, 1 << 16)
        if not data:
            _exit(0)
        body += data
        if len(body) >= 4:
            length = 4 + unpack_u32(body)[0]
    return decode(body, 4)  # type: ignore[no-any-return]


def send(number: int, fields: list[bytes]) -> None:
    data = encode(number, fields)
    while data:
        data = data[write(RESPONSE_FD, data) :]


def clip(text: object, limit: int) -> bytes:
    """Encode a text from untrusted code in at most limit bytes. The middle of a longer text is
    replaced by a mark, without splitting characters.
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


def is_internal(path: str) -> bool:
    """Whether a frame of a traceback is ours or IPython's, not the user's."""
    return path.startswith(OUR_DIR) or "/IPython/" in path


class Interpreter:
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
        self.question: list[bytes] = []
        self.answer: list[bytes] = []

    def on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """SIGINT: stop user code. Between cells there is nothing to stop."""
        if self.waiting:  # for the host, which answers by the same deadline
            self.missed = True
        elif self.running:
            raise KeyboardInterrupt

    def serve(self, fields: list[bytes]) -> list[bytes]:
        if fields[0] in (b"put", b"ask", b"get"):
            return self.exchange(*fields)
        kind, *rest = [field.decode("utf-8", "surrogatepass") for field in fields]
        if kind == "push":
            return self.run(self.push, rest[0])
        if kind == "tools":
            return self.define_tools(rest)
        if kind == "console":
            dup2(1, 2)
            return [b"ok"]
        if kind == "env":
            environ.update(zip(rest[::2], rest[1::2], strict=True))
            return [b"ok"]
        work = self.evaluate if kind == "run" or self.notebook is None else self.cell
        if not rest[1:]:
            return self.run(work, rest[0])
        previous = dict(environ)
        environ.update(zip(rest[1::2], rest[2::2], strict=True))
        try:
            return self.run(work, rest[0])
        finally:
            environ.clear()
            environ.update(previous)

    def run(self, work: Callable[..., list[bytes]], *args: object) -> list[bytes]:
        signal(SIGINT, self.on_interrupt)  # the last cell may have replaced the handler
        if self.calls is not None:
            self.calls.open = True
        try:
            answer: list[bytes] = self.interruptible(work, *args)
        except SystemExit as stop:
            code = stop.code
            if getpid() != self.pid:
                self.leave(code)
            answer = [b"exit", self.guarded(lambda: repr(code), 200)]
        except BaseException as error:
            answer = self.describe(error)
        if getpid() != self.pid:  # a fork made by user code reached the end of the cell
            self.leave(None)
        if self.calls is not None:
            self.calls.shut()
        self.flush()
        return answer

    def interruptible(self, work: Callable[..., Any], *args: object) -> Any:
        """Call work. Only here SIGINT raises KeyboardInterrupt."""
        try:
            self.running = True
            return work(*args)
        finally:
            settrace(None)  # a trace function that user code left would run in our frames too
            setprofile(None)
            self.running = False

    def define_tools(self, fields: list[str]) -> list[bytes]:
        """Define host functions: maximum sizes of arguments and answers, then names and texts."""
        self.calls = host["Calls"](self, self.put, self.take, int(fields[0]), int(fields[1]))
        for name, doc in zip(fields[2::2], fields[3::2], strict=True):
            self.namespace[name] = self.calls.function(name, doc)
        return [b"ok"]

    def put(self, fields: list[bytes]) -> None:
        """Send a call to the host, after everything that was printed before."""
        self.flush()
        send(self.number, fields)

    def take(self) -> list[bytes]:
        """Receive the host's answer. It is the request with which the step goes on."""
        self.number, fields = receive()
        return fields

    def push(self, line: str) -> list[bytes]:
        more, error = self.console.push(line)
        if error is not None:
            return self.describe(error)
        return [b"more"] if more else [b"ok"]

    def exchange(self, kind: bytes, *piece: bytes) -> list[bytes]:
        if kind == b"get":
            return self.next_piece()
        self.question += piece
        return [b"ok"] if kind == b"put" else self.run(self.answer_question)

    def answer_question(self) -> list[bytes]:
        question, self.question = b"".join(self.question).decode("ascii", "replace"), []
        answer = self.peer.answer(question).encode("utf-8", "backslashreplace")
        size = self.value_bytes
        self.answer = [answer[at : at + size] for at in range(0, len(answer), size)][::-1]
        return self.next_piece()

    def next_piece(self) -> list[bytes]:
        piece = self.answer.pop()
        return [b"more" if self.answer else b"ok", b"piece", piece]

    def cell(self, source: str) -> list[bytes]:
        size = self.value_bytes
        error, results = self.notebook.run(source, 8 * size, lambda text: clip(text, size).decode())
        if isinstance(error, SystemExit):
            raise error
        answer = [b"ok"] if error is None else self.describe(error)
        return [*answer, b"results", b"[" + b",".join(results) + b"]"]

    def evaluate(self, source: str) -> list[bytes]:
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
        """Clip a text that untrusted code produces; a note instead if producing it fails."""
        try:
            return self.interruptible(lambda: clip(produce(), limit))  # type: ignore[no-any-return]
        except BaseException as error:
            return b"<unprintable: " + clip(class_name(type(error)), 99) + b">"

    def describe(self, error: BaseException) -> list[bytes]:
        name = clip(class_name(type(error)), 200)
        value = self.guarded(lambda: str(error), 4096)
        if value.startswith(b"<unprintable"):  # format only the frames, without str(error)
            text = self.guarded(
                lambda: "".join(format_tb(error.__traceback__, limit=-40)), self.traceback_bytes
            )
        else:
            text = self.guarded(lambda: self.format_traceback(error), self.traceback_bytes)
        return [b"error", name, value, text]

    def format_traceback(self, error: BaseException) -> str:
        trace = TracebackException(type(error), error, error.__traceback__, limit=-40)
        trace.stack[:] = [frame for frame in trace.stack if not is_internal(frame.filename)]
        if not trace.stack:
            trace.stack = None  # type: ignore[assignment]  # no "Traceback ..." without frames
        return "".join(trace.format())

    def flush(self) -> None:
        """Flush the streams into the pipes, before the answer that ends the step."""
        for flush in self.flush_streams:
            try:
                flush()
            except BaseException:  # closed or full: the host gets what arrived
                continue

    def leave(self, code: Any) -> Never:
        """Exit a fork made by user code, as Python would."""
        self.flush()
        _exit(code if isinstance(code, int) else 0 if code is None else 1)


def prepare(environment: dict[str, str], value_bytes: int, traceback_bytes: int) -> Interpreter:
    """Make an interpreter for serve(), in this process or in its forks."""
    environ.clear()
    environ.update(environment)
    sys.argv = [""]
    if os.path.exists(VENV_PYTHON):
        sys.executable = VENV_PYTHON  # its subprocesses find the template's packages, as cells do
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (stays open)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    interpreter = Interpreter(value_bytes, traceback_bytes)
    if "IPython" in sys.modules:
        interpreter.notebook = isolated("notebook")["make_notebook"](sys.modules["__main__"])
    signal(SIGINT, interpreter.on_interrupt)
    return interpreter


def warm_up(interpreter: Interpreter) -> None:
    """Run a few cells in the zygote, so that Python and IPython specialize byte code and fill
    caches once. Otherwise each session does it, in pages that it must copy first.
    """
    global REQUEST_FD, RESPONSE_FD
    session_fds, namespace = (REQUEST_FD, RESPONSE_FD), dict(interpreter.namespace)
    (REQUEST_FD, request), (answer, RESPONSE_FD) = os.pipe(), os.pipe()
    for kind in (b"run", b"cell") * 20:
        reseed()
        for cell in (b"x = 1 + 1\nprint(x, end='')", b"x", b"1 / 0"):
            write(request, encode(7, [kind, cell]))
            number, fields = receive()
            send(number, interpreter.serve(fields))
            read(answer, 1 << 16)
    for fd in (REQUEST_FD, RESPONSE_FD, request, answer):
        os.close(fd)
    REQUEST_FD, RESPONSE_FD = session_fds
    if interpreter.notebook is not None:
        interpreter.notebook.reset()
    interpreter.cells = 0
    interpreter.namespace.clear()
    interpreter.namespace.update(namespace)
    line_cache.clear()


def serve(interpreter: Interpreter) -> Never:
    reseed()
    interpreter.pid = getpid()
    try:
        while True:
            interpreter.number, fields = receive()
            answer = interpreter.serve(fields)
            send(interpreter.number, answer)
    finally:  # the protocol cannot go on: closed descriptors or no memory
        _exit(70)
