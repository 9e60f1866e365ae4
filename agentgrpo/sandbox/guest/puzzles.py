"""Judges an answer to a task of reasoning-gym, inside a sandbox (envs/reasoning_gym.py).

Some of its verifiers evaluate the answer as Python, or let sympy do so. Here they read literals and
arithmetic alone, so that no answer is a program that runs where the verdict is made.
"""

import ast
import re
import sys
from typing import Any

import reasoning_gym
import sympy
from sympy.parsing import sympy_parser

EVALUATING = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
ARITHMETIC = (abs, divmod, pow, round, sum, sympy.cbrt, sympy.real_root, sympy.root, sympy.sqrt)
NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Compare, ast.cmpop),
    *(ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
)
evaluate = sympy_parser.eval_expr


def plain(code: str, local_dict: Any, global_dict: Any) -> Any:
    """As eval_expr of sympy, for arithmetic; ValueError for any other program.

    Of sympy's names only formulas and their classes are known: lambdify and others run text.
    """
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, NODES):
            raise ValueError(f"{type(node).__name__} is no arithmetic")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError("a call of what was called is no arithmetic")
        if isinstance(node, ast.Name):
            value = local_dict.get(node.id, global_dict.get(node.id))
            kind = value if isinstance(value, type) else type(value)
            if not issubclass(kind, sympy.Basic) and not any(value is one for one in ARITHMETIC):
                raise ValueError(f"{node.id} is no arithmetic")
        text = node.value if isinstance(node, ast.Constant) else ""
        if isinstance(text, str) and not re.fullmatch(r"[\w.+-]*", text):
            raise ValueError("text is no arithmetic")
    return evaluate(code, local_dict, global_dict)


def judge(dataset: str, options: dict[str, Any], index: int, answer: str) -> float:
    """What the verifier gives; nothing for an answer that it cannot read."""
    sympy_parser.eval_expr = plain
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name.rpartition(".")[2] in EVALUATING:
            vars(module)["eval"] = ast.literal_eval
    made = reasoning_gym.create_dataset(dataset, **options)
    entry = made[index]
    try:
        return float(made.score_answer(answer, entry))
    except Exception:  # whatever a text that is no answer makes of a verifier
        return 0.0
