"""Python's interactive console, one line at a time: what ``>>> `` would have shown.

The prompts are the host's business; everything a terminal would show between them is written to
standard output here: echoed expressions, tracebacks, "_".
"""

import itertools
import linecache
import sys
import traceback
from code import InteractiveInterpreter
from typing import Any


class Console(InteractiveInterpreter):
    """Collects lines until they are a complete statement, then runs it in namespace."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__(namespace)
        self._lines: list[str] = []
        self._numbers = itertools.count()
        self._raised: BaseException | None = None

    def push(self, line: str) -> tuple[bool, BaseException | None]:
        """Take one line: whether the statement needs more of them, and what it raised.

        SystemExit goes through; every other exception is shown, as Python does.
        """
        self._lines.append(line)
        self._raised, more, name = None, False, "<stdin>"
        source = "\n".join(self._lines)
        if sys.version_info >= (3, 13):  # tracebacks show what was typed, found by this name
            name = f"<stdin>-{next(self._numbers)}"
            linecache.cache[name] = len(source), None, source.splitlines(True), "<stdin>"
        try:
            more = self.runsource(source, name)
        finally:
            if not more:
                self._lines.clear()
        return more, self._raised

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        """Show why a statement cannot be compiled; at a terminal it ends with its newline."""
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
        """Show what a statement has raised."""
        error: Any = sys.exception()
        self._show(error, error.__traceback__.tb_next)

    def _show(self, error: BaseException, trace: Any) -> None:
        self._raised = error
        told = traceback.TracebackException(type(error), error, trace, limit=-40)
        told.stack[:] = [
            frame for frame in told.stack if not frame.filename.startswith("/sandbox/")
        ]
        if not told.stack:
            told.stack = None  # type: ignore[assignment]
        sys.stderr.write("".join(told.format()))
