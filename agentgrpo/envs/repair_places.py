"""Mutants of a source file, found in its syntax tree."""

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
    """Replace `old` at (line, column) of `file` by `new`."""

    file: str
    line: int
    column: int
    old: str
    new: str

    @property
    def lines(self) -> range:
        return range(self.line, self.line + 1 + self.old.count("\n"))

    def apply(self, text: str) -> str:
        lines = text.encode().splitlines(keepends=True)
        offset = sum(map(len, lines[: self.line - 1])) + self.column
        source, old = text.encode(), self.old.encode()
        assert source[offset:].startswith(old)
        return (source[:offset] + self.new.encode() + source[offset + len(old) :]).decode()


def replacements_for(node: ast.AST) -> Iterator[ast.AST]:
    """Replacements for a node: another operator, number or boolean, or `pass`."""
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
    """All mutants of a file in the order of its syntax tree, without annotations and messages."""

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
        for new in replacements_for(node):
            replacement = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
            yield Mutant(file, node.lineno, node.col_offset, old, replacement)


def apply_mutant(mutant: Mutant, text: str) -> str:
    """Apply a mutant to a file's text, without unnecessary brackets."""
    mutated, bare = (mutant.apply(text), mutant._replace(new=mutant.new[1:-1]).apply(text))
    with contextlib.suppress(SyntaxError, ValueError):
        return bare if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(bare)) else mutated
    return mutated


def bodies_of(file: str, text: str) -> Iterator[Mutant]:
    """Mutants that replace a function's body, on lines of its own, and keep its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            if body and body[0].lineno > node.lineno:
                first, last = body[0], body[-1]
                lines = text.encode().splitlines(True)[first.lineno - 1 : last.end_lineno]
                lines[-1] = lines[-1][: last.end_col_offset]
                old = b"".join(lines)[first.col_offset :].decode()
                yield Mutant(file, first.lineno, first.col_offset, old, "raise NotImplementedError")
