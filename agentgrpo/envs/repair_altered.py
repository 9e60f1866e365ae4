"""Altered tests: copies that right code fails, so that an answer which decides its verdict shows.

A place is one edit of a test function: a constant, a comparison or an exception type. Copies keep
names and line numbers. Each also renames local variables and holds the value that it does not use
in a dummy statement, so that neither text nor the set of constants says which copy is altered.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

TYPES = ("ValueError", "TypeError", "KeyError", "IndexError", "RuntimeError", "OSError")
SWAPS = {"==": "!=", "<": ">=", ">": "<=", "in": "not in", "is": "is not"}
SWAPS |= {new: old for old, new in SWAPS.items()}
OPERATOR = re.compile(r"not in|is not|[=!<>]=|<|>|\bin\b|\bis\b")
SIMPLE = ast.Assign | ast.AugAssign | ast.Expr | ast.Assert | ast.Return | ast.Raise | ast.Pass
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """`old`, which stands at (line, column in bytes) of a test file, becomes `new`."""

    line: int
    column: int
    old: str
    new: str

    def dummy(self, altered: bool) -> str:
        """An expression with the value that a copy does not use."""
        value = self.old if altered else self.new
        operand = "None" if value.startswith("is") else "()"
        return f"{operand} {value} {operand}" if value in SWAPS else value


def parse(source: str) -> ast.Module:
    """CPython takes the depth of all threads' trees for one's (gh-106905), hence more than once."""
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


@functools.lru_cache(256)
def functions_by_name(text: str) -> dict[str, Function]:
    """The functions of a test file, as pytest names them. Remembered, as every verdict asks."""

    def walk(scope: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, Function):
                yield f"{prefix}::{node.name}", node
            elif isinstance(node, ast.stmt):
                yield from walk(node, f"{prefix}::{getattr(node, 'name', '')}".removesuffix("::"))

    return dict(walk(parse(text), ""))


def places_of(text: str, function: Function, line: int, rng: random.Random) -> list[Place]:
    """Where a function can be altered, in random order: on this line first, comparisons last."""
    lines, places = text.encode().splitlines(), []
    todo: list[ast.AST] = [*function.body]
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize"):
            todo += call.args[1:]
    for node in todo:  # grows meanwhile
        old = new = ""
        fixed = _is_text(node) or isinstance(node, ast.JoinedStr)
        todo += [] if fixed else ast.iter_child_nodes(node)
        if isinstance(node, ast.expr) and node.lineno == node.end_lineno:
            old = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
        if isinstance(node, ast.Constant) and node.value not in (None, ...):
            new = repr(_changed(node.value, rng))
        elif re.fullmatch(r"([a-z]\w*\.)*[A-Z]\w*[a-z]\w*", old):  # a class, perhaps that is raised
            new = rng.choice([name for name in TYPES if name != old])
        elif isinstance(node, ast.Compare) and old:
            start, end = node.left.end_col_offset or 0, node.comparators[0].col_offset
            if found := OPERATOR.search(lines[node.lineno - 1][start:end].decode()):
                places.append(Place(node.lineno, start + found.start(), found[0], SWAPS[found[0]]))
        if isinstance(node, ast.expr) and old and new:
            places.append(Place(node.lineno, node.col_offset, old, new))
    rng.shuffle(places)
    return sorted(places, key=lambda place: (place.line != line, place.old in SWAPS))


def _changed(value: object, rng: random.Random) -> object:
    """Another value of the same type."""
    if isinstance(value, int | float | complex):
        return not value if isinstance(value, bool) else value + rng.choice((1, 2, -1))
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    at = rng.randrange(len(text) + 1)
    letter = rng.choice("aeinorst".replace(text[at : at + 1] or " ", ""))
    text = text[:at] + letter + text[at + rng.randrange(2) :]
    return text.encode("latin-1") if isinstance(value, bytes) else text


def copy_of(
    text: str, drawn: Mapping[str, tuple[Place, bool]], tests: Collection[str], rng: random.Random
) -> str:
    """A test file whose functions are disguised, and altered at their place if that says so.

    Test functions that none of `tests` names are blanked: pytest's rewriting of assertions is most
    of the time of a run.
    """
    edits: list[Place] = []
    for name, (place, altered) in drawn.items():
        edits += [*_disguise(text, functions_by_name(text)[name], place.dummy(altered), rng)]
        edits += [place] if altered else []
    lines = text.encode().splitlines(keepends=True)
    for line, column, old, new in sorted(edits, key=lambda e: (e[0], e[1], bool(e[2])))[::-1]:
        before, after = lines[line - 1][:column], lines[line - 1][column + len(old.encode()) :]
        lines[line - 1] = before + new.encode() + after
    wanted = {test.partition("[")[0].rpartition("::")[2] for test in tests}
    words = Counter(re.findall(r"\w+", text))
    for function in functions_by_name(text).values():
        name = function.name
        if name.startswith("test") and name not in wanted and words[name] == 1:
            first = min(n.lineno for n in (function, *function.decorator_list))
            blank = [b"\n"] * ((function.end_lineno or 0) - first)
            lines[first - 1 : function.end_lineno] = [
                b" " * function.col_offset + b"pass\n",
                *blank,
            ]
    return b"".join(lines).decode()


def _disguise(text: str, function: Function, dummy: str, rng: random.Random) -> Iterator[Place]:
    """Edits that rename a function's variables and add a statement, and change no meaning."""

    def new_name() -> str:
        return next(n for _ in iter(int, 1) if (n := f"v{rng.randrange(1 << 24):x}") not in text)

    nodes = [node for part in function.body for node in ast.walk(part)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    fixed = {*re.findall(r"(?<!\bid=)'(\w+)'", ast.dump(function)), "__class__"}  # in other roles
    for node in (n for n in nodes if isinstance(n, ast.JoinedStr | ast.ClassDef)):
        fixed |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    stored = sorted({name.id for name in names if isinstance(name.ctx, ast.Store)} - fixed)
    if not {"locals", "vars", "eval", "exec", "dir"} & {name.id for name in names}:
        new_names = {name: new_name() for name in stored}
        for name in (name for name in names if name.id in new_names):
            yield Place(name.lineno, name.col_offset, name.id, new_names[name.id])
    spots = [n for n in function.body if isinstance(n, SIMPLE)] or nodes
    spot = rng.choice([n for n in spots if isinstance(n, SIMPLE) and not _is_text(n)] or [None])
    if spot is not None:
        yield Place(spot.lineno, spot.col_offset, "", f"{new_name()} = {dummy}; ")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
