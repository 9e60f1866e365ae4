"""Asks and judges tasks of reasoning-gym, inside a sandbox (envs/adapters/reasoning_gym.py).

Some of its verifiers evaluate the answer as Python, or let sympy do so. Here they read literals and
arithmetic alone, so that no answer is a program that runs where the verdict is made.
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

EVALUATING = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
    *(ast.Call, ast.Name, ast.Load, ast.Constant),
)
NAMES = {
    *("Symbol", "Integer", "Float", "Rational", "E", "I", "pi", "Abs", "abs", "Pow", "pow"),
    *("exp", "log", "ln", "sqrt", "cbrt", "root", "real_root"),
    *(
        f"{of}{name}{kind}"
        for of in ("", "a")
        for name in ("sin", "cos", "tan", "sec", "csc", "cot")
        for kind in ("", "h")
    ),
}
"""Numbers and elementary functions. Others say the question again (Integral, Poly), or run text."""
SUM = re.compile(r"(?:[0-9\s+()-]|(?<!\*)\*(?!\*)|(?<!/)/(?!/))*")
"""Made of the numbers that it shows; whatever else spells one (1e0, 0x18, log(E), a comment) would
be a number more, or hide one."""
COMPLEX = re.compile(r"[0-9\s.eE+*()ijIJ-]*")
"""Without nan."""
evaluate = sympy_parser.eval_expr


def plain(code: str, local_dict: Any, global_dict: Any) -> Any:
    """As eval_expr of sympy, for arithmetic; ValueError for any other program."""
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, NODES):
            raise ValueError(f"{type(node).__name__} is no arithmetic")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError("a call of what was called is no arithmetic")
        if isinstance(node, ast.Name) and node.id not in NAMES and node.id not in local_dict:
            raise ValueError(f"{node.id} is no arithmetic")
        text = node.value if isinstance(node, ast.Constant) else ""
        if isinstance(text, str) and not re.fullmatch(r"[\w.+-]*", text):
            raise ValueError("text is no arithmetic")
    return evaluate(code, local_dict, global_dict)


def questions(dataset: str, options: dict[str, Any], first: int, last: int) -> list[str]:
    """What is asked, by the process that judges: some hang on the seed of Python's hashes."""
    made = reasoning_gym.create_dataset(dataset, **options)
    return [_entry(made, index)["question"] for index in range(first, last)]


def _entry(made: Any, index: int) -> Any:
    random.seed(index)  # list_functions draws from it, and codeio's programs from both
    numpy.random.seed(index)  # noqa: NPY002 - that one
    return made[index]


def judge(dataset: str, options: dict[str, Any], index: int, answer: str) -> float:
    """What the verifier gives; nothing for an answer that it cannot read."""
    sympy_parser.eval_expr = plain
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name.rpartition(".")[2] in EVALUATING:
            vars(module)["eval"] = ast.literal_eval
    made = reasoning_gym.create_dataset(dataset, **options)
    entry = _entry(made, index)
    try:
        if not _is_answer(dataset, answer, entry):
            answer = ""
        return float(made.score_answer(answer, entry))
    except Exception:  # whatever a text that is no answer makes of a verifier
        return 0.0


def _is_answer(dataset: str, answer: str, entry: Any) -> bool:
    """What has to hold besides, for a verifier that pays others in full too. May raise."""
    said = answer.strip().removesuffix(".")
    if dataset == "countdown":
        return SUM.fullmatch(said) is not None
    if dataset == "puzzle24":  # it takes any four numbers, and 24.9
        used = sorted(map(int, re.findall("[0-9]+", said)))
        given = SUM.fullmatch(said) and used == sorted(entry["metadata"]["numbers"])
        return bool(given and sympy_parser.parse_expr(said) == 24)
    if dataset == "complex_arithmetic":  # min(1.0, nan) is 1.0
        return COMPLEX.fullmatch(answer) is not None
    if dataset == "coin_flip":  # it takes the beginning of a number: 0 for 0.125
        number, right = (Fraction(text.replace(",", "")) for text in (answer, entry["answer"]))
        near = min(Fraction(1, 10**4), right / 10, (1 - right) / 10 or 1)
        return bool(abs(number - right) <= near)
    if dataset == "game_of_life_halting":  # bool("False") is True
        return said.lower() == str(entry["answer"]).lower()
    return True
