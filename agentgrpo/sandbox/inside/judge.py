"""Runs trusted tests; the graded code is in another session (grade.check_tests).

``begin()`` runs the tests in a thread. When they use the graded code, the thread sends a question
and waits. ``proceed(reply)`` passes the reply to its last question and returns its next question,
or the verdict: a word and, on further lines, the reason. The words are: passed; unused (the tests
ended without using the graded code); failed; broken (they fail for any code); memory.
"""

import builtins
import importlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from exchange import Malformed, decode, encode  # type: ignore[import-not-found]

questions: queue.Queue[str] = queue.Queue()
replies: queue.Queue[str] = queue.Queue()
turn = threading.Lock()
known: "dict[int, RemoteObject]" = {}
violations: list[str] = []
too_large: list[str] = []
"""Questions whose answers did not fit into memory."""
changes = 0
"""Number of questions that may have changed state of the graded code."""
uses = 0
"""How often the tests have used the graded code: calls, attributes, items, comparisons. Counted
here, where the graded code cannot change it.
"""
failures: list[tuple[bool, str]] = []
"""For each failed test: whether it fails for any code, and its traceback."""
BY_VALUE = (AssertionError, TypeError, AttributeError, KeyError, IndexError, ValueError)
"""Exceptions that an imported constant can cause without a counted use: it is sent by value."""


class NotPassable(TypeError):
    """The tests pass an object of theirs that cannot be copied, whatever the graded code is."""


