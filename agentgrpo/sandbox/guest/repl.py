"""The interpreter inside a session: reads requests, runs untrusted code, answers once per request.

Everything here is at the mercy of the code it runs. The host believes nothing it says beyond
"this is what the session showed": how a step ended, how long it took and what it cost are
established elsewhere. What this file does promise is to survive ordinary accidents: every
primitive is bound before user code can replace it, and errors are formatted behind a guard.

A request is ``length:u32, id:u32, count:u32, (length:u32, bytes) * count``; an answer has the same
form. Little endian; the first field names the kind. No JSON, no pickle: nothing to recurse into.

    run CODE (NAME VALUE)*    run a cell, these environment variables set for its duration
    cell CODE (NAME VALUE)*   the same, and show the value's HTML, PNG ... forms as well
    env (NAME VALUE)*         set environment variables for good
    console                   from now on both streams are one, as on a terminal
    push LINE                 a line typed at the interactive prompt

    ok [TEXT (MIME DATA)*] | error NAME VALUE TRACEBACK | exit CODE | more
"""

import ast
import fcntl
import linecache
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Never

sys.path.insert(0, os.path.dirname(__file__))
from console import Console  # type: ignore[import-not-found]

REQUEST_FD, RESPONSE_FD = 3, 4
OURS = "/sandbox/guest/"
ONLY_AST = ast.PyCF_ONLY_AST
RICH_FORMS = {
    "_repr_html_": b"text/html",
    "_repr_markdown_": b"text/markdown",
    "_repr_latex_": b"text/latex",
    "_repr_svg_": b"image/svg+xml",
    "_repr_png_": b"image/png",
    "_repr_jpeg_": b"image/jpeg",
}


