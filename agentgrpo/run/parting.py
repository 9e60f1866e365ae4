"""Where two runs part: the first step, rollout, turn and token that differ, and why.

From the records alone, read side by side in the order in which they were written. Left out is what
no two runs agree on: times, memory, and hashes of lines that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from agentgrpo.files import CHECKSUMS, read_table, read_text
from agentgrpo.run.atomic import numbered_rows
from agentgrpo.run.checkpoint import SAVED, step_of
from agentgrpo.run.folder import MAY_CHANGE, flatten
from agentgrpo.run.metrics import HASHES

CLOCKS = ("_s", "seconds", "timings", "_asleep", "_awake", "_before_sleep", *HASHES)
"""How names end of what no two runs agree on: times, and the memory of the machine."""
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
        and shown[name] not in MAY_CHANGE - {"steps"}
    ]


def parting(one: Path, other: Path, *, since: int = 0, until: int | None = None) -> str | None:
    """The first difference of two runs' records, in words; None: they are the same, to the bit.

    Compared are the steps from `since` (from 0, and the evaluation before it) to before `until`;
    None: until either run ends.
    """
    for a, b in zip_longest(*(_lines(run, since, until) for run in (one, other))):
        if (a is None or b is None) and until is None:
            return None
        if a != b:
            return _difference(a or {}, b or {})
    return None


def _lines(run: Path, since: int, until: int | None) -> Iterator[dict[str, Any]]:
    """In the order of time: the rollouts of a step or evaluation, then its numbers."""
    rollouts = numbered_rows(run / "rollouts.jsonl", growing=True)
    row = next(rollouts, None)
    for _, line in numbered_rows(run / "metrics.jsonl", growing=True):
        place = line["step"], "heldout" if "eval/rollouts" in line else "train"
        wanted = since <= line["step"] and (until is None or line["step"] < until)
        while row is not None and (row[1]["step"], row[1]["split"]) == place:
            if wanted:
                yield repeatable(row[1])
            row = next(rollouts, None)
        if wanted:
            yield repeatable(line)


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Where two lines of the same place differ, and what that comes from."""
    first = next(name for name in {**a, **b} if a.get(name) != b.get(name))
    where = f"step {a.get('step', b.get('step'))}"
    plain = f"{first} is {a.get(first)!r:.60} and {b.get(first)!r:.60}"
    if "segments" not in a or "segments" not in b:
        return f"{where}: {plain}; the rollouts before it are the same"
    where = f"{where} {a['split']} group {a['group']} rollout {a['index']}"
    if first in ("step", "split", "group", "index", "task"):
        return f"{where}: {'the data' if first == 'task' else 'its place'}: {plain}"
    turn = 0
    for rows in zip([*a["closed_rows"], a["segments"]], [*b["closed_rows"], b["segments"]]):  # noqa: B905
        for x, y in zip(*rows, strict=False):
            if x != y:
                return f"{where} turn {turn} {_token(x, y)}"
            turn += x["logprobs"] is not None
    return f"{where}: {plain}"


def _token(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The first token of two segments that differs, and why."""
    ids = a["token_ids"], b["token_ids"]
    apart = next((i for i, (x, y) in enumerate(zip(*ids, strict=False)) if x != y), -1)
    apart = min(map(len, ids)) if apart < 0 else apart
    if a["logprobs"] is None or b["logprobs"] is None:
        return (
            f"token {apart} of what it was shown before: environment or template said another thing"
        )
    pairs = zip(a["logprobs"][:apart], b["logprobs"][:apart], strict=True)
    gaps = [(abs(x - y), place) for place, (x, y) in enumerate(pairs) if x != y]
    if not gaps:
        return (
            f"token {apart}: sampled otherwise, from the same log-probabilities before it: the seed"
        )
    gap, place = gaps[0]
    cause = "rounding" if gap < ROUNDING else "other weights"
    return f"token {place}: its log-probability is {gap:.1e} nats another: {cause}, or edited"