class ProtocolViolation(BaseException):
    """Not an Exception, so that no test takes it for an expected failure."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        violations.append(message)


def ask(what: str, *args: Any) -> Any:
    """Send a question to the graded session. Returns its value or raises its exception."""
    global changes, uses
    changes += what in ("call", "set_attribute", "set_item", "delete_item", "next")
    uses += what != "find"
    question = encode((what, *args), number_of)
    with turn:
        questions.put(question)
        reply = replies.get()
    try:
        match decode(reply, remote_object, widen=True):
            case ("value", value):
                return value
            case ("raise", [str(), *_] as names, tuple() as args, str() as text):
                error = error_of(names, args, text)
            case other:
                raise Malformed(f"{other!r:.80}")
    except MemoryError:
        too_large.append(what)
        raise
    except Malformed as malformed:
        raise ProtocolViolation(f"the answer to {what!r} is malformed: {malformed}") from None
    raise error


def error_of(names: list[str], error_args: tuple[Any, ...], text: str) -> BaseException:
    """An exception of the graded code as a builtin one, but none that ends an iterator."""
    classes = (getattr(builtins, str(name), None) for name in names)
    kind = next((c for c in classes if isinstance(c, type) and issubclass(c, BaseException)), None)
    message = f"{names[0]}: {text}"
    if kind is None or not issubclass(kind, Exception):
        return ProtocolViolation(f"the code raised {message}")
    if issubclass(kind, (StopIteration, StopAsyncIteration)):
        return RuntimeError(f"the code raised {message}")
    for args in (error_args, (text,)):
        try:
            error: BaseException = kind(*args)
        except Exception:  # the class needs other arguments
            continue
        error.add_note(f"{message} (in the graded code)")
        return error
    return RuntimeError(message)


def number_of(value: Any) -> int:
    if type(value) is not RemoteObject:
        raise NotPassable(f"a {type(value).__name__} cannot be passed to the graded code")
    return object.__getattribute__(value, "_number")  # type: ignore[no-any-return]


def remote_object(number: int) -> "RemoteObject":
    """The RemoteObject of a number; equal numbers give the same object."""
    if type(number) is not int:
        raise Malformed("an object without a number")
    if number not in known:
        known[number] = RemoteObject(number)
    return known[number]


class RemoteObject:
    """A proxy of an object in the graded session.

    It equals only itself, whatever the object's ``__eq__`` returns. Its content is requested once,
    and again only after a call that may have changed it. So length, iteration and items are
    consistent, however a test looks at it.
    """

    __slots__ = ("_changes", "_number", "_seen")

    def __init__(self, number: int) -> None:
        for name, value in (("_number", number), ("_changes", -1), ("_seen", {})):
            object.__setattr__(self, name, value)

    def _once(self, what: str, *args: Any) -> Any:
        if self._changes != changes:
            object.__setattr__(self, "_changes", changes)
            self._seen.clear()
        key = (what, encode(args, number_of))
        if key not in self._seen:
            self._seen[key] = ask(what, self, *args)
        return self._seen[key]

    def _shape(self) -> tuple[frozenset[str], int | None]:
        match self._once("shape"):
            case (frozenset() as ways, None | int() as size, None | list() as content):
                if content is not None and len(content) != size:
                    raise ProtocolViolation(
                        f"an object with len() {size} iterates over {len(content)}"
                    )
                return ways, size
            case other:
                raise ProtocolViolation(f"no shape of an object: {other!r:.80}")

    def _require(self, way: str) -> frozenset[str]:
        ways, _ = self._shape()
        if way not in ways:
            raise TypeError(f"{self!r} has no {way}")
        return ways

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise TypeError(f"{self!r} cannot be copied")

    def __repr__(self) -> str:
        return f"<object {self._number} of the graded code>"

    def __eq__(self, other: object) -> bool:
        global uses
        uses += 1
        return self is other

    __hash__ = object.__hash__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python's protocols would trust it
            raise AttributeError(f"tests cannot see {name!r} of the graded code", name=name)
        return ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set_attribute", self, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask("set_item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        ask("delete_item", self, key)

    def __len__(self) -> int:
        self._require("__len__")
        size = self._shape()[1]
        if type(size) is not int or size < 0:
            raise ProtocolViolation(f"a length of {size!r}")
        return size

    def __bool__(self) -> bool:
        return len(self) > 0 if "__len__" in self._shape()[0] else bool(self._once("true"))

    def __iter__(self) -> Iterator[Any]:
        ways, _ = self._shape()
        if "__iter__" not in ways:
            self._require("__getitem__")
            return (self[index] for index in range(len(self)))
        content = self._once("shape")[2]
        if content is not None:
            return iter(list(content))
        if "__next__" in ways and "__getitem__" not in ways:
            return self._rest()
        return self._shared()

    def _rest(self) -> Iterator[Any]:
        while item := ask("next", self):
            yield item[0]

    def _shared(self) -> Iterator[Any]:
        """Iterate without a length: values are fetched on demand, as there may be no end."""
        iterator = self._once("iterator")
        values: list[Any] = self._seen.setdefault("content", [])
        index = 0
        while True:
            if index == len(values):
                item = ask("fetch", iterator)
                if not item:
                    return
                values.append(item[0])
            yield values[index]
            index += 1

    def __next__(self) -> Any:
        self._require("__next__")
        item = ask("next", self)
        if not item:
            raise StopIteration
        return item[0]

    def __getitem__(self, key: Any) -> Any:
        ways = self._require("__getitem__")
        if "__iter__" not in ways or "keys" in ways or type(key) not in (int, slice):
            return self._once("item", key)
        if type(key) is int and key >= 0:
            for index, value in enumerate(self):
                if index == key:
                    return value
            raise IndexError("index out of range")
        return list(self)[key]

    def __contains__(self, value: Any) -> bool:
        """Search the content here: the object's ``__contains__`` would see the expected value."""
        ways, _ = self._shape()
        if "__iter__" not in ways and not {"__len__", "__getitem__"} <= ways:
            raise TypeError(
                f"{self!r} has no items that `in` could search, and its __contains__ is not called;"
                " call it by a name: has(a, b) with names={'has': 'lambda a, b: b in a', ...}"
            )
        return any(value is item or value == item for item in self)

    def __reversed__(self) -> Iterator[Any]:
        return iter([*self][::-1])


def record_failure(error: BaseException) -> None:
    always = not (uses or isinstance(error, (*BY_VALUE, ProtocolViolation)))
    text = "".join(traceback.format_exception(error, limit=-5))
    reason = f"{text[:2000]}{text[2000:][-2000:]}"
    failures.append((always or isinstance(error, ImportError | NotPassable), reason))


def run_test(test: Callable[..., Any], *args: Any) -> None:
    """Run a test and record its failure. ``sys.exit(0)`` is a success."""
    try:
        test(*args)
    except BaseException as error:
        exits = isinstance(error, SystemExit) and error.code in (None, 0)
        if not exits and type(error).__name__ != "SkipTest":
            record_failure(error)


