r"""Compare answers as numbers, as mathematics or as words, for rewards and measures.

Numbers in a text are parsed as data sets write them: 1,234 and 1_234 are 1234; 12.0 is 12; a
leading minus counts unless it joins two numbers (10-3 ends with 3); 3/4 and \frac{3}{4} are 0.75;
1 1/2 is 1.5; 3 \times 10^6 is 3e6; the exponent of a unit is not a number. Comparison is exact, in
decimals and fractions.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate

from agentgrpo.rewards.formulas import LIMIT_EXCEEDED, Comparison, compare
from agentgrpo.types import Task

UNSIGNED = r"""
    (?> (?: (?<! [\w.] ) (?<! \d, ) \d{1,3} (?:,\d{3})+ (?! ,?\d )  # 1,234,567; begun once: linear
          | (?<! [\w.] ) \d+ (?:_\d+)*                             # 1234 or 1_234
          | (?<! [\w.] ) (?= \.\d )                                # .5
        )
        (?: \.\d+ )?
        (?: [eE] [+-]? \d{1,4} (?! \w ) )?   # bounded: Decimal refuses 1e999999999999999999
    )
"""
NUMBER = re.compile(
    rf"""
    (?P<sign> (?<! [\w)\]] ) - (?: \\?[$€£] )? )?  # after a word or bracket, an operator
    (?: (?<! [\w.,/] ) (?P<whole> \d{{1,9}} ) [ ] (?= \d{{1,9}}/\d{{1,9}} (?! [\d.,/]*\d ) ) )?
    (?P<over> {UNSIGNED} ) (?: / (?P<under> {UNSIGNED} ) )?+
    (?! ² )
    """,
    re.ASCII | re.VERBOSE,
)
"""Matching takes time linear in the text, since the text is a policy's."""
GAP = r"(?:[ '\u2019\u00a0\u2007\u2009\u202f~]|\{,\}|,?\\[,!:; ])"
"""Separators of thousands other than commas, in text and LaTeX."""
GROUPED_DIGITS = re.compile(rf"(?<![\w.,])\d+(?:{GAP}\d+)+", re.ASCII)
MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-"))
SPELLINGS = (
    (re.compile(r"(?<=\d) ?\\[dt]?frac(?=\{\d)"), r" \\frac"),  # 1\frac{1}{2}
    (re.compile(r"\\[dt]?frac\{(-?[\d.,]{1,99})\}\{([\d.,]{1,99})\}"), r"\1/\2"),
    (re.compile(r" ?(?:\\times|\\cdot|[\xd7*\xb7\u22c5]) ?10\^\{?(-?\d{1,4})\}?(?!\d)"), r"e\1"),
    (re.compile(r"(?<![\w.)}])10\^\{?(-?\d{1,4})\}?+(?!\w)"), r"1e\1"),
    # An exponent is not a number, and neither is its base: cm^2, 2^10.
    (re.compile(r"\^\{?-?\d+\}?|[⁰¹³⁴-⁹]"), "²"),
)
"""LaTeX spellings and what NUMBER reads instead."""
NOT_A_NUMBER = re.compile(
    r"^\s*[\[{][^,:\]}]*[,:]|\\(?:[dt]?frac|sqrt|pi|infty|log|ln|sin|cos|tan|begin)"
)
"""Matches an expected answer that is a list, an object or a formula."""
NOT_ALONE = re.compile(
    r"(?<![a-z])(?:sqrt|pi|log|ln|sin|cos|tan|hundred|thousand|million|billion|trillion|dozen)"
    r"(?![a-z])|[\u03c0\u221a\u00b1]|\d(?:!|\.\.|\u2026|[ixyz]\b|_\d\d?(?!\d))",
    re.IGNORECASE,
)
"""Matches a short expected answer that is more than its number: 2pi, 5!, 0.333..., 3 million."""
UNIT_POWER = re.compile(r"(?<=[a-z])[23](?!\w)|²")
"""Matches the power of a unit: km2."""
STATED = re.compile(r"=|\b(?:is|are|was|were|equals)\b")
MAX_WORDS = 9
"""A longer expected answer is a solution, which may have other numbers before its last."""


Number = Decimal | Fraction


def accepted_answers(task: Task) -> list[str]:
    """The accepted answers of `spec["answer"]`, which is one answer or a list."""
    answer = task.spec.get("answer")
    accepted = answer if isinstance(answer, list | tuple) else [answer]
    if not accepted or not all(
        isinstance(element, str | int | float | Number) for element in accepted
    ):
        raise ValueError(
            f"task {task.id}: spec['answer'] must hold an answer (text, a number, true or false, "
            f"or a list of these), got {answer!r:.80} in a spec with {sorted(task.spec)}"
        )
    return [str(element) for element in accepted]


