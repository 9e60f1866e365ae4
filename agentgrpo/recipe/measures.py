"""What rollouts are measured by besides reward: quality, economy, and how sure the numbers are.

One row per task (means over its rollouts), and measures as functions of the rows' means, so that
one bootstrap over tasks gives every measure its 95 % interval, ratios included, and the difference
of two runs on the same tasks its paired one. Rollouts that the machine broke are left out; a task
that has too few others takes no part.

Tool calls, their failures and the policy's tokens are counted by status and by token span, never by
searching text: a document that contains `<search>` or "error" changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from agentgrpo.rewards.answer_quality import Quality
from agentgrpo.support.statistics import wilson
from agentgrpo.types import Group, Rollout, Status, Task

Floats = NDArray[np.float64]
SOLVED_AT = 0.75
"""Quality from which on a task counts as solved where it is graded."""


# -- many attempts ---------------------------------------------------------------------------------


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that one of k attempts, drawn without replacement, solved it (unbiased).

    Chen et al., arXiv:2107.03374, equation 1.
    """
    _check_attempts(attempts, solved, k)
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, solved: int, k: int) -> float:
    """Probability that all of k attempts solved it, as unbiased (tau-bench's pass^k)."""
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
    columns: Mapping[str, float | None]
    """Means over the attempts, by name; None: too few of them were valid, none or for this k."""


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
    """One row per group, scored, one per task.

    `ks`: for which pass@k and pass^k are wanted; None for a task with fewer valid rollouts.
    """
    rows = []
    for group in groups:
        valid = [r for r in group.rollouts if r.status is not Status.INFRA_ERROR]
        qualities = [quality(rollout) for rollout in valid]
        columns = {
            name: _mean_of([column(r, q) for r, q in zip(valid, qualities, strict=True)])
            for name, column in COLUMNS.items()
        }
        if concise is not None:
            columns["conciseness"] = _mean_of([concise(rollout) for rollout in valid])
        solved = sum(value >= SOLVED_AT for value in qualities)
        for k in ks:
            for name, of in ((f"pass@{k}", pass_at_k), (f"pass^{k}", pass_hat_k)):
                columns[name] = of(len(valid), solved, k) if k <= len(valid) else None
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


def _mean_of(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


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


def known(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """Those of tasks that the machine left attempts enough for every column."""
    return [row for row in rows if None not in row.columns.values()]


def estimates(rows: Sequence[TaskRow], *, resamples: int = 2000) -> dict[str, Estimate]:
    """Every measure over the known tasks, its interval by the percentile bootstrap over them.

    Where each task is simply solved or not, as after one attempt, the interval is Wilson's: the
    bootstrap's would have no width once all tasks are solved. Resampling is seeded: same rows, same
    intervals.
    """
    measures, rows = _measures(rows), known(rows)
    if not rows:
        return dict.fromkeys(measures, Estimate(None, None, None))
    drawn = _resample(len(rows), resamples)
    out = {}
    for name, measure in measures.items():
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
    """`after` minus `before` for every measure of both, paired by the tasks known in both."""
    by_id = {row.id: row for row in after}
    odd = by_id.keys() ^ {row.id for row in before}
    if odd or len(by_id) != len(after) or len(before) != len(after) or not before:
        named = f"; {min(odd)!r} is in one of them only" if odd else ""
        raise ValueError(
            f"two runs are compared on the same tasks, got {len(before)} and {len(after)}{named}"
        )
    then, now = _measures(before), _measures(after)
    both = [(row, by_id[row.id]) for row in known(before) if known([by_id[row.id]])]
    if not both:
        return dict.fromkeys((name for name in then if name in now), Estimate(None, None, None))
    before, after = zip(*both, strict=True)
    drawn = _resample(len(before), resamples)
    out = {}
    for name in (name for name in then if name in now):
        value = now[name](_means(after, None)) - then[name](_means(before, None))
        spread = now[name](_means(after, drawn)) - then[name](_means(before, drawn))
        out[name] = _estimate(float(value[0]), *_percentiles(spread))
    return out


def _measures(rows: Sequence[TaskRow]) -> dict[str, Callable[[Mapping[str, Floats]], Floats]]:
    """The standing ones, and the means of what the rows have besides (pass@k, conciseness)."""
    if not rows:
        return {}
    extra = [name for name in rows[0].columns if name not in COLUMNS]
    return {**MEASURES, **{name: itemgetter(name) for name in extra}}


def _column(rows: Sequence[TaskRow], name: str) -> Floats:
    return np.array([row.columns[name] for row in rows], np.float64)


def _means(rows: Sequence[TaskRow], drawn: NDArray[np.int64] | None) -> dict[str, Floats]:
    """Means over tasks by column: [1], or [resamples] with drawn [resamples, tasks]."""
    index = np.arange(len(rows))[None, :] if drawn is None else drawn
    return {name: _column(rows, name)[index].mean(axis=1) for name in rows[0].columns}


def _resample(tasks: int, resamples: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, tasks, (resamples, tasks))


def _percentiles(values: Floats) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def _estimate(*numbers: float) -> Estimate:
    return Estimate(*(number if math.isfinite(number) else None for number in numbers))
