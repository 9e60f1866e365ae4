"""Python's interactive console, one line at a time: what ``>>> `` would have shown.

The prompts are the host's business; everything a terminal would show between them is written to
standard output here: echoed expressions, tracebacks, "_".
"""

import sys
import traceback
from codeop import CommandCompiler
from typing import Any


class Console:
    """Collects lines until they are a complete statement, then runs it in namespace."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._lines: list[str] = []
        self._compile = CommandCompiler()

    def push(self, line: str) -> tuple[bool, BaseException | None]:
        """Take one line: whether the statement needs more of them, and what it raised.

        SystemExit goes through; every other exception is shown, as Python does.
        """
        self._lines.append(line)
        source = "\n".join(self._lines)
        try:
            code = self._compile(source, "<stdin>", "single")
        except (OverflowError, SyntaxError, ValueError) as error:
            self._lines.clear()
            return False, self._refused(source, error)
        if code is None:
            return True, None
        self._lines.clear()
        try:
            exec(code, self._namespace)
        except SystemExit:
            raise
        except BaseException as error:
            trace = error.__traceback__
            self._show(error, trace.tb_next if trace is not None else None)
            return False, error
        return False, None

    def _refused(self, source: str, error: Exception) -> Exception:
        """Show why a statement cannot be compiled; at a terminal it ends with its newline."""
        try:
            compile(f"{source}\n", "<stdin>", "single", self._compile.compiler.flags, True)
        except SyntaxError as typed:
            typed.__context__ = None
            error = typed
        except (OverflowError, ValueError):
            pass
        self._show(error, None)
        return error

    def _show(self, error: BaseException, trace: Any) -> None:
        told = traceback.TracebackException(type(error), error, trace, limit=-40)
        told.stack[:] = [
            frame for frame in told.stack if not frame.filename.startswith("/sandbox/")
        ]
        if not told.stack:
            told.stack = None  # type: ignore[assignment]
        sys.stderr.write("".join(told.format()))
