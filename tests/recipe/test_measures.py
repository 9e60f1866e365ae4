"""Measures on rollouts written by hand, intervals against simulation, reports read back."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgrpo.actions import InfrastructureError
from agentgrpo.models.endpoints import ScriptedEndpoint
from agentgrpo.recipe import measures
from agentgrpo.recipe.evaluate import read_report, write_report
from agentgrpo.recipe.measures import (
    TaskRow,
    differences,
    estimates,
    measure_tasks,
    pass_at_k,
    pass_hat_k,
)
from agentgrpo.recipe.report import markdown, markdown_of_comparison, report, rows_of
from agentgrpo.rewards.answer_quality import conciseness, judge_quality, last_question, make_quality
from agentgrpo.rewards.answers import (
    accepted_answers,
    exact_match,
    f1,
    math_equal,
    same_mathematics,
)
from agentgrpo.support.statistics import wilson
from agentgrpo.types import Group, Segment, Status, Task
from tests.given import a_rollout


def task(name: str = "t", **spec: Any) -> Task:
    return Task(id=name, messages=({"role": "user", "content": "Who?"},), spec=spec)


@pytest.mark.parametrize(
    ("compare", "answer", "accepted", "expected"),
    [
        (f1, "James Madison Jr", ["james madison"], 0.8),
        (f1, "The Beatles", ["beatles"], 1.0),
        (f1, "yes", ["no"], 0.0),
        (f1, "", ["no"], 0.0),
        (f1, "", [""], 1.0),
        (f1, "Paris, France", ["Paris France"], 1.0),
        (f1, "U.S.", ["us"], 1.0),
        (f1, "New York City", ["Boston", "New York"], 0.8),
        (f1, "a b b", ["b b c"], 0.8),  # "a" is an article
        (f1, "an apple", ["apples"], 0.0),
        (exact_match, " The  Beatles ", ["Queen", "beatles"], 1.0),
        (exact_match, "beatles band", ["beatles"], 0.0),
        (exact_match, "band the beatles", ["beatles band"], 0.0),
        (exact_match, "1,234.5%", ["1234.5"], 1.0),
        (exact_match, "covid-19, 5.", ["COVID19 5"], 1.0),
        (exact_match, "2001-09-11", ["2001/09/11"], 1.0),
        (math_equal, "1,234", ["1234.0"], 1.0),
        (math_equal, "36.0000001", ["36"], 0.0),
        (math_equal, r"\frac{1}{2}", ["0.5"], 1.0),
        (math_equal, r"The final answer is \[ \boxed{\frac{3}{6}} \]", [r"\frac{1}{2}"], 1.0),
        (math_equal, "$x^2+2x+1$", ["$(x+1)^2$"], 1.0),
        (math_equal, "x^2+2x+1", ["$(x+1)^2$"], 1.0),
        (math_equal, "$x^2+2x+2$", ["$(x+1)^2$"], 0.0),
        (math_equal, "41", ["42", "41.0"], 1.0),
        (math_equal, "forty-two", ["42"], 0.0),
    ],
)
def test_S3_10_answers_are_compared(
    compare: Callable[[str, Sequence[str]], float],
    answer: str,
    accepted: list[str],
    expected: float,
) -> None:
    assert compare(answer, accepted) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("5", "-5"), ("5", "\N{MINUS SIGN}5"), ("15", "1.5"), ("5", ".5"), ("34", "3/4"),
        ("12", "1,2"), ("1000", "1.000"), ("1030", "10:30"), ("56", "5..6"),
        ("the", "a"), ("", "A"), ("+", "-"), ("", "!"),
    ],
)  # fmt: skip
def test_answers_that_differ_in_operators_are_not_equal(answer: str, accepted: str) -> None:
    assert exact_match(answer, [accepted]) == exact_match(accepted, [answer]) == 0.0
    assert f1(answer, [accepted]) == 0.0


def test_plain_numbers_are_compared_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgrpo.rewards.answers.compare", None)
    assert same_mathematics("1000.0", "1,000") == (True, True, True)
    assert [math_equal(said, ["1000.0"]) for said in ("1,000", "1000.", "1001")] == [1.0, 1.0, 0.0]


def test_unparsable_formulas_are_compared_as_text() -> None:
    assert same_mathematics(" a$b ", "a$b") == (False, True, True)
    assert not same_mathematics("6", "a$b").equal


def test_S3_10_judge() -> None:
    asked = []

    def reply(messages: Sequence[Any]) -> str:
        asked.append(messages[0]["content"])
        return replies.pop(0)

    quality = judge_quality(ScriptedEndpoint(reply))
    played = a_rollout(task=task(answer=["USA", "America"]), answer="United States")
    for said, expected in [
        ("Correct.", 1.0),
        ("Incorrect", 0.0),
        ("That is not  correct", 0.0),
        ("Correct? No, wrong.", 0.0),
    ]:
        replies = ["I cannot say", said]  # asked again only where there was no verdict
        assert quality(played) == expected
        assert not replies
    replies = [""] * 3
    with pytest.raises(
        InfrastructureError, match=r"task .*expected Correct or Incorrect .* in 3 replies"
    ):
        quality(played)
    assert all(text in asked[0] for text in ("Who?", "USA", "America", "United States"))
    played.answer = "the USA"
    assert quality(played) == 1.0  # equal: the judge is not asked (its replies are used up)
    played.answer = None
    assert quality(played) == 0.0
    for said, accepted in [("x+1", "x-1"), ("x/2", "x*2"), ("5", "-5"), ("C++", "C"), ("the", "A")]:
        replies = ["Incorrect"]
        assert quality(a_rollout(task=task(answer=accepted), answer=said)) == 0.0
        assert not replies, "asked, since they differ"


@pytest.mark.parametrize(("yes", "expected"), [(0, 1.0), (4, 1.0), (5, 1.0), (6, 0.0), (10, 0.0)])
def test_S3_16_conciseness_is_a_majority_vote_with_ties_concise(yes: int, expected: float) -> None:
    votes = iter(["Yes, the second one."] * yes + ["No."] * (10 - yes))
    judge = ScriptedEndpoint(lambda messages: next(votes))
    assert conciseness(judge, lambda r: "what it did")(a_rollout()) == expected


def test_S3_16_replies_without_a_vote_are_ignored() -> None:
    votes = iter(["Hm.", "yes", "", "yes", "no"])
    judge = ScriptedEndpoint(lambda messages: next(votes, ""))
    assert conciseness(judge, lambda r: "", votes=5)(a_rollout()) == 0.0  # 2 of 3
    with pytest.raises(InfrastructureError, match="got neither in 2 replies"):
        conciseness(judge, lambda r: "", votes=2)(a_rollout())


def test_S3_16_calls_count_by_status_and_length_by_sampled_tokens() -> None:
    """Tool results of any length and wording change nothing."""
    played = [
        a_rollout(
            [[-1.0] * 5, [-1.0] * 7],
            answer="x",
            rewards={"answer": 1.0},
            stats={"tool_calls": 4.0, "tool_errors": 1.0},
        ),
        a_rollout([[-1.0] * 4], answer="x", rewards={"answer": 1.0}),
    ]
    documents = Segment(np.arange(500, dtype=np.int32))
    for changed in (False, True):
        if changed:
            played[0].segments.insert(2, documents)
        groups = [Group(task=task(str(i)), rollouts=[r]) for i, r in enumerate(played)]
        seen = estimates(measure_tasks(groups, make_quality("answer")))
        assert seen["successful_execution"].value == 3 / 4
        assert seen["reasoning_tokens"].value == 8
        assert seen["tool_calls"].value == 2
        assert seen["efficiency"].value == (1 / 4 + 1) / 2
        assert seen["tool_productivity"].value == pytest.approx(100 * 2 / 2.1)


def test_measures_of_a_graded_task() -> None:
    stats = [{"tool_calls": float(c), "tool_errors": 0.0} for c in (0, 2, 4)]
    rollouts = [
        a_rollout(answer="x", rewards={"answer": a}, stats=s)
        for a, s in zip((2.0, 1.5, 0.5), stats, strict=True)
    ]
    rollouts.append(a_rollout(status=Status.INFRA_ERROR))
    rollouts[2].answer = None
    broken = Group(task=task("b"), rollouts=[a_rollout(status=Status.INFRA_ERROR)])
    groups = [Group(task=task(kind="qa"), rollouts=rollouts), broken]
    row, unknown = measure_tasks(groups, make_quality("answer", weight=2.0), ks=(1, 2, 4))
    assert (unknown.id, unknown.attempts, {*unknown.columns.values()}) == ("b", 0, {None})
    assert unknown.columns.keys() == row.columns.keys()
    left_out = {name: row.columns.pop(name) for name in ("pass@4", "pass^4")}  # type: ignore[attr-defined]
    assert set(left_out.values()) == {None}
    assert (row.attempts, row.solved, row.kind) == (3, 2, "qa")
    assert row.columns == pytest.approx(
        {
            "quality": 2 / 3,
            "solved": 2 / 3,
            "efficiency": fmean([1.0, 0.75 / 2, 0.25 / 4]),
            "tool_calls": 2.0,
            "successful_calls": 2.0,
            "answered": 2 / 3,
            "reasoning_tokens": 2.0,
            "pass@1": 2 / 3,
            "pass^1": 2 / 3,
            "pass@2": 1.0,
            "pass^2": 1 / 3,
        }
    )


def test_task_with_too_few_valid_attempts_is_excluded() -> None:
    def played(**worth: Sequence[float | None]) -> list[TaskRow]:
        groups = [
            Group(
                task=task(name),
                rollouts=[
                    a_rollout(status=Status.INFRA_ERROR)
                    if value is None
                    else a_rollout(answer="x", rewards={"answer": value})
                    for value in values
                ],
            )
            for name, values in worth.items()
        ]
        return measure_tasks(groups, make_quality("answer"), ks=(1, 2))

    first = played(a=(1, 1), b=(1, None), c=(0, 0), d=(1, 0))
    seen = estimates(first)
    assert [seen["pass^2"].value, seen["pass^1"].value] == pytest.approx([1 / 3, 0.5])
    assert [seen["pass^2"].low, seen["pass^2"].high] == pytest.approx([*wilson(1, 3)])
    before = json.loads(json.dumps(report(first, model="m"), allow_nan=False))
    assert (before["tasks"], before["left_out"]) == (3, 1)
    assert "all tasks (3; 1 left out)" in markdown(before)
    assert re.search(r"\| pass\^2 \| 0\.333 \[.*\] \|", markdown(before))
    second = played(a=(None, 1), b=(1, 1), c=(1, 1), d=(1, 1))
    for pair, gained in (((rows_of(before), second), 1.0), ((second, rows_of(before)), -1.0)):
        assert differences(*pair)["pass^2"].value == gained, "of c and d, which both know"
    nothing = report(played(a=(None, None)))
    shown = markdown_of_comparison({"a": nothing, "b": nothing})
    assert "| pass@1 | - | - | - |" in shown


@given(st.integers(1, 7), st.data())
def test_S2_11_pass_at_k_and_pass_hat_k_count_the_draws(attempts: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, attempts)), data.draw(st.integers(1, attempts))
    outcomes = [True] * solved + [False] * (attempts - solved)
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(attempts, solved, k) == pytest.approx(fmean(map(any, draws)))
    assert pass_hat_k(attempts, solved, k) == pytest.approx(fmean(map(all, draws)))


def test_quality_is_a_share_of_the_answers_value() -> None:
    with pytest.raises(ValueError, match="task t: spec"):
        make_quality("f1")(a_rollout(task=task()))
    assert make_quality("f1")(a_rollout(task=task(answer="a bee"), answer=None)) == 0.0
    assert make_quality("f1")(a_rollout(task=task(answer="the bee"), answer="bee")) == 1.0
    assert make_quality("answer")(a_rollout(rewards={"answer": 0.0, "solved": 1.0})) == 1.0
    half = make_quality("answer", weight=2.0)
    for parts, expected in [
        ({"answer": -1.0}, 0.0),
        ({"answer": 1.0}, 0.5),
        ({"answer": 0.0, "partial": 1.0}, 0.5),
        ({"answer": 5.0}, 1.0),  # beyond its weight it is no better than right
    ]:
        assert half(a_rollout(rewards=parts)) == expected


def test_last_question_is_the_last_user_message() -> None:
    said = [
        ("system", "S"),
        ("user", "First?"),
        ("assistant", "A"),
        ("user", "Last?"),
        ("tool", "T"),
    ]
    messages = tuple({"role": role, "content": content} for role, content in said)
    assert last_question(Task(id="t", messages=messages, spec={})) == "Last?"
    assert last_question(Task(id="t", messages=(), spec={})) == ""


@pytest.mark.parametrize("answer", [None, [], ["a", None]])
def test_task_without_an_accepted_answer_is_named(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"task t: spec\['answer'\] must hold an answer"):
        accepted_answers(task(answer=answer))


def test_judge_is_called_greedily_first_and_not_for_equal_numbers() -> None:
    asked: list[float] = []

    class Judge:
        def complete(self, messages: Any, *, temperature: float, **options: Any) -> list[str]:
            asked.append(temperature)
            return ["Hm." if len(asked) < 3 else "Correct"]

    quality = judge_quality(Judge())  # type: ignore[arg-type]
    assert quality(a_rollout(task=task(answer="1000"), answer="1,000")) == 1.0
    assert asked == []
    assert quality(a_rollout(task=task(answer="UK"), answer="Britain")) == 1.0
    assert asked[0] == 0.0 < asked[1] == asked[2]


def test_measures_are_the_documented_ones_and_their_intervals_of_95_percent() -> None:
    rng = random.Random(5)
    values = [rng.random() for _ in range(400)]
    seen = estimates(rows(values))
    assert seen.keys() == measures.MEASURES.keys()
    quality = seen["quality"]
    assert quality.low is not None
    assert quality.high is not None
    half = 1.96 * stdev(values) / math.sqrt(400)
    assert quality.high - quality.low == pytest.approx(2 * half, rel=0.08)  # of 90 %: 0.84 as wide


def rows(values: Sequence[float], calls: float = 1.0) -> list[TaskRow]:
    return [
        TaskRow(
            id=str(i),
            kind="k" if i % 2 else "l",
            attempts=1,
            solved=int(value),
            columns={
                **dict.fromkeys(measures.COLUMNS, value),
                "tool_calls": calls,
                "successful_calls": calls,
            },
        )
        for i, value in enumerate(values)
    ]


def test_wilsons_interval() -> None:
    """R: prop.test(8, 10, correct = FALSE). All solved is not certainty."""
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((0.7224672, 1.0), abs=1e-6)
    assert math.isnan(wilson(0, 0)[0])
    assert min(wilson(0, trials)[0] for trials in range(1, 300)) == 0.0
    assert max(wilson(trials, trials)[1] for trials in range(1, 300)) <= 1.0
    seen = estimates(rows([1.0] * 20))["solved"]
    assert (seen.value, seen.low) == pytest.approx((1.0, 0.8389), abs=1e-3)


def test_intervals_have_their_nominal_coverage() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(200):
        sample = rows([rng.betavariate(2, 3) for _ in range(30)])
        seen = estimates(sample, resamples=400)["quality"]
        assert seen.low is not None
        assert seen.high is not None
        hits += seen.low <= 0.4 <= seen.high
    assert 178 <= hits <= 199  # 190 expected, deviation 3.1; percentile intervals are a bit narrow


def test_successful_execution_is_undefined_without_calls() -> None:
    seen = estimates(rows([1.0, 0.0], calls=0.0))["successful_execution"]
    assert (seen.value, seen.low, seen.high) == (None, None, None)
    assert "| successful_execution | - |" in markdown(report(rows([1.0], calls=0.0)))


def test_difference_is_paired_by_task() -> None:
    """A constant gain on tasks of any difficulty is certain; unpaired it would drown."""
    before = rows([i / 40 for i in range(20)])
    after = rows([i / 40 + 0.1 for i in range(20)])
    gained = differences(before, list(reversed(after)))["quality"]
    assert (gained.value, gained.low, gained.high) == pytest.approx((0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match=r"got 20 and 19; '19' is in one of them only"):
        differences(before, after[:-1])


def test_report_is_read_back_and_compared(tmp_path: Path) -> None:
    earlier = report(rows([0.0, 1.0, 0.0, 1.0]), model="m0", seed=3)
    write_report(tmp_path / "a", earlier, None)
    read = json.loads((tmp_path / "a" / "report.json").read_text())
    assert read == earlier
    assert rows_of(read) == rows([0.0, 1.0, 0.0, 1.0])
    assert read["kinds"]["k"]["tasks"] == 2
    assert read["kinds"]["k"]["measures"]["solved"]["value"] == 1.0
    later = report(rows([1.0, 1.0, 0.0, 1.0]), model="m1")
    write_report(tmp_path / "b", later, read_report(tmp_path / "a" / "report.json"))
    text = (tmp_path / "b" / "report.md").read_text()
    assert text.startswith("Model: m1\n")
    assert "| measure | all tasks (4) |" in text
    assert "| solved | 0.750 [0.301, 0.954] |" in text
    assert "| kind of task | tasks | quality | solved |" in text
    assert "| l | 2 | 0.500 | 0.500 |" in text
    assert "| solved | 0.500 [0.150, 0.850] | 0.750 [0.301, 0.954] | 0.250 [" in text
    assert markdown_of_comparison({"before": earlier, "after": later}) in text
    other = report(rows([1.0, 0.0]), model="m2")
    with pytest.raises(ValueError, match="got 4 and 2"):
        write_report(tmp_path / "c", other, earlier)
    kept = json.loads((tmp_path / "c" / "report.json").read_text())
    assert kept == other, "what was played for is not lost with the comparison"