def holds_answer(task: Task) -> bool:
    """Whether the question contains an accepted answer literally."""
    try:
        texts = [re.escape(text.strip()) for text in accepted_answers(task)]
    except ValueError:
        return False
    question = "\n".join(str(message.get("content")) for message in task.messages)
    return any(re.search(rf"(?<!\w){t}(?!\w)", question, re.IGNORECASE) for t in texts if t)


# -- numbers ---------------------------------------------------------------------------------------


def last_number(text: str) -> Number | None:
    """The last number in `text`, exactly. A fraction becomes a Fraction. None: no number.

    >>> last_number("That makes 1,234.50 dollars."), last_number("about -1/2")
    (Decimal('1234.50'), Fraction(-1, 2))
    """
    last = deque(NUMBER.finditer(_normalize_latex(text)), maxlen=1)
    return _number(last[0]) if last else None


def only_number(text: str) -> Number | None:
    r"""The number if `text` is only a number, apart from outer space and a full stop; else None.

    >>> only_number(" 12.0\n"), only_number("it is 12")
    (Decimal('12.0'), None)
    """
    match = NUMBER.fullmatch(_normalize_latex(text.strip()).removesuffix("."))
    number = _number(match) if match else None
    by_zero = match and match["under"] and isinstance(number, Decimal)
    return None if by_zero else number


def _normalize(text: str) -> str:
    """Replace Unicode minus signs by `-` and join digits that gaps group: 10 000 is 10000."""

    def join(match: re.Match[str]) -> str:
        first, *others = re.split(GAP, match[0])
        thousands = len(first) <= 3 and all(len(digits) == 3 for digits in others)
        return "".join([first, *others]) if thousands else match[0]

    return GROUPED_DIGITS.sub(join, text.translate(MINUS))


def _normalize_latex(text: str) -> str:
    text = _normalize(text)
    for spelling, plain in SPELLINGS:
        text = spelling.sub(plain, text)
    return text


def _number(match: re.Match[str]) -> Number:
    """Convert a match. A quotient with denominator 0 or 100 characters is its last number only."""
    sign = "-" if match["sign"] else ""
    numerator = Decimal(sign + match["over"].replace(",", ""))
    if match["under"] is None:
        return numerator
    denominator = Decimal(match["under"].replace(",", ""))
    if not denominator or len(match[0]) >= 100:
        return denominator
    integer = Fraction(sign + (match["whole"] or "0"))
    return integer + Fraction(numerator) / Fraction(denominator)


def expected_numbers(task: Task) -> list[Number]:
    """The number in each accepted answer."""
    expected: list[Number] = []
    for text in accepted_answers(task):
        last = text.rpartition("####")[2].rpartition("\\boxed")[2]
        number = last_number(last)
        if number is None or _is_ambiguous(_normalize_latex(last)):
            raise ValueError(
                f"task {task.id}: {'no' if number is None else 'more than a'} number in the answer "
                f"{text!r:.400}, and reward.kind = 'numeric' compares numbers; 'math' compares "
                "formulas, 'text' texts, 'choice' the letters of options"
            )
        expected.append(number)
    return expected


def _is_ambiguous(text: str) -> bool:
    """Whether an expected answer is more than a number: 12:30, 3,14, 2 hours 30 minutes, 2pi."""
    stated = STATED.split(text)[-1]
    if NOT_A_NUMBER.search(text) or len(stated.split()) > MAX_WORDS:
        return NOT_A_NUMBER.search(text) is not None
    rest, count = NUMBER.subn(" ", stated)
    has_digits = any(unicodedata.category(c)[0] == "N" for c in UNIT_POWER.sub("", rest))
    return count > 1 or has_digits or NOT_ALONE.search(stated) is not None


# -- mathematics -----------------------------------------------------------------------------------


