"""What crosses between a judge and the code it judges: data of a closed set of types, and numbers.

As JSON in ASCII. None, bool, float, str and small ints are JSON's own (Infinity and NaN as Python
writes them), everything else is ``[kind, ...]``. What is of no such type, exactly, stays where it
is; a number stands for it. ``decode()`` makes nothing but these types, whatever it is given: types
and shapes of all parts are those that ``encode()`` writes, exactly, before anything is made.
A judge reads numbers of numpy as Python's and arrays as float64, complex128 and int64: of a narrow
type they would have the judge's own numbers cast down to it (``float16("inf") == 10**6``).

The judge's questions are tuples ``(what, ...)`` and the answers ``("value", value)`` or ``("raise",
names of the classes, arguments, text)``; judge.py asks, an ObjectServer answers.
"""

import importlib
import json
import operator
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, get_args

DEEPEST = 150
SMALL = 1 << 63
FORMS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
MAKE = {name: kind for kind, name in FORMS.items()}
FACTORIES = {kind.__name__: kind for kind in (*FORMS, dict, int, float, str, bool)}
TAKE: dict[str, tuple[tuple[Any, ...], Callable[[Any], tuple[Any, ...]]]] = {
    "builtins.bytearray": ((bytes,), lambda v: (bytes(v),)),
    "builtins.complex": ((float, float), lambda v: (v.real, v.imag)),
    "builtins.range": ((int, int, int), lambda v: (v.start, v.stop, v.step)),
    "collections.Counter": ((dict,), lambda v: (dict(v),)),
    "collections.OrderedDict": ((list,), lambda v: (list(v.items()),)),
    "collections.deque": ((list, int | None), lambda v: (list(v), v.maxlen)),
    "datetime.date": ((int, int, int), lambda v: (v.year, v.month, v.day)),
    "datetime.timedelta": ((int, int, int), lambda v: (v.days, v.seconds, v.microseconds)),
    "decimal.Decimal": ((str,), lambda v: (str(v),)),
    "fractions.Fraction": ((int, int), lambda v: (int(v.numerator), int(v.denominator))),
}
"""Classes that cross by the arguments that make them again, and the types of these."""
ARRAYS = ("b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)),
          "f2", "f4", "f8", "c8", "c16")  # fmt: skip
"""No long doubles: float64 would take others for equal."""
WAYS = ("__len__", "__iter__", "__next__", "__getitem__", "keys")


PLAIN: dict[str, Callable[..., Any]] = {
    "attribute": getattr, "set_attribute": setattr, "item": operator.getitem,
    "set_item": operator.setitem, "delete_item": operator.delitem, "true": bool,
    "iterator": iter,
}  # fmt: skip
"""Questions that Python's own functions answer; an ObjectServer's methods answer the others."""


class Malformed(Exception):
    """It is not of the form above."""


def encode(value: Any, number_of: Callable[[Any], int]) -> str:
    """A value as it crosses. number_of() says what stands for whatever is no data, or is nested
    more than DEEPEST deep; or it raises.
    """
    return json.dumps(_tree(value, number_of, DEEPEST), check_circular=False)


