"""Runs trusted tests in a session of its own; what they test is elsewhere (grade.check_tests).

``begin()`` runs the tests in a thread. Whenever they touch the graded code, the thread asks and
waits; ``proceed(reply)`` hands it the reply to its last question and returns its next one, or the
verdict: a word and, on further lines, why. The words: passed; unused (the tests ended and used
nothing of the graded code); failed; broken (they fail for any code); memory.
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
fouls: list[str] = []
short: list[str] = []
"""Questions whose answers did not fit into the memory."""
changes = 0
"""Questions so far that may have changed something there."""
uses = 0
"""How often the tests have used the graded code: calls, attributes, items, comparisons. Counted
here, where that code has no hand.
"""
failures: list[tuple[bool, str]] = []
"""Of each test that failed: whether any code fails it, and its traceback."""
BY_VALUE = (AssertionError, TypeError, AttributeError, KeyError, IndexError, ValueError)
"""What a constant that the tests import may cause unseen, as it is no function to be called."""


class ProtocolViolation(BaseException):
    """What no test may take for a failure that it expected, nor an iterator for its end."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        fouls.append(what)


def ask(what: str, *args: Any) -> Any:
    """What the graded session answers to a question; raises what it raised there."""
    global changes, uses
    changes += what in ("call", "set_attribute", "set_item", "delete_item", "next")
    uses += what != "find"
    question = encode((what, *args), number_of)
    with turn:
        questions.put(question)
        reply = replies.get()
    try:
        match decode(reply, graded, widen=True):
            case ("value", value):
                return value
            case ("raise", [str(), *_] as names, tuple() as given, str() as text):
                error = error_of(names, given, text)
            case other:
                raise Malformed(f"{other!r:.80}")
    except MemoryError:
        short.append(what)
        raise
    except Malformed as malformed:
        raise ProtocolViolation(f"the answer to {what!r} is malformed: {malformed}") from None
    raise error


def error_of(names: list[str], given: tuple[Any, ...], text: str) -> BaseException:
    """What a test sees of an exception of the graded code: the nearest class of Python's own.

    Those that end more than a test, or an iterator, do not; see PEP 479.
    """
    classes = (getattr(builtins, str(name), None) for name in names)
    found = next((c for c in classes if isinstance(c, type) and issubclass(c, BaseException)), None)
    told = f"{names[0]}: {text}"
    if found is None or not issubclass(found, Exception):
        return ProtocolViolation(f"the code raised {told}")
    if issubclass(found, (StopIteration, StopAsyncIteration)):
        return RuntimeError(f"the code raised {told}")
    for args in (given, (text,)):
        try:
            error: BaseException = found(*args)
        except Exception:  # it is made of other arguments
            continue
        error.add_note(f"{told} (in the graded code)")
        return error
    return RuntimeError(told)


def number_of(value: Any) -> int:
    """What stands for something that is not data, on its way there."""
    if type(value) is not RemoteObject:
        raise TypeError(f"a {type(value).__name__} cannot be handed to the graded code")
    return object.__getattribute__(value, "_number")  # type: ignore[no-any-return]


def graded(number: int) -> "RemoteObject":
    """What stands for something of the graded session: the same for the same."""
    if type(number) is not int:
        raise Malformed("an object without a number")
    if number not in known:
        known[number] = RemoteObject(number)
    return known[number]


