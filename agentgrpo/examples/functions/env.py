"""Tasks to write small Python functions, each with hidden tests.

A row of the table is one function for each value of {k}. The expected results are computed from the
expression.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from agentgrpo.envs.graded import UnitTestEnv
from agentgrpo.examples import shuffled
from agentgrpo.types import Task


class Function(NamedTuple):
    """A function of the tasks."""

    name: str
    returns: str
    """Its return value in words."""
    expression: str
    """Its return value in Python."""
    arguments: str
    inputs: tuple[str, ...]
    """Arguments of the tests' calls."""
    values: tuple[int | str, ...] = ("",)
    """Values of {k}."""


NUMBER = "x", ("0", "3", "-4", "17", "250")
PAIR = "a, b", ("1, 2", "7, 3", "-4, 4", "5, 5", "-2, -9")
TEXT = "text", ("'anna'", "'Oslo'", "'ten bells'", "'x'", "'banana split'")
LIST = "numbers", ("[4]", "[3, 1, 2]", "[5, -2, 9, 0, 5, 8]", "[2, 2, 7, 1]", "[10, 20, -30, 40]")

FUNCTIONS = (
    Function("plus_{k}", "x plus {k}", "x + {k}", *NUMBER, (2, 3, 5, 7, 9, 12, 20, 31, 100)),
    Function("minus_{k}", "x minus {k}", "x - {k}", *NUMBER, (1, 4, 6, 8, 15, 40, 99)),
    Function("times_{k}", "x times {k}", "x * {k}", *NUMBER, (3, 4, 5, 8, 10, 11, 24, 60)),
    Function("from_{k}", "{k} minus x", "{k} - x", *NUMBER, (10, 25, 50, 100, 365)),
    Function("square_plus_{k}", "the square of x, plus {k}", "x**2 + {k}", *NUMBER, (1, 2, 5, 30)),
    Function("rest_{k}", "the remainder of x divided by {k}", "x % {k}", *NUMBER, (2, 3, 5, 7, 10)),
    Function("above_{k}", "whether x is greater than {k}", "x > {k}", *NUMBER, (0, 2, 10, 100)),
    Function("add", "the sum of a and b", "a + b", *PAIR),
    Function("multiply", "the product of a and b", "a * b", *PAIR),
    Function("larger", "the larger of a and b", "max(a, b)", *PAIR),
    Function("distance", "the absolute difference of a and b", "abs(a - b)", *PAIR),
    Function("sum_plus_{k}", "the sum of a and b, plus {k}", "a + b + {k}", *PAIR, (1, 6, 10, 50)),
    Function("shout", "the text in upper case", "text.upper()", *TEXT),
    Function("backwards", "the text backwards", "text[::-1]", *TEXT),
    Function("length", "the number of characters in the text", "len(text)", *TEXT),
    Function("repeat_{k}", "the text, repeated {k} times", "text * {k}", *TEXT, (2, 3, 4, 6, 10)),
    Function("head_{k}", "the first {k} characters of the text", "text[:{k}]", *TEXT, (2, 3, 4, 8)),
    Function(
        "count_{k}", "how often the letter {k} is in the text", "text.count('{k}')", *TEXT,
        ("a", "e", "l", "n", "s"),
    ),
    Function(
        "ends_with_{k}", "whether the text ends with the letter {k}", "text.endswith('{k}')", *TEXT,
        ("a", "o", "s", "t", "x"),
    ),
    Function("total", "the sum of the list", "sum(numbers)", *LIST),
    Function("largest", "the largest number of the list", "max(numbers)", *LIST),
    Function("ordered", "the list, sorted", "sorted(numbers)", *LIST),
    Function("last", "the last number of the list", "numbers[-1]", *LIST),
    Function(
        "count_above_{k}", "how many numbers of the list are greater than {k}",
        "sum(n > {k} for n in numbers)", *LIST, (0, 2, 4, 9),
    ),
    Function(
        "all_plus_{k}", "the list with {k} added to every number", "[n + {k} for n in numbers]",
        *LIST, (1, 5, 10, 100),
    ),
)  # fmt: skip


def rows(numbers: Sequence[int] = ()) -> Iterator[dict[str, str]]:
    """Yield `question` and hidden `tests` of every function.

    Args:
        numbers: replaces the values of {k}, and selects functions where {k} is a number on which
            every test depends.
    """
    for function in FUNCTIONS:
        values: Sequence[int | str] = function.values
        if numbers:
            dependent = isinstance(values[0], int) and function.inputs is not TEXT[1]
            values = numbers if dependent else ()
        for k in values:
            name, returns, expression = (text.replace("{k}", str(k)) for text in function[:3])
            question = f"Write a function {name}({function.arguments}) that returns {returns}."
            reference = f"lambda {function.arguments}: {expression}"
            tests = [
                f"assert {name}({arguments}) == {eval(f'({reference})({arguments})')!r}"
                for arguments in function.inputs  # eval() sees only the table above
            ]
            yield {"question": question, "tests": "\n".join(tests)}


HELDOUT_FUNCTIONS = 128


class FunctionsEnv(UnitTestEnv):
    """Small functions with hidden tests. The splits share no function, but kinds of functions."""

    def tasks(self, split: str) -> list[Task]:
        functions = shuffled(rows(range(2, 40)))
        split_functions = (
            functions[:HELDOUT_FUNCTIONS] if split == "heldout" else functions[HELDOUT_FUNCTIONS:]
        )
        return [
            Task(
                id=f"functions/{split}/{index}",
                messages=({"role": "user", "content": row["question"]},),
                spec={"tests": row["tests"]},
            )
            for index, row in enumerate(split_functions)
        ]
