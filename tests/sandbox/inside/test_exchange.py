"""exchange.decode() returns only the closed set of types, or raises Malformed."""

import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from agentgrpo.sandbox.inside.exchange import Malformed, decode, encode


class Graded:
    """What a number stands for: like the judge's, it answers whatever Python asks."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AssertionError(f"{name} was asked of the graded code while its answer was read")

    def __iter__(self) -> Any:
        raise AssertionError("the graded code was asked while its answer was read")

    __len__ = __getitem__ = __call__ = __bool__ = __iter__


ONE_ITEM = (str, bytes, bytearray, complex, float, int, bool, type(None), range, Decimal)
CONTENT: dict[type, Any] = {
    **dict.fromkeys((list, tuple, set, frozenset, deque), list),
    **dict.fromkeys((dict, Counter, OrderedDict, defaultdict),
                    lambda v: [*v.keys(), *v.values()]),
}  # fmt: skip
FACTORIES = {None, list, tuple, set, frozenset, dict, int, float, str, bool}


def is_data(value: Any) -> bool:
    """Whether it is of the closed set of types, with all that is in it and nothing beside."""
    kind = type(value)
    if getattr(value, "__dict__", {}) and kind is not Graded:
        return False
    if kind in ONE_ITEM:
        return True
    if kind is Graded:
        return type(value.number) is int and value.number >= 0
    if kind in CONTENT:
        if kind is defaultdict and value.default_factory not in FACTORIES:
            return False
        return all(map(is_data, CONTENT[kind](value)))
    if kind is date:
        return bool(date(value.year, value.month, value.day) == value)
    if kind is timedelta:
        return bool(timedelta(value.days, value.seconds, value.microseconds) == value)
    if kind is Fraction:
        parts = (value.numerator, value.denominator)
        return {*map(type, parts)} == {int} and Fraction(*parts) == value and parts[1] > 0
    if kind.__module__ == "numpy":
        if value.dtype.kind == "b" and not {0, 1}.issuperset(value.tobytes()):
            return False
        return value.dtype.kind in "biufc" and (not value.shape or kind.__name__ == "ndarray")
    return False


ARRAY = ["made", "numpy"]
B4 = ["bytes", "01000000"]
MALFORMED: list[Any] = [
    {}, [], [[]], ["other"], ["made"], ["made", ["list"]], ["made", "os.system", "true"],
    ["int", 1], ["int"], ["int", "1", "2"], ["int", "x"], ["str", "0"], ["str", 1],
    ["bytes", ["00"]],
    ["object", -1], ["object", "1"], ["object", 1.0], ["object", True], ["object", None],
    ["object", []], ["object", 1, 2], ["dict", "ab"], ["dict", [1]], ["dict", [1, 2, 3]],
    ["dict", {"a": 1, "b": 2}], ["set", ["list"]],
    ["made", "defaultdict", "list", ["list"]], ["made", "defaultdict", "eval", ["dict"]],
    ["made", "defaultdict", ["object", 1], ["dict"]], ["made", "defaultdict", "list"],
    ["made", "defaultdict", ["tuple"], ["dict"]],
    ["made", "builtins.bytearray", 99], ["made", "builtins.bytearray", ["list", 1]],
    ["made", "builtins.complex", 1, 2.0], ["made", "builtins.complex", "1j"],
    ["made", "builtins.range", 1], ["made", "builtins.range", True, 2, 1],
    ["made", "collections.Counter", "ab"], ["made", "collections.Counter", ["object", 1]],
    ["made", "collections.OrderedDict", ["dict"]], ["made", "collections.OrderedDict", "ab"],
    ["made", "collections.OrderedDict", ["list", "ab"]],
    ["made", "collections.OrderedDict", ["list", ["object", 1]]],
    ["made", "collections.OrderedDict", ["list", ["tuple", 1]]],
    ["made", "collections.deque", ["object", 1], None],
    ["made", "collections.deque", ["list"], True],
    ["made", "datetime.date", ["bytes", "ffff01ff"]], ["made", "datetime.date", 1, 1, True],
    ["made", "datetime.timedelta", 1], ["made", "datetime.timedelta", 1.5, 0, 0],
    ["made", "decimal.Decimal", 1], ["made", "decimal.Decimal", ["object", 1]],
    ["made", "decimal.Decimal", "1", None],
    ["made", "fractions.Fraction", ["object", 1]], ["made", "fractions.Fraction", 1.5],
    ["made", "fractions.Fraction", "1/3"], ["made", "fractions.Fraction", 1, ["object", 1]],
]  # fmt: skip
ARRAYS: list[Any] = [
    [*ARRAY, "<i4", ["tuple", -1], B4, True], [*ARRAY, "<i4", 1, B4, True],
    [*ARRAY, "<i4", ["tuple", True], B4, True], [*ARRAY, "<i4", ["list", 1], B4, True],
    [*ARRAY, "<i4", ["tuple", 1], B4, 1], [*ARRAY, "<i4", ["tuple", 1], B4, False],
    [*ARRAY, "<i4", ["tuple", 1], ["made", "builtins.bytearray", B4], True],
    [*ARRAY, "<i4", ["tuple", 1], ["object", 1], True],
    [*ARRAY, "int32", ["tuple", 1], B4, True], [*ARRAY, "(2,)i2", ["tuple", 2], B4, True],
    [*ARRAY, "|S4", ["tuple", 1], B4, True], [*ARRAY, "|V4", ["tuple", 1], B4, True],
    [*ARRAY, "|O", ["tuple", 1], ["bytes", "00" * 8], True],
    [*ARRAY, ["list", ["tuple", "count", "<i4"]], ["tuple", 1], B4, True],
    [*ARRAY, ["object", 1], ["tuple", 1], B4, True], [*ARRAY, None, ["tuple", 1], B4, True],
    [*ARRAY, "|b1", ["tuple", 1], ["bytes", "02"], True],
    [*ARRAY, "|b1", ["tuple"], ["bytes", "ff"], False],
]  # fmt: skip
GOOD: list[Any] = [
    ["made", "defaultdict", None, ["dict", [1, 2]]],
    ["made", "defaultdict", "list", ["dict"]], ["made", "builtins.bytearray", B4],
    ["made", "builtins.complex", 1.0, -0.0], ["made", "builtins.range", 1, 9, 2],
    ["made", "collections.Counter", ["dict", ["a", 2]]],
    ["made", "collections.deque", ["list", 1], 3],
    ["made", "collections.OrderedDict", ["list", ["tuple", 1, 2]]],
    ["made", "collections.deque", ["list"], None], ["made", "datetime.date", 2020, 2, 29],
    ["made", "datetime.timedelta", -1, 5, 6], ["made", "decimal.Decimal", "-1.10"],
    ["made", "fractions.Fraction", 1, 3], ["int", "-0x10000000000000000"], ["str", "c3a4"], B4,
    ["dict", [["object", 1], ["set", 1]]], ["frozenset", "a"], 1.5, None, True, "a",
]  # fmt: skip
GOOD_ARRAYS: list[Any] = [
    [*ARRAY, "<i4", ["tuple", 1, 1], B4, True], [*ARRAY, "<f4", ["tuple"], B4, False],
    [*ARRAY, "|b1", ["tuple", 4], B4, True], [*ARRAY, "<c16", ["tuple", 0], ["bytes", ""], True],
    [*ARRAY, "<i4", ["tuple"], B4, True],
]  # fmt: skip


def wire(tree: Any) -> Any:
    """What is read of a tree on the wire."""
    return decode(json.dumps(tree), Graded)


@pytest.mark.parametrize("tree", MALFORMED, ids=str)
def test_other_spellings_are_malformed(tree: Any) -> None:
    with pytest.raises(Malformed):
        wire(tree)


def test_arrays_round_trip() -> None:
    pytest.importorskip("numpy")
    for tree in ARRAYS:
        with pytest.raises(Malformed):
            pytest.fail(f"{tree} is {wire(tree)!r}")
    for tree in GOOD_ARRAYS:
        assert json.loads(encode(wire(tree), lambda graded: graded.number)) == tree


@pytest.mark.parametrize("tree", GOOD, ids=str)
def test_valid_texts_are_decoded(tree: Any) -> None:
    assert is_data(wire(tree))
    assert json.loads(encode(wire(tree), lambda graded: graded.number)) == tree


WORDS = ["a", "b", "count", "index", "first count", "a b", "", "_a", "P", "list", "int", "<i4",
         "|b1", "|O", "1", "00", "01000000", "ff02", "0x1", "a,b", "1e5", "sNaN",
    "\uff43ount"]  # fmt: skip
LEAVES = [None, True, False, 0, 1, 2, -1, 3, 1.5, float("nan"), 1 << 70, *WORDS]
KINDS = ["list", "tuple", "set", "frozenset", "dict", "int", "str", "bytes", "object", "made"]
TAGS = ["numpy", "defaultdict", *{tree[1] for tree in GOOD if type(tree) is list
        and tree[0] == "made"}]  # fmt: skip


def any_tree(rng: random.Random, room: int) -> Any:
    """A tree: of any kind, or a good one of which one part is another."""
    if room == 0 or rng.random() < 0.2:
        return rng.choice(LEAVES)
    if rng.random() < 0.7:
        tree = json.loads(json.dumps(rng.choice(GOOD + GOOD_ARRAYS + MALFORMED)))
        at = tree
        while type(at) is list and at:
            where = rng.randrange(len(at))
            if type(at[where]) is not list or rng.random() < 0.5:
                at[where] = any_tree(rng, room - 1)
                break
            at = at[where]
        return tree
    kind = rng.choice([*KINDS, any_tree(rng, 0)])
    parts = [any_tree(rng, room - 1) for _ in range(rng.randrange(4))]
    if kind == "dict":
        parts = [[any_tree(rng, room - 1), part] for part in parts]
    return [kind, *([rng.choice(TAGS)] if kind == "made" else []), *parts]


def test_any_text_decodes_to_data_or_malformed() -> None:
    rng, read_well = random.Random(18), 0
    for _ in range(30_000):
        tree = any_tree(rng, 4)
        try:
            value = wire(tree)
        except Malformed:
            continue
        assert is_data(value), (tree, value)
        read_well += 1
    assert read_well > 3000, "many of them are data"
