"""What rollouts are measured by besides reward: quality, economy, and how sure the numbers are.

One row per task (means over its rollouts), and measures as functions of the rows' means, so that
one bootstrap over tasks gives every measure its 95 % interval, ratios included, and the difference
of two runs on the same tasks its paired one. Rollouts that the machine broke are left out.

Tool calls, their failures and the policy's tokens are counted by status and by token span, never by
searching text: a document that contains `<search>` or "error" changes no number.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.actions import InfrastructureError
from agentgrpo.engine.endpoints import Endpoint
from agentgrpo.rewards.formulas import compare
from agentgrpo.rewards.rewards import last_number
from agentgrpo.types import Group, Rollout, Status, Task

Floats = NDArray[np.float64]
Quality = Callable[[Rollout], float]
"""How good the answer of a rollout is, in [0, 1]."""

SOLVED_AT = 0.75
"""Quality from which on a task counts as solved where it is graded."""


# -- answers ---------------------------------------------------------------------------------------


def normalize(text: str) -> str:
    """Lower case, without articles and surplus space; punctuation stays (as ET-Agent's F1 has it).

    >>> normalize(" The  Beatles, a band ")
    'beatles, band'
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower()).split())


def references(task: Task) -> list[str]:
    """The accepted answers: `spec["answer"]`, one or a list of them.

    Raises:
        ValueError: the task has none.
    """
    answer = task.spec.get("answer")
    accepted = answer if isinstance(answer, list | tuple) else [answer]
    if not accepted or any(one is None for one in accepted):
        raise ValueError(f"task {task.id!r}: spec['answer'] must hold an answer, got {answer!r}")
    return [str(one) for one in accepted]


