"""Parsing and scoring of answers, and loading of user-defined rewards."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgrpo.rewards.answers import expected_numbers, holds_answer, last_number, only_number
from agentgrpo.rewards.shipped import NumericReward, score, try_reward
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.train.plugins import load_reward
from agentgrpo.types import COUNTS, Group, Rollout, Status, Task
from tests.given import TASK, a_rollout


def played(answer: str | None, *, expected: Any = 36, **stats: float) -> Rollout:
    """A rollout that ran one piece of code, ended with `answer` and should have said `expected`."""
    counts = {"tool_calls": 1.0, "tool_errors": 0.0, "malformed": 0.0} | stats
    given = Task(id="q7", messages=(), spec={"answer": expected})
    return a_rollout(task=given, answer=answer, stats=counts)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("505\n", "505"),
        ("The answer is 36.", "36"),
        ("12 * 3 = 36 pens", "36"),
        ("12.0", "12"),
        (".5", "0.5"),
        ("-5", "-5"),
        ("\N{MINUS SIGN}5", "-5"),
        ("(-5)", "-5"),
        ("10-3", "3"),
        ("1,234,567", "1234567"),
        ("$1,234.50.", "1234.5"),
        ("(3,4)", "4"),
        ("1,2345", "2345"),
        ("5kg", "5"),
        ("100%", "100"),
        ("1e3", "1000"),
        ("1.5e+16", "15000000000000000"),
        ("\\boxed{42}", "42"),
        ("#### 72", "72"),
        ("-$5", "-5"),
        (r"-\$1,000", "-1000"),
        ("-€5", "-5"),
        ("\N{EN DASH}5", "-5"),
        ("1_000", "1000"),
        (r"3 \times 10^{6}", "3000000"),
        (r"1.5 \cdot 10^6", "1500000"),
        ("about 10^6 of them", "1000000"),
        ("from $3-$5", "5"),
        (r"\boxed{1{,}234}", "1234"),
        (r"1\,234\,567", "1234567"),
        ("1 234", "1234"),
        ("it is 10\u00a0000", "10000"),
        ("10\u202f000,", "10000"),
        ("\N{MINUS SIGN}1\u2009234\u2009567.5", "-1234567.5"),
        ("10'000 and 10\u2019000 CHF", "10000"),
        (r"$10\ 000$", "10000"),
        ("10~000", "10000"),
        ("in 2020 300", "300"),
        ("1 100 20", "20"),
        ("7 8 123", "123"),
        ("1 000 1/2", "0.5"),
        ("7,8,123", "123"),
        ("36 cm^2", "36"),
        (r"90^\circ", "90"),
        ("36 m²", "36"),
        ("2^10 = 1024", "1024"),
        ("3/4", "0.75"),
        ("-3/4", "-0.75"),
        ("1 1/2", "1.5"),
        (r"-1\frac{1}{2}", "-1.5"),
        (r"-\dfrac{3}{4}", "-0.75"),
        ("12/25/2024", "2024"),
        ("5/0", "0"),
        ("9" * 60 + "/" + "3" * 60, "3" * 60),
        ("1" + ",000" * 200, "1" + "000" * 200),
    ],
)
def test_last_number_parses_common_spellings(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_text_without_a_number_has_none() -> None:
    texts = ["", "none", "nan", "inf", "x2", "v1.2", "\N{SUPERSCRIPT TWO}", "2^10", "5²", "s^-2"]
    texts += ["10^4m", "12³", "10⁴"]
    assert [last_number(text) for text in texts] == [None] * 13
    strict = ["36 pens", "it is 36", "36 36", "12*3", "36..", "", f"1e{10**30}"]
    strict += ["12/25/2024", "5/0", "1/2/3"]
    assert [only_number(text) for text in strict] == [None] * 10
    assert last_number("1e3") == 1000


def test_fraction_is_compared_exactly_and_power_is_rejected() -> None:
    third = NumericReward(answer=1.0, format=0.0)
    for said, right in (("1/3", 1), (r"\frac{2}{6}", 1), ("0.333333333333", 0), ("3", 0)):
        assert third(played(said, expected="1/3"))["answer"] == right
    assert only_number("1/3") == Fraction(1, 3)
    with pytest.raises(ValueError, match="no number in the answer"):
        expected_numbers(Task(id="q", messages=(), spec={"answer": "2^10"}))


@pytest.mark.parametrize("answer", [{"x": 4}, None, [], [None], [["4"]]])
def test_expected_answer_that_is_not_text_or_number_is_rejected(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"task q: spec\['answer'\] must hold an answer \(text,"):
        expected_numbers(Task(id="q", messages=(), spec={"answer": answer}))


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("5 m2", "5"), ("10 km/h", "10"), ("5 cm^3 of it", "5"), ("USD 1,234", "1234"),
        ("12%", "12"), ("It is 5.", "5"), ("3 + 4 = 7", "7"), ("x = -5", "-5"), (r"\$5", "5"),
        ("1st", "1"), ("She has 3 and gets 4 more, so there are 7 apples in all.", "7"),
        ("3 apples and 4 pears and 2 plums make 9 fruits", "9"),
        *dict.fromkeys(
            ("5 dollars and 20 cents", "2 hours 30 minutes", "6 ft 2 in", "12:30", "3:45 PM",
             "2021-05-06", "12/25/2024", "10-12", "10 to 12", "5 or 6", "(3, 4)", "3 : 2", "7 R2",
             "3,14", "1.000,50", "1.000.000", "1,00,000", "3.(3)", "0.333...", "2\xbd",
             "1011_2", "sqrt(2)", "2pi", "pi/4", "5\xb11", "5!", "2i",
             "3x+2", "1.5 million", "2\N{SQUARE ROOT}")
        ).items(),
    ],
)  # fmt: skip
def test_expected_answer_with_more_than_a_number_is_rejected(answer: str, number: str) -> None:
    """The last number was expected: 30 of 12:30, 14 of 3,14, 0 of 1,00,000."""
    task = Task(id="q", messages=(), spec={"answer": answer})
    if number:
        assert expected_numbers(task) == [Decimal(number)]
        return
    with pytest.raises(ValueError, match="task q: more than a number in the answer"):
        expected_numbers(task)


@pytest.mark.parametrize(
    ("question", "answer", "held"),
    [
        ("What is 60 * 64? Answer: 3840", "3840", True),
        ("Name it: the NILE.", ["Amazon", "nile"], True),
        ("What is 13 * 4?", 3, False),
        ("What is it?", "", False),
        ("None", None, False),
        ("a {'x': 1}", {"x": 1}, False),
    ],
)
def test_holds_answer_detects_an_answer_in_the_question(
    question: str, answer: Any, held: bool
) -> None:
    messages = ({"role": "user", "content": question},)
    assert holds_answer(Task(id="q", messages=messages, spec={"answer": answer})) == held


READ = r"""
import resource
from types import SimpleNamespace
from agentgrpo.agents.tags import TagAgent
from agentgrpo.envs.graded import program_in
from agentgrpo.recipe.operators import OperatorSkipped, _step_in
from agentgrpo.rewards.answers import f1, last_number, only_number
from agentgrpo.rewards.choices import chosen_option
from agentgrpo.types import Task