def tests_in(namespace: dict[str, Any], source: str) -> Iterator[Callable[[], Any]]:
    """The functions and classes that pytest and unittest would collect."""
    unittest = sys.modules.get("unittest")
    for name, thing in [*namespace.items()]:
        if isinstance(thing, FunctionType) and name.startswith("test"):
            if thing.__code__.co_argcount <= len(thing.__defaults__ or ()):
                yield thing
            elif source.count(name) == 1:  # not a helper that others call: it needs fixtures
                yield lambda: importlib.import_module("pytest")
        elif isinstance(thing, type) and unittest and issubclass(thing, unittest.TestCase):
            cases = unittest.defaultTestLoader.loadTestsFromTestCase(thing)
            yield from (unittest.TestSuite([case]).debug for case in cases)
        elif isinstance(thing, type) and name.startswith("Test"):
            yield from (partial(run_method, thing, m) for m in dir(thing) if m.startswith("test"))


def run_method(owner: Callable[[], Any], name: str) -> None:
    """Run a test method of a class that is not a TestCase, as pytest does."""
    instance = owner()
    getattr(instance, "setup_method", lambda: None)()
    try:
        getattr(instance, name)()
    finally:
        getattr(instance, "teardown_method", lambda: None)()


def run_pytest(module: ModuleType) -> None:
    """Run the tests of a module with pytest, for its fixtures, parameters and marks."""
    import pytest

    class Plugin:
        def pytest_pycollect_makemodule(self, module_path: Any, parent: Any) -> Any:
            collector = pytest.Module.from_parent(parent, path=module_path)
            collector.obj = module
            return collector

        def pytest_exception_interact(self, call: Any) -> None:
            record_failure(call.excinfo.value)

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    open("test_answer.py", "w").close()  # the plugin makes pytest collect the module instead
    options = "-qq --tb=no --capture=sys -p no:cacheprovider -p no:faulthandler test_answer.py"
    code = pytest.main(options.split(), plugins=[Plugin()])
    if code not in (0, 5) and not failures:
        raise RuntimeError(f"pytest ended with {code!r}")


def run_module(name: str, source: str, globals_: dict[str, Any], entry: str, every: bool) -> None:
    """Run tests as a module of this name: its code, then the tests that it defines."""
    module = sys.modules[name] = sys.modules["__main__"] = ModuleType(name)
    namespace = vars(module)
    namespace.update(globals_)
    code = compile(source, "<tests>", "exec")
    run_test(exec, code, namespace)
    check = namespace.get("check")
    if isinstance(check, FunctionType) and entry and not uses:
        run_test(check, globals_[entry])
    if "pytest" in code.co_names and not failures:  # the tests import pytest
        run_test(run_pytest, module)
        return
    for test in tests_in(namespace, source):
        if every or not failures:
            run_test(test)


def run_tests(
    source: str, modules: Sequence[str], names: dict[str, str], entry: str, homes: Sequence[str],
    values: frozenset[str], every: bool,
) -> str:  # fmt: skip
    """Run tests; again as a script if they do not use the code as a module. Returns the verdict."""
    global uses
    try:
        targets = {name: ask("find", other) for name, other in names.items()}
        globals_ = {name: importlib.import_module(name) for name in modules} | targets
        for home in homes:
            sys.modules[home] = ModuleType(home)
            vars(sys.modules[home]).update(targets)
        for name in ("__tests__", "__main__"):
            if not uses and not failures:
                run_module(name, source, globals_, entry, every)
        uses += any(name in values for name in targets if type(targets[name]) is not RemoteObject)
    except BaseException as error:
        record_failure(error)
    broken = [reason for always, reason in failures if always]
    for reason in [*violations, *broken, *(reason for _, reason in failures)]:
        word = "memory" if too_large else "broken" if broken and not violations else "failed"
        return f"{word}\n{reason}"
    return "passed" if uses else "unused\nthe tests ended and used nothing of the graded code"


def begin(source: str, *args: Any) -> None:
    """Start run_tests() in a thread. Raises SyntaxError if the tests cannot be compiled."""
    compile(source, "<tests>", "exec")
    globals()["__proceed__"] = proceed
    work = threading.Thread(target=lambda: questions.put(run_tests(source, *args)), daemon=True)
    work.start()


def proceed(reply: str) -> str:
    """Pass a reply to the tests ("": the first call). Returns the next question or the verdict."""
    if reply:
        replies.put(reply)
    return questions.get()