def f1(answer: str, accepted: Sequence[str]) -> float:
    """Overlap of words after normalize(), harmonic mean of precision and recall; the best of all.

    >>> f1("James Madison Jr", ["james madison"])
    0.8
    """
    return max(_f1(normalize(answer).split(), normalize(one).split()) for one in accepted)


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1.0 if the answer is one of the accepted after normalize()."""
    return float(normalize(answer) in map(normalize, accepted))


def math_equal(answer: str, accepted: Sequence[str]) -> float:
    r"""1.0 if the answer is mathematically equal to an accepted one, LaTeX included (math-verify).

    Plain numbers are compared exactly and first.
    """
    return float(any(_math_equal(answer, one) for one in accepted))


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _math_equal(answer: str, wanted: str) -> bool:
    number, expected = _plain_number(answer), _plain_number(wanted)
    if number is not None and expected is not None:
        return number == expected
    gold, said = (
        text if "\\boxed" in text or "$" in text else f"${text}$" for text in (wanted, answer)
    )
    return compare(gold, said).equal


def _plain_number(text: str) -> Decimal | None:
    plain = text.strip().replace(",", "")
    return last_number(plain) if re.fullmatch(r"[-+]?\d+(\.\d+)?", plain) else None


# -- judges ----------------------------------------------------------------------------------------

JUDGE = """Question: {question}
Accepted answers: {accepted}
Given answer: {answer}
Is the given answer equivalent to an accepted one? Reply with one word: Correct or Incorrect."""

REDUNDANT = """Question: {question}
An assistant with tools did this:
{trajectory}
Is any of its tool calls redundant or ineffective, so that it could be left out? Say yes or no."""


TRIES = 3
"""How often a judge is asked that says neither the one nor the other."""


def says_correct(reply: str) -> bool | None:
    """A judge's verdict: "correct", and neither "incorrect", "not correct" nor "wrong".

    None: it gave none.
    """
    said = reply.lower()
    if re.search(r"incorrect|wrong|not\s+correct", said):
        return False
    return True if "correct" in said else None


def says_yes(reply: str) -> bool | None:
    """Whether the first word that is yes or no is yes; None: there is no such word."""
    found = re.search(r"\b(yes|no)\b", reply.lower())
    return None if found is None else found.group() == "yes"


def judged(judge: Endpoint) -> Quality:
    """Quality by a model: 1.0 where it finds the answer equivalent to an accepted one.

    A mathematically equal answer is not put to it. Its first verdict counts: asking until it agrees
    would count its mistakes as the policy's merits. It is asked again only while it gives none.

    Raises (when called):
        InfrastructureError: it gives none, or does not answer.
    """

    def quality(rollout: Rollout) -> float:
        if rollout.answer is None:
            return 0.0
        accepted = references(rollout.task)
        if exact_match(rollout.answer, accepted) or math_equal(rollout.answer, accepted):
            return 1.0
        prompt = JUDGE.format(
            question=question_of(rollout.task), accepted=accepted, answer=rollout.answer
        )
        for attempt in range(TRIES):
            (reply,) = judge.complete(
                [{"role": "user", "content": prompt}], temperature=0.6 if attempt else 0.0
            )
            if (verdict := says_correct(reply)) is not None:
                return float(verdict)
        raise InfrastructureError(
            f"task {rollout.task.id}: the judge said neither Correct nor Incorrect, {TRIES} times; "
            f"the last: {reply[:80]!r}"
        )

    return quality


def conciseness(judge: Endpoint, text_of: Callable[[Rollout], str], *, votes: int = 10) -> Quality:
    """1.0 unless more than half of the judge's votes call a tool call of the rollout redundant.

    Args:
        judge: asked `votes` times at temperature 0.6; a tie is concise, no vote no voice.
        text_of: the rollout as the judge is shown it.
        votes: at least 1.

    Raises (when called):
        InfrastructureError: no vote was cast, or the judge does not answer.
    """

    def concise(rollout: Rollout) -> float:
        prompt = REDUNDANT.format(question=question_of(rollout.task), trajectory=text_of(rollout))
        replies = judge.complete([{"role": "user", "content": prompt}], n=votes, temperature=0.6)
        cast = [vote for vote in map(says_yes, replies) if vote is not None]
        if not cast:
            raise InfrastructureError(
                f"task {rollout.task.id}: none of {votes} votes says yes or no; the first: "
                f"{replies[0][:80]!r}"
            )
        return float(2 * sum(cast) <= len(cast))

    return concise


def question_of(task: Task) -> str:
    """What was asked: the last message of the user."""
    return next((m["content"] for m in reversed(task.messages) if m["role"] == "user"), "")


def quality_by(name: str, *, weight: float = 1.0, judge: Endpoint | None = None) -> Quality:
    """The quality that a config names.

    Args:
        name: `answer` (the reward's part of that name), `f1`, `exact`, `math` or `judge`.
        weight: of the reward's part `answer`.
        judge: for `judge`.

    Raises:
        ValueError: unknown, or `judge` without one.
    """
    if name == "answer":
        return lambda rollout: min(1.0, max(0.0, _judged_answer(rollout, weight)))
    if name == "judge":
        if judge is None:
            raise ValueError("measures.quality: 'judge' needs measures.judge, the endpoint's name")
        return judged(judge)
    compare = {"f1": f1, "exact": exact_match, "math": math_equal}.get(name)
    if compare is None:
        raise ValueError(
            f"measures.quality: expected answer, f1, exact, math or judge, got {name!r}"
        )

    def quality(rollout: Rollout) -> float:
        accepted = references(rollout.task)
        return 0.0 if rollout.answer is None else compare(rollout.answer, accepted)

    return quality


def _judged_answer(rollout: Rollout, weight: float) -> float:
    """What the environment says (`solved`), else the reward: `answer`, or a share as `partial`."""
    if "solved" in rollout.rewards:
        return rollout.rewards["solved"]
    return (rollout.rewards.get("answer", 0.0) + rollout.rewards.get("partial", 0.0)) / weight


# -- many attempts ---------------------------------------------------------------------------------


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that one of k attempts, drawn without replacement, solved it (unbiased).

    Chen et al., arXiv:2107.03374, equation 1.

    Raises:
        ValueError: not 1 <= k <= attempts, or not 0 <= solved <= attempts.
    """
    _check_attempts(attempts, solved, k)
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, solved: int, k: int) -> float:
    """Probability that all of k attempts solved it, unbiased in the same way (tau-bench's pass^k).

    Raises:
        ValueError: as pass_at_k().
    """
    _check_attempts(attempts, solved, k)
    return math.comb(solved, k) / math.comb(attempts, k)


def _check_attempts(attempts: int, solved: int, k: int) -> None:
    if not (1 <= k <= attempts and 0 <= solved <= attempts):
        raise ValueError(
            f"expected 1 <= k <= attempts and 0 <= solved <= attempts, "
            f"got k {k}, attempts {attempts}, solved {solved}"
        )


# -- measures --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One task, played: counts and means over its rollouts."""

    id: str
    kind: str
    attempts: int
    solved: int
    """Attempts of a quality of SOLVED_AT or more."""
    columns: Mapping[str, float]
    """Means over the attempts, by name."""


