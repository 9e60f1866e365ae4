"""A calculator tool. It parses arithmetic and never evaluates code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MAX_CHARS = 200


def calculate(expression: str) -> str:
    """Calculate an arithmetic expression, such as 12 * (31 + 14).

    Args:
        expression: numbers, + - * / // % and brackets.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"expected at most {MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error.msg}") from None
    value = _value(tree)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        result: int | float = BINARY[type(node.op)](_value(node.left), _value(node.right))
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError(f"{ast.unparse(node)[:40]!r} is no arithmetic")