def _tree(value: Any, number_of: Callable[[Any], int], room: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else ["int", hex(value)]
    if kind is str:
        if value.isascii():
            return value
        return ["str", value.encode("utf-8", "surrogatepass").hex()]
    if kind is bytes:
        return ["bytes", value.hex()]
    if room == 0:
        return ["object", number_of(value)]
    named = kind.__bases__ == (tuple,) and "_fields" in vars(kind)  # it crosses as the tuple
    if kind in FORMS or named:
        return [FORMS.get(kind, "tuple"), *[_tree(inner, number_of, room - 1) for inner in value]]
    if kind is dict:
        pairs = [[_tree(part, number_of, room - 1) for part in pair] for pair in value.items()]
        return ["dict", *pairs]
    taken = _taken(value, kind)
    if taken is None:
        return ["object", number_of(value)]
    return ["made", taken[0], *[_tree(part, number_of, room - 1) for part in taken[1]]]


def _taken(value: Any, kind: type) -> tuple[str, tuple[Any, ...]] | None:
    """The class that a value is made again by, and its arguments; None if it is no data."""
    home, name = kind.__module__, kind.__name__
    tag, module = f"{home}.{name}", sys.modules.get(home)
    if module is not None and getattr(module, name, None) is kind:
        if tag in TAKE:
            return tag, TAKE[tag][1](value)
        if tag == "collections.defaultdict":
            named = (name for name, made in FACTORIES.items() if made is value.default_factory)
            return "defaultdict", (next(named, None), dict(value))
        if home == "numpy" and (name == "ndarray" or issubclass(kind, module.generic)):
            parts = (value.dtype.str, tuple(value.shape), value.tobytes(), name == "ndarray")
            return ("numpy", parts) if value.dtype.str[1:] in ARRAYS else None
    return None


def decode(text: str, object_of: Callable[[int], Any], widen: bool = False) -> Any:
    """The value that was spelled. object_of() says what a number stands for; widen: as a judge.

    Raises:
        Malformed: it was not spelled by encode().
    """
    try:
        return _value(json.loads(text), object_of, widen)
    except MemoryError:
        raise
    except Exception as error:  # whatever a text that is none makes of its parts
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None


def _value(tree: Any, object_of: Callable[[int], Any], widen: bool) -> Any:
    if type(tree) is dict:
        raise Malformed("an object of JSON")
    if type(tree) is not list:
        return tree
    kind, *parts = tree
    if kind in ("int", "str", "bytes", "object"):
        (part,) = _exact(parts, int if kind == "object" else str)
        if kind == "object":
            if part < 0:
                raise Malformed("an object without a number")
            return object_of(part)
        if kind == "int":
            return int(part, 16)
        data = bytes.fromhex(part)
        return data if kind == "bytes" else data.decode("utf-8", "surrogatepass")
    if kind == "made":
        made = _made(parts[0], *[_value(part, object_of, widen) for part in parts[1:]])
        return _widened(made) if widen and parts[0] == "numpy" else made
    if kind == "dict":
        _exact(parts, *[list] * len(parts))
        return dict(_value(["tuple", *pair], object_of, widen) for pair in parts)
    return MAKE[kind]([_value(part, object_of, widen) for part in parts])


def _exact(parts: Any, *kinds: Any) -> Any:
    """The parts, if they are as many as these types and of them, exactly."""
    for part, kind in zip(parts, kinds, strict=True):
        if type(part) not in (get_args(kind) or (kind,)):
            raise Malformed(f"a {type(part).__name__}, not a {kind}")
    return parts


def _made(kind: str, *parts: Any) -> Any:
    if kind == "numpy":
        dtype, shape, data, is_array = _exact(parts, str, tuple, bytes, bool)
        _exact(shape, *[int] * (len(shape) if is_array else 0))
        numpy = importlib.import_module("numpy")
        of = numpy.dtype(dtype)
        if of.str != dtype or dtype[1:] not in ARRAYS:
            raise Malformed(f"an array of {dtype}")
        if of.kind == "b" and not {0, 1}.issuperset(data):
            raise Malformed("neither True nor False")
        array = numpy.frombuffer(data, of).reshape(shape).copy()
        if array.shape != shape:  # -1 is whatever fits
            raise Malformed(f"an array of the shape {shape}")
        return array if is_array else array[()]
    if kind == "defaultdict":
        name, content = _exact(parts, str | None, dict)
        return defaultdict(None if name is None else FACTORIES[name], content)
    _exact(parts, *TAKE[kind][0])
    home, _, name = kind.rpartition(".")
    if kind == "collections.OrderedDict":
        _exact(parts[0], *[tuple] * len(parts[0]))
    return getattr(importlib.import_module(home), name)(*parts)


WIDE = {"b": "?", "i": "i8", "f": "f8", "c": "c16"}


def _widened(value: Any) -> Any:
    """A number as Python's, an array as of the widest type of its kind."""
    if not isinstance(value, importlib.import_module("numpy").ndarray):
        return value.item()
    fits = value.dtype.kind != "u" or value.dtype.itemsize < 8 or (value < SMALL).all()
    return value.astype(WIDE.get(value.dtype.kind, "i8")) if fits else value


class ObjectServer:
    """Answers questions about what is in a namespace.

    Args:
        namespace: where expressions are evaluated.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # it lives on, so that the identity is its own
        return self._numbers[id(value)]

    def answer(self, text: str) -> str:
        """The answer to a question. Whatever comes of it is an answer, exceptions too. In a judge
        that is at work (judge.begin), its next question.
        """
        try:
            if "__proceed__" in self._namespace:
                return str(self._namespace["__proceed__"](text))
            what, *args = decode(text, self._objects.__getitem__)
            return encode(("value", (PLAIN.get(what) or getattr(self, what))(*args)), self._number)
        except BaseException as error:
            return self._raised(error)

    def _raised(self, error: BaseException) -> str:
        names = [kind.__name__ for kind in type.mro(type(error)) if kind.__module__ == "builtins"]
        try:
            text = str(str(error))
        except BaseException:
            text = "<unprintable>"
        try:
            return encode(("raise", [type(error).__name__, *names], error.args, text), self._number)
        except BaseException:
            return encode(("raise", [*names], (text,), text), self._number)

    def find(self, expression: str) -> Any:
        """What an expression means there. A name is the code's own, not one of Python's."""
        if expression.isidentifier() and expression not in self._namespace:
            raise NameError(f"name {expression!r} is not defined")
        return eval(compile(expression, "<names>", "eval"), self._namespace)

    def call(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call."""
        return called(*args, **kwargs)

    def call_name(self, name: str, args: tuple[Any, ...]) -> Any:
        """The result of a call of what has that name there."""
        return self._namespace[name](*args)

    def next(self, iterator: Any) -> tuple[Any, ...]:
        """The next one, alone in a tuple; () at the end."""
        for value in iterator:
            return (value,)
        return ()

    fetch = next
    """The same, of an iterator that the judge made: nothing there is changed by it."""

    def shape(self, owner: Any) -> tuple[frozenset[str], int | None, list[Any] | None]:
        """Which ways there are to look at its content, its length, and all of it if it has both a
        length and an iterator.
        """
        kind = type(owner)
        ways = frozenset(name for name in WAYS if hasattr(kind, name))
        size = len(owner) if "__len__" in ways else None
        return ways, size, list(owner) if {"__len__", "__iter__"} <= ways else None
