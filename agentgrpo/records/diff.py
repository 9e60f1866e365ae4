"""Where two runs part: the first step, rollout, turn and token that differ, and why.

From the records alone, read side by side in the order in which they were written. Left out is what
no two runs agree on: times, memory, and hashes of lines that hold them.
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
"""How names end of what no two runs agree on: times, and the memory of the machine."""
UNSEEN = ("out_dir", "save_every", "keep_checkpoints", "trackers")
"""Settings that change no record."""
LATER = ("logprobs", "entropies", "advantage", "advantages")
"""How names end of what a step adds to its rollouts when all of them are played."""
ROUNDING = 1e-3
"""Nats that rounding may move a log-probability by."""


def repeatable(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the records without what no two runs agree on."""
    kept = {name: value for name, value in row.items() if not name.endswith(CLOCKS)}
    return {**kept, "stats": repeatable(row["stats"])} if "stats" in row else kept


def weights(run: Path) -> dict[int, list[str]]:
    """The checksums of each checkpoint's weights, by its step."""
    found = {step_of(path): path / CHECKSUMS for path in run.glob(SAVED)}
    lines = {step: read_text(path).splitlines() for step, path in found.items() if path.exists()}
    return {step: [s for s in sums if s.endswith(".safetensors")] for step, sums in lines.items()}


def described(one: Path, other: Path) -> list[str]:
    """The settings, versions and machines in which two runs differ, a line each."""
    a, b = (flatten(read_table(run / "run.json")) for run in (one, other))
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    shown = {name: name.removeprefix("config.") for name in names}
    return [
        f"{shown[name]}: {a.get(name)!r:.70} and {b.get(name)!r:.70}"
        for name in names
        if name.startswith(("config.", "versions.", "machine.", "engine."))
        and shown[name] not in UNSEEN
    ]


def parting(one: Path, other: Path, *, since: int = 0, until: int | None = None) -> str | None:
    """The first difference of two runs' records and weights, in words; None: they are the same.

    Compared are the steps from `since` (from 0, and the evaluation before it) to before `until`;
    None: until either run ends.
    """
    causes = [line.partition(": ")[0] for line in described(one, other)]
    causes[3:] = [f"{len(causes) - 3} more that differ"] if len(causes) > 3 else []
    for a, b in zip_longest(*(_lines(run, since, until) for run in (one, other))):
        if (a is None or b is None) and until is None:
            break
        if a != b:
            says, cause = _difference(a or {}, b or {})
            return f"{says}: by {' or '.join([*causes, cause])}"
    ours, theirs = weights(one), weights(other)
    both = sorted(step for step in ours.keys() & theirs.keys() if step > since)
    apart = next((step for step in both if ours[step] != theirs[step]), None)
    return None if apart is None else f"step {apart}: other weights, after the same rollouts"


def _lines(run: Path, since: int, until: int | None) -> Iterator[dict[str, Any]]:
    """In the order of time: the rollouts of a step, what it adds to them, then its numbers."""

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
            rows = [*map(repeatable, block)]
            yield from ({k: row[k] for k in row if not k.endswith(LATER)} for row in rows)
            yield from ({k: row[k] for k in row if k.endswith((*LATER, *PLACE))} for row in rows)


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """Where two lines of the same place differ, and what that comes from if no setting made it."""
    first = next(name for name in {**a, **b} if a.get(name) != b.get(name))
    one = a if "split" in a else b
    where = name_of(one) if "split" in one else f"step {a.get('step', b.get('step'))}"
    seen = f"{where}: {first} is {a.get(first)!r:.60} and {b.get(first)!r:.60}"
    if ("segments" in a) != ("segments" in b):
        return f"{where}: one has played more", "the data or a reward"
    if "segments" not in a:
        return seen, "the learner, after the same rollouts and rewards"
    if first in (*PLACE, "task"):
        return seen, "the data"
    turn = 0
    for x, y in zip_longest(*(chain(*r["closed_rows"], r["segments"]) for r in (a, b))):
        if x is None or y is None:
            return f"{where} turn {turn}: one has ended, {a['status']} and {b['status']}", "a limit"
        if x != y:
            says, cause = _token(x, y)
            return f"{where} turn {turn} token {says}", cause
        turn += x["logprobs"] is not None
    return seen, "the reward or environment, for the same tokens"


def _token(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """The first token of two segments that differs, and why."""
    pairs = (zip(s["token_ids"], s["logprobs"] or repeat(0.0), strict=False) for s in (a, b))
    place, x, y = next((i, x, y) for i, (x, y) in enumerate(zip_longest(*pairs)) if x != y)
    if a["logprobs"] is None or b["logprobs"] is None:
        return f"{place} of what it was shown before", "a tool's answer or the template"
    if x is None or y is None:
        return f"{place}: one turn ends there", "a limit or the seed"
    if x[0] != y[0]:
        return f"{place}: {x[0]} and {y[0]}", "the seed, rounding or other weights"
    cause = (
        "rounding" if (gap := abs(x[1] - y[1])) < ROUNDING else "other weights, or an edited record"
    )
    return f"{place}: its log-probability is {gap:.1e} nats another", cause
