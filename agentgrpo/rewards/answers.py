r"""Whether answers are the same: as numbers, as mathematics, as words. Rewards and measures ask.

The numbers in a text are read as data sets write them: 1,234 and 1_234 are 1234, 12.0 is 12, a
leading minus counts unless it joins two numbers (the 3 in 10-3 is 3), 3/4 and \frac{3}{4} are 0.75,
1 1/2 is 1.5, 3 \times 10^6 is 3e6, and the exponent of a unit is none. Comparison is exact, in
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

from agentgrpo.rewards.formulas import TOO_MUCH, Comparison, compare
from agentgrpo.types import Task

ONE = r"""
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
    (?P<over> {ONE} ) (?: / (?P<under> {ONE} ) )?+
    (?! ² )
    """,
    re.ASCII | re.VERBOSE,
)
"""Takes time linear in the text: a policy may say anything."""
GAP = r"(?:[ '\u2019\u00a0\u2007\u2009\u202f~]|\{,\}|,?\\[,!:; ])"
"""What people and LaTeX set thousands apart with, besides commas."""
GAPPED = re.compile(rf"(?<![\w.,])\d+(?:{GAP}\d+)+", re.ASCII)
MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63\uff0d", "-"))
SPELLINGS = (
    (re.compile(r"(?<=\d) ?\\[dt]?frac(?=\{\d)"), r" \\frac"),  # 1\frac{1}{2}
    (re.compile(r"\\[dt]?frac\{(-?[\d.,]{1,99})\}\{([\d.,]{1,99})\}"), r"\1/\2"),
    (re.compile(r" ?(?:\\times|\\cdot|[\xd7*\xb7\u22c5]) ?10\^\{?(-?\d{1,4})\}?(?!\d)"), r"e\1"),
    (re.compile(r"(?<![\w.)}])10\^\{?(-?\d{1,4})\}?+(?!\w)"), r"1e\1"),
    (re.compile(r"\^\{?-?\d+\}?|[⁰¹³⁴-⁹]"), "²"),  # it is no number, nor is what has it: cm^2, 2^10
)
"""How LaTeX writes what NUMBER reads."""
NO_NUMBER = re.compile(
    r"^\s*[\[{][^,:\]}]*[,:]|\\(?:[dt]?frac|sqrt|pi|infty|log|ln|sin|cos|tan|begin)"
)
"""What an expected answer has that is a list, an object or a formula."""


Number = Decimal | Fraction


def accepted_answers(task: Task) -> list[str]:
    """The accepted answers: `spec["answer"]`, one or a list of them."""
    answer = task.spec.get("answer")
    accepted = answer if isinstance(answer, list | tuple) else [answer]
    if not accepted or not all(isinstance(one, str | int | float | Number) for one in accepted):
        raise ValueError(
            f"task {task.id}: spec['answer'] must hold an answer (text, a number, true or false, "
            f"or a list of these), got {answer!r:.80} in a spec with {sorted(task.spec)}"
        )
    return [str(one) for one in accepted]


def holds_answer(task: Task) -> bool:
    """Whether the question has an accepted answer in it, word for word."""
    given = task.spec.get("answer")
    accepted = given if isinstance(given, list | tuple) else [given]
    texts = [re.escape(str(one).strip()) for one in accepted if isinstance(one, str | int | float)]
    asked = "\n".join(str(message.get("content")) for message in task.messages)
    return any(re.search(rf"(?<!\w){t}(?!\w)", asked, re.IGNORECASE) for t in texts if t)


# -- numbers ---------------------------------------------------------------------------------------


def last_number(text: str) -> Number | None:
    """The last number in `text`, exactly; a Fraction where it is written as one. None: there is
    none.

    >>> last_number("That makes 1,234.50 dollars."), last_number("about -1/2")
    (Decimal('1234.50'), Fraction(-1, 2))
    """
    last = deque(NUMBER.finditer(_spelled(text)), maxlen=1)
    return _number(last[0]) if last else None


def only_number(text: str) -> Number | None:
    r"""The number that `text` is, but for surrounding space and a final full stop; else None.

    >>> only_number(" 12.0\n"), only_number("it is 12")
    (Decimal('12.0'), None)
    """
    found = NUMBER.fullmatch(_spelled(text.strip()).removesuffix("."))
    number = _number(found) if found else None
    by_zero = found and found["under"] and isinstance(number, Decimal)
    return None if by_zero else number


def _plain(text: str) -> str:
    """The text with minus signs as `-`, and no gaps within numbers: 10 000 is 10000."""

    def joined(found: re.Match[str]) -> str:
        first, *others = re.split(GAP, found[0])
        thousands = len(first) <= 3 and all(len(digits) == 3 for digits in others)
        return "".join([first, *others]) if thousands else found[0]

    return GAPPED.sub(joined, text.translate(MINUS))


def _spelled(text: str) -> str:
    text = _plain(text)
    for spelling, plain in SPELLINGS:
        text = spelling.sub(plain, text)
    return text


def _number(found: re.Match[str]) -> Number:
    """A quotient is one number; by zero, or of hundreds of digits, its last part is."""
    sign = "-" if found["sign"] else ""
    over = Decimal(sign + found["over"].replace(",", ""))
    if found["under"] is None:
        return over
    under = Decimal(found["under"].replace(",", ""))
    if not under or len(found[0]) >= 100:
        return under
    whole = Fraction(sign + (found["whole"] or "0"))
    return whole + Fraction(over) / Fraction(under)


def expected_numbers(task: Task) -> list[Number]:
    """The number that each of the accepted answers holds."""
    expected: list[Number] = []
    for text in accepted_answers(task):
        last = text.rpartition("####")[2].rpartition("\\boxed")[2]
        number = last_number(last)
        if number is None or NO_NUMBER.search(_spelled(last)):
            raise ValueError(
                f"task {task.id}: {'more than a' if number else 'no'} number in the answer "
                f"{text!r:.400}, and reward.kind = 'numeric' compares numbers; 'math' compares "
                "formulas, 'text' texts, 'choice' the letters of options"
            )
        expected.append(number)
    return expected


# -- mathematics -----------------------------------------------------------------------------------


def same_mathematics(answer: str, wanted: str) -> Comparison:
    r"""Compare as mathematics, LaTeX included (math-verify); two plain numbers exactly.

    Formulas stand in dollars or `\boxed{}`. An answer without either is read as text with a number
    or formula in it, and as one formula; either may be equal. Where math-verify finds no formula in
    what is wanted, it is compared as text.
    """
    if has_open_box(answer):
        return Comparison(wanted_read=True, said_read=False, equal=False)
    answer, wanted = (_plain(text).replace("\\$", "") for text in (answer, wanted))
    if not wanted.rstrip(" $}").endswith("*"):
        answer = answer.strip(" \n\t*`")  # Markdown's bold and code
    number, expected = only_number(answer), only_number(wanted)
    if isinstance(number, Decimal) and isinstance(expected, Decimal):
        return Comparison(wanted_read=True, said_read=True, equal=number == expected)
    seen = compare(_as_formula(wanted), answer)
    wanted_read, said_read, equal = seen
    if not wanted_read:
        equal = _bare(answer) == _bare(wanted)
    elif not equal and seen is not TOO_MUCH and answer != _as_formula(answer):
        equal = compare(_as_formula(wanted), _as_formula(answer)).equal
    return Comparison(wanted_read, said_read or equal, equal)


def math_equal(answer: str, accepted: Sequence[str]) -> float:
    """1.0 if the answer is mathematically equal to an accepted one."""
    return float(any(same_mathematics(answer, one).equal for one in accepted))


def has_open_box(text: str) -> bool:
    r"""Whether the last `\boxed{` is not closed: a turn cut short, which answers nothing."""
    *before, inner = re.split(r"\\boxed\s*\{", text)
    depths = accumulate(((c == "{") - (c == "}") for c in inner), initial=1)
    return bool(before) and 0 not in depths


def _as_formula(text: str) -> str:
    return text if "\\boxed" in text or "$" in text else f"${text}$"


def _bare(text: str) -> str:
    """Without space and dollars."""
    return "".join(text.replace("$", "").split())


def expected_mathematics(task: Task) -> list[str]:
    """The accepted answers, each a formula or a text."""
    return _filled(task, _bare)


def _filled(task: Task, left: Callable[[str], Sequence[str]]) -> list[str]:
    """The accepted answers, of each of which something is left to compare."""
    accepted = accepted_answers(task)
    if not all(map(left, accepted)):
        raise ValueError(f"task {task.id}: there is nothing in the answer {task.spec['answer']!r}")
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
    """The words that answers are compared by: without case, punctuation and articles (SQuAD's).

    Numbers keep sign and decimal point, and stay apart. Where nothing else is left, articles stay,
    or punctuation.

    >>> words("The  U.S. Open,"), words("-1,234.5 to 3/4"), words("A")
    (['us', 'open'], ['-1234.5', 'to', '3', '4'], ['a'])
    """

    def plain(found: re.Match[str]) -> str:
        if found["kept"] or unicodedata.category(found[0][0])[0] == "M":  # a vowel, an accent
            return found[0]
        return " " if found["apart"] else ""

    lower = unicodedata.normalize("NFC", text.lower()).replace("\N{MINUS SIGN}", "-")
    said = PUNCTUATION.sub(plain, lower).split()
    return [word for word in said if word not in ARTICLES] or said or lower.split()


def expected_texts(task: Task) -> list[str]:
    """The accepted answers, each with a word in it: who says nothing is not to be right."""
    return _filled(task, words)


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Overlap of words(), harmonic mean of precision and recall; the best of all accepted.

    1.0 is an exact match up to the order of the words.

    >>> f1("James Madison Jr", ["james madison"])
    0.8
    """
    return max(_f1(words(answer), words(one)) for one in accepted)


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1.0 if the answer has the words() of an accepted one, in their order."""
    return float(words(answer) in map(words, accepted))


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted))
