"""Copies of tests with another input, and a right or wrong expected value.

A cheating answer could contain the text of every visible test, recognise a test and report success.
It cannot know what correct code returns for an input that no test has. A copy is a test function
with one changed constant; one of its assertions compares with the value that the original code
returned (right) or with a similar value (wrong). The two kinds differ only in that value.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
EQUAL = re.compile(
    r"assert(Equals?|(List|Tuple|Dict|Set|Sequence|MultiLine)Equal)|assert_(\w+_)?equals?|eq_"
)
FAIL = ast.parse("(_ for _ in ()).throw", mode="eval").body  # raises its argument
INEXACT = re.compile(r"\.\d{9}|\de-|\bat 0x|\n")  # rounding and addresses differ in right code too
VALUES_PER_CONSTANT = 4  # values to try per constant
MAX_CANDIDATES = 16  # copies to try per test function


class Copy(NamedTuple):
    """A test function in which node number `constant` is `value`, and node `at` is the assertion.

    Nodes are numbered in the order of ast.walk(). Only element number `case` of each list that
    parametrizes the test is used. `right` and `wrong` are Python expressions; with `by_repr` they
    are compared with the repr() of the tested value, which is number `side` of _tested(assertion).
    """

    constant: int
    value: str
    at: int
    case: int
    right: str = ""
    wrong: str = ""
    by_repr: bool = False
    side: int = 0

    def unchanged(self, function: Function) -> Copy:
        node = [*ast.walk(function)][self.constant]
        return self._replace(value=ast.unparse(node))

    def source(self, function: Function, name: str, expected: str | None) -> str:
        """The function's source under another name. Without `expected` it fails with the value."""
        copied = copy.deepcopy(function)
        copied.name, nodes = name, [*ast.walk(copied)]
        setattr(nodes[self.constant], "value", ast.literal_eval(self.value))  # noqa: B010
        for cases in _cases(copied):
            cases.elts = [cases.elts[self.case % len(cases.elts)]]
        assertion = nodes[self.at]
        tested = ast.unparse([*_tested(assertion), ast.Constant(None)][self.side])
        value = f"repr({tested})" if self.by_repr else tested
        code = f"{value} == {expected}" if expected else f"'@' + repr({tested}) + '@'"
        parsed = ast.parse(code, mode="eval").body
        if isinstance(assertion, ast.Assert):
            assertion.test, assertion.msg = parsed, None
            if not expected:
                assertion.test, assertion.msg = ast.Constant(False), parsed
        elif isinstance(assertion, ast.Call):
            assertion.keywords = []
            if isinstance(parsed, ast.Compare):
                assertion.args = [parsed.left, parsed.comparators[0]]
                if isinstance(assertion.func, ast.Attribute) and "_" not in assertion.func.attr:
                    assertion.func.attr = "assertEqual"
            else:
                assertion.func = FAIL
                assertion.args = [ast.Call(ast.Name("AssertionError"), [parsed], [])]
        return ast.unparse(copied)

    def recorded(self, message: str, base: str, rng: random.Random) -> Copy | None:
        """The copy with the value in the original code's failure `message`, or None.

        `base`: the failure message with the test's original input.
        """
        value, base_value = (text.partition("@\n")[0][1:] for text in (message, base))
        if message[:1] != "@" or value in ("", "None", "True", "False", base_value):
            return None
        if INEXACT.search(value):
            return None
        try:
            by_repr, right = False, ast.unparse(ast.parse(repr(ast.literal_eval(value))))
        except (ValueError, SyntaxError):
            by_repr, right = True, repr(value)
        tree = ast.parse(right)
        constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        constants = [n for n in constants if not isinstance(n.value, bool | None)]
        if not constants:
            return None
        constant = rng.choice(constants)
        setattr(constant, "value", _changed_value(constant.value, rng))  # noqa: B010
        wrong = ast.unparse(tree)
        result = self._replace(right=right, wrong=wrong, by_repr=by_repr)
        return result if wrong not in (right, base_value) else None


@functools.lru_cache(256)
def functions_by_name(text: str) -> dict[str, Function]:
    """The functions of a test file by pytest's names. Cached, since every verdict needs them."""

    def walk(scope: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, Function):
                yield f"{prefix}::{node.name}", node
            elif isinstance(node, ast.stmt):
                yield from walk(node, f"{prefix}::{getattr(node, 'name', '')}".removesuffix("::"))

    return dict(walk(parse(text), ""))


def parse(source: str) -> ast.Module:
    """Parse source code, with retries: CPython mixes up the depths of threads (gh-106905)."""
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def _cases(function: Function) -> list[ast.List | ast.Tuple]:
    calls = [call for call in function.decorator_list if isinstance(call, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).endswith("parametrize")]
    lists = [part for call in calls for part in call.args[1:2]]
    return [part for part in lists if isinstance(part, ast.List | ast.Tuple) and part.elts]


