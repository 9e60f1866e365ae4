"""Runs trusted tests in a session of its own; what they test is elsewhere (grade.check_tests).

``begin()`` runs the tests in a thread. Whenever they touch the graded code, the thread asks and
waits; ``proceed(reply)`` hands it the reply to its last question and returns its next one.
"""

import ast
import builtins
import queue
import threading
import traceback
from typing import Any

questions: queue.Queue[tuple[str, str]] = queue.Queue()
replies: queue.Queue[tuple[str, str, str]] = queue.Queue()


def ask(expression: str) -> Any:
    """The value of an expression in the graded session."""
    questions.put(("ask", expression))
    kind, text, detail = replies.get()
    if kind == "value":
        return ast.literal_eval(text)
    if kind == "object":
        return Graded(text)
    known: Any = getattr(builtins, text, None)
    is_exception = isinstance(known, type) and issubclass(known, Exception)
    raise (known(detail) if is_exception else RuntimeError(f"{text}: {detail}"))


class Graded:
    """Something of the graded session, known by the expression that means it there.

    It equals nothing but itself, whatever its ``__eq__`` says over there.
    """

    def __init__(self, expression: str) -> None:
        self._expression = expression

    def __repr__(self) -> str:
        return self._expression

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [spell(value) for value in args]
        given += [f"{name}={spell(value)}" for name, value in kwargs.items()]
        return ask(f"{self._expression}({', '.join(given)})")

    def __getattr__(self, name: str) -> Any:
        return ask(f"{self._expression}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return ask(f"{self._expression}[{spell(key)}]")

    def __len__(self) -> int:
        return int(ask(f"len({self._expression})"))

    def __iter__(self) -> Any:
        return iter(ask(f"list({self._expression})"))


def spell(value: Any) -> str:
    """A value as an expression of the graded session."""
    if isinstance(value, Graded):
        return value._expression
    text = repr(value)
    ast.literal_eval(text)  # raises for what cannot be handed over
    return text


def run_tests(source: str, names: dict[str, str]) -> None:
    """The thread of the tests: the last thing it asks is its verdict."""
    namespace: dict[str, Any] = {name: Graded(other) for name, other in names.items()}
    namespace["__name__"] = "__tests__"
    try:
        exec(compile(source, "<tests>", "exec"), namespace)
        questions.put(("passed", ""))
    except BaseException:
        questions.put(("failed", traceback.format_exc(limit=-5)))


def begin(source: str, names: dict[str, str]) -> None:
    """Start the tests."""
    threading.Thread(target=run_tests, args=(source, names), daemon=True).start()


def proceed(reply: tuple[str, str, str] | None) -> tuple[str, str]:
    """Answer the last question, if there was one; the next."""
    if reply is not None:
        replies.put(reply)
    return questions.get()