class RemoteObject:
    """Something of the graded session that is no data, known by its number there.

    It equals nothing but itself, whatever its ``__eq__`` says over there. What it contains is asked
    once, and again only when something may have changed it: however a test looks at it (length,
    iteration, items), it sees the same.
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

    def _need(self, way: str) -> frozenset[str]:
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
        if name.startswith("_"):  # of a protocol, which would believe it
            raise AttributeError(f"{name!r} of the graded code is not seen by tests", name=name)
        return ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set_attribute", self, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask("set_item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        ask("delete_item", self, key)

    def __len__(self) -> int:
        self._need("__len__")
        size = self._shape()[1]
        if type(size) is not int or size < 0:
            raise ProtocolViolation(f"a length of {size!r}")
        return size

    def __bool__(self) -> bool:
        return len(self) > 0 if "__len__" in self._shape()[0] else bool(self._once("true"))

    def __iter__(self) -> Iterator[Any]:
        ways, _ = self._shape()
        if "__iter__" not in ways:
            self._need("__getitem__")
            return (self[index] for index in range(len(self)))
        content = self._once("shape")[2]
        if content is not None:
            return iter(list(content))
        if "__next__" in ways and "__getitem__" not in ways:
            return self._rest()
        return self._shared()

    def _rest(self) -> Iterator[Any]:
        while got := ask("next", self):
            yield got[0]

    def _shared(self) -> Iterator[Any]:
        """What has no length may have no end: it is fetched as far as it is looked at."""
        iterator = self._once("iterator")
        seen: list[Any] = self._seen.setdefault("content", [])
        index = 0
        while True:
            if index == len(seen):
                got = ask("fetch", iterator)
                if not got:
                    return
                seen.append(got[0])
            yield seen[index]
            index += 1

    def __next__(self) -> Any:
        self._need("__next__")
        got = ask("next", self)
        if not got:
            raise StopIteration
        return got[0]

    def __getitem__(self, key: Any) -> Any:
        ways = self._need("__getitem__")
        if "__iter__" not in ways or "keys" in ways or type(key) not in (int, slice):
            return self._once("item", key)
        if type(key) is int and key >= 0:
            for index, value in enumerate(self):
                if index == key:
                    return value
            raise IndexError("index out of range")
        return list(self)[key]

    def __contains__(self, value: Any) -> bool:
        """By its content alone: ``__contains__`` over there would be told what a test looks for."""
        ways, _ = self._shape()
        if "__iter__" not in ways and not {"__len__", "__getitem__"} <= ways:
            raise TypeError(
                f"{self!r} has no items that `in` could look through, and its __contains__ is not "
                "asked; ask it by a name: has(a, b) with names={'has': 'lambda a, b: b in a', ...}"
            )
        return any(value is one or value == one for one in self)

    def __reversed__(self) -> Iterator[Any]:
        return iter([*self][::-1])


def note(error: BaseException) -> None:
    """Record that the test that runs now has failed."""
    always = not (uses or isinstance(error, (*BY_VALUE, ProtocolViolation)))
    text = "".join(traceback.format_exception(error, limit=-5))
    why = f"{text[:2000]}{text[2000:][-2000:]}"
    failures.append((always or isinstance(error, ImportError), why))


def attempt(test: Callable[..., Any], *args: Any) -> None:
    """Run a test and record its failure. ``sys.exit(0)`` ends it well."""
    try:
        test(*args)
    except BaseException as error:
        exits = isinstance(error, SystemExit) and error.code in (None, 0)
        if not exits and type(error).__name__ != "SkipTest":
            note(error)


def tests_in(namespace: dict[str, Any], source: str) -> Iterator[Callable[[], Any]]:
    """The functions and classes that pytest and unittest would collect."""
    unittest = sys.modules.get("unittest")
    for name, thing in [*namespace.items()]:
        if isinstance(thing, FunctionType) and name.startswith("test"):
            if thing.__code__.co_argcount <= len(thing.__defaults__ or ()):
                yield thing
            elif source.count(name) == 1:  # no helper that others call: it wants fixtures
                yield lambda: importlib.import_module("pytest")
        elif isinstance(thing, type) and unittest and issubclass(thing, unittest.TestCase):
            cases = unittest.defaultTestLoader.loadTestsFromTestCase(thing)
            yield from (unittest.TestSuite([case]).debug for case in cases)
        elif isinstance(thing, type) and name.startswith("Test"):
            yield from (partial(run_method, thing, m) for m in dir(thing) if m.startswith("test"))


def run_method(owner: Callable[[], Any], name: str) -> None:
    """Run a test of a class that is no TestCase, as pytest does."""
    instance = owner()
    getattr(instance, "setup_method", lambda: None)()
    try:
        getattr(instance, name)()
    finally:
        getattr(instance, "teardown_method", lambda: None)()


def run_pytest(module: ModuleType) -> None:
    """Run the tests of a module by pytest, for its fixtures, parameters and marks."""
    import pytest

    class Plugin:
        def pytest_pycollect_makemodule(self, module_path: Any, parent: Any) -> Any:
            collector = pytest.Module.from_parent(parent, path=module_path)
            collector.obj = module
            return collector

        def pytest_exception_interact(self, call: Any) -> None:
            note(call.excinfo.value)

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    open("test_answer.py", "w").close()  # what it collects is the module instead
    options = "-qq --tb=no --capture=sys -p no:cacheprovider -p no:faulthandler test_answer.py"
    code = pytest.main(options.split(), plugins=[Plugin()])
    if code not in (0, 5) and not failures:
        raise RuntimeError(f"pytest ended with {code!r}")


def run_module(name: str, source: str, given: dict[str, Any], entry: str, every: bool) -> None:
    """Run tests as a module of this name: its code, then what it only defines."""
    module = sys.modules[name] = sys.modules["__main__"] = ModuleType(name)
    namespace = vars(module)
    namespace.update(given)
    code = compile(source, "<tests>", "exec")
    attempt(exec, code, namespace)
    check = namespace.get("check")
    if isinstance(check, FunctionType) and entry and not uses:
        attempt(check, given[entry])
    if "pytest" in code.co_names and not failures:  # they import it
        attempt(run_pytest, module)
        return
    for test in tests_in(namespace, source):
        if every or not failures:
            attempt(test)


def verdict_of(
    source: str, modules: Sequence[str], names: dict[str, str], entry: str, homes: Sequence[str],
    values: frozenset[str], every: bool,
) -> str:  # fmt: skip
    """Run tests and return the verdict. Where they use nothing of the graded code when they are
    imported, they run once more as a script.
    """
    global uses
    try:
        found = {name: ask("find", other) for name, other in names.items()}
        given = {name: importlib.import_module(name) for name in modules} | found
        for home in homes:
            sys.modules[home] = ModuleType(home)
            vars(sys.modules[home]).update(found)
        for name in ("__tests__", "__main__"):
            if not uses and not failures:
                run_module(name, source, given, entry, every)
        uses += any(name in values for name in found if type(found[name]) is not RemoteObject)
    except BaseException as error:
        note(error)
    certain = [told for always, told in failures if always]
    for why in [*fouls, *certain, *(told for _, told in failures)]:
        return f"{'memory' if short else 'broken' if certain and not fouls else 'failed'}\n{why}"
    return "passed" if uses else "unused\nthe tests ended and used nothing of the graded code"


def begin(source: str, *of: Any) -> None:
    """Start the tests. Raises what compiling them does."""
    compile(source, "<tests>", "exec")
    globals()["__proceed__"] = proceed
    work = threading.Thread(target=lambda: questions.put(verdict_of(source, *of)), daemon=True)
    work.start()


def proceed(reply: str) -> str:
    """Answer the last question, if there was one; the next, or the verdict."""
    if reply:
        replies.put(reply)
    return questions.get()