def same_mathematics(answer: str, expected: str) -> Comparison:
    r"""Compare mathematically, including LaTeX (math-verify); compare two plain numbers exactly.

    Formulas stand between dollars or in `\boxed{}`. An answer with neither is parsed as text that
    contains a formula and as one formula; either may be equal. If math-verify finds no formula in
    the expected answer, the two are compared as text.
    """
    if has_open_box(answer):
        return Comparison(expected_parsed=True, answer_parsed=False, equal=False)
    answer, expected = (_normalize(text).replace("\\$", "") for text in (answer, expected))
    if not expected.rstrip(" $}").endswith("*"):
        answer = answer.strip(" \n\t*`")  # Markdown for bold and code
    number, expected_number = only_number(answer), only_number(expected)
    if isinstance(number, Decimal) and isinstance(expected_number, Decimal):
        return Comparison(expected_parsed=True, answer_parsed=True, equal=number == expected_number)
    comparison = compare(_as_formula(expected), answer)
    expected_parsed, answer_parsed, equal = comparison
    if not expected_parsed:
        equal = _strip_dollars(answer) == _strip_dollars(expected)
    elif not equal and comparison is not LIMIT_EXCEEDED and answer != _as_formula(answer):
        equal = compare(_as_formula(expected), _as_formula(answer)).equal
    return Comparison(expected_parsed, answer_parsed or equal, equal)


def math_equal(answer: str, accepted: Sequence[str]) -> float:
    """1.0 if the answer is mathematically equal to an accepted one."""
    return float(any(same_mathematics(answer, text).equal for text in accepted))


def has_open_box(text: str) -> bool:
    r"""Whether the last `\boxed{` is not closed, as in a truncated turn: it has no answer."""
    *before, inner = re.split(r"\\boxed\s*\{", text)
    depths = accumulate(((c == "{") - (c == "}") for c in inner), initial=1)
    return bool(before) and 0 not in depths


def _as_formula(text: str) -> str:
    return text if "\\boxed" in text or "$" in text else f"${text}$"


def _strip_dollars(text: str) -> str:
    return "".join(text.replace("$", "").split())


def expected_mathematics(task: Task) -> list[str]:
    """The accepted answers. Raises ValueError if one is empty."""
    return _require_content(task, _strip_dollars)


def _require_content(task: Task, content_of: Callable[[str], Sequence[str]]) -> list[str]:
    """Return the accepted answers. Raises ValueError if one has no content to compare."""
    accepted = accepted_answers(task)
    if not all(map(content_of, accepted)):
        raise ValueError(f"task {task.id}: the answer {task.spec['answer']!r} is empty")
    return accepted


# -- words -----------------------------------------------------------------------------------------


ARTICLES = ("a", "an", "the")
PUNCTUATION = re.compile(
    r"""
      (?P<kept> (?<= \d ) \. (?= \d ) | (?<! [\w)\].] ) (?: - (?= \.?\d ) | \. (?= \d ) ) )
    | (?P<apart> (?<= \d ) (?! ,\d{3} (?! \d ) ) [^\w\s]+ (?= \d ) )  # 3/4, 2001-09-11
    | [^\w\s] | _
    """,
    re.VERBOSE,
)


def words(text: str) -> list[str]:
    """Split a text for comparison, without case, punctuation and articles (as in SQuAD).

    Numbers keep sign and decimal point and stay separate. If nothing else remains, articles or
    punctuation are kept.

    >>> words("The  U.S. Open,"), words("-1,234.5 to 3/4"), words("A")
    (['us', 'open'], ['-1234.5', 'to', '3', '4'], ['a'])
    """

    def replace(match: re.Match[str]) -> str:
        # Combining marks (category M) are vowels or accents, not punctuation.
        if match["kept"] or unicodedata.category(match[0][0])[0] == "M":
            return match[0]
        return " " if match["apart"] else ""

    lower = unicodedata.normalize("NFC", text.lower()).replace("\N{MINUS SIGN}", "-")
    tokens = PUNCTUATION.sub(replace, lower).split()
    return [word for word in tokens if word not in ARTICLES] or tokens or lower.split()


def expected_texts(task: Task) -> list[str]:
    """The accepted answers. Raises ValueError if one has no words: an empty answer would match."""
    return _require_content(task, words)


def f1(answer: str, accepted: Sequence[str]) -> float:
    """F1 of the overlap of words(), the best over the accepted answers. Word order is ignored.

    >>> f1("James Madison Jr", ["james madison"])
    0.8
    """
    return max(_f1(words(answer), words(text)) for text in accepted)


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1.0 if the answer has the same words() as an accepted one, in the same order."""
    return float(words(answer) in map(words, accepted))


def _f1(answer: Sequence[str], expected: Sequence[str]) -> float:
    if not answer or not expected:
        return float(answer == expected)
    common = sum((Counter(answer) & Counter(expected)).values())
    return 2 * common / (len(answer) + len(expected))
