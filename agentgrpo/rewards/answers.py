r"""Whether answers are the same: as numbers, as mathematics, as words. Rewards and measures ask.

The numbers in a text are read as people write them: 1,234 and 1_234 are 1234, 12.0 is 12, a leading
minus counts unless it joins two numbers (the 3 in 10-3 is 3), 3/4 and \frac{3}{4} are 0.75, and the
exponent of a unit is none. Comparison is exact, in decimals and fractions.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

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
    (?P<parts> {ONE} (?: / {ONE} )*+ )
    (?! [⁰¹²³⁴-⁹] )
    """,
    re.ASCII | re.VERBOSE,
)
"""Takes time linear in the text: a policy may say anything."""
MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
"""What is read as one: hyphens, the figure and en dash, the sign itself, and two wide ones."""
SPELLINGS = (
    (re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])(?=\d{3})"), ","),  # 1\,234
    (re.compile(r"(?<=\d) ?\\[dt]?frac(?=\{\d)"), r" \\frac"),  # 1\frac{1}{2}
    (re.compile(r"\\[dt]?frac\{(-?[\d.,]{1,99})\}\{([\d.,]{1,99})\}"), r"\1/\2"),
    (re.compile(r" ?(?:\\times|\\cdot|[\xd7*\xb7\u22c5]) ?10\^\{?(-?\d{1,4})\}?(?!\d)"), r"e\1"),
    (re.compile(r"(?<![\w.)}])10\^\{?(-?\d{1,4})\}?+(?!\w)"), r"1e\1"),
    (re.compile(r"\^\{?-?\d+\}?"), "²"),  # it is no number, nor is what has it: cm^2, 2^10
)
"""How LaTeX writes what NUMBER reads."""


def accepted_answers(task: Task) -> list[str]:
    """The accepted answers: `spec["answer"]`, one or a list of them.

    Raises:
        ValueError: the task has none; names it.
    """
    answer = task.spec.get("answer")
    accepted = answer if isinstance(answer, list | tuple) else [answer]
    if not accepted or any(one is None for one in accepted):
        raise ValueError(
            f"task {task.id}: spec['answer'] must hold an answer, got {answer!r} in a spec with "
            f"{sorted(task.spec)}"
        )
    return [str(one) for one in accepted]


# -- numbers ---------------------------------------------------------------------------------------


Number = Decimal | Fraction


def last_number(text: str) -> Number | None:
    """The last number in `text`, exactly; a Fraction where it is written as one. None: there is
    none.

    >>> last_number("That makes 1,234.50 dollars."), last_number("about -1 1/2")
    (Decimal('1234.50'), Fraction(-3, 2))
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
    # a Decimal of a quotient is its last part: of a date, or of a division by 0
    return None if found and "/" in found["parts"] and isinstance(number, Decimal) else number


def _spelled(text: str) -> str:
    text = text.translate(MINUS)
    for spelling, plain in SPELLINGS:
        text = spelling.sub(plain, text)
    return text


def _number(found: re.Match[str]) -> Number:
    """A quotient of two is one number; of more, as in a date, the last is."""
    parts = [part.replace(",", "") for part in found["parts"].split("/")]
    last, sign = Decimal(parts[-1]), "-" if found["sign"] else ""
    if len(parts) == 2 and last and len(found["parts"]) < 100:
        number = int(found["whole"] or 0) + Fraction(Decimal(parts[0])) / Fraction(last)
        return -number if sign else number
    return Decimal(sign + parts[0]) if len(parts) == 1 else last


def expected_numbers(task: Task) -> list[Number]:
    """The number that each of the accepted answers holds.

    Raises:
        ValueError: one holds none; names the task.
    """
    expected: list[Number] = []
    for text in accepted_answers(task):
        if (number := last_number(text)) is None:
            raise ValueError(
                f"task {task.id}: no number in the answer {text!r}, and "
                "reward.kind = 'numeric' compares numbers; 'text' compares texts"
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


def _as_formula(text: str) -> str:
    return text if "\\boxed" in text or "$" in text else f"${text}$"


def _bare(text: str) -> str:
    """Without space and dollars."""
    return "".join(text.replace("$", "").split())


def expected_mathematics(task: Task) -> list[str]:
    """The accepted answers, each a formula or a text.

    Raises:
        ValueError: one is empty, or there is none; names the task.
    """
    return _filled(task, _bare)


def _filled(task: Task, left: Callable[[str], Sequence[str]]) -> list[str]:
    """The accepted answers, of each of which something is left to compare."""
    accepted = accepted_answers(task)
    if not all(map(left, accepted)):
        raise ValueError(f"task {task.id}: there is nothing in the answer {task.spec['answer']!r}")
    return accepted


# -- words -----------------------------------------------------------------------------------------


ARTICLES = ("a", "an", "the")
APART = re.compile(r"(?<=\d)(?!\.\d|,\d{3}(?!\d))[^\w\s]+(?=\d)")
"""What stands between two numbers: 3/4, 2001-09-11; in 1.5 and 1,234 it is part of one."""
PUNCTUATION = re.compile(
    r"""
    ( (?<= \d ) \. (?= \d )                             # of a number: it stays
    | (?<! [\w)\].] ) (?: - (?= \.?\d ) | \. (?= \d ) )
    )
    | [^\w\s] | _
    """,
    re.VERBOSE,
)


def words(text: str) -> list[str]:
    """The words that answers are compared by: without case, punctuation and articles (SQuAD's).

    Numbers keep sign and decimal point. Where nothing else is left, articles stay, or punctuation.

    >>> words("The  U.S. Open,"), words("-1,234.5 to 3/4"), words("A")
    (['us', 'open'], ['-1234.5', 'to', '3', '4'], ['a'])
    """
    lower = unicodedata.normalize("NFC", text.lower()).replace("\N{MINUS SIGN}", "-")
    said = PUNCTUATION.sub(_kept, APART.sub(" ", lower)).split()
    return [word for word in said if word not in ARTICLES] or said or lower.split()


def expected_texts(task: Task) -> list[str]:
    """The accepted answers, each with a word in it: who says nothing is not to be right.

    Raises:
        ValueError: one is empty, or there is none; names the task.
    """
    return _filled(task, words)


def _kept(found: re.Match[str]) -> str:
    r"""Of a number; and vowels and tones that are marks, no part of Python's \w."""
    mark = found[0]
    if found[1] or unicodedata.category(mark) not in ("Mc", "Mn"):
        return found[1] or ""
    order = unicodedata.combining(mark)  # 10 to 36: points of Hebrew and Arabic; 200..: accents
    spells = order < 10 or 84 <= order < 200
    return mark if spells and not unicodedata.name(mark, "").startswith("VARIATION") else ""


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
