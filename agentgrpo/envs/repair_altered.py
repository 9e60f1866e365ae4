"""Copies of tests with another input, whose expected value is right or wrong.

An answer can hold the text of every test that its policy could read, compare it with what runs, and
report what pays. It cannot know what right code returns for an input that no test has. A copy is a
test function with one constant changed; one of its assertions compares with what the original code
then returned (right), or with a similar value (wrong). Nothing but that value differs.
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
EQUAL = re.compile(r"assert(Equals?|(List|Tuple|Dict|Set|Sequence|MultiLine)Equal)")
INEXACT = re.compile(r"\.\d{9}|\de-|\bat 0x|\n")  # rounding and addresses differ in right code too
VALUES, CANDIDATES = 4, 16  # that are tried, per constant; copies, per test function


class Copy(NamedTuple):
    """A test function in which node number `constant` is `value`, and assertion `at` compares.

    Nodes are numbered as ast.walk() yields them. Of each list that parametrizes the test, only the
    element number `case` is used. `right` and `wrong` are Python; of `by_repr`, of a repr().
    """

    constant: int
    value: str
    at: int
    case: int
    right: str = ""
    wrong: str = ""
    by_repr: bool = False

    def unchanged(self, function: Function) -> Copy:
        """The same copy with the input that the test has."""
        node = [*ast.walk(function)][self.constant]
        return self._replace(value=ast.unparse(node))

    def source(self, function: Function, name: str, expected: str | None) -> str:
        """The function under another name; without an expected value it fails with the value."""
        made = copy.deepcopy(function)
        made.name, nodes = name, [*ast.walk(made)]
        setattr(nodes[self.constant], "value", ast.literal_eval(self.value))  # noqa: B010
        for cases in _cases(made):
            cases.elts = [cases.elts[self.case % len(cases.elts)]]
        assertion = nodes[self.at]
        tested = ast.unparse(_tested(assertion) or ast.Constant(None))
        value = f"repr({tested})" if self.by_repr else tested
        code = f"{value} == {expected}" if expected else f"'@' + repr({tested}) + '@'"
        parsed = ast.parse(code, mode="eval").body
        if isinstance(assertion, ast.Assert):
            assertion.test, assertion.msg = parsed, None
            if not expected:
                assertion.test, assertion.msg = ast.Constant(False), parsed
        elif isinstance(assertion, ast.Call) and isinstance(assertion.func, ast.Attribute):
            assertion.func.attr, assertion.keywords = "fail", []
            assertion.args = [parsed]
            if isinstance(parsed, ast.Compare):
                assertion.func.attr = "assertEqual"
                assertion.args = [parsed.left, parsed.comparators[0]]
        return ast.unparse(made)

    def recorded(self, message: str, base: str, rng: random.Random) -> Copy | None:
        """The copy with the value that original code failed with; `base` is that of the test."""
        value, usual = (text.partition("@\n")[0][1:] for text in (message, base))
        if message[:1] != "@" or value in ("", "None", "True", "False", usual):
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
        chosen = rng.choice(constants)
        setattr(chosen, "value", _changed(chosen.value, rng))  # noqa: B010
        wrong = ast.unparse(tree)
        made = self._replace(right=right, wrong=wrong, by_repr=by_repr)
        return made if wrong not in (right, usual) else None


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


def parse(source: str) -> ast.Module:
    """CPython takes the depth of all threads' trees for one's (gh-106905), hence more than once."""
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def _cases(function: Function) -> list[ast.List | ast.Tuple]:
    """The lists of values that parametrize a test."""
    calls = [call for call in function.decorator_list if isinstance(call, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).endswith("parametrize")]
    lists = [part for call in calls for part in call.args[1:2]]
    return [part for part in lists if isinstance(part, ast.List | ast.Tuple) and part.elts]


def _tested(node: ast.AST) -> ast.expr | None:
    """What an assertion of equality is about: the side that is no literal."""
    sides: Sequence[ast.expr] = ()
    match node:
        case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
            sides = left, right
        case ast.Call(ast.Attribute(_, name), [left, right, *_]) if EQUAL.fullmatch(name):
            sides = left, right
    calls = [side for side in sides if any(isinstance(n, ast.Call) for n in ast.walk(side))]
    return next(iter(calls or [s for s in sides if not isinstance(s, ast.Constant)]), None)


def candidates(function: Function, failed_at: int, rng: random.Random) -> list[Copy]:
    """Copies to try: of assertions where broken code failed or later, inputs in them first."""
    numbers = {node: number for number, node in enumerate(ast.walk(function))}
    asserted = [node for node in numbers if _tested(node) is not None]
    ends = {node: getattr(node, "end_lineno", 0) for node in asserted}
    targets = sorted((n for n in asserted if ends[n] >= failed_at), key=lambda n: ends[n])[:3]
    elsewhere = {part for node in asserted for part in ast.walk(node)}
    shown = [n for n in numbers if isinstance(n, ast.Expr | ast.JoinedStr)]
    fixed = {part for node in shown for part in ast.iter_child_nodes(node)}
    cases = [(number, n) for of in _cases(function) for number, n in enumerate(of.elts)]
    case_of = {part: number for number, node in cases for part in ast.walk(node)}
    inputs = [node for part in function.body for node in ast.walk(part)] + [*case_of]
    inputs = [node for node in inputs if node not in fixed]
    found: dict[Copy, tuple[bool, int]] = {}
    for order, target in [*enumerate(targets)] * VALUES:
        tested = {*ast.walk(_tested(target) or target)}
        for node in inputs:
            near = node in tested
            if not isinstance(node, ast.Constant) or node.value in (None, ...):
                continue
            if near or (node not in elsewhere and node.lineno <= ends[target]):
                case = case_of.get(node, rng.randint(0, max(case_of.values(), default=0)))
                value = repr(_changed(node.value, rng, least=0))
                found[Copy(numbers[node], value, numbers[target], case)] = not near, order
    return sorted(rng.sample([*found], len(found)), key=lambda one: found[one])[:CANDIDATES]


def _changed(value: object, rng: random.Random, least: float = -float("inf")) -> object:
    """Another value of the same type, of the same letters."""
    if isinstance(value, complex):
        return value + 1
    if isinstance(value, int | float):
        new = value + rng.choice((1, 2, 3, -1))
        return not value if isinstance(value, bool) else new if new > least else value + 1
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    at = rng.randrange(len(text) + 1)
    here, word = text[at : at + 1], re.sub(r"\W", "", text)
    letters = sorted({*word} - {here}) or sorted({*"aeinorst"} - {here})
    text = text[:at] + rng.choice(letters) + text[at + rng.randrange(2) :]
    return text.encode("latin-1") if isinstance(value, bytes) else text


def with_copies(
    text: str, copies: Mapping[str, Sequence[tuple[str, Copy, str | None]]], tests: Collection[str]
) -> str:
    """A test file with copies (name, copy, expected) behind their functions.

    Test functions that none of `tests` names are blanked: pytest's rewriting of assertions is most
    of the time of a run.
    """
    lines = text.encode().splitlines(keepends=True)
    wanted = {test.partition("[")[0].rpartition("::")[2] for test in tests}
    words = Counter(re.findall(r"\w+", text))
    functions = functions_by_name(text)
    for name, function in sorted(functions.items(), key=lambda item: -item[1].lineno):
        first = min(n.lineno for n in (function, *function.decorator_list)) - 1
        last, start = function.end_lineno or 0, lines[first][: function.col_offset]
        added = [one.source(function, new, value) for new, one, value in copies.get(name, ())]
        made = "\n".join(added).encode().splitlines(keepends=True)
        if not lines[last - 1].endswith((b"\n", b"\r")):
            lines[last - 1] += b"\n"
        lines[last:last] = [start + line for line in made] + [b"\n"] * bool(made)
        unused = function.name not in wanted and words[function.name] == 1
        if unused and function.name.startswith("test"):
            lines[first:last] = [start + b"pass\n", *[b"\n"] * (last - first - 1)]
    return b"".join(lines).decode()
