"""Serialises values between a judge and the graded code: a closed set of types, and object numbers.

The format is JSON in ASCII. None, bool, float, str and small ints are plain JSON (Infinity and NaN
as Python writes them), everything else is ``[kind, ...]``. An object of any other type stays in its
session and is represented by a number. ``decode()`` creates only these types, from any input: it
checks that types and shapes of all parts are exactly those of ``encode()`` before it creates
anything. A judge reads numpy scalars as Python numbers and arrays as float64, complex128 and int64.
With narrow types, numpy would cast the judge's own numbers down (``float16("inf") == 10**6``).

The judge's questions are tuples ``(what, ...)``, the answers ``("value", value)`` or ``("raise",
names of the classes, arguments, text)``. judge.py asks, an ObjectServer answers.
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
"""Classes that are serialised as constructor arguments, and the types of the arguments."""
ARRAYS = ("b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)),
          "f2", "f4", "f8", "c8", "c16")  # fmt: skip
"""No long doubles: converted to float64, different values could be equal."""
WAYS = ("__len__", "__iter__", "__next__", "__getitem__", "keys")


PLAIN: dict[str, Callable[..., Any]] = {
    "attribute": getattr, "set_attribute": setattr, "item": operator.getitem,
    "set_item": operator.setitem, "delete_item": operator.delitem, "true": bool,
    "iterator": iter,
}  # fmt: skip
"""Questions answered by Python functions; methods of ObjectServer answer the others."""


class Malformed(Exception):
    """A text does not have the form above."""


def encode(value: Any, number_of: Callable[[Any], int]) -> str:
    """Serialise a value. number_of() returns the number of an object that has another type or is
    nested more than DEEPEST deep, or raises.
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
    is_namedtuple = kind.__bases__ == (tuple,) and "_fields" in vars(kind)  # sent as a tuple
    if kind in FORMS or is_namedtuple:
        return [FORMS.get(kind, "tuple"), *[_tree(inner, number_of, room - 1) for inner in value]]
    if kind is dict:
        pairs = [[_tree(part, number_of, room - 1) for part in pair] for pair in value.items()]
        return ["dict", *pairs]
    call = _constructor_call(value, kind)
    if call is None:
        return ["object", number_of(value)]
    return ["made", call[0], *[_tree(part, number_of, room - 1) for part in call[1]]]


def _constructor_call(value: Any, kind: type) -> tuple[str, tuple[Any, ...]] | None:
    """The class and the arguments that create an equal value; None for other types."""
    home, name = kind.__module__, kind.__name__
    tag, module = f"{home}.{name}", sys.modules.get(home)
    if module is not None and getattr(module, name, None) is kind:
        if tag in TAKE:
            return tag, TAKE[tag][1](value)
        if tag == "collections.defaultdict":
            names = (name for name, kind in FACTORIES.items() if kind is value.default_factory)
            return "defaultdict", (next(names, None), dict(value))
        if home == "numpy" and (name == "ndarray" or issubclass(kind, module.generic)):
            parts = (value.dtype.str, tuple(value.shape), value.tobytes(), name == "ndarray")
            return ("numpy", parts) if value.dtype.str[1:] in ARRAYS else None
    return None


def decode(text: str, object_of: Callable[[int], Any], widen: bool = False) -> Any:
    """Deserialise a value. object_of() returns the object of a number; widen: for a judge.

    Raises:
        Malformed: encode() does not write this.
    """
    try:
        return _value(json.loads(text), object_of, widen)
    except MemoryError:
        raise
    except Exception as error:  # a hostile text can cause many kinds
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
        value = _construct(parts[0], *[_value(part, object_of, widen) for part in parts[1:]])
        return _widened(value) if widen and parts[0] == "numpy" else value
    if kind == "dict":
        _exact(parts, *[list] * len(parts))
        return dict(_value(["tuple", *pair], object_of, widen) for pair in parts)
    return MAKE[kind]([_value(part, object_of, widen) for part in parts])


def _exact(parts: Any, *kinds: Any) -> Any:
    """Return the parts if their number and types are exactly these."""
    for part, kind in zip(parts, kinds, strict=True):
        if type(part) not in (get_args(kind) or (kind,)):
            raise Malformed(f"a {type(part).__name__}, not a {kind}")
    return parts


def _construct(kind: str, *parts: Any) -> Any:
    if kind == "numpy":
        dtype, shape, data, is_array = _exact(parts, str, tuple, bytes, bool)
        _exact(shape, *[int] * (len(shape) if is_array else 0))
        numpy = importlib.import_module("numpy")
        array_type = numpy.dtype(dtype)
        if array_type.str != dtype or dtype[1:] not in ARRAYS:
            raise Malformed(f"an array of {dtype}")
        if array_type.kind == "b" and not {0, 1}.issuperset(data):
            raise Malformed("neither True nor False")
        array = numpy.frombuffer(data, array_type).reshape(shape).copy()
        if array.shape != shape:  # reshape() accepts -1
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
    """Convert a scalar to a Python number, an array to the widest type of its kind."""
    if not isinstance(value, importlib.import_module("numpy").ndarray):
        return value.item()
    fits = value.dtype.kind != "u" or value.dtype.itemsize < 8 or (value < SMALL).all()
    return value.astype(WIDE.get(value.dtype.kind, "i8")) if fits else value


class ObjectServer:
    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # keeps it alive, so that its id() is not reused
        return self._numbers[id(value)]

    def answer(self, text: str) -> str:
        """Answer a question; an exception is an answer too. In a session with a running judge
        (judge.begin), pass the text to the judge and return its next question.
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
        """Evaluate an expression. A name must be defined by the code: builtins do not count."""
        if expression.isidentifier() and expression not in self._namespace:
            raise NameError(f"name {expression!r} is not defined")
        return eval(compile(expression, "<names>", "eval"), self._namespace)

    def call(self, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return called(*args, **kwargs)

    def call_name(self, name: str, args: tuple[Any, ...]) -> Any:
        return self._namespace[name](*args)

    def next(self, iterator: Any) -> tuple[Any, ...]:
        """The next value, in a tuple; () at the end."""
        for value in iterator:
            return (value,)
        return ()

    fetch = next
    """The same for an iterator that the judge created: the call changes no state of the code."""

    def shape(self, owner: Any) -> tuple[frozenset[str], int | None, list[Any] | None]:
        """An object's methods of WAYS, its length, and, if it has both, its content."""
        kind = type(owner)
        ways = frozenset(name for name in WAYS if hasattr(kind, name))
        size = len(owner) if "__len__" in ways else None
        return ways, size, list(owner) if {"__len__", "__iter__"} <= ways else None