def step(text):
    try:
        _step_in(text, SimpleNamespace(trajectory=SimpleNamespace(turns=[])))
    except OperatorSkipped:
        pass

READERS = [
    *((read, unit) for read in (last_number, only_number)
      for unit in (",111", "1/", "-", "1^", r"\frac{1}{", "{,}", " 111", r"\ 1")),
    *((lambda text: chosen_option(text, {"A": "x"}), unit)
      for unit in ("A) ", "answer ", "D\n", "(", r"\boxed{", "option ", "A and ")),
    *((lambda text: f1(text, ["a"]), unit) for unit in ("!", "a ", "1.", "\u0301")),
    *((lambda text: program_in("```python\n" + text, ["f"]), unit)
      for unit in ("f\n", '"', "\\", '"a', "> ```\n")),
    *((lambda text: TagAgent().parse(f"<answer>{text}</answer>", None), unit)
      for unit in ("<answer>", r"\boxed{")),
    *((step, unit) for unit in ("\n", "Step: ", "Step: 1 ", "9")),
]
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for read, unit in READERS:
    for text in (unit * (SIZE // len(unit)) + ",1x", "1" + unit * (SIZE // len(unit)) + ",1"):
        read(text)
"""


@pytest.mark.slow
def test_parsing_takes_time_linear_in_the_text() -> None:
    """The kernel kills it after a minute of CPU time; quadratic code needs several."""
    code = READ.replace("SIZE", "200_000")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.integers(-(10**30), 10**30), st.sampled_from(["{}", "{:,}", "{:_}", "{}.0", " {}. "]))
def test_integer_in_every_format_is_parsed(value: int, form: str) -> None:
    text = form.format(value)
    assert last_number(f"so it is {text}") == value
    assert only_number(text) == value


@given(st.text(alphabet="0123456789.,-_eE+ ()x\N{MINUS SIGN}", max_size=40))
def test_parsers_accept_any_text(text: str) -> None:
    last_number(text)
    only_number(text)


@pytest.mark.parametrize(
    ("rollout", "answer", "form"),
    [
        (played("36"), 1.0, 0.1),
        (played("36.00 pens"), 1.0, 0.1),
        (played("1,036", expected="so #### 1036"), 1.0, 0.1),
        (played("36", expected=["12", "so #### 36"]), 1.0, 0.1),
        (played("36", expected=["12", "37"]), 0.0, 0.1),
        (played("37"), 0.0, 0.1),
        (played("36.0000001"), 0.0, 0.1),
        (played("-36"), 0.0, 0.1),
        (played("many"), 0.0, 0.0),
        (played(None), 0.0, 0.0),
        (played("36", tool_calls=0), 1.0, 0.0),
        (played("36", tool_errors=1), 1.0, 0.0),
        (played("36", tool_calls=2, tool_errors=1), 1.0, 0.1),  # repaired
        (played("36", malformed=1), 1.0, 0.0),
    ],
)
def test_numeric_reward(rollout: Rollout, answer: float, form: float) -> None:
    assert NumericReward()(rollout) == {"answer": answer, "format": form}


def test_numeric_reward_applies_weights_and_strict() -> None:
    reward = NumericReward(answer=2.0, format=0.5, strict=True)
    assert reward(played("36")) == {"answer": 2.0, "format": 0.5}
    assert reward(played("36 pens")) == {"answer": 0.0, "format": 0.0}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"target": 1}, r"task q7: .* got None in a spec with \['target'\]"),
        ({"answer": "blue"}, "task q7: no number in the answer 'blue'"),
        ({"answer": ["1", "one"]}, "task q7: no number in the answer 'one'"),
    ],
)
def test_unscorable_task_is_named(spec: dict[str, Any], message: str) -> None:
    rollout = played("1")
    rollout.task = Task(id="q7", messages=(), spec=spec)
    with pytest.raises(ValueError, match=message):
        NumericReward()(rollout)


def test_score_skips_infrastructure_errors() -> None:
    fine, broken = played("36"), played("36")
    broken.status = Status.INFRA_ERROR
    score(Group(task=fine.task, rollouts=[broken, fine]), NumericReward())
    assert broken.rewards == {}
    assert fine.reward == pytest.approx(1.1)


@pytest.mark.parametrize("bad", [1.0, None, {"answer": math.nan}, {"answer": "1"}, {3: 1.0}])
def test_score_rejects_an_invalid_reward(bad: Any) -> None:
    rollout = played("36")
    said = r"lambda.* gave a wrong result: expected .*finite .*task 'q7', rollout 0, at .*\d\)"
    with pytest.raises(UserCodeError, match=said):
        score(Group(task=rollout.task, rollouts=[rollout]), lambda _: bad)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_rewards.py").write_text(
        "def short(rollout):\n    return {'short': 1.0}\nX = 3\n"
    )
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "crashes.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rewards"
    for name in ("my_rewards", "needs_more", "crashes"):
        sys.modules.pop(name, None)


def test_user_reward_is_loaded_by_name(user_module: str) -> None:
    assert load_reward(f"{user_module}:short")(played("1")) == {"short": 1.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards", r"^reward\.kind: expected 'module:function' .*, got 'my_rewards'"),
        ("my_rewards:", "expected 'module:function'"),
        ("my_rewards.py:short", r"without .py\), got 'my_rewards.py:short'"),
        (":short", "expected 'module:function'"),
        ("my_rewards.py:a b", "expected 'module:function'"),
        ("my_reward:short", r"no module 'my_reward' \(from 'my_reward:short'\)"),
        ("my_rewards.deep:short", "no module 'my_rewards.deep'"),
        ("my_rewards:shrt", "module 'my_rewards' has no 'shrt'"),
        ("my_rewards:X", "module 'my_rewards' has no callable 'X'"),
    ],
)
def test_wrong_reward_name_is_explained(user_module: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward(name)


def test_error_in_the_users_module_names_its_line(user_module: str) -> None:
    with pytest.raises(
        UserCodeError,
        match=r"'needs_more' raised ModuleNotFoundError: .*'not_inst.*\(at .*needs_more.py:1\)",
    ):
        load_reward("needs_more:f")
    with pytest.raises(UserCodeError, match=r"ZeroDivisionError: .*crashes.py:1\)"):
        load_reward("crashes:f")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "{'answer': float(rollout.answer.strip() == 'x')}",
            r"AttributeError: .*strip.* for the answer None",
        ),
        ("{'answer': rollout.task.spec['answr']}", r"KeyError: 'answr' for the answer None"),
        ("{'answer': 1 / (rollout.answer != '42')}", r"ZeroDivisionError: .* for the answer '42'"),
        ("1.0", r"gave a wrong result: expected \{name: finite number\}, got 1.0"),
    ],
)
def test_broken_reward_is_detected_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    """The error has file and line; try_reward() scores dummy rollouts."""
    path = tmp_path / "broken_reward.py"
    path.write_text(f"def f(rollout):\n    return {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_reward", raising=False)
    with pytest.raises(UserCodeError, match=message) as caught:
        try_reward(load_reward("broken_reward:f"), TASK)
    assert str(caught.value).startswith("the reward f ")
    line = 1 if "wrong result" in message else 2
    assert str(caught.value).endswith(f"(task {TASK.id!r}, at {path}:{line})")


def test_valid_reward_passes() -> None:
    try_reward(NumericReward(answer=1.0, format=0.1), TASK)
    try_reward(lambda rollout: {name: rollout.stats[name] for name in COUNTS}, TASK)
    try_reward(lambda view: {"short": len(view.turns[-1]) / view.stats["turns"]}, TASK)