COLUMNS: dict[str, Callable[[Rollout, float], float]] = {
    "quality": lambda r, q: q,
    "solved": lambda r, q: float(q >= SOLVED_AT),
    "efficiency": lambda r, q: q / max(1.0, r.stats["tool_calls"]),
    "tool_calls": lambda r, q: r.stats["tool_calls"],
    "successful_calls": lambda r, q: r.stats["tool_calls"] - r.stats["tool_errors"],
    "answered": lambda r, q: float(r.answer is not None),
    "reasoning_tokens": lambda r, q: float(r.num_sampled),
}
"""What is averaged over a task's rollouts, from the rollout and its quality."""


def _share_that_worked(mean: Mapping[str, Floats]) -> Floats:
    calls = mean["tool_calls"]
    return np.divide(
        mean["successful_calls"], calls, out=np.full_like(calls, np.nan), where=calls > 0
    )


MEASURES: dict[str, Callable[[Mapping[str, Floats]], Floats]] = {
    "quality": lambda mean: mean["quality"],
    "solved": lambda mean: mean["solved"],
    "efficiency": lambda mean: mean["efficiency"],
    "tool_productivity": lambda mean: (
        100 * mean["quality"] * mean["tool_calls"] / (mean["tool_calls"] + 0.1)
    ),
    "tool_calls": lambda mean: mean["tool_calls"],
    "successful_execution": _share_that_worked,
    "answered": lambda mean: mean["answered"],
    "reasoning_tokens": lambda mean: mean["reasoning_tokens"],
}
"""Measures as functions of the columns' means over tasks.

quality: mean of the answers' quality. efficiency: quality per tool call, by rollout (the quality
itself without a call). tool_productivity: ET-Agent's 100 acc C / (C + 0.1), C being the mean calls.
successful_execution: calls that did not fail / calls, by status; unknown without calls.
reasoning_tokens: tokens that the policy sampled.
"""


def measure_tasks(
    groups: Sequence[Group],
    quality: Quality,
    *,
    concise: Quality | None = None,
    ks: Sequence[int] = (),
) -> list[TaskRow]:
    """One row per group that the machine did not break altogether.

    Args:
        groups: scored, one per task.
        quality: of a rollout's answer.
        concise: 1.0 or 0.0 for a rollout, for the measure `conciseness`.
        ks: for which pass@k and pass^k are wanted; at most the number of rollouts of any task.

    Raises:
        ValueError: a k is larger than the number of valid rollouts of a task.
    """
    rows = []
    for group in groups:
        valid = [r for r in group.rollouts if r.status is not Status.INFRA_ERROR]
        if not valid:
            continue
        qualities = [quality(rollout) for rollout in valid]
        columns = {
            name: fmean(column(r, q) for r, q in zip(valid, qualities, strict=True))
            for name, column in COLUMNS.items()
        }
        if concise is not None:
            columns["conciseness"] = fmean(map(concise, valid))
        solved = sum(value >= SOLVED_AT for value in qualities)
        for k in ks:
            columns[f"pass@{k}"] = pass_at_k(len(valid), solved, k)
            columns[f"pass^{k}"] = pass_hat_k(len(valid), solved, k)
        rows.append(
            TaskRow(
                id=group.task.id,
                kind=kind_of(group.task),
                attempts=len(valid),
                solved=solved,
                columns=columns,
            )
        )
    return rows


def kind_of(task: Task) -> str:
    """What sort of task it is: `spec["kind"]`, else its level, else "task"."""
    if "kind" in task.spec:
        return str(task.spec["kind"])
    return f"level {task.spec['level']}" if "level" in task.spec else "task"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval; None where it is undefined (no tool call, no task)."""

    value: float | None
    low: float | None
    high: float | None


def estimates(rows: Sequence[TaskRow], *, resamples: int = 2000) -> dict[str, Estimate]:
    """Every measure over the tasks, its interval by the percentile bootstrap over tasks.

    Where each task is simply solved or not, as after one attempt, the interval is Wilson's: the
    bootstrap's would have no width once all tasks are solved. Resampling is seeded: same rows, same
    intervals.
    """
    drawn = _resample(len(rows), resamples)
    out = {}
    for name, measure in _measures(rows).items():
        values = _column(rows, name) if name in rows[0].columns else None
        value = measure(_means(rows, None))
        if values is not None and np.isin(values, (0.0, 1.0)).all():
            low, high = wilson(int(values.sum()), len(values))
        else:
            low, high = _percentiles(measure(_means(rows, drawn)))
        out[name] = _estimate(float(value[0]), low, high)
    return out


def differences(
    before: Sequence[TaskRow], after: Sequence[TaskRow], *, resamples: int = 2000
) -> dict[str, Estimate]:
    """`after` minus `before` for every measure of both, paired by task.

    Raises:
        ValueError: the two did not measure the same tasks; one that differs is named.
    """
    by_id = {row.id: row for row in after}
    odd = by_id.keys() ^ {row.id for row in before}
    if odd or len(by_id) != len(after) or len(before) != len(after) or not before:
        named = f"; {min(odd)!r} is in one of them only" if odd else ""
        raise ValueError(
            f"two runs are compared on the same tasks, got {len(before)} and {len(after)}{named}"
        )
    paired = [by_id[row.id] for row in before]
    drawn = _resample(len(before), resamples)
    then, now = _measures(before), _measures(paired)
    out = {}
    for name in (name for name in then if name in now):
        value = now[name](_means(paired, None)) - then[name](_means(before, None))
        spread = now[name](_means(paired, drawn)) - then[name](_means(before, drawn))
        out[name] = _estimate(float(value[0]), *_percentiles(spread))
    return out


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927)."""
    if trials == 0:
        return math.nan, math.nan
    z2 = 1.959964**2
    share = successes / trials
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


