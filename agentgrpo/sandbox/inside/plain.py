"""A Python context in an image, run by the image's python3 (3.6 or newer).

Passed as ``python3 -c``, because an image has no files of agentgrpo. Implements the protocol of
repl.py (run, cell, env, console, push) on descriptors 3 and 4. Arguments: maximum bytes of a value
and of a traceback.
"""

import ast
import code
import linecache
import os
import signal
import struct
import sys
import traceback
import types
from typing import Any

running = False


def receive() -> Any:
    body = b""
    while len(body) < 4 or len(body) < 4 + struct.unpack_from("<I", body)[0]:
        data = os.read(3, 1 << 16)
        if not data:
            os._exit(0)
        body += data
    number, count = struct.unpack_from("<II", body, 4)
    at, fields = 12, []
    for _ in range(count):
        end = at + 4 + struct.unpack_from("<I", body, at)[0]
        fields.append(body[at + 4 : end].decode("utf-8", "surrogatepass"))
        at = end
    return number, fields


def clip(text: str, size: int) -> bytes:
    """The same as in repl.py."""
    data = text[: size + 1].encode("utf-8", "backslashreplace")
    if len(data) <= size:
        return data
    mark = b"\n... cut: %d characters in all ...\n" % len(text)
    half = (size - len(mark)) // 2
    end = text[-half:].encode("utf-8", "backslashreplace")[-half:]
    return mark.join(part.decode("utf-8", "ignore").encode() for part in (data[:half], end))


def send(number: int, fields: Any) -> None:
    """Send an answer: pairs of a text and its maximum bytes."""
    parts = [clip(text, size) for text, size in fields]
    body = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    body = struct.pack("<III", 8 + len(body), number, len(parts)) + body
    while body:
        body = body[os.write(4, body) :]


def interrupt(_signal: int, _frame: Any) -> None:
    """SIGINT: stop a cell. Between cells there is nothing to stop."""
    if running:
        raise KeyboardInterrupt


class Console(code.InteractiveConsole):
    raised: Any = None

    def runcode(self, code: Any) -> None:
        try:
            exec(code, self.locals)
        except SystemExit:
            raise
        except BaseException:
            self.showtraceback()

    def showtraceback(self) -> None:
        self.raised = error = sys.exc_info()[1]
        assert error is not None
        assert error.__traceback__ is not None
        traceback.print_exception(type(error), error, error.__traceback__.tb_next)

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        self.raised = sys.exc_info()[1]
        sys.stderr.write("".join(traceback.format_exception_only(type(self.raised), self.raised)))

    def answer(self, line: str) -> Any:
        self.raised, more = None, False
        try:
            more = self.push(line)
        finally:
            if not more:  # exit() and interrupts leave push() before it clears the buffer
                self.resetbuffer()
        if more:
            return [("more", 9)]
        if self.raised is None:
            return [("ok", 9)]
        return [("error", 9), (type(self.raised).__name__, 200), (str(self.raised), 4096), ("", 1)]


def evaluate(source: str, name: str, names: Any, value_size: int) -> Any:
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    tree = ast.parse(source, name)
    last: Any = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    value = last and eval(compile(ast.Expression(last.value), name, "eval"), names)
    return [("ok", 9)] + ([] if value is None else [("value", 9), (repr(value), value_size)])


def run(traceback_size: int, work: Any, *args: Any) -> Any:
    """Call work, which an interrupt stops. Returns the fields of the answer."""
    global running
    signal.signal(signal.SIGINT, interrupt)
    try:
        running = True
        return work(*args)
    except SystemExit as stop:
        return [("exit", 9), (repr(stop.code), 200)]
    except BaseException as error:
        running = False
        frames = error.__traceback__ and error.__traceback__.tb_next  # without our frames
        frames = frames and frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames, -40))
        fields = [("error", 9), (type(error).__name__, 200), (str(error), 4096)]
        return [*fields, (text, traceback_size)]
    finally:
        running = False
        sys.stdout.flush()
        sys.stderr.flush()


def main(value_size: int, traceback_size: int) -> None:
    os.set_inheritable(3, False)
    os.set_inheritable(4, False)
    signal.signal(signal.SIGINT, interrupt)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv, cells = [""], 0
    console = Console(vars(module), "<stdin>")
    while True:
        number, (kind, *rest) = receive()
        if kind == "console":
            os.dup2(1, 2)
            send(number, [("ok", 9)])
            continue
        if kind not in ("run", "cell", "env", "push"):
            send(number, [("error", 9), ("NotSupported", 99), (kind, 99), ("", 1)])
            continue
        source = rest.pop(0) if kind != "env" else ""
        before = dict(os.environ)
        os.environ.update(zip(rest[::2], rest[1::2]))  # noqa: B905 (not before 3.10)
        cells += 1
        if kind == "push":
            answer = run(traceback_size, console.answer, source)
        else:
            cell = source, f"<cell {cells}>", vars(module), value_size
            answer = run(traceback_size, evaluate, *cell)
        if kind != "env":
            os.environ.clear()
            os.environ.update(before)
        send(number, answer)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