def reseed() -> None:
    """Forks share their random state: give each session its own (stdlib random does so itself)."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


class Channel:
    """The two pipes to the host, with every primitive bound before user code runs."""

    def __init__(self) -> None:
        self._read, self._write, self._exit = os.read, os.write, os._exit
        self._u32, self._head = struct.Struct("<I"), struct.Struct("<II")
        self._len, self._int = len, int

    def _exactly(self, count: int) -> bytes:
        data = b""
        while self._len(data) < count:
            more = self._read(REQUEST_FD, count - self._len(data))
            if not more:  # the host closed the session
                self._exit(0)
            data += more
        return data

    def receive(self) -> tuple[int, list[bytes]]:
        (length,) = self._u32.unpack(self._exactly(4))
        body = self._exactly(length)
        number, count = self._head.unpack_from(body)
        fields, at = [], 8
        for _ in range(count):
            (size,) = self._u32.unpack_from(body, at)
            fields.append(body[at + 4 : at + 4 + size])
            at += 4 + size
        return number, fields

    def send(self, number: int, fields: list[bytes]) -> None:
        body = self._head.pack(number, self._len(fields))
        for field in fields:
            body += self._u32.pack(self._len(field)) + field
        data = self._u32.pack(self._len(body)) + body
        while data:
            data = data[self._write(RESPONSE_FD, data) :]


class Interpreter:
    """Runs one cell at a time in one namespace and says how it went."""

    def __init__(self, value_bytes: int, traceback_bytes: int) -> None:
        self._value_bytes, self._traceback_bytes = value_bytes, traceback_bytes
        self._compile, self._exec, self._eval = compile, exec, eval
        self._repr, self._str, self._isinstance, self._type = repr, str, isinstance, type
        self._expr, self._expression = ast.Expr, ast.Expression
        self._format = traceback.TracebackException
        self._getpid, self._exit = os.getpid, os._exit
        self._pid = os.getpid()
        self._lines = linecache.cache
        self._signal, self._sigint = signal.signal, signal.SIGINT
        self._flush = (sys.stdout.flush, sys.stderr.flush)
        self._cells = 0
        self._running = False
        self._base, self._length, self._environ = BaseException, len, os.environ
        self._console: Console | None = None
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        self.namespace: dict[str, Any] = module.__dict__
        self.namespace["__builtins__"] = sys.modules["builtins"]

    def on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """Stop user code; between cells there is nothing to stop."""
        if self._running:
            raise KeyboardInterrupt

    def serve(self, fields: list[bytes]) -> list[bytes]:
        """Do what a request asks; the fields of its answer."""
        kind, *rest = [field.decode("utf-8", "surrogatepass") for field in fields]
        if kind == "push":
            return self.run(lambda: self._push(rest[0]))
        if kind == "console":
            os.dup2(1, 2)
            return [b"ok"]
        if kind == "env":
            os.environ.update(zip(rest[::2], rest[1::2], strict=True))
            return [b"ok"]
        environ = self._environ
        before = dict(environ) if rest[1:] else None
        environ.update(zip(rest[1::2], rest[2::2], strict=True))
        try:
            return self.run(lambda: self._evaluate(rest[0], rich=kind == "cell"))
        finally:
            if before is not None:
                environ.clear()
                environ.update(before)

    def run(self, work: Callable[[], list[bytes]]) -> list[bytes]:
        """Run user code under guard; the fields of its answer."""
        self._signal(self._sigint, self.on_interrupt)  # the last cell may have replaced it
        try:
            try:
                self._running = True
                answer = work()
            finally:
                self._running = False
        except SystemExit as stop:
            code = stop.code
            if self._getpid() != self._pid:
                self._leave(code)
            answer = [b"exit", self._guarded(lambda: self._repr(code), 200)]
        except self._base as error:
            answer = self._describe(error)
        if self._getpid() != self._pid:  # a fork of user code reached the end of the cell
            self._leave(None)
        self._flush_streams()
        return answer

    def _push(self, line: str) -> list[bytes]:
        if self._console is None:
            self._console = Console(self.namespace)
        more, error = self._console.push(line)
        if error is not None:
            return self._describe(error)
        return [b"more"] if more else [b"ok"]

    def _evaluate(self, source: str, *, rich: bool) -> list[bytes]:
        self._cells += 1
        name = f"<cell {self._cells}>"
        self._lines[name] = (len(source), None, source.splitlines(True), name)
        tree = self._compile(source, name, "exec", ONLY_AST)
        last = None
        if tree.body and self._isinstance(tree.body[-1], self._expr):
            last = self._expression(tree.body.pop().value)
        code: CodeType = self._compile(tree, name, "exec")
        self._exec(code, self.namespace)
        if last is None:
            return [b"ok"]
        value = self._eval(self._compile(last, name, "eval"), self.namespace)
        if value is None:
            return [b"ok"]
        answer = [b"ok", self._clip(self._repr(value), self._value_bytes)]
        return answer + self._rich(value) if rich else answer

    def _rich(self, value: Any) -> list[bytes]:
        """Jupyter's other forms of a value, as far as they fit: MIME type, data, MIME type ..."""
        found: list[bytes] = []
        room = 8 * self._value_bytes
        for method, mime in RICH_FORMS.items():
            show = getattr(self._type(value), method, None)
            data: Any = show(value) if show is not None else None
            if self._isinstance(data, self._str):
                data = data.encode("utf-8", "backslashreplace")
            if self._isinstance(data, bytes) and self._length(data) < room:
                room -= self._length(data)
                found += [mime, data]
        return found

    def _clip(self, text: Any, limit: int) -> bytes:
        if not self._isinstance(text, self._str):
            return b"<not a string>"
        return self._str(text[: limit + 1]).encode("utf-8", "backslashreplace")[:limit]

    def _guarded(self, produce: Any, limit: int) -> bytes:
        try:
            try:
                self._running = True  # __str__ may be as endless as anything else
                return self._clip(produce(), limit)
            finally:
                self._running = False
        except self._base as error:
            return b"<unprintable: " + self._type(error).__name__.encode() + b">"

    def _describe(self, error: BaseException) -> list[bytes]:
        def text() -> str:
            told = self._format(self._type(error), error, error.__traceback__, limit=-40)
            told.stack[:] = [frame for frame in told.stack if not frame.filename.startswith(OURS)]
            if not told.stack:
                told.stack = None  # type: ignore[assignment]  # no "Traceback ..." without frames
            whole = "".join(told.format())
            half = self._traceback_bytes // 2
            return whole if len(whole) <= 2 * half else f"{whole[:half]}\n...\n{whole[-half:]}"

        name = self._guarded(lambda: self._type(error).__name__, 200)
        value = self._guarded(lambda: self._str(error), 4096)
        return [b"error", name, value, self._guarded(text, self._traceback_bytes + 8)]

    def _flush_streams(self) -> None:
        for flush in self._flush:
            try:
                flush()
            except self._base:  # closed or full: the host sees what arrived on the pipes
                continue

    def _leave(self, code: Any) -> Never:
        self._flush_streams()
        self._exit(code if self._isinstance(code, int) else 0 if code is None else 1)


def run(environment: dict[str, str], value_bytes: int, traceback_bytes: int) -> Never:
    """Serve the host until it closes the request pipe."""
    os.environ.clear()
    os.environ.update(environment)
    reseed()
    sys.argv = [""]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (the session's, for good)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = Channel()
    interpreter = Interpreter(value_bytes, traceback_bytes)
    signal.signal(signal.SIGINT, interpreter.on_interrupt)
    receive, send, leave = channel.receive, channel.send, os._exit
    try:
        while True:
            number, fields = receive()
            send(number, interpreter.serve(fields))
    finally:  # a protocol that cannot go on: closed descriptors, no memory left
        leave(70)


if __name__ == "__main__":  # a further context of a session, started by its init
    for _fd in (REQUEST_FD, RESPONSE_FD):
        fcntl.fcntl(_fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    sys.path += sys.argv[3:]
    run(dict(os.environ), int(sys.argv[1]), int(sys.argv[2]))