def _measures(rows: Sequence[TaskRow]) -> dict[str, Callable[[Mapping[str, Floats]], Floats]]:
    """The standing ones, and the means of what the rows have besides (pass@k, conciseness)."""
    if not rows:
        return {}
    extra = [name for name in rows[0].columns if name not in COLUMNS]
    return {**MEASURES, **{name: itemgetter(name) for name in extra}}


def _column(rows: Sequence[TaskRow], name: str) -> Floats:
    return np.array([row.columns[name] for row in rows])


def _means(rows: Sequence[TaskRow], drawn: NDArray[np.int64] | None) -> dict[str, Floats]:
    """Means over tasks by column: [1], or [resamples] with drawn [resamples, tasks]."""
    index = np.arange(len(rows))[None, :] if drawn is None else drawn
    return {name: _column(rows, name)[index].mean(axis=1) for name in rows[0].columns}


def _resample(tasks: int, resamples: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, max(tasks, 1), (resamples, tasks))


def _percentiles(values: Floats) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def _estimate(*numbers: float) -> Estimate:
    return Estimate(*(number if math.isfinite(number) else None for number in numbers))


# -- reports ---------------------------------------------------------------------------------------


def report(rows: Sequence[TaskRow], **about: Any) -> dict[str, Any]:
    """Everything about a run as JSON values; `about` is put in front (model, seed, ...)."""
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in _kinds(rows)}
    return {
        **about,
        "tasks": len(rows),
        "measures": _plain(estimates(rows)),
        "kinds": {
            kind: {"tasks": len(members), "measures": _plain(estimates(members))}
            for kind, members in kinds.items()
        },
        "per_task": [
            {
                "id": row.id,
                "kind": row.kind,
                "attempts": row.attempts,
                "solved": row.solved,
                "columns": dict(row.columns),
            }
            for row in rows
        ],
    }


def rows_of(written: Mapping[str, Any]) -> list[TaskRow]:
    """The rows of a report."""
    return [TaskRow(**row) for row in written["per_task"]]


def markdown(written: Mapping[str, Any]) -> str:
    """A report as two tables: every measure over all tasks, and the values by kind of task."""
    names = list(written["measures"])
    by_kind = []
    for kind, part in written["kinds"].items():
        values = [part["measures"][name]["value"] for name in names]
        shown = ["-" if value is None else f"{value:.3f}" for value in values]
        by_kind.append([kind, str(part["tasks"]), *shown])
    whole = [[name, _shown(seen)] for name, seen in written["measures"].items()]
    return "\n".join(
        [
            table_of(["measure", f"all tasks ({written['tasks']})"], whole),
            table_of(["kind of task", "tasks", *names], by_kind),
        ]
    )


def markdown_of_comparison(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Reports side by side, by name, with the paired difference of the last to the first.

    Raises:
        ValueError: these two measured other tasks.
    """
    before, *_, after = reports.values()
    gained = _plain(differences(rows_of(before), rows_of(after)))
    head = ["measure", *reports, "difference"]
    rows = [
        [name, *(_shown(r["measures"][name]) for r in reports.values()), _shown(gained[name])]
        for name in gained
    ]
    return table_of(head, rows)


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *rows))


def _kinds(rows: Sequence[TaskRow]) -> list[str]:
    return list(dict.fromkeys(row.kind for row in rows))


def _plain(measured: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {name: {"value": e.value, "low": e.low, "high": e.high} for name, e in measured.items()}


def _shown(estimate: Mapping[str, float | None]) -> str:
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    if value is None:
        return "-"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"
