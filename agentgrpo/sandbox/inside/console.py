"""Python's interactive console, one line at a time.

The host prints the prompts. Everything else that a terminal shows is written to the streams here:
echoed expressions, tracebacks, output.
"""

import itertools
import linecache
import sys
import traceback
from code import InteractiveInterpreter
from typing import Any


class Console(InteractiveInterpreter):
    """Collects lines until they are a complete statement, then runs it in the namespace."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__(namespace)
        self._lines: list[str] = []
        self._numbers = itertools.count()
        self._raised: BaseException | None = None

    def push(self, line: str) -> tuple[bool, BaseException | None]:
        """Add a line. Returns whether the statement needs more lines, and its exception."""
        self._lines.append(line)
        self._raised, more, name = None, False, "<stdin>"
        source = "\n".join(self._lines)
        if sys.version_info >= (3, 13):  # tracebacks show the typed lines, found by this name
            name = f"<stdin>-{next(self._numbers)}"
            linecache.cache[name] = len(source), None, source.splitlines(True), "<stdin>"
        try:
            more = self.runsource(source, name)
        finally:
            if not more:
                self._lines.clear()
        return more, self._raised

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        """Print a syntax error. As on a terminal, the source ends with a newline."""
        error: Any = sys.exception()
        try:
            source = "\n".join([*self._lines, ""])
            compile(source, "<stdin>", "single", self.compile.compiler.flags, True)
        except SyntaxError as typed:
            typed.__context__ = None
            error = typed
        except (OverflowError, ValueError):
            pass
        self._show(error, None)

    def showtraceback(self) -> None:
        """Print the exception of a statement, without our frame."""
        error: Any = sys.exception()
        self._show(error, error.__traceback__.tb_next)

    def _show(self, error: BaseException, trace: Any) -> None:
        self._raised = error
        report = traceback.TracebackException(type(error), error, trace, limit=-40)
        report.stack[:] = [
            frame for frame in report.stack if not frame.filename.startswith("/sandbox/")
        ]
        if not report.stack:
            report.stack = None  # type: ignore[assignment]
        sys.stderr.write("".join(report.format()))
