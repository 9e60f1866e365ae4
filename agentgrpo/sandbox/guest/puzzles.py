"""Judges an answer to a task of reasoning-gym, inside a sandbox (envs/reasoning_gym.py).

Some of its verifiers evaluate the answer as Python, or let sympy do so. Here they read literals and
arithmetic alone, so that no answer is a program that runs where the verdict is made.
"""

import ast
import builtins
import re
import sys
from typing import Any

import reasoning_gym
from sympy.parsing import sympy_parser

EVALUATING = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
ARITHMETIC = {"abs", "divmod", "float", "int", "max", "min", "pow", "round", "sum"}
BUILTINS = set(dir(builtins)) - ARITHMETIC - {"True", "False", "None"}
NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Compare, ast.cmpop),
    *(ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List),
)
evaluate = sympy_parser.eval_expr


def plain(code: str, local_dict: Any, global_dict: Any) -> Any:
    """As eval_expr of sympy, for arithmetic; ValueError for any other program."""
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, NODES):
            raise ValueError(f"{type(node).__name__} is no arithmetic")
        if isinstance(node, ast.Name) and node.id in BUILTINS:
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
