"""Measures of rollouts other than reward: quality and efficiency, with confidence intervals.

There is one row per task (means over its rollouts), and measures are functions of the rows' means.
So one bootstrap over tasks gives the 95 % interval of every measure, also of ratios, and the paired
interval of the difference of two runs on the same tasks. Rollouts with an infrastructure error are
excluded; so is a task with too few other rollouts.

Tool calls, their failures and the policy's tokens are counted by status and by token span, never by
text search: a document that contains `<search>` or "error" changes no number.
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
"""Minimum quality of a solved rollout."""


# -- many attempts ---------------------------------------------------------------------------------


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that one of k <= attempts, drawn without replacement, solved it (unbiased).

    Chen et al., arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, solved: int, k: int) -> float:
    """Probability that all of k attempts solved it (unbiased; tau-bench's pass^k)."""
    return math.comb(solved, k) / math.comb(attempts, k)


# -- measures --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """Counts and means over the rollouts of one task."""

    id: str
    kind: str
    attempts: int
    solved: int
    """Attempts with a quality of SOLVED_AT or more."""
    columns: Mapping[str, float | None]
    """Means over the attempts, by name. None: too few valid attempts."""


COLUMNS: dict[str, Callable[[Rollout, float], float]] = {
    "quality": lambda r, q: q,
    "solved": lambda r, q: float(q >= SOLVED_AT),
    "efficiency": lambda r, q: q / max(1.0, r.stats["tool_calls"]),
    "tool_calls": lambda r, q: r.stats["tool_calls"],
    "successful_calls": lambda r, q: r.stats["tool_calls"] - r.stats["tool_errors"],
    "answered": lambda r, q: float(r.answer is not None),
    "reasoning_tokens": lambda r, q: float(r.num_sampled),
}
"""Functions of a rollout and its quality that are averaged over a task's rollouts."""


def _successful_share(mean: Mapping[str, Floats]) -> Floats:
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
    "successful_execution": _successful_share,
    "answered": lambda mean: mean["answered"],
    "reasoning_tokens": lambda mean: mean["reasoning_tokens"],
}
"""Measures as functions of the columns' means over tasks.

quality: mean of the answers' quality. efficiency: quality per tool call, by rollout (the quality
itself without a call). tool_productivity: ET-Agent's 100 acc C / (C + 0.1), C being the mean calls.
successful_execution: share of calls that did not fail, by status; undefined without calls.
reasoning_tokens: tokens that the policy sampled.
"""


def measure_tasks(
    groups: Sequence[Group],
    quality: Quality,
    *,
    concise: Quality | None = None,
    ks: Sequence[int] = (),
) -> list[TaskRow]:
    """Make one row per scored group.

    `ks`: values of k for pass@k and pass^k, which are None for a task with fewer valid rollouts.
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
    """The kind of a task: `spec["kind"]`, else its level, else "task"."""
    if "kind" in task.spec:
        return str(task.spec["kind"])
    return f"level {task.spec['level']}" if "level" in task.spec else "task"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval. None: undefined (no tool call, no task)."""

    value: float | None
    low: float | None
    high: float | None


def complete_rows(rows: Sequence[TaskRow]) -> list[TaskRow]:
    """Rows of tasks with enough valid attempts for every column."""
    return [row for row in rows if None not in row.columns.values()]


def estimates(rows: Sequence[TaskRow], *, resamples: int = 2000) -> dict[str, Estimate]:
    """Every measure over the complete rows, with intervals by the percentile bootstrap over tasks.

    If each task is either solved or not, as after one attempt, the interval is Wilson's, since the
    bootstrap's would have width 0 if all tasks are solved. Resampling is seeded: equal rows have
    equal intervals.
    """
    measures, rows = _all_measures(rows), complete_rows(rows)
    if not rows:
        return dict.fromkeys(measures, Estimate(None, None, None))
    drawn = _resample(len(rows), resamples)
    result = {}
    for name, measure in measures.items():
        values = _column(rows, name) if name in rows[0].columns else None
        value = measure(_means(rows, None))
        if values is not None and np.isin(values, (0.0, 1.0)).all():
            low, high = wilson(int(values.sum()), len(values))
        else:
            low, high = _percentiles(measure(_means(rows, drawn)))
        result[name] = _estimate(float(value[0]), low, high)
    return result


def differences(
    before: Sequence[TaskRow], after: Sequence[TaskRow], *, resamples: int = 2000
) -> dict[str, Estimate]:
    """`after` minus `before` for every common measure, paired by tasks complete in both."""
    by_id = {row.id: row for row in after}
    unmatched = by_id.keys() ^ {row.id for row in before}
    if unmatched or len(by_id) != len(after) or len(before) != len(after) or not before:
        example = f"; {min(unmatched)!r} is in one of them only" if unmatched else ""
        raise ValueError(
            f"expected two runs on the same tasks, got {len(before)} and {len(after)}{example}"
        )
    earlier, later = _all_measures(before), _all_measures(after)
    pairs = [
        (row, by_id[row.id]) for row in complete_rows(before) if complete_rows([by_id[row.id]])
    ]
    names = [name for name in earlier if name in later]
    if not pairs:
        return dict.fromkeys(names, Estimate(None, None, None))
    before, after = zip(*pairs, strict=True)
    drawn = _resample(len(before), resamples)
    result = {}
    for name in names:
        value = later[name](_means(after, None)) - earlier[name](_means(before, None))
        resampled = later[name](_means(after, drawn)) - earlier[name](_means(before, drawn))
        result[name] = _estimate(float(value[0]), *_percentiles(resampled))
    return result


def _all_measures(rows: Sequence[TaskRow]) -> dict[str, Callable[[Mapping[str, Floats]], Floats]]:
    """MEASURES, and the means of the rows' other columns (pass@k, conciseness)."""
    if not rows:
        return {}
    extra_names = [name for name in rows[0].columns if name not in COLUMNS]
    return {**MEASURES, **{name: itemgetter(name) for name in extra_names}}


def _column(rows: Sequence[TaskRow], name: str) -> Floats:
    return np.array([row.columns[name] for row in rows], np.float64)


def _means(rows: Sequence[TaskRow], drawn: NDArray[np.int64] | None) -> dict[str, Floats]:
    """Means over tasks by column: [1], or [resamples] with indices [resamples, tasks]."""
    index = np.arange(len(rows))[None, :] if drawn is None else drawn
    return {name: _column(rows, name)[index].mean(axis=1) for name in rows[0].columns}


def _resample(tasks: int, resamples: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, tasks, (resamples, tasks))


def _percentiles(values: Floats) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return math.nan, math.nan
    low, high = np.percentile(finite, [2.5, 97.5])
    return float(low), float(high)


def _estimate(*numbers: float) -> Estimate:
    return Estimate(*(number if math.isfinite(number) else None for number in numbers))