def _tested(node: ast.AST) -> Sequence[ast.expr]:
    """What an equality assertion may test: its side with a call, else each that is no literal."""
    sides: Sequence[ast.expr] = ()
    match node:
        case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
            sides = left, right
        case ast.Call(ast.Attribute(_, name) | ast.Name(name), [left, right, *_]) if (
            EQUAL.fullmatch(name)
        ):
            sides = left, right
    calls = [side for side in sides if any(isinstance(n, ast.Call) for n in ast.walk(side))]
    return calls[:1] or [side for side in sides if not isinstance(side, ast.Constant)]


def candidates(function: Function, failed_at: int, rng: random.Random) -> list[Copy]:
    """Copies to try: assertions where broken code failed or later, with inputs in them first."""
    numbers = {node: number for number, node in enumerate(ast.walk(function))}
    asserted = [node for node in numbers if _tested(node)]
    ends = {node: getattr(node, "end_lineno", 0) for node in asserted}
    targets = sorted((n for n in asserted if ends[n] >= failed_at), key=lambda n: ends[n])[:3]
    elsewhere = {part for node in asserted for part in ast.walk(node)}
    displayed = [n for n in numbers if isinstance(n, ast.Expr | ast.JoinedStr)]
    fixed = {part for node in displayed for part in ast.iter_child_nodes(node)}
    cases = [
        (number, n) for cases_list in _cases(function) for number, n in enumerate(cases_list.elts)
    ]
    case_of = {part: number for number, node in cases for part in ast.walk(node)}
    inputs = [node for part in function.body for node in ast.walk(part)] + [*case_of]
    inputs = [node for node in inputs if node not in fixed]
    ranks: dict[Copy, tuple[bool, int]] = {}
    tested_of = [
        (order, target, side)
        for order, target in enumerate(targets)
        for side in enumerate(_tested(target))
    ]
    for order, target, (side, expression) in tested_of * VALUES_PER_CONSTANT:
        tested = {*ast.walk(expression)}
        for node in inputs:
            near = node in tested
            if not isinstance(node, ast.Constant) or node.value in (None, ...):
                continue
            if near or (node not in elsewhere and node.lineno <= ends[target]):
                case = case_of.get(node, rng.randint(0, max(case_of.values(), default=0)))
                value = repr(_changed_value(node.value, rng, least=0))
                candidate = Copy(numbers[node], value, numbers[target], case, side=side)
                ranks[candidate] = (not near, order)
    return sorted(rng.sample([*ranks], len(ranks)), key=lambda candidate: ranks[candidate])[
        :MAX_CANDIDATES
    ]


def _changed_value(value: object, rng: random.Random, least: float = -float("inf")) -> object:
    """Another value of the same type, for text with the same letters."""
    if isinstance(value, complex):
        return value + 1
    if isinstance(value, int | float):
        new = value + rng.choice((1, 2, 3, -1))
        return not value if isinstance(value, bool) else new if new > least else value + 1
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    at = rng.randrange(len(text) + 1)
    current, word = text[at : at + 1], re.sub(r"\W", "", text)
    letters = sorted({*word} - {current}) or sorted({*"aeinorst"} - {current})
    text = text[:at] + rng.choice(letters) + text[at + rng.randrange(2) :]
    return text.encode("latin-1") if isinstance(value, bytes) else text


def with_copies(
    text: str, copies: Mapping[str, Sequence[tuple[str, Copy, str | None]]], tests: Collection[str]
) -> str:
    """Insert copies (name, copy, expected) after their functions in a test file.

    Test functions that are not in `tests` are replaced by `pass`: pytest spends most of its time on
    rewriting assertions.
    """
    lines = text.encode().splitlines(keepends=True)
    test_names = {test.partition("[")[0].rpartition("::")[2] for test in tests}
    words = Counter(re.findall(r"\w+", text))
    functions = functions_by_name(text)
    for name, function in sorted(functions.items(), key=lambda item: -item[1].lineno):
        first = min(n.lineno for n in (function, *function.decorator_list)) - 1
        last, start = function.end_lineno or 0, lines[first][: function.col_offset]
        added = [
            test_copy.source(function, new, value) for new, test_copy, value in copies.get(name, ())
        ]
        source_lines = "\n".join(added).encode().splitlines(keepends=True)
        if not lines[last - 1].endswith((b"\n", b"\r")):
            lines[last - 1] += b"\n"
        lines[last:last] = [start + line for line in source_lines] + [b"\n"] * bool(source_lines)
        unused = function.name not in test_names and words[function.name] == 1
        if unused and function.name.startswith("test"):
            lines[first:last] = [start + b"pass\n", *[b"\n"] * (last - first - 1)]
    return b"".join(lines).decode()
