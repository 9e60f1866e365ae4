"""Generate and score tasks of reasoning-gym inside a sandbox (envs/adapters/reasoning_gym.py).

Some verifiers evaluate the answer as Python, directly or through sympy. Here they are restricted to
literals and arithmetic, so that an answer cannot run code in the process that scores it.
"""

import ast
import random
import re
import sys
from fractions import Fraction
from typing import Any

import numpy
import reasoning_gym
from sympy.parsing import sympy_parser

MODULES_WITH_EVAL = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
ALLOWED_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
    *(ast.Call, ast.Name, ast.Load, ast.Constant),
)
ALLOWED_NAMES = {
    *("Symbol", "Integer", "Float", "Rational", "E", "I", "pi", "Abs", "abs", "Pow", "pow"),
    *("exp", "log", "ln", "sqrt", "cbrt", "root", "real_root"),
    *(
        f"{of}{name}{kind}"
        for of in ("", "a")
        for name in ("sin", "cos", "tan", "sec", "csc", "cot")
        for kind in ("", "h")
    ),
}
"""Numbers and elementary functions. Others repeat the question (Integral, Poly) or run text."""
PLAIN_SUM = re.compile(r"(?:[0-9\s+()-]|(?<!\*)\*(?!\*)|(?<!/)/(?!/))*")
"""A sum of plain integers. Other spellings (1e0, 0x18, log(E), a comment) would add a number that
is not counted, or hide one."""
COMPLEX_NUMBER = re.compile(r"[0-9\s.eE+*()ijIJ-]*")
"""A complex number, but not nan."""
original_eval = sympy_parser.eval_expr


def eval_arithmetic(code: str, local_dict: Any, global_dict: Any) -> Any:
    """Sympy's eval_expr, restricted to arithmetic. Raises ValueError for other code."""
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, ALLOWED_NODES):
            raise ValueError(f"{type(node).__name__} is not arithmetic")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError("a call of an expression is not arithmetic")
        if (
            isinstance(node, ast.Name)
            and node.id not in ALLOWED_NAMES
            and node.id not in local_dict
        ):
            raise ValueError(f"{node.id} is not arithmetic")
        text = node.value if isinstance(node, ast.Constant) else ""
        if isinstance(text, str) and not re.fullmatch(r"[\w.+-]*", text):
            raise ValueError("a string is not arithmetic")
    return original_eval(code, local_dict, global_dict)


def questions(dataset: str, options: dict[str, Any], first: int, last: int) -> list[str]:
    """Generate questions, in the process that scores: some depend on Python's hash seed."""
    data = reasoning_gym.create_dataset(dataset, **options)
    return [_entry(data, index)["question"] for index in range(first, last)]


def _entry(data: Any, index: int) -> Any:
    random.seed(index)  # list_functions uses the global generator; codeio's programs use both
    numpy.random.seed(index)  # noqa: NPY002 - the global generator is the one they use
    return data[index]


def judge(dataset: str, options: dict[str, Any], index: int, answer: str) -> float:
    """The verifier's score; 0.0 for an answer that it cannot parse."""
    sympy_parser.eval_expr = eval_arithmetic
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name.rpartition(".")[2] in MODULES_WITH_EVAL:
            vars(module)["eval"] = ast.literal_eval
    data = reasoning_gym.create_dataset(dataset, **options)
    entry = _entry(data, index)
    try:
        if not _meets_extra_condition(dataset, answer, entry):
            answer = ""
        return float(data.score_answer(answer, entry))
    except Exception:  # a verifier can raise anything for a text that is not an answer
        return 0.0


def _meets_extra_condition(dataset: str, answer: str, entry: Any) -> bool:
    """Check what the dataset's verifier does not check, so that cheats would pass. May raise."""
    text = answer.strip().removesuffix(".")
    if dataset == "countdown":
        return PLAIN_SUM.fullmatch(text) is not None
    if dataset == "puzzle24":  # the verifier accepts any four numbers, and 24.9
        numbers = sorted(map(int, re.findall("[0-9]+", text)))
        is_sum = PLAIN_SUM.fullmatch(text) and numbers == sorted(entry["metadata"]["numbers"])
        return bool(is_sum and sympy_parser.parse_expr(text) == 24)
    if dataset == "complex_arithmetic":  # min(1.0, nan) is 1.0
        return COMPLEX_NUMBER.fullmatch(answer) is not None
    if dataset == "coin_flip":  # the verifier accepts a prefix of the number: 0 for 0.125
        number, expected = (Fraction(text.replace(",", "")) for text in (answer, entry["answer"]))
        tolerance = min(Fraction(1, 10**4), expected / 10, (1 - expected) / 10 or 1)
        return bool(abs(number - expected) <= tolerance)
    if dataset == "game_of_life_halting":  # bool("False") is True
        return text.lower() == str(entry["answer"]).lower()
    return True
