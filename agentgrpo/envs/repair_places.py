"""Places of a file's source where it can be broken, found in its syntax tree."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.USub: ast.UAdd,
}  # fmt: skip


class Mutant(NamedTuple):
    """`old`, which stands at (line, column) of `file`, becomes `new`."""

    file: str
    line: int
    column: int
    old: str
    new: str

    @property
    def lines(self) -> range:
        """Those that a test must run to notice."""
        return range(self.line, self.line + 1 + self.old.count("\n"))

    def apply(self, text: str) -> str:
        """The file's text with it."""
        lines = text.encode().splitlines(keepends=True)
        at = sum(map(len, lines[: self.line - 1])) + self.column
        whole, old = text.encode(), self.old.encode()
        assert whole[at:].startswith(old)
        return (whole[:at] + self.new.encode() + whole[at + len(old) :]).decode()


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may take a node's place: an operator swapped, a number or truth another."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in SWAPS:
            yield ast.Compare(left, [SWAPS[type(op)]()], [right])
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.UnaryOp(op, operand) if type(op) in SWAPS:
            yield ast.UnaryOp(SWAPS[type(op)](), operand)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its syntax tree; none of annotations or messages."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "exc", "msg"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                    yield from walk(child)

    lines = text.encode().splitlines()
    for node in walk(ast.parse(text)):
        if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
            continue
        old = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
        for new in changed(node):
            said = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
            yield Mutant(file, node.lineno, node.col_offset, old, said)


def apply(mutant: Mutant, text: str) -> str:
    """A file's text with a mutant, and without brackets that nothing needs."""
    made, bare = mutant.apply(text), mutant._replace(new=mutant.new[1:-1]).apply(text)
    with contextlib.suppress(SyntaxError, ValueError):
        return bare if ast.dump(ast.parse(made)) == ast.dump(ast.parse(bare)) else made
    return made


def bodies_of(file: str, text: str) -> Iterator[Mutant]:
    """Every function's body that stands on lines of its own, removed, its docstring kept."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            if body and body[0].lineno > node.lineno:
                first, last = body[0], body[-1]
                lines = text.encode().splitlines(True)[first.lineno - 1 : last.end_lineno]
                lines[-1] = lines[-1][: last.end_col_offset]
                old = b"".join(lines)[first.col_offset :].decode()
                yield Mutant(file, first.lineno, first.col_offset, old, "raise NotImplementedError")
