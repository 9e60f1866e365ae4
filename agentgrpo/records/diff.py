"""Finds the first difference between two runs: step, rollout, turn and token, with its cause.

Reads both runs' records side by side in the order in which they were written. Times, memory sizes
and hashes of lines with them are ignored, since they differ between any two runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import chain, groupby, repeat, zip_longest
from pathlib import Path
from typing import Any

from agentgrpo.records.checkpoint import SAVED, step_of
from agentgrpo.records.metrics import FILES, HASHES
from agentgrpo.records.rollouts import PLACE, name_of
from agentgrpo.records.run_folder import flatten
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.support.files import CHECKSUMS, read_table, read_text

CLOCKS = ("_s", "seconds", "timings", "_asleep", "_awake", "_before_sleep", *HASHES)
"""Suffixes of ignored names: times, and the machine's memory."""
NO_EFFECT = ("out_dir", "save_every", "keep_checkpoints", "trackers")
"""Settings that change no record."""
ADDED_LATER = ("logprobs", "entropies", "advantage", "advantages")
"""Suffixes of columns that a step fills after all its rollouts are played."""
ROUNDING = 1e-3
"""Rounding may move a log-probability by this many nats."""


def without_clocks(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the records without times and memory sizes."""
    values = {name: value for name, value in row.items() if not name.endswith(CLOCKS)}
    return {**values, "stats": without_clocks(row["stats"])} if "stats" in row else values


def weight_checksums(run: Path) -> dict[int, list[str]]:
    """The checksums of each checkpoint's weights, by its step."""
    files = {step_of(path): path / CHECKSUMS for path in run.glob(SAVED)}
    lines = {step: read_text(path).splitlines() for step, path in files.items() if path.exists()}
    return {step: [s for s in sums if s.endswith(".safetensors")] for step, sums in lines.items()}


def setting_differences(run_a: Path, run_b: Path) -> list[str]:
    """The settings, versions and machines in which two runs differ, a line each."""
    a, b = (flatten(read_table(run / "run.json")) for run in (run_a, run_b))
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    labels = {name: name.removeprefix("config.") for name in names}
    return [
        f"{labels[name]}: {a.get(name)!r:.70} and {b.get(name)!r:.70}"
        for name in names
        if name.startswith(("config.", "versions.", "machine.", "engine."))
        and labels[name] not in NO_EFFECT
    ]


def first_difference(
    run_a: Path, run_b: Path, *, since: int = 0, until: int | None = None
) -> str | None:
    """Describe the first difference of two runs' records and weights; None: they are the same.

    Compares the steps since <= step < until, with the evaluation before them if `since` is 0.
    `until` None: until either run ends.
    """
    causes = [line.partition(": ")[0] for line in setting_differences(run_a, run_b)]
    causes[3:] = [f"{len(causes) - 3} more that differ"] if len(causes) > 3 else []
    for a, b in zip_longest(*(_lines(run, since, until) for run in (run_a, run_b))):
        if (a is None or b is None) and until is None:
            break
        if a != b:
            difference, cause = _compare(a or {}, b or {})
            return f"{difference}: caused by {' or '.join([*causes, cause])}"
    sums_a, sums_b = weight_checksums(run_a), weight_checksums(run_b)
    common = sorted(step for step in sums_a.keys() & sums_b.keys() if step > since)
    differing = next((step for step in common if sums_a[step] != sums_b[step]), None)
    return None if differing is None else f"step {differing}: other weights after equal rollouts"


def _lines(run: Path, since: int, until: int | None) -> Iterator[dict[str, Any]]:
    """In order of time: the rollouts of a step, their columns that are added later, its metrics.

    So a difference in tokens is reported before the advantages that follow from it.
    """

    def when(row: Mapping[str, Any]) -> tuple[int, bool, bool]:
        heldout = row.get("split") == "heldout" or "eval/rollouts" in row
        return row["step"], not heldout, "split" not in row

    files = [
        (row for _, row in numbered_rows(run / name, growing=True)
         if not any(key.startswith("preflight/") for key in row))  # before any step
        for name in FILES
    ]  # fmt: skip
    for (step, *_), block in groupby(merge(*files, key=when), when):
        if since <= step and (until is None or step < until):
            rows = [*map(without_clocks, block)]
            later = (*ADDED_LATER, *PLACE)
            yield from ({k: row[k] for k in row if not k.endswith(ADDED_LATER)} for row in rows)
            yield from ({k: row[k] for k in row if k.endswith(later)} for row in rows)


def _compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """Where two corresponding lines differ, and the cause if no setting explains it."""
    name = next(name for name in {**a, **b} if a.get(name) != b.get(name))
    rollout = a if "split" in a else b
    where = name_of(rollout) if "split" in rollout else f"step {a.get('step', b.get('step'))}"
    difference = f"{where}: {name} is {a.get(name)!r:.60} and {b.get(name)!r:.60}"
    if ("segments" in a) != ("segments" in b):
        return f"{where}: only one run has this rollout", "the data or a reward"
    if "segments" not in a:
        return difference, "the learner, after equal rollouts and rewards"
    if name in (*PLACE, "task"):
        return difference, "the data"
    turn = 0
    for x, y in zip_longest(*(chain(*r["closed_rows"], r["segments"]) for r in (a, b))):
        if x is None or y is None:
            statuses = f"{a['status']} and {b['status']}"
            return f"{where} turn {turn}: only one has ended, {statuses}", "a limit"
        if x != y:
            token, cause = _compare_tokens(x, y)
            return f"{where} turn {turn} token {token}", cause
        turn += x["logprobs"] is not None
    return difference, "the reward or environment, with equal tokens"


def _compare_tokens(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """The first token in which two segments differ, and the cause."""
    pairs = (zip(s["token_ids"], s["logprobs"] or repeat(0.0), strict=False) for s in (a, b))
    place, x, y = next((i, x, y) for i, (x, y) in enumerate(zip_longest(*pairs)) if x != y)
    if a["logprobs"] is None or b["logprobs"] is None:
        return f"{place} of the observation before", "a tool's answer or the template"
    if x is None or y is None:
        return f"{place}: only one turn ends there", "a limit or the seed"
    if x[0] != y[0]:
        return f"{place}: {x[0]} and {y[0]}", "the seed, rounding or other weights"
    gap = abs(x[1] - y[1])
    cause = "rounding" if gap < ROUNDING else "other weights, or an edited record"
    return f"{place}: log-probabilities differ by {gap:.1e} nats", cause
